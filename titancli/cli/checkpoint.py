"""`titan checkpoint list|show|verify`: what a run has saved, what is in it, and whether it is whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from titancli.cli.output import note, out, print_json, table
from titancli.cli.path_types import FolderOrURL
from titancli.errors import EXIT_ENVIRONMENT, EXIT_OK, EnvironmentProblem
from titancli.terminal import clean

if TYPE_CHECKING:
    from titancli.checkpoint.format.layout import TensorLayout
    from titancli.checkpoint.inspect import Found

FOLDER = FolderOrURL()
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.command("list", short_help="List the checkpoints of a run.")
@click.argument("run", type=FOLDER)
@JSON
def list_(run: Path, as_json: bool) -> None:
    """List the checkpoints of RUN, oldest step first.

    A checkpoint is `good` when all of its files exist and have the recorded sizes; `titan checkpoint verify`
    also compares their checksums.
    """
    from titancli.checkpoint.inspect import folders, look_at

    found = [look_at(path, "size") for path in folders(run)]
    if not found:
        note(f"{run} has no checkpoints")
    if as_json:
        print_json("checkpoints", {"checkpoints": [_document(one) for one in found]})
    else:
        table(("checkpoint", "step", "saved", "size", "written by", "state"), [_row(one) for one in found])


@click.command("show", short_help="Show the contents of a checkpoint.")
@click.argument("path", type=FOLDER)
@click.option("--layout", "pieces", is_flag=True, help="Show where the chunks of each tensor are stored.")
@JSON
def show(path: Path, pieces: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint: its origin, and its tensors by name.

    PATH is a checkpoint, or a run folder, which stands for its last checkpoint. Sizes are sizes on disk.
    """
    from titancli.checkpoint.inspect import folders, look_at, metadata_of

    if not (paths := folders(path)):
        raise EnvironmentProblem(f"{path} has no checkpoints")
    found = look_at(paths[-1], "size")
    tensors = metadata_of(found.path).everything()
    if as_json:
        print_json("checkpoint", {"checkpoint": _facts(found), "tensors": _tensors(tensors)})
        return
    _print_facts(found, tensors)
    _print_tensors(tensors, pieces)


@click.command("verify", short_help="Verify every checksum of checkpoints.")
@click.argument("paths", nargs=-1, required=True, type=FOLDER)
@JSON
def verify(paths: tuple[Path, ...], as_json: bool) -> int:
    """Read every file of the given checkpoints and compare sizes and checksums. Prints a line for each.

    PATH is a checkpoint, or a run folder, which stands for all of its checkpoints. The exit code is 5 if any
    checkpoint is damaged. What was set aside in a run folder (`step-N.unknown-…`) is reported, and does not
    count.
    """
    from titancli.checkpoint.inspect import folders, look_at

    named = [path.absolute() for path in paths]

    def bad(one: Found) -> bool:
        return bool(one.faults) and not (one.set_aside and one.path not in named)

    chosen = [folder for path in paths for folder in folders(path)]
    if not chosen:
        raise EnvironmentProblem(f"there is no checkpoint in {' or in '.join(map(str, paths))}")
    found = []
    for folder in chosen:
        found.append(look_at(folder, "full"))
        if not as_json:
            print(clean(_verdict(found[-1])), flush=True)
    ok = not any(map(bad, found))
    if as_json:
        print_json("verification", {"ok": ok, "checkpoints": [_document(one) for one in found]})
    return EXIT_OK if ok else EXIT_ENVIRONMENT


# ------------------------------------------------------------------------------------------------ words


def _verdict(found: Found) -> str:
    if found.set_aside:
        state = "; ".join(found.faults) or "undamaged"
        return f"set aside: {found.path}: {state} (nothing loads it; you may delete it)"
    if found.faults:
        return f"bad:  {found.path}: {'; '.join(found.faults)}"
    from titancli.checkpoint.format.disk import size_text

    count = len(found.manifest.files) + 1 if found.manifest else 0
    return f"good: {found.path} ({count} files, {size_text(found.size)})"


def _row(found: Found) -> tuple[str, ...]:
    from titancli.checkpoint.format.disk import size_text

    manifest = found.manifest
    state = ("set aside; " if found.set_aside else "") + ("; ".join(found.faults) or "good")
    if manifest is None:
        return found.path.name, "-", "-", "-", "-", state
    size, writers = size_text(found.size), _writers(found)
    return found.path.name, str(manifest.step), manifest.created, size, writers, state


def _writers(found: Found) -> str:
    """Return the ranks that wrote it, such as `8 ranks (dp_shard 4, tp 2)`."""
    mesh = ", ".join(f"{name} {degree}" for name, degree in found.mesh.items() if degree > 1)
    ranks = f"{found.ranks} rank{'' if found.ranks == 1 else 's'}"
    return f"{ranks} ({mesh})" if mesh else ranks


def _print_facts(found: Found, tensors: dict[str, TensorLayout]) -> None:
    from titancli.checkpoint.format.disk import size_text

    manifest = found.manifest
    if manifest is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = {
        "step": manifest.step,
        "saved": manifest.created,
        "by run": manifest.run_id,
        "with": versions,
        "written by": _writers(found),
        "files": f"{len(manifest.files) + 1}, {size_text(found.size)}",
        "tensors": len(tensors),
        "state": ", ".join(manifest.state) or "none (weights only)",
        "looks": "; ".join(found.faults)
        or "good (file sizes only; `titan checkpoint verify` also checks the checksums)",
    }
    out(str(found.path))
    for name, value in facts.items():
        out(f"  {name:<11} {value}")
    print()


def _print_tensors(tensors: dict[str, TensorLayout], pieces: bool) -> None:
    from titancli.checkpoint.format.disk import size_text
    from titancli.checkpoint.inspect import nbytes

    rows = []
    for name, tensor in tensors.items():
        parts = f"{len(tensor.chunks)} piece{'' if len(tensor.chunks) == 1 else 's'}"
        rows.append((name, tensor.dtype, _shape(tensor.shape), size_text(nbytes(tensor)), parts))
        if pieces:
            rows += [
                ("", "", _shape(chunk.shape), f"at {_shape(chunk.offsets)}", chunk.file)
                for chunk in tensor.chunks
            ]
    table(("tensor", "dtype", "shape", "size", "pieces"), rows)


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


# -------------------------------------------------------------------------------------------- documents


def _document(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "path": str(found.path),
        "step": manifest.step if manifest else None,
        "created": manifest.created if manifest else None,
        "run_id": manifest.run_id if manifest else None,
        "bytes": found.size if manifest else None,
        "ranks": found.ranks,
        "mesh": found.mesh,
        "good": not found.faults,
        "set_aside": found.set_aside,
        "faults": found.faults,
    }


def _facts(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    if manifest is None:
        raise EnvironmentProblem("; ".join(found.faults))
    return {
        **_document(found),
        "serial": manifest.serial,
        "versions": manifest.versions,
        "lock_xxh3_64": manifest.lock_xxh3_64,
        "files": [{"name": name, "bytes": digest.size} for name, digest in manifest.files.items()],
        "state": manifest.state,
    }


def _tensors(tensors: dict[str, TensorLayout]) -> list[dict[str, Any]]:
    from titancli.checkpoint.inspect import nbytes

    return [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": nbytes(tensor),
            "chunks": [
                {"offsets": list(chunk.offsets), "shape": list(chunk.shape), "file": chunk.file}
                for chunk in tensor.chunks
            ],
        }
        for name, tensor in tensors.items()
    ]
