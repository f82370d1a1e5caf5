"""torch.compile where it pays: each block's forward, and the arithmetic of the chunked loss."""

from __future__ import annotations

import shlex
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titancli.errors import RecipeError
from titancli.parallel.budget import in_our_words, within_budget
from titancli.parallel.programs import check_programs
from titancli.parallel.wrapped import parts, wrap
from titancli.recipe.schema import ActivationCheckpoint, Compile

RECOMPILES = 64
"""Maximum recompilations of a function. torch compiles everything that backward recomputes through a
single function of its own, for every kind of block, with and without gradients: the default limit of 8 is
soon reached, and would end the run."""


def compile_model(
    model: nn.Module, section: Compile, activation_checkpoint: ActivationCheckpoint, device: torch.device
) -> None:
    """Compile in place what `section` names, without changing a name in the module tree.

    Args:
        device: that the model is to run on.

    Raises:
        RecipeError: torch has no such backend.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if section.backend not in known:
        raise RecipeError(
            f"compile.backend = {section.backend!r} is not a backend of torch.compile",
            hint=f"use one of {', '.join(sorted(torch._dynamo.list_backends()))}",
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    if section.model:
        backend: Any = section.backend
        if activation_checkpoint.mode == "memory_budget":
            backend = within_budget(section.backend, activation_checkpoint.memory_budget)
        for block in model.layers.values():  # type: ignore[operator]
            for module, name in parts(block):
                # The forward, not the module: FSDP2's hooks stay outside of the compiled code, which blocks
                # of one shape share.
                compiled: Any = torch.compile(getattr(module, name), backend=backend, fullgraph=True)
                wrap(module, name, in_our_words(compiled) if backend is not section.backend else compiled)
    output: Any = model.output  # a pipeline stage may have none
    if section.loss(on_gpu=device.type == "cuda") and output is not None:
        output.loss_backend = section.backend


def check_inductor(backend: str, device: torch.device) -> None:
    """Refuse what inductor cannot build for a CPU, for want of a program or because of where it is installed.

    It joins the C++ compiler's arguments to one line and splits that again, and does not quote the folders of
    libraries and the files that it writes (`CppBuilder`, `_run_compile_cmd`; torch 2.11 to 2.13).

    Raises:
        EnvironmentProblem: a program is not installed.
        RecipeError: one of these paths contains a space or a quote.
    """
    if backend != "inductor" or device.type != "cpu":
        return
    check_programs()
    for path, what_to_do in _unquoted_paths():
        if not _is_one_word(path):
            raise RecipeError(
                f"compile.backend = 'inductor': on a CPU, torch passes {path} to the C++ compiler without "
                "quotes, and it contains a space or a quote",
                hint=f"{what_to_do}, or write compile.enable = false",
            )


def _unquoted_paths() -> Iterator[tuple[str, str]]:
    """Yield the paths that inductor does not quote, each with advice for its user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    move = "install Python and torch in a folder whose path contains none"
    yield str(Path(torch.__file__).parent / "lib"), move
    if library_folder := sysconfig.get_config_var("LIBDIR"):
        yield library_folder, move
    yield tempfile.gettempdir(), "set TMPDIR to a folder whose path contains none"
    yield cache_dir(), "set TORCHINDUCTOR_CACHE_DIR to a folder whose path contains none"


def _is_one_word(path: str) -> bool:
    try:
        return shlex.split(path) == [path]
    except ValueError:  # a quote that does not end
        return False
