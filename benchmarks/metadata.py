"""What a checkpoint's metadata cost at the size of Llama 3.1 405B: seconds, bytes, memory; without any data.

    python benchmarks/metadata.py [--ranks 512 8192]

The state is that of AdamW (weights, two moments and a step a parameter), sharded by FSDP over all ranks; or,
as `hsdp`, over groups of 512. Every rank is simulated in this process: rank 0 is given what all ranks tell,
makes the plan, is told by all that nothing has changed, and writes the index. One rank then reads what it
needs to load its own part: the manifest, the index, its own part of the metadata, and that of the ranks that
wrote the rest.

Prints a table: seconds of rank 0's first and second plan, megabytes of the index and of all that one rank
reads, and the seconds and megabytes of memory (peak, beyond what was there) in which it reads them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titancli.checkpoint.format.hashed import PIECE, Digest
from titancli.checkpoint.format.layout import Chunk
from titancli.checkpoint.format.manifest import MANIFEST, Manifest, manifest_bytes, read_manifest
from titancli.checkpoint.format.metadata import METADATA, index_bytes, open_metadata, part_bytes, part_name
from titancli.checkpoint.format.plan import Box, SavePlan

SUM = "0123456789abcdef"


def tensors(layers: int = 126) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the whole training state."""
    dim, kv, hidden, vocabulary = 16384, 1024, 53248, 128256
    block = {
        "attention.wq.weight": (dim, dim),
        "attention.wk.weight": (kv, dim),
        "attention.wv.weight": (kv, dim),
        "attention.wo.weight": (dim, dim),
        "feed_forward.w1.weight": (hidden, dim),
        "feed_forward.w2.weight": (dim, hidden),
        "feed_forward.w3.weight": (hidden, dim),
        "attention_norm.weight": (dim,),
        "ffn_norm.weight": (dim,),
    }
    weights = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    weights |= {
        "tok_embeddings.weight": (vocabulary, dim),
        "norm.weight": (dim,),
        "output.weight": (vocabulary, dim),
    }
    moments = {f"optimizer.{n}.{key}": s for n, s in weights.items() for key in ("exp_avg", "exp_avg_sq")}
    steps = {f"optimizer.{name}.step": () for name in weights}
    return {f"model.{name}": shape for name, shape in weights.items()} | moments | steps


def box_of(shape: tuple[int, ...], place: int, shards: int) -> Box:
    """What FSDP gives one of so many ranks of a tensor."""
    if not shape:
        return Box("F32", (), (), ())
    rows = -(-shape[0] // shards)
    first = min(place * rows, shape[0])
    sizes = (min(rows, shape[0] - first), *shape[1:])
    return Box("F32", shape, (first, *(0 for _ in shape[1:])), sizes)


class Told(NamedTuple):
    """What all ranks tell rank 0, and the names behind it."""

    everyones: list[Any]
    names: dict[str, tuple[str, ...]]


def told(ranks: int, shards: int, layers: int = 126) -> Told:
    """Return what the ranks would tell."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, shape in tensors(layers).items():
        by_shape.setdefault(shape, []).append(name)
    names = {str(shape): tuple(sorted(found)) for shape, found in by_shape.items()}
    everyones = [
        [
            (box, str(shape))
            for shape in by_shape
            if 0 not in (box := box_of(shape, rank % shards, shards)).sizes
        ]
        for rank in range(ranks)
    ]
    return Told(everyones, names)


def plan(given: Told) -> tuple[SavePlan, list[Any]]:
    """Return rank 0's first plan, and what each rank is to write."""
    made = SavePlan()
    return made, made._divide(given.everyones, given.names)


def write(folder: Path, made: SavePlan, given: Told, tasks: Sequence[Any], wanted: Sequence[int]) -> None:
    """Write what a rank reads beside data: the manifest, the index, and the parts of some ranks."""
    files = {}
    for rank in range(len(tasks)):
        files[f"rank-{rank:05d}.safetensors"] = Digest(600_000_000, SUM)
        files[part_name(rank)] = Digest(100_000, SUM)
    data = index_bytes(made.groups)
    (folder / METADATA).write_bytes(data)
    files[METADATA] = digest_of(data)
    for rank in wanted:
        chunks, start, file = {}, 400_000, f"rank-{rank:05d}.safetensors"
        for number, chosen in tasks[rank]:
            box, key = given.everyones[rank][number]
            for name in given.names[key][slice(*chosen)] if isinstance(chosen[0], int) else chosen:
                # Checksums cannot be compressed, so they must not be alike here.
                count = -(-box.nbytes // PIECE)
                sums = tuple(f"{hash((name, piece)) & 0xFFFFFFFFFFFFFFFF:016x}" for piece in range(count))
                chunks[name] = [Chunk(box.offsets, box.sizes, file, name, sums, PIECE, start)]
                start += box.nbytes
        data = part_bytes(chunks, {file: Digest(400_000, SUM)})
        (folder / part_name(rank)).write_bytes(data)
        files[part_name(rank)] = digest_of(data)
    manifest = Manifest(1, "run", 1, "", {}, None, {"ranks": len(tasks), "mesh": {}}, files, {})
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))


