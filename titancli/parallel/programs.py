"""The programs by which inductor compiles for a CPU. Torch-free."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from titancli.errors import EnvironmentProblem

COMPILER = "clang++" if sys.platform == "darwin" else "g++"
HOW_TO_GET = "install what is missing (Debian and Ubuntu: apt install g++ openssl)"


def missing_programs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the programs that inductor would run and that are not on the PATH.

    These are a C++ compiler (`torch._inductor.config.cpp.cxx`) and openssl, which hashes the headers that are
    compiled once (`torch._inductor.codecache._precompile_header`).
    """
    wanted = [] if environ.get("TORCH_INDUCTOR_INSTALL_GXX") else [environ.get("CXX", COMPILER)]
    return [name for name in (*wanted, "openssl") if shutil.which(name, path=environ.get("PATH")) is None]


def check_programs(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to compile for a CPU without the programs that it takes.

    Raises:
        EnvironmentProblem: names them.
    """
    if missing := missing_programs(environ):
        raise EnvironmentProblem(
            f"compile.enable: inductor needs {' and '.join(missing)} on a CPU, not found on PATH",
            hint=f"{HOW_TO_GET}, or set compile.enable=false",
        )
