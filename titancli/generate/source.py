"""The generating model and its tokenizer, from a run, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titancli.checkpoint.base import open_weights
from titancli.checkpoint.format.manifest import is_checkpoint
from titancli.checkpoint.hf.detect_model import (
    adds_bos,
    check_parameters,
    find_checkpoint,
    hf_form,
    model_of,
    parameter_shapes,
    recipe_of,
)
from titancli.checkpoint.hf.folder import read_hf
from titancli.checkpoint.hf.lazy_tensor import put
from titancli.checkpoint.hf.sidecar_files import end_ids, kept_of
from titancli.data.prompt import prompt_ids
from titancli.engine.first_weights import allocate
from titancli.errors import EnvironmentProblem, PluginError, UsageError
from titancli.models.blocks.state import named_state
from titancli.protocols import Tokenizer
from titancli.recipe.assets import hub_hint
from titancli.registry.component import build, component_info
from titancli.registry.fields import required_fields
from titancli.runs import RunFolder

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Source:
    """Found and checked, its weights still on the disk."""

    folder: Path
    """The checkpoint, or the Hugging Face folder."""
    config: Any
    """The model's."""
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    """Tokens that end a text."""
    bos: bool
    """True if the model was trained on texts that begin with bos."""
    read: Callable[[str], Tensor]
    """A parameter, whole, on the CPU."""

    @property
    def name(self) -> str:
        """The model component's."""
        return component_info(self.config).name


def of_turns(source: Source) -> Source:
    """Return a source that also ends where its chat template ends turns, for answers to messages."""
    ends = frozenset(source.tokenizer.turn_ends or ())
    return dataclasses.replace(source, end_ids=source.end_ids | ends)


def find_source(src: Path, *, tokenizer: str | None, component: str | None, say: Say) -> Source:
    """Find what SRC names, and check everything but the weights' values.

    Args:
        src: a run (its newest good checkpoint), a checkpoint, or a folder with config.json and safetensors.
        tokenizer: a tokenizer component that needs no settings, or a folder; None: the source's own.
        component: the model that reads a Hugging Face folder; None: the one of its model_type.
        say: receives a line about each checkpoint that was skipped.

    Raises:
        TitanError: it is none of these, is damaged, has no tokenizer, or its weights are another model's.
    """
    if not src.is_dir():
        hint = hub_hint(src) or "give a run, a checkpoint, or a Hugging Face folder"
        raise EnvironmentProblem(f"folder {src} does not exist", hint=hint)
    if is_checkpoint(src) or RunFolder.is_run(src) or (src / "checkpoints").is_dir():
        if component is not None:
            raise UsageError(
                "--model-component can only be used with a Hugging Face folder", hint="remove it"
            )
        return _from_checkpoint(src, tokenizer, say)
    if (src / "config.json").is_file():
        return _from_hf(src.absolute(), tokenizer, component)
    raise EnvironmentProblem(
        f"{src} is not a run, a checkpoint or a Hugging Face folder",
        hint="give RUN, RUN/checkpoints/step-N, or a folder with config.json and *.safetensors",
    )


def _from_checkpoint(src: Path, tokenizer: str | None, say: Say) -> Source:
    folder = find_checkpoint(src, say)
    config, own, _ = recipe_of(folder)
    if tokenizer is None and own is None:  # what is no language model has none either
        _bare(config, seq_len=1)
    built = _tokenizer(tokenizer) if tokenizer is not None or own is None else _recipes_tokenizer(own)
    # Looking for the newest good one has read every file already.
    reader = open_weights(folder, config, verify="full" if folder == src.absolute() else "size", say=say)
    check_parameters(reader, config, folder)
    ends = end_ids(kept_of(folder), built.eos_id)
    return Source(folder, config, built, ends, adds_bos(folder, built), reader.read)


def _from_hf(src: Path, tokenizer: str | None, component: str | None) -> Source:
    _, _, config = model_of(src, component)
    if tokenizer is None and (src / "tokenizer.json").is_file():
        tokenizer = str(src)
    built = _tokenizer(tokenizer)
    reader = read_hf(src, hf_form(config))
    reader.check(parameter_shapes(config))
    ends = end_ids(kept_of(src), built.eos_id)
    return Source(src, config, built, ends, built.adds_bos, reader.parameter)


