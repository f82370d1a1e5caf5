"""From a checkpoint to a GGUF file: what belongs to it, and the lines that are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_gguf.export import Model, ends_of, write_model
from titan_gguf.families import notes
from titan_gguf.mix import bytes_of
from titan_gguf.newfile import refuse_file
from titan_gguf.tokens import APPROXIMATE, vocabulary
from titancli.checkpoint import open_weights
from titancli.checkpoint.hf.convert import Checksums
from titancli.checkpoint.hf.detect_model import check_parameters, find_checkpoint, hf_form, recipe_of
from titancli.checkpoint.hf.sidecar_files import is_tokenizer_file, kept_of, texts
from titancli.errors import EnvironmentProblem, UsageError
from titancli.files import read_bytes
from titancli.registry.component import build


def convert(
    src: Path,
    dst: Path,
    file_type: str,
    *,
    pre: str | None,
    verify: bool,
    progress: Callable[[str, int, int], None],
    say: Callable[[str], None],
) -> tuple[list[str], bool]:
    """Write a checkpoint, or a run's newest good one, as a GGUF file.

    Its checksums are verified during the conversion, and the file appears only if they match.

    Returns:
        Lines for the user, and whether the comparison passed, if there was one.

    Raises:
        TitanError: `src` is not a good checkpoint, its model or its tokenizer cannot be written, or `dst` is
            not free.
    """
    from titan_gguf.verify import python_with_llamacpp, verdict

    refuse_file(dst)
    python = python_with_llamacpp() if verify else None
    folder = find_checkpoint(src, say)
    config, tokenizer, loss = recipe_of(folder)
    form = hf_form(config)
    if loss is not None and loss.hf_form(form, {}).loader is not None:
        say("the head that the loss has is left out: GGUF holds the language model")
    reader = open_weights(folder, config, verify="size", reuse=True, say=say)
    check_parameters(reader, config, folder)
    model = Model(reader, form, file_type)
    say(f"exporting {folder}")
    for note in notes(model.config):
        say(note)
    built = build(tokenizer) if tokenizer is not None else None
    kept = kept_of(folder, tokenizer=built is None)
    files = {name: data for name, data in kept.items() if is_tokenizer_file(name)} | _files(built)
    if "tokenizer.json" not in files and getattr(built, "fingerprint", None) != "byte":
        raise UsageError(
            f"{folder} has no tokenizer.json, and a GGUF file needs one",
            hint="convert a checkpoint of a run whose [tokenizer] is a folder with tokenizer.json",
        )
    eos, bos = (None, None) if built is None else (built.eos_id, built.bos_id)
    said = texts(form.config_json(), kept, eos, bos)
    words = vocabulary(files, model.rows, ends_of(said), eos=eos, bos=bos, pre=pre, say=say)
    if words.pre in APPROXIMATE:
        say(f"llama.cpp splits letters with combining marks (Hindi, Bengali) otherwise than {words.pre} does")
    with Checksums(folder, reader.manifest, data=folder == src.absolute()) as checksums:

        def watch(name: str, done: int, total: int) -> None:
            checksums.check_so_far()
            progress(name, done, total)

        write_model(dst, model, words, progress=watch, say=say, before_rename=checksums.check)
    lines = [*_sizes(model), f"GGUF file: {dst}", f"use it with: llama-cli -m {dst}"]
    if not verify:
        return lines, True
    found, good = verdict(dst, model, config, built, words.pre, python)
    return [*found, *lines], good


def _files(tokenizer: Any) -> dict[str, bytes]:
    found = {}
    for name, path in (tokenizer.files if tokenizer is not None else {}).items():
        try:
            found[name] = read_bytes(Path(path))
        except OSError as error:
            raise EnvironmentProblem(f"the tokenizer's {path} cannot be read: {error.strerror}") from error
    return found


def _sizes(model: Model) -> list[str]:
    """Return how many tensors have which type, and the bytes of a weight."""
    kinds = Counter(item.kind.name for item in model.items)
    weights = sum(_count(item.shape) for item in model.items)
    size = sum(bytes_of(item.kind, item.shape) for item in model.items)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return [f"tensors: {listed}; {size / weights:.3f} bytes per weight"]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
