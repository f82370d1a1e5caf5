"""Readers of files that a stranger may have written, and for each a small file that expands, one that is
nested, and one without an end.

`python -m tests.security.readers FILE NAME FOLDER` makes the files of a row in FILE's `READERS` and reads
each of them, within `SECONDS` of CPU time and `MEBIBYTES` of memory. A plugin's rows are in its own tests.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import os
import resource
import runpy
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEBIBYTES = 10, 256
"""What reading a file may take. A reader that waits for a FIFO is ended by an alarm."""
DEEP = 100_000
ROOT = Path(__file__).parents[2]
HARMS = ("expands", "nested", "endless")
Make = Callable[[Path], None]


@dataclass(frozen=True)
class Reader:
    """A reader and its three files."""

    door: str
    """The row of `tests.security.doors.DOORS` that it belongs to."""
    read: Callable[[Path], Any]
    file: str
    expands: Make
    nested: Make
    endless: Make
    warm: str = ""
    """Modules that are imported first; their memory is not the file's."""


def text(value: str | bytes) -> Make:
    return lambda path: path.write_bytes(value.encode() if isinstance(value, str) else value) and None


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    """A terabyte, of which nothing lies on the disk."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def zeros(path: Path) -> None:
    """3 GiB of zeros."""
    import zstandard

    with open(path, "wb") as out, zstandard.ZstdCompressor(level=1).stream_writer(out) as packed:
        for _ in range(3 << 7):
            packed.write(bytes(1 << 23))


def zipped(content: Callable[[int], bytes]) -> Make:
    """128 MiB, in pieces."""

    def make(path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=1) as out:
            for number in range(1 << 3):
                out.write(content(number))

    return make


def bzip(path: Path) -> None:
    """256 MiB."""
    path.write_bytes(bz2.compress(bytes(1 << 28), 1))


def xz(path: Path) -> None:
    """256 MiB."""
    path.write_bytes(lzma.compress(bytes(1 << 28), preset=0))


def sparse_list(path: Path) -> None:
    path.write_bytes(b'[{"text": "')
    os.truncate(path, 1 << 40)


def card(harm: str) -> Make:
    """A dataset's card, whose YAML `datasets` loads."""

    def make(path: Path) -> None:
        (path.parent / "a.jsonl").write_text('{"text": "a"}\n')
        if harm == "merges":
            merges(path)
            path.write_text(f"---\n{path.read_text()}\n---\n")
        else:
            path.write_text(f"---\na: {BRACKETS}\n---\n")

    return make


def megatron(sequences: int, size: int) -> Make:
    """An index whose header counts so many sequences, of no tokens, in a file of so many bytes."""

    def make(path: Path) -> None:
        path.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, 1))
        os.truncate(path, size)

    return make


def lattice(path: Path) -> None:
    for floor in range(40):
        (path.parent / f"{floor}.toml").write_text(f'extends = ["{floor + 1}.toml", "./{floor + 1}.toml"]\n')
    (path.parent / "40.toml").write_text("[training]\nsteps = 1\n")
    path.write_text('extends = "0.toml"\n')


