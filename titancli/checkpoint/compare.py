"""`convert-checkpoint --verify`: whether our logits are transformers'."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from titancli.checkpoint.hf import put
from titancli.checkpoint.libraries import library_of
from titancli.checkpoint.tensors import Tensors
from titancli.checkpoint.which import hf_form
from titancli.errors import EnvironmentProblem, UsageError
from titancli.models.blocks.state import named_state
from titancli.registry.component import build

VERIFY_LIMIT = 1e-3
"""The largest difference of logits, relative to the largest logit, that passes."""
VERIFY_SHAPE = (2, 64)
"""Rows and tokens that the logits are compared on."""


def refuse_incomparable(form: Any) -> None:
    """
    Raises:
        UsageError: transformers does not load what the form writes.
    """
    if (library := library_of(form).name) != "transformers":
        raise UsageError(f"--verify compares with transformers, and this model is one of {library}'s")


def verdict(
    model: Any, reader: Tensors, hf_folder: Path, dtype: torch.dtype | None
) -> tuple[list[str], bool]:
    """Lines on how our logits differ from transformers', and whether that is little enough."""
    absolute, relative = logit_difference(model, reader, hf_folder, dtype)
    good = relative <= VERIFY_LIMIT
    lines = [
        f"largest difference of logits: {absolute:.3g} absolute, {relative:.3g} of the largest logit",
        f"verified: {'yes' if good else f'NO, more than {VERIFY_LIMIT:g}'}",
    ]
    form = hf_form(model)
    if any(not form.sources(name) and bool(reader.read(name).any()) for name in reader.names()):
        lines.append(
            "compared without what a Hugging Face folder has no place for: the experts' balancing biases"
        )
    return lines, good


@torch.no_grad()
def logit_difference(
    model: Any, reader: Tensors, hf_folder: Path, dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """The largest difference of logits between our model and transformers', on random tokens.

    Both run on the CPU in float32, on `VERIFY_SHAPE` tokens; weights are rounded to `dtype` first, as the
    conversion did, and what the folder has no place for is as it would come back.

    Returns:
        The largest absolute difference, and that divided by the largest logit.

    Raises:
        EnvironmentProblem: transformers cannot load the folder.
    """
    ours = build(model, seq_len=VERIFY_SHAPE[1])
    form = hf_form(model)
    for name, tensor in named_state(ours):
        value = reader.read(name) if form.sources(name) else form.from_hf(name, [])
        put(tensor, value.to(dtype) if dtype else value)
    tokens = torch.randint(
        0, ours.output.weight.shape[0], VERIFY_SHAPE, generator=torch.Generator().manual_seed(0)
    )
    logits = ours.float().eval()(tokens=tokens)
    del ours
    theirs = load_in_transformers(hf_folder)
    for parameter in theirs.parameters() if dtype else ():
        parameter.copy_(parameter.to(dtype))  # not the buffers: they hold rotary frequencies
    expected = theirs.eval()(input_ids=tokens).logits
    difference = float((logits - expected).abs().max())
    return difference, difference / float(expected.abs().max())


def load_in_transformers(folder: Path) -> torch.nn.Module:
    """The folder as transformers loads it, in float32 on the CPU.

    Raises:
        EnvironmentProblem: it cannot.
    """
    before = logging.root.manager.disable
    logging.disable(
        logging.WARNING
    )  # what it imports along the way warns of kernels that a CPU does not need
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EnvironmentProblem(f"transformers cannot load {folder}: {error}") from error
    finally:
        logging.disable(before)