def _recipes_tokenizer(config: Any) -> Tokenizer:
    try:
        return build(config)
    except EnvironmentProblem as error:  # its files have moved since the run, and a lock file stays as it is
        raise EnvironmentProblem(error.message, hint="give its location: --tokenizer FOLDER") from error


def _tokenizer(name: str | None) -> Tokenizer:
    """Return the tokenizer that the user named."""
    from titancli.data import HFTokenizer
    from titancli.registry import current

    if name is None:
        raise EnvironmentProblem(
            "these weights have no tokenizer", hint="give one: --tokenizer FOLDER, or --tokenizer byte"
        )
    if "/" in name or Path(name).is_dir():
        return build(HFTokenizer(path=Path(name).absolute()))
    config = current().find("tokenizer", name)
    if needed := required_fields(config):
        raise UsageError(
            f"--tokenizer {name}: this tokenizer needs {', '.join(needed)}",
            hint="give the path of a folder with tokenizer.json; it must contain a /",
        )
    return build(config())


def encode(source: Source, texts: Sequence[str], *, bos: bool | None = None) -> list[list[int]]:
    """Token ids of prompts; an empty one begins a new text, after the end of another.

    Args:
        bos: whether they begin with the tokenizer's bos; None: as the model has learnt.

    Raises:
        UsageError: the tokenizer has no bos, or a prompt leaves no room in the model's context.
        EnvironmentProblem: the tokenizer is another model's.
    """
    tokenizer = source.tokenizer
    if bos and tokenizer.bos_id is None:
        raise UsageError("--bos: the tokenizer has no BOS token", hint="remove it")
    begins = source.bos if bos is None else bos
    prompts = [prompt_ids(tokenizer, text, bos=begins) or [tokenizer.eos_id] for text in texts]
    return _fitting(source.config, prompts)


def encode_chat(source: Source, texts: Sequence[str], *, system: str | None = None) -> list[list[int]]:
    """Token ids of conversations in which a user has said each text, up to where the answer begins.

    Raises:
        RecipeError: the tokenizer has no chat template, or it takes no system message.
        UsageError, EnvironmentProblem: as in `encode`.
    """
    prompts = [
        prompt_ids(source.tokenizer, [{"role": "user", "content": text}], system=system) for text in texts
    ]
    return _fitting(source.config, prompts)


def _fitting(config: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the prompts, if the model has their tokens and room for them."""
    vocab_size, longest = config.vocab_size, config.max_seq_len
    for number, prompt in enumerate(prompts, start=1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if not prompt:
            raise UsageError(f"{which} has no tokens", hint="add some text")
        if vocab_size is not None and max(prompt) >= vocab_size:
            raise EnvironmentProblem(
                f"{which} contains the token {max(prompt)}, but the model has only {vocab_size} tokens",
                hint="the tokenizer does not belong to this model: give the right one with --tokenizer",
            )
        if longest is not None and len(prompt) >= longest:
            raise UsageError(
                f"{which} has {len(prompt)} tokens, but the model's context (max_seq_len) is {longest}",
                hint="shorten it to leave room for at least one new token",
            )
    return prompts


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        EnvironmentProblem: there is no GPU, and `cuda` was asked for.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise EnvironmentProblem("--device cuda: torch finds no GPU", hint="use --device cpu")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def load_model(source: Source, *, seq_len: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the whole model on one device.

    Raises:
        PluginError: it cannot generate.
        EnvironmentProblem: its weights cannot be read, or do not fit in memory.
    """
    model = _bare(source.config, seq_len=seq_len).to(dtype).eval()
    try:
        allocate(model, device)
        for name, tensor in named_state(model):
            put(tensor, source.read(name))
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() for p in model.parameters()) * dtype.itemsize / 2**30
        raise EnvironmentProblem(
            f"the weights, {size:.1f} GiB, do not fit in the GPU's memory",
            hint="use --dtype bfloat16 or --device cpu",
        ) from error
    return model


def _bare(config: Any, *, seq_len: int) -> Any:
    """Return the model on meta.

    Raises:
        PluginError: it cannot generate.
    """
    with torch.device("meta"):
        model = build(config, seq_len=seq_len)
    if model.new_cache is None:
        raise PluginError(
            f"the model {component_info(config).name} cannot generate: {model.why_no_cache}",
            hint="docs/your-own-model.md describes what a model needs for that",
        )
    return model
