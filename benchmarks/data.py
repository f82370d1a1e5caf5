"""Data at speed: tokenizing, reading and resuming, each beside its peer in the same run.

    python benchmarks/data.py [--megabytes N] [--seconds N] [--workers N]

Tokenizing: `titan data tokenize` (from reading JSON Lines to checksummed shards) beside
`tokenizers.encode_batch_fast` alone, which has the texts in memory and as many threads as there are
workers; the tokenizer is a byte-level BPE of 8,192 tokens, trained on the spot on the standard library.
Reading: tokens per second of one core as batches of int64, of `token_shards` in each order, of a plain
`numpy.memmap` in order, of Megatron-LM's format read by NumPy in a random order, and of `datasets` in
Arrow; and how long the first batch after a resume takes. Memory: what 10 TB of tokens (sparse files) add to
a process. Waiting: the share of its time that a run waits for rows that take 5 ms each, by worker processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEQ_LEN, ROWS = 2048, 8


def corpus(folder: Path, megabytes: int) -> Path:
    """JSON Lines made of the standard library, a file a row, repeated."""
    texts = [
        file.read_text(errors="replace")[:20_000]
        for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    ]
    path, written = folder / "corpus.jsonl", 0
    with open(path, "w", encoding="utf-8") as file:
        while written < megabytes << 20:
            for number, text in enumerate(texts):
                written += file.write(json.dumps({"text": f"{written} {number}\n{text}"}) + "\n")
    return path


def tokenizer(folder: Path, lines: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    with open(lines, encoding="utf-8") as file:
        made.train_from_iterator(
            (json.loads(line)["text"] for line, _ in zip(file, range(300), strict=False)), trainer
        )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def tokenizing(folder: Path, lines: Path, names: Path, workers: int) -> None:
    code = (
        "import json, sys, time\nfrom tokenizers import Tokenizer\n"
        "made = Tokenizer.from_file(sys.argv[1]); made.encode_special_tokens = True\n"
        "texts = [json.loads(line)['text'] for line in open(sys.argv[2], encoding='utf-8')]\n"
        "begun, count = time.perf_counter(), 0\n"
        "for first in range(0, len(texts), 512):\n"
        "    found = made.encode_batch_fast(texts[first:first + 512], add_special_tokens=False)\n"
        "    count += sum(len(one) for one in found)\n"
        "print(json.dumps([count, time.perf_counter() - begun]))"
    )
    peer = [sys.executable, "-c", code, str(names / "tokenizer.json"), str(lines)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    own = [sys.executable, "-m", "titancli", "data", "tokenize", str(lines), "OUT", "--tokenizer", str(names)]
    own += ["--workers", str(workers), "--json", "-q"]
    ratios = []
    for attempt in range(3):
        own[5] = str(folder / f"out{attempt}")
        count, seconds = json.loads(
            subprocess.run(peer, env=environment, check=True, capture_output=True).stdout
        )
        found = json.loads(subprocess.run(own, check=True, capture_output=True).stdout)
        rates = found["tokens"] / found["seconds"], count / seconds
        ratios.append(rates[0] / rates[1])
        print(f"| {workers} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratios[-1]:.2f} x |")
    print(f"\ntitan data tokenize is {sorted(ratios)[1]:.2f} x encode_batch_fast\n")


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Tokens per second, after the first batch."""
    next(batches)
    begun, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < seconds:
        for _ in range(20):
            next(batches)
        count += 20 * ROWS * SEQ_LEN
    return count / passed


def reading(folder: Path, names: Path, seconds: float) -> None:
    import numpy as np
    import torch

    from titancli.data import HFTokenizer, TokenShards
    from titancli.registry.component import build

    torch.set_num_threads(1)
    runtime = {"tokenizer": build(HFTokenizer(path=names)), "seq_len": SEQ_LEN, "rows": ROWS}
    runtime |= {"dp_rank": 0, "dp_size": 1, "seed": 1}

    def shards(**fields: Any) -> Any:
        return build(TokenShards(paths=[folder / "out0"], **fields), **runtime)

    def resumed(**fields: Any) -> float:
        state = shards(**fields).state_dict()
        place: dict[str, Any] = {"group": {"document": 777, "past": 0}, "used": 3}
        if "group" not in state:
            place = {"row": 10**9} if "row" in state else {"mark": {"document": 777}, "offset": 3}
        dataset = shards(**fields)
        begun = time.perf_counter()
        dataset.load_state_dict({**state, **place})
        next(iter(dataset))
        return 1e3 * (time.perf_counter() - begun)

    data = np.memmap(next((folder / "out0").glob("*.bin")), "<u2", "r")
    span = ROWS * SEQ_LEN

    def plain(order: Callable[[int], Any]) -> Iterator[Any]:
        """Rows of a memory-mapped file in some order, as Megatron-LM's indexed dataset reads them."""
        number = 0
        while True:
            rows = [data[first : first + SEQ_LEN + 1].astype(np.int64) for first in order(number)]
            both = torch.from_numpy(np.stack(rows))
            yield both[:, :-1].contiguous(), both[:, 1:].contiguous()
            number += 1

    count = (len(data) - 1) // SEQ_LEN
    shuffled = np.random.RandomState(1).permutation(count) * SEQ_LEN
    listed = plain(lambda n: [(n * span + row * SEQ_LEN) % (count * SEQ_LEN) for row in range(ROWS)])
    random = plain(lambda n: [shuffled[(n * ROWS + row) % count] for row in range(ROWS)])
    for name, fields in {
        "token_shards": {},
        "token_shards, document_mask": {"document_mask": True},
        "token_shards, documents": {"shuffle": "documents"},
        "token_shards, off": {"shuffle": "off"},
        "token_shards, best_fit": {"shuffle": "documents", "document_mask": True, "packing": "best_fit"},
    }.items():
        print(f"| {name} | {rate(iter(shards(**fields)), seconds) / 1e6:,.0f} | {resumed(**fields):.1f} |")
    print(f"| numpy.memmap in order | {rate(listed, seconds) / 1e6:,.0f} | |")
    print(f"| Megatron's format by NumPy, shuffled rows | {rate(random, seconds) / 1e6:,.0f} | |")
    print(
        f"| datasets (Arrow), shuffled rows | {rate(arrow(data, shuffled, count), seconds) / 1e6:,.0f} | |\n"
    )


