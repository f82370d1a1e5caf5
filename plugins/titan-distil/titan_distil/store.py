"""Stored distributions: the most probable tokens of every row, in safetensors, found again by the row itself.

A folder has `topk-RANK-NUMBER.safetensors`, with `rows` [N] (a hash of each row), `ids` [N, S, K] int32 and
`logprobs` [N, S, K] fp32, and `topk.json`, written last: what it was made of. Rows are found by their hash,
so that any layout, order or number of epochs reads them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from titan_distil.losses import TOP
from titancli import Batch, LossResult, TitanError, phase
from titancli.data.packing import tokenizer_identity
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem
from titancli.files import read_bytes, read_json, regular

if TYPE_CHECKING:
    from torch import Tensor

    from titan_distil import DistilStore
    from titan_distil import Teacher as Config
    from titancli import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers

VERSION = 1
FILE = re.compile(r"topk-\d{5}-\d{5}\.safetensors")
FOLDER, INDEX = "topk", "topk.json"
FILE_BYTES = 256 * 2**20
"""A file holds about this much."""
SEEN = ("tokens", "positions", "document_ids")
"""What the teacher's distributions depend on."""


# ------------------------------------------------------------------------------------------------ writing


def build(
    config: DistilStore, *, engine: Engine, data: None, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    return partial(store, config, engine, tokenizer, run)


def store(config: DistilStore, engine: Engine, tokenizer: Any, run: Run) -> None:
    """Store as many batches as a run of the recipe reads, or all that there are. Collective."""
    if run.open_dataset is None or run.recipe is None or run.folder is None:
        raise TitanError("the loop distil_store needs a run with a recipe and a folder")
    dataset = run.open_dataset(run.recipe.dataset)
    identity = made_of(run.recipe.weights, tokenizer, dataset.state_dict(), run.batch_shape[1])
    ranks, degrees = Ranks(), engine.mesh.degrees
    writes = dist.get_rank() % (degrees.cp * degrees.tp) == 0  # the others have the same rows
    writer = Writer(run.folder / FOLDER) if writes else None
    taken, loss = itertools.islice(dataset, run.steps * engine.settings.accumulation), _Top(config.k)

    def keep() -> None:
        if writer is not None and batch is not None:
            writer.add(batch, *loss.found)

    def close() -> dict[str, int]:
        return {} if writer is None else writer.close()

    while True:
        batch = ranks.call("reading data", lambda: next(taken, None))
        if not all(ranks.gather(batch is not None)) or batch is None:
            break
        with phase("teacher"):
            engine.evaluate(batch, loss)
        ranks.call("storing distributions", keep)
        if run.should_stop():
            raise TitanError(f"stopped by {run.signal} before all was stored", hint="start it again")
    files = ranks.allgather_call("storing distributions", close)
    index = {"version": VERSION, "k": config.k, "vocabulary": run.recipe.model.vocab_size, **identity}
    index["files"] = dict(itertools.chain.from_iterable(found.items() for found in files))
    if dist.get_rank() == 0:
        path = run.folder / FOLDER / INDEX
        path.with_suffix(".new").write_text(json.dumps(index, indent=1), encoding="utf-8")
        os.replace(path.with_suffix(".new"), path)


class Writer:
    """The files of one rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._files = folder, dict[str, int]()
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, batch: Batch, log_probs: Tensor, ids: Tensor) -> None:
        """Add the rows of a batch, each once."""
        for row, number in enumerate(hashes(batch)):
            self._kept[number] = (ids[row].int().cpu().numpy(), log_probs[row].float().cpu().numpy())
        one = next(iter(self._kept.values()))
        if len(self._kept) * sum(part.nbytes for part in one) >= FILE_BYTES:
            self._write()

    def close(self) -> dict[str, int]:
        """Write what is left, and return the files with their numbers of rows."""
        self._write()
        return self._files

    def _write(self) -> None:
        if not self._kept:
            return
        name = f"topk-{dist.get_rank():05}-{len(self._files):05}.safetensors"
        ids, log_probs = zip(*self._kept.values(), strict=True)
        rows = np.array([*self._kept], dtype=np.int64)
        try:
            save_file(
                {"rows": rows, "ids": np.stack(ids), "logprobs": np.stack(log_probs)}, self._folder / name
            )
        except (OSError, SafetensorError) as error:
            raise EnvironmentProblem(f"{self._folder / name} cannot be written: {error}") from error
        self._files[name] = len(rows)
        self._kept = {}


class _Top:
    """A loss that is none: takes the most probable tokens."""

    output = "logprobs"

    def __init__(self, k: int) -> None:
        self.outputs = (f"topk:{k}",)
        self.found: tuple[Tensor, Tensor]

    def __call__(self, out: Tensor, batch: Batch) -> LossResult:
        self.found = batch["topk_logprobs"], batch["topk_ids"]
        nothing = torch.zeros((), device=out.device)
        return LossResult(nothing, nothing)


# ------------------------------------------------------------------------------------------------ identities


def made_of(weights: Path | None, tokenizer: Any, position: Any, seq_len: int) -> dict[str, Any]:
    """Return the identity of what is stored: teacher, tokenizer, data and length of rows; as plain JSON."""
    found = {
        "teacher": None if weights is None else version_of(weights),
        "tokenizer": None if tokenizer is None else tokenizer_identity(tokenizer),
        "data": position.get("data"),
        "seq_len": seq_len,
    }
    return dict(json.loads(json.dumps(found)))


def version_of(weights: Path) -> str:
    """Return the version of a teacher: a hash of its checkpoint's manifest, which has all checksums; of a
    Hugging Face folder, of the names and sizes of its files and of both ends of each."""
    manifest = weights / "manifest.json"
    if manifest.is_file():
        return xxhash.xxh3_128_hexdigest(read_bytes(manifest))
    digest = xxhash.xxh3_128()
    for path in sorted(weights.glob("*.safetensors")):
        with os.fdopen(regular(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            digest.update(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return digest.hexdigest()


def hashes(batch: Batch) -> list[int]:
    """Return a hash of what the teacher sees of each row, a signed 64-bit integer."""
    arrays = [batch[name].long().cpu().numpy() for name in SEEN if name in batch]
    rows = (b"".join(array[row].tobytes() for array in arrays) for row in range(batch.rows))
    return [int(np.uint64(xxhash.xxh3_64_intdigest(row)).astype(np.int64)) for row in rows]


# ------------------------------------------------------------------------------------------------ reading


class Stored:
    """Adds stored distributions to batches, in the place of a live teacher."""

    def __init__(self, student: Engine, config: Config, tokenizer: Any, run: Run, data: Any) -> None:
        """
        Raises:
            EnvironmentProblem: it is not complete, or was made of another teacher, another tokenizer, other
                data or other rows.
        """
        if config.topk is None or run.recipe is None:
            raise TitanError("the loop distil needs the recipe of its run, and loop.teacher.topk")
        self._student, self._folder, self._ranks = student, config.topk, Ranks()
        position = data.dataset.state_dict()
        now = made_of(config.weights, tokenizer, position, run.batch_shape[1])
        now["vocabulary"] = run.recipe.model.vocab_size
        self._ranks.call(f"reading {self._folder}", partial(self._open, now))

    def _open(self, now: dict[str, Any]) -> None:
        path = self._folder / INDEX
        try:
            index = read_json(path)
            self._k = int(index["k"])
            files = [self._opened(name, index["seq_len"]) for name in index["files"]]
            self._places = {
                int(row): (file, place)
                for file in files
                for place, row in enumerate(file.get_tensor("rows").tolist())
            }
        except FileNotFoundError as error:
            hint = 'give the folder topk of a finished run with [loop] type = "distil_store"'
            raise EnvironmentProblem(f"{error.filename or error} does not exist", hint=hint) from error
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise EnvironmentProblem(f"{path}, or a file beside it, is damaged: {error}") from error
        if index.get("version") != VERSION:
            raise EnvironmentProblem(f"{path} has the version {index.get('version')}, not {VERSION}")
        for name, value in now.items():
            if value != index.get(name) and not (name == "teacher" and value is None):
                raise EnvironmentProblem(
                    f"{self._folder} was made of another {name}: {index.get(name)}, not {value}",
                    hint="store it again, from a recipe with the same data, tokenizer, training.seq_len and "
                    "training.seed",
                )

    def _opened(self, name: str, seq_len: int) -> Any:
        if not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of one of its files")
        os.close(regular(self._folder / name, os.O_RDONLY))
        file = safe_open(self._folder / name, "np")
        rows = len(file.get_tensor("rows"))
        for key in ("ids", "logprobs"):
            if (shape := file.get_slice(key).get_shape()) != [rows, seq_len, self._k]:
                raise ValueError(f"{name} has {key} of the shape {shape}")
        return file

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch, on the device, with the teacher's most probable tokens. Collective.

        Raises:
            EnvironmentProblem: a row was not stored.
        """
        with phase("teacher"):
            log_probs, ids = self._ranks.call("reading distributions", partial(self._rows, batch))
            found = Batch({**batch, TOP[0]: log_probs, TOP[1]: ids}, unit=batch.unit)
            return found.to(self._student.device)

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        shape = (*batch["tokens"].shape, self._k)
        log_probs, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        for row, number in enumerate(hashes(batch)):
            if number not in self._places:
                if (batch["targets"][row] < 0).all():  # fills up a batch
                    continue
                raise EnvironmentProblem(
                    f"{self._folder} has nothing of a row that begins with the tokens "
                    f"{batch['tokens'][row, :8].tolist()}",
                    hint="store as many steps as are trained, with the same training.seed",
                )
            file, place = self._places[number]
            log_probs[row] = torch.from_numpy(file.get_slice("logprobs")[place])
            ids[row] = torch.from_numpy(file.get_slice("ids")[place])
        return log_probs, ids

    def close(self) -> None:
        """Close the files."""
        self._places = {}
