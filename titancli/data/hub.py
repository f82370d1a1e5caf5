"""Downloads of the files that a run reads from a Hugging Face repository, by `huggingface_hub`. Torch-free.

What was downloaded is not downloaded again, and what was interrupted continues; tokens and mirrors are
`huggingface_hub`'s own settings (`HF_TOKEN`, `hf auth login`, `HF_ENDPOINT`).
"""

from __future__ import annotations

from pathlib import Path

from titancli.errors import EnvironmentProblem

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Of these an export takes along what a folder has."""
CONFIG = ("config.json", "generation_config.json")
WEIGHTS = ("*.safetensors", "model.safetensors.index.json")
NOT_NEEDED = ("*/*", "consolidated*")
"""Folders (`original/`, `onnx/`), and weights in another layout beside those that transformers reads."""


def download(repository: str, folder: Path, *, weights: bool, revision: str | None = None) -> list[Path]:
    """Download a repository's tokenizer and config, and its weights if asked for; return the files.

    Raises:
        EnvironmentProblem: the repository cannot be reached or read, or lacks what was asked for.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    patterns = [*TOKENIZER_FILES, *CONFIG, *(WEIGHTS if weights else ())]
    try:
        snapshot_download(
            repository,
            revision=revision,
            local_dir=folder,
            allow_patterns=patterns,
            ignore_patterns=list(NOT_NEEDED),
        )
    except GatedRepoError as error:
        raise EnvironmentProblem(
            f"{repository} is gated: its owner must grant you access",
            hint=f"ask for it at {constants.ENDPOINT}/{repository}, then log in: hf auth login",
        ) from error
    except RepositoryNotFoundError as error:
        raise EnvironmentProblem(
            f"there is no repository {repository}, or it is private",
            hint="check the name; for a private one, log in: hf auth login",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise EnvironmentProblem(
            f"cannot download {repository}: {first}",
            hint="the same command continues the download; HF_ENDPOINT names a mirror",
        ) from error
    found = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    wanted = "safetensors" if weights else "json"
    if not any(path.suffix == f".{wanted}" for path in found):
        lacking = "weights in safetensors" if weights else "tokenizer"
        raise EnvironmentProblem(f"{repository} has no {lacking}")
    return found
