"""Build the null device's library and put it where torch looks for NVIDIA's.

    python tests/null_gpu/build.py      in an environment with torch's CUDA build, and no library of NVIDIA's

What torch imports and the C files do not define is made here: a product of cuBLAS is one launch, CUPTI says
that all is well, and anything else ends the process with its name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "device"
SITE = Path(sysconfig.get_paths()["purelib"])
OF_NVIDIA = re.compile(
    r"(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)\w+"
)
SONAME = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit)")
LIBRARY = "libnull_gpu.so"


def main() -> None:
    """Compile, and link the library under every name that torch's libraries need."""
    folder = SITE / "torch" / "lib"
    users = sorted(path for path in folder.glob("lib*.so") if path.name != LIBRARY and not path.is_symlink())
    symbols: dict[str, str | None] = {}
    needed = {"libcuda.so.1"}
    for user in users:
        for line in run("nm", "-D", "--undefined-only", str(user)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if OF_NVIDIA.fullmatch(name):
                symbols[name] = version.lstrip("@") or symbols.get(name)
        needed |= {
            line.split()[1] for line in run("objdump", "-p", str(user)).splitlines() if "NEEDED" in line
        }
    compile_library(folder / LIBRARY, symbols)
    for name in sorted(name for name in needed if SONAME.match(name)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(LIBRARY)


def compile_library(target: Path, symbols: dict[str, str | None]) -> None:
    """Compile the C files and what they leave out, each symbol with the version that torch asks for."""
    sources = sorted(HERE.glob("*.c"))
    include = SITE / "triton" / "backends" / "nvidia" / "include"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        flags = ["-O2", "-fPIC", "-pthread", f"-I{include}", f"-I{HERE}", "-Wall", "-Wno-unknown-pragmas"]
        objects = []
        for source in sources:
            objects.append(made / f"{source.stem}.o")
            run("cc", *flags, "-c", str(source), "-o", str(objects[-1]))
        defined = {
            line.split()[-1]
            for one in objects
            for line in run("nm", "-g", "--defined-only", str(one)).splitlines()
        }
        rest = made / "rest.c"
        rest.write_text(written(sorted(symbols.keys() - defined)), encoding="utf-8")
        versions = sorted({version for version in symbols.values() if version})
        script = made / "versions"
        script.write_text(
            "".join(
                f"{version} {{ {' '.join(f'{name};' for name in symbols if symbols[name] == version)} }};\n"
                for version in versions
            ),
            encoding="utf-8",
        )
        target.unlink(missing_ok=True)
        run(
            "cc",
            *flags,
            "-shared",
            "-o",
            str(target),
            str(rest),
            *map(str, objects),
            "-ldl",
            f"-Wl,--version-script={script}",
            f"-Wl,-soname,{LIBRARY}",
        )


def written(names: list[str]) -> str:
    """Return C for what no file defines."""
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "int null_gpu_blas(const char *name);",
        "static int missing(const char *name) {",
        '    fprintf(stderr, "null_gpu: %s is not there\\n", name);',
        "    abort();",
        "}",
    ]
    for name in names:
        if name.startswith("cublas"):
            body = f'null_gpu_blas("{name}")'
        else:
            body = "0" if name.startswith("cupti") else f'missing("{name}")'
        lines.append(f"int {name}() {{ return {body}; }}")
    return "\n".join(lines) + "\n"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