def repeated(path: Path) -> None:
    """5.8 GiB: one value of 1 MiB in 5,800 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 5800, pa.int32()), pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"text": values}), path, compression="zstd", store_schema=False)


def long_value(path: Path) -> None:
    """One value of 256 MiB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": pa.array(["x" * (1 << 28)])})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def forged(path: Path) -> None:
    """A column of texts whose type is FLOAT: a byte of the footer differs, and pyarrow aborts at it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", "b"]}), path, store_schema=False)
    data = path.read_bytes()
    good, bad = (bytes((0x15, kind)) + b"\x25\x02\x18\x04text" for kind in (12, 8))
    assert data.count(good) == 1
    path.write_bytes(data.replace(good, bad))


def footer(path: Path) -> None:
    """A footer of 2 GiB, in holes."""
    path.write_bytes(b"PAR1")
    os.truncate(path, 4 + (1 << 31))
    with open(path, "ab") as file:
        file.write(((1 << 31) - 8).to_bytes(4, "little") + b"PAR1")


def tokenizer(**parts: Any) -> Make:
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "a"},
    } | parts

    def make(path: Path) -> None:
        path.write_text(json.dumps(whole))
        (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')

    return make


def merges(path: Path) -> None:
    lines = [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 60)]
    path.write_text("\n".join(["a0: &a0 {k: 1}", *lines]))


# ------------------------------------------------------------------------------------------------ the readers


def recipe(path: Path) -> Any:
    from titancli.recipe.merge import read_recipe
    from titancli.recipe.problems import Problems
    from titancli.registry import current

    return read_recipe(path, current(), Problems())


def rows(path: Path) -> Any:
    from titancli.data.files import find_files
    from titancli.data.jsonl import LineReader

    reader = LineReader(find_files(path), shuffle=True, seed=0, max_bytes=1 << 23)
    return sum(len(row.data or b"") for _, row, _ in reader.read(0, None))


def documents(path: Path) -> Any:
    from titancli.data.files import FileSource, find_files

    source = FileSource("text", find_files(path), shuffle=False, seed=0)
    return sum(len(piece.text) for piece in source.read(0, None))


def column(path: Path) -> Any:
    from titancli.data import Parquet
    from titancli.data.files import find_files
    from titancli.data.parquet import ParquetSource

    source = ParquetSource(Parquet(paths=[path], text="text"), find_files(path), 0)
    return sum(len(piece.text) for piece in source.read(0, None))


def dataset(path: Path) -> Any:
    """Read a file, or the folder of one that datasets reads besides rows, as `[dataset] type = "hf"` does."""
    import datasets

    from titancli.data import HFDataset
    from titancli.data.hf_datasets import IndexedSource, load

    datasets.config.HF_DATASETS_CACHE = str(path.parent.with_suffix(".cache"))
    datasets.config.HF_HUB_OFFLINE = True
    config = HFDataset(path=str(path.parent if path.name in FOLDERS else path))
    return sum(len(piece.text) for piece in IndexedSource(config, load(config), 0).read(0, None))


def shards(path: Path) -> Any:
    from titancli.data.shards import read_index

    return read_index(path.parent)


def foreign(path: Path) -> Any:
    """Open the files of another tool, by their names."""
    from titancli.data import TokenShards
    from titancli.data.shards.foreign import open_foreign

    kinds: dict[str, Any] = {".idx": {"format": "megatron"}, ".bin": {"format": "llm.c"}}
    kind = kinds.get(path.suffix, {"format": "raw", "dtype": "uint16"})
    if path.suffix == ".idx":
        path.with_suffix(".bin").write_bytes(bytes(16))
    return open_foreign(
        TokenShards(paths=[path.with_suffix(".bin") if path.suffix == ".idx" else path], **kind), "x"
    )


def excluded(path: Path) -> Any:
    from titancli.checkpoint.exclude import Exclusion

    return Exclusion.once(["model.x"], path.parent)


def lock_model(path: Path) -> Any:
    """Of a damaged lock there is no model; the error comes when the weights are read."""
    from titancli.checkpoint.hf.config_match import vocabulary_in
    from titancli.registry import current

    return vocabulary_in(path.parent, current().find("model", "llama3"))


def prompts(path: Path) -> Any:
    from titancli.generate.prompts import read_file

    return read_file(path)


def tokenizer_of(path: Path) -> Any:
    from titancli.data.hf_tokenizer import HFTokenizer

    return HFTokenizer(path.parent).encode("a")


def chat(path: Path) -> Any:
    from titancli.data.hf_tokenizer import HFTokenizer

    tokenizer()(path.with_name("tokenizer.json"))
    return HFTokenizer(path.parent).chat([{"role": "user", "content": "a"}])


def model(path: Path) -> Any:
    from titancli.recipe.load import _model_table
    from titancli.registry import current

    return _model_table(str(path.parent), current())


def exported(path: Path) -> Any:
    from titancli.checkpoint.hf.folder import _bytes_of

    return _bytes_of(path)


def adapters(path: Path) -> Any:
    from titancli.recipe.peft_folder import config_of

    return config_of(path.parent)


def likeness(path: Path) -> Any:
    from titancli.checkpoint.hf.config_match import read_config

    return read_config(path)


def header(path: Path) -> Any:
    from titancli.checkpoint.format.tensorfile import read_header

    return read_header(path)


BRACKETS = "[" * DEEP
HUGE = (1 << 62).to_bytes(8, "little")
FOLDERS = ("README.md", "state.json", "dataset_info.json")
HF = "datasets datasets.packaged_modules titancli.data.hf_datasets pyarrow.parquet torch"
LOCK = "titancli.checkpoint.hf.config_match titancli.checkpoint.exclude"
SHARDS = "titancli.data.shards titancli.data.shards.foreign"
DATA = "titancli.data.jsonl titancli.data.parquet"
ROWS = "text, rows and prompts"
READERS = {
    "recipe": Reader("recipes", recipe, "x.toml", lattice, text(f"a = {BRACKETS}"), fifo),
    "rows": Reader(ROWS, rows, "x.jsonl", zeros, text(f'{{"text": {BRACKETS}\n'), fifo, DATA),
    "list": Reader(
        ROWS,
        rows,
        "x.json",
        zipped(lambda n: (b"" if n else b'[{"text": "') + b"x" * (1 << 24)),
        text(f'[{{"a": {BRACKETS}'),
        fifo,
        DATA,
    ),
    "table": Reader(
        ROWS,
        rows,
        "x.csv",
        zipped(lambda n: (b"" if n else b'a,b\n1,"') + b"x\n" * (1 << 23)),
        text("a,b\n1," + '"' * DEEP),
        fifo,
        DATA,
    ),
    "document": Reader(ROWS, documents, "x.txt", zeros, text(gzip.compress(gzip.compress(b"x"))), fifo, DATA),
    "rows of Parquet": Reader(ROWS, rows, "x.parquet", repeated, long_value, fifo, f"{DATA} pyarrow.parquet"),
    "column": Reader(ROWS, column, "x.parquet", repeated, long_value, fifo, f"{DATA} pyarrow.parquet"),
    "footer, rows": Reader(ROWS, rows, "x.parquet", footer, forged, fifo, f"{DATA} pyarrow.parquet"),
    "footer, column": Reader(ROWS, column, "x.parquet", footer, forged, fifo, f"{DATA} pyarrow.parquet"),
    "footer, hf": Reader(ROWS, dataset, "x.parquet", footer, forged, fifo, HF),
    "hf, compressed": Reader(ROWS, dataset, "x.jsonl.zst", zeros, bzip, xz, HF),
    "hf, lines": Reader(ROWS, dataset, "x.jsonl", sparse, text(f'{{"text": {BRACKETS}\n'), fifo, HF),
    "hf, list": Reader(ROWS, dataset, "x.json", sparse_list, text(f'[{{"text": {BRACKETS}'), fifo, HF),
    "hf, text": Reader(ROWS, dataset, "x.txt", sparse, zipped(lambda n: b"x" * (1 << 24)), fifo, HF),
    "hf, Parquet": Reader(ROWS, dataset, "x.parquet", repeated, long_value, fifo, HF),
    "hf, card": Reader(ROWS, dataset, "README.md", card("merges"), card("nested"), fifo, HF),
    "hf, saved": Reader(ROWS, dataset, "state.json", sparse, text(BRACKETS), fifo, HF),
    "lock of a checkpoint": Reader(
        "the lock of a run", excluded, "recipe.lock.toml", sparse, text(f"a = {BRACKETS}"), text("[a"), LOCK
    ),
    "model of a checkpoint": Reader(
        "the lock of a run", lock_model, "recipe.lock.toml", sparse, text(f"a = {BRACKETS}"), fifo, LOCK
    ),
    "prompts": Reader(
        ROWS,
        prompts,
        "x.jsonl",
        sparse,
        text(f'{{"prompt": {BRACKETS}'),
        text("\n" * 100),
        "titancli.generate.prompts",
    ),
    "index of shards": Reader("token shards", shards, "index.json", sparse, text(BRACKETS), fifo, SHARDS),
    "Megatron": Reader(
        "token shards",
        foreign,
        "x.idx",
        megatron(1 << 34, 1 << 38),
        megatron((1 << 64) - 1, 64),
        fifo,
        SHARDS,
    ),
    "llm.c": Reader(
        "token shards",
        foreign,
        "x.bin",
        text(struct.pack("<3i", 20240520, 1, -1) + bytes(1012)),
        text(struct.pack("<3i", 20240520, 1, (1 << 31) - 1) + bytes(1020)),
        fifo,
        SHARDS,
    ),
    "NumPy": Reader(
        "token shards",
        foreign,
        "x.npy",
        text(b"\x93NUMPY\1\0v\0{'descr': '<u2', 'fortran_order': False, 'shape': (1 << 60,), }\n"),
        text(b"\x93NUMPY\1\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\ncos\nsystem\n"),
        fifo,
        SHARDS,
    ),
    "tokenizer": Reader(
        "tokenizers and chat templates",
        tokenizer_of,
        "tokenizer.json",
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        text(BRACKETS),
        tokenizer(
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(x+x+)+y"},
                "behavior": "Isolated",
                "invert": False,
            }
        ),
        "titancli.data.hf_tokenizer",
    ),
    "chat template": Reader(
        "tokenizers and chat templates",
        chat,
        "chat_template.jinja",
        text("{{ 'x' * 10**10 }}"),
        text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        text("{% for m in messages %}{{ 'x'|center(10**10) }}{% endfor %}"),
        "titancli.data.hf_tokenizer titancli.data.chat_template transformers",
    ),
    "tokenizer of an export": Reader(
        "tokenizers and chat templates",
        exported,
        "tokenizer.json",
        sparse,
        text(BRACKETS),
        fifo,
        "titancli.checkpoint.hf.folder",
    ),
    "config.json": Reader(
        "config.json, generation_config.json, adapters",
        model,
        "config.json",
        text('{"model_type": "llama", "num_hidden_layers": 1' + "0" * 4000 + "}"),
        text(f'{{"model_type": {BRACKETS}'),
        sparse,
    ),
    "adapter_config.json": Reader(
        "config.json, generation_config.json, adapters",
        adapters,
        "adapter_config.json",
        sparse,
        text(BRACKETS),
        fifo,
    ),
    "config.json of weights": Reader(
        "config.json, generation_config.json, adapters",
        likeness,
        "config.json",
        sparse,
        text(f'{{"model_type": {BRACKETS}'),
        fifo,
        "titancli.checkpoint.hf.config_match",
    ),
    "tensors": Reader(
        "weights of Hugging Face folders",
        header,
        "x.safetensors",
        text(HUGE + b"{}"),
        text((DEEP).to_bytes(8, "little") + BRACKETS.encode()),
        fifo,
        "titancli.checkpoint.format.tensorfile",
    ),
}

SMALL = "tests/security/test_small_files.py::test_a_small_file_that_is_none_is_refused_or_left_out"
LISTED = "tests/security/test_run_folders.py::test_one_folder_neither_ends_nor_holds_up_the_list_of_all"
ELSEWHERE = {
    "the lock of a run": SMALL,
    "run.json": LISTED,
    "notes": SMALL,
    "the event log": LISTED,
    "logs and reports of ranks": SMALL,
    "locks": LISTED,
    "digests": SMALL,
    "requests and answers: profiles, replays, evaluations, rollouts, sweeps, jobs": SMALL,
    "the rendezvous in a shared folder": SMALL,
    "metadata of checkpoints": "tests/security/test_run_folders.py"
    "::test_metadata_of_a_few_bytes_take_little_memory",
    "task files of lm-eval": "plugins/titan-eval/tests/test_eval_readers.py::test_small_files_cost_little",
    "images and what is made of them": "plugins/titan-flux/tests/test_flux_readers.py"
    "::test_small_files_cost_little",
    "stored distributions of a teacher": "plugins/titan-distil/tests/test_distil_store.py"
    "::test_a_store_of_somebody_else_opens_nothing_outside_and_waits_for_nothing",
}
"""Doors whose readers another test bounds."""
OWN = {
    "tables of metrics": "is only appended to",
    "sources that a run keeps, and files of titan reproduce": "are copied, and read by the lines of the run",
    "the git repository around the current folder": "git reads it",
    "sockets and stores that ranks meet through": "no files",
    "checkpoints": "its tensors are in the row 'tensors', its JSON is bounded by the metadata's reader",
    "copies in the memory of nodes": "of this user, by checksums",
    "object stores": "their files are those of checkpoints",
    "the Hub": "the library huggingface_hub and datasets read it",
    "caches of this user": "nobody else writes there",
    "installed plugins, whose code is trusted": "is code",
    "programs that titan starts, and what they answer": "no files",
    "the machine itself: /proc, /sys, files that commands write for who calls them": "the kernel's",
}
"""Doors without a file of a stranger that titan itself parses, each with why."""


def require_bounds(file: str, name: str, folder: Path, whole: Collection[str] = ()) -> None:
    """Read the files of a row in a child, which ends by a signal after 10 CPU-seconds for a file, or if it
    waits.

    Args:
        file: the module with the row.
        whole: harms whose files are read to their end, or whose faults the reader returns; every other one is
            refused.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.readers", file, name, str(folder)],
        cwd=ROOT,
        env=os.environ | {"TITAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {harm: grown for harm, (_, grown) in found.items() if grown > MEBIBYTES} == {}
    assert {harm for harm, (error, _) in found.items() if error} == set(HARMS) - set(whole), found


def main(file: str, name: str, folder: Path) -> int:
    """Print the outcome of each file of a row as JSON: its error, and the mebibytes that reading it added."""
    from titancli.errors import TitanError

    signal.alarm(20 * SECONDS)  # on a FIFO it would wait for ever
    row = runpy.run_path(file)["READERS"][name]
    for module in row.warm.split():
        importlib.import_module(module)
    made = {}
    for harm in HARMS:
        made[harm] = folder / harm / row.file
        made[harm].parent.mkdir()
        if (child := os.fork()) == 0:  # what making a file needs is not what reading it needs
            getattr(row, harm)(made[harm])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    found = {}
    for harm, path in made.items():
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            row.read(path)
            error = ""
        except TitanError as refused:
            error = str(refused)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used.ru_maxrss
        found[harm] = [error, grown >> 10]
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