def digest_of(data: bytes) -> Digest:
    import xxhash

    return Digest(len(data), xxhash.xxh3_64(data).hexdigest())


def load(folder: Path, rank: int, shards: int, layers: int = 126) -> int:
    """Look up what a rank loads, as a load does; return the number of its pieces."""
    manifest = read_manifest(folder)
    metadata = open_metadata(folder, manifest.files)
    wanted = {}
    for name, shape in tensors(layers).items():
        box = box_of(shape, rank % shards, shards)
        wanted[name] = [(box.offsets, box.sizes)]
    found = metadata.layouts(wanted)
    if len(found) != len(wanted):
        raise SystemExit(f"{len(found)} of {len(wanted)} tensors were found in {folder}")
    return sum(len(layout.chunks) for layout in found.values())


def row(ranks: int, shards: int) -> list[str]:
    given = told(ranks, shards)
    began = time.perf_counter()
    made, tasks = plan(given)
    first = time.perf_counter() - began
    digests = [f"{rank:032x}" for rank in range(ranks)]
    began = time.perf_counter()
    if digests != [f"{rank:032x}" for rank in range(ranks)]:  # as a later save compares them
        raise SystemExit("the digests of equal layouts differ")
    index = index_bytes(made.groups)
    second = time.perf_counter() - began
    rank = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, made, given, tasks, needed_parts(made, given, rank))
        size = sum(path.stat().st_size for path in folder.iterdir())
        began = time.perf_counter()
        load(folder, rank, shards)
        seconds = time.perf_counter() - began
        tracemalloc.start()
        load(folder, rank, shards)
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    figures = [f"{first:.2f}", f"{second:.3f}", f"{len(index) / 1e6:.2f}", f"{size / 1e6:.2f}"]
    return [
        f"{ranks} ({'fsdp' if shards == ranks else 'hsdp'})",
        *figures,
        f"{seconds:.2f}",
        f"{memory / 1e6:.0f}",
    ]


def needed_parts(made: SavePlan, given: Told, rank: int) -> list[int]:
    """Return the ranks that have written what a rank loads."""
    mine = {(box.shape, box.offsets) for box, _ in given.everyones[rank]}
    return sorted({c.rank for g in made.groups for c in g.cells if (g.shape, c.offsets) in mine})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 8192])
    heads = ["ranks", "first plan, s", "next plans, s", "index, MB", "a rank reads, MB", "in s", "memory, MB"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for ranks in parser.parse_args().ranks:
        for shards in sorted({ranks, min(ranks, 512)}, reverse=True):
            print(f"| {' | '.join(row(ranks, shards))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
