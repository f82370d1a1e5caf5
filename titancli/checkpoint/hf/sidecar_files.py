"""Files beside the weights of a Hugging Face folder, kept in checkpoints so that an export has them again.

A checkpoint stores each such file as `hf-NAME`, listed in its manifest like any other (of one in a folder see
`tokenizer_files.flat`): for a converted folder its configs and tokenizer, for a run the configs of the folder
that it started from. (A run's tokenizer is its recipe's.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titancli.checkpoint.format.manifest import is_checkpoint
from titancli.data.tokenizer_files import TEMPLATES, TOKENIZER_FILES, flat_templates, tokenizer_files
from titancli.data.tokenizer_files import is_tokenizer_file as is_tokenizer_file
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes
from titancli.models.config_json import HARMLESS
from titancli.models.quantization import KEY

PREFIX = "hf-"
CONFIG, GENERATION = "config.json", "generation_config.json"
OWN = {"architectures", "auto_map", "dtype", "model_type", KEY, "torch_dtype", "transformers_version"}
"""Harmless keys of config.json that an export sets itself."""
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack")
TALK = ("readme", "license", "notice", "use_policy", ".")
"""Prefixes of files that no program reads."""


def kept_of(folder: Path, *, tokenizer: bool = False) -> dict[str, bytes]:
    """Return the files beside the weights of a Hugging Face folder, or those that a checkpoint has kept of
    one, by name.

    Args:
        tokenizer: whether to include its tokenizer's files.

    Raises:
        EnvironmentProblem: a file cannot be read, or is not JSON though it should be.
    """
    prefix = PREFIX if is_checkpoint(folder) else ""
    paths = {name: folder / f"{prefix}{name}" for name in (CONFIG, GENERATION)}
    if tokenizer and prefix:
        paths |= {name: folder / f"{prefix}{name}" for name in TOKENIZER_FILES}
        paths |= dict(flat_templates(folder, prefix))
    elif tokenizer:
        paths |= tokenizer_files(folder)
    found = {}
    for name, path in paths.items():
        try:
            found[name] = read_bytes(path)
            if name in (CONFIG, GENERATION) and not isinstance(json.loads(found[name]), dict):
                raise ValueError("no object")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise EnvironmentProblem(f"{path} is damaged: {error}", hint="download it again") from error
    return found


def not_kept(folder: Path) -> list[str]:
    """Return the names of a Hugging Face folder's other files, such as code."""
    known = (CONFIG, GENERATION, TEMPLATES, *TOKENIZER_FILES)
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in known
        and not path.name.endswith(WEIGHTS)
        and not path.name.lower().startswith(TALK)
    )


def texts(
    own: Mapping[str, Any], kept: Mapping[str, bytes], eos_id: int | None, bos_id: int | None
) -> dict[str, dict[str, Any]]:
    """Return an export's config.json and, if it has any contents, generation_config.json.

    A tokenizer whose end marker is among those of the folder is the folder's, and all its ids stay. Otherwise
    the ids of the given tokenizer are written instead.

    Args:
        own: the model's config.json, as its form writes it.
        kept: as returned by `kept_of`.
        eos_id, bos_id: the tokenizer's; None: there is none.
    """
    before = json.loads(kept.get(CONFIG, b"{}"))
    before = before.get("text_config", before)
    before = {key: value for key, value in before.items() if key in HARMLESS - OWN}
    config = {"bos_token_id": None, "eos_token_id": None, **before, **own}
    generation = json.loads(kept[GENERATION]) if GENERATION in kept else None
    if eos_id is None:
        return {CONFIG: config} if generation is None else {CONFIG: config, GENERATION: generation}
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
    if eos_id in _ends(config) | _ends(generation or {}):
        ids = {key: known if (known := config[key]) is not None else i for key, i in ids.items()}
        config |= ids
    else:
        config = _without_ids(config, own)
        config |= {key: i for key, i in ids.items() if i is not None or key not in own}
        generation = None if generation is None else {**_without_ids(generation, {}), **ids}
    return {CONFIG: config, GENERATION: generation or {"_from_model_config": True, **ids}}


def of_another_tokenizer(kept: Mapping[str, bytes], eos_id: int | None) -> bool:
    """Return whether the folder names end markers that do not include the tokenizer's."""
    ends = _all_ends(kept)
    return bool(ends) and eos_id is not None and eos_id not in ends


def end_ids(kept: Mapping[str, bytes], eos_id: int | None) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and all that the folder names (an instruct model
    has several) unless they belong to another tokenizer.

    Args:
        kept: as returned by `kept_of`.
        eos_id: the tokenizer's; None: there is none.
    """
    own = set() if eos_id is None else {eos_id}
    return frozenset(own if of_another_tokenizer(kept, eos_id) else own | _all_ends(kept))


def with_ends(
    kept: Mapping[str, bytes], ends: Sequence[int], eos_id: int, bos_id: int | None
) -> Mapping[str, bytes]:
    """Return the files with further tokens that end a text, in generation_config.json; ids of another
    tokenizer give way to the tokenizer's.

    Args:
        kept: as returned by `kept_of`.
        eos_id, bos_id: the tokenizer's.
    """
    if set(ends) <= end_ids(kept, eos_id):
        return kept
    found = {name: json.loads(kept.get(name, b"{}")) for name in (CONFIG, GENERATION)}
    if of_another_tokenizer(kept, eos_id):
        for text in found.values():
            if isinstance(inner := text.get("text_config"), dict):
                text["text_config"] = _without_ids(inner, {})
        found = {name: _without_ids(text, {}) for name, text in found.items()}
    known = [one for name in (GENERATION, CONFIG) for one in _listed(found[name])]
    ids: dict[str, Any] = {"eos_token_id": list(dict.fromkeys([*known, eos_id, *ends]))}
    if bos_id is not None:
        ids["bos_token_id"] = found[GENERATION].get("bos_token_id", bos_id)
    # transformers would take the ids of config.json if this said that they come from there.
    generation = {key: value for key, value in found[GENERATION].items() if key != "_from_model_config"}
    texts = {CONFIG: found[CONFIG]} if CONFIG in kept else {}
    made = {name: json.dumps(text, indent=2).encode() for name, text in texts.items()}
    return {**kept, **made, GENERATION: json.dumps(generation | ids, indent=2).encode()}


def _all_ends(kept: Mapping[str, bytes]) -> set[Any]:
    ends: set[Any] = set()
    for name in (CONFIG, GENERATION):
        found = json.loads(kept.get(name, b"{}"))
        ends |= _ends(found) | _ends(found.get("text_config") or {})
    return {one for one in ends if type(one) is int}


def _ends(config: Mapping[str, Any]) -> set[Any]:
    return set(_listed(config))


def _listed(config: Mapping[str, Any]) -> list[Any]:
    """Return the end markers in their order."""
    found = config.get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def _without_ids(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the ids of another tokenizer, except those that the model's form writes."""
    return {key: value for key, value in config.items() if key in own or not key.endswith("_token_id")}