def arrow(data: Any, shuffled: Any, count: int) -> Iterator[Any]:
    import datasets
    import numpy as np

    rows = [
        data[first : first + SEQ_LEN + 1].astype(np.uint16)
        for first in range(0, min(count, 4000) * SEQ_LEN, SEQ_LEN)
    ]
    table = datasets.Dataset.from_dict({"ids": rows}).with_format("torch")
    order = (shuffled // SEQ_LEN)[: 10 * len(rows)] % len(rows)
    number = 0
    while True:
        chosen = [int(order[(number * ROWS + row) % len(order)]) for row in range(ROWS)]
        ids = table[chosen]["ids"].long()
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        number += 1


def memory(folder: Path) -> None:
    """What a rank of 1024 needs for 10 TB: sparse files of uint16."""
    from titancli.data import ByteTokenizer, TokenShards
    from titancli.data.shards import Index, Shard
    from titancli.registry.component import build

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    out, shards, tokens, documents = folder / "large", [], 1 << 29, 1 << 20
    out.mkdir()
    for number in range(10_240):
        name, modified = f"{number:05d}", []
        for suffix, size in ((".bin", 2 * tokens), (".idx", 8 * documents)):
            with open(out / f"{name}{suffix}", "wb") as file:
                file.truncate(size)
            modified.append((out / f"{name}{suffix}").stat().st_mtime_ns)
        shards.append(Shard(name, tokens, documents, 0, ("0" * 256, "0" * 16), (modified[0], modified[1])))
    (out / "index.json").write_text(Index(out, "byte", 257, 256, "uint16", [], 0, shards).text())
    shards.clear()
    before, begun = resident(), time.perf_counter()
    runtime = {"seq_len": SEQ_LEN, "rows": ROWS, "dp_rank": 1000, "dp_size": 1024, "seed": 1}
    dataset = build(TokenShards(paths=[out]), tokenizer=build(ByteTokenizer()), **runtime)
    opened = time.perf_counter() - begun
    for _, _batch in zip(range(1000), dataset, strict=False):
        pass
    more = resident() - before
    print(f"10 TiB in 10,240 shards: opened in {opened:.2f} s; after 1,000 batches {more:.1f} MiB more")


def waiting(folder: Path) -> None:
    """The share of its time that a run waits for rows that take 5 ms each, by `titan train`."""
    plugin = Path(__file__).parents[1] / "tests/data/slow_plugin.py"
    run = [sys.executable, "-m", "titancli", "train", "llama3_debug", "-p", str(plugin), "dataset.type=slow"]
    run += ["dataset.seconds=0.005", "training.local_batch_size=64", "training.seq_len=8", "-q"]
    run += ["training.steps=30", "metrics.log_freq=1", "checkpoint.enable=false", "model.dim=32"]
    for workers in (0, 2, 8):
        out = folder / f"waiting{workers}"
        more = [f"training.dataloader.num_workers={workers}", "--run-dir", str(out)]
        subprocess.run([*run, *more], check=True, capture_output=True)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        steps = [event["metrics"] for event in events if event["event"] == "step"][10:]
        print(f"| {workers} | {sum(step['data_wait_share'] for step in steps) / len(steps):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = corpus(folder, chosen.megabytes)
        names = tokenizer(folder / "tokenizer", lines)
        print(
            "| workers | titan data tokenize, tokens/s | encode_batch_fast, tokens/s | ratio |\n"
            "|---|---|---|---|"
        )
        tokenizing(folder, lines, names, chosen.workers)
        print("| reader | million tokens/s a core | resume, ms |\n|---|---|---|")
        reading(folder, names, chosen.seconds)
        memory(folder)
        print("\n| num_workers | data_wait_share |\n|---|---|")
        waiting(folder)


if __name__ == "__main__":
    main()
