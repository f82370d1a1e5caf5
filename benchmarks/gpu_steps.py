"""What `train_gpu.py` measures: one optimizer step of each variant, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import sidebyside as side
import torch
import torch.distributed as dist
import torchtitan_step
import where_time_goes

RECIPES = {"debugmodel": "llama3_debug", "1B": "llama3_1b", "3B": "llama3_3b", "8B": "llama3_8b"}
OUT_OF_MEMORY = 77
WORDS = 4096
"""Different tokens in the rows, at most."""

LORA = ['weights="."', 'converters=[{type="lora", rank=16, alpha=32.0}]', 'training.dtype="bfloat16"']
OVERRIDES = {
    "titan": [],
    "titan documents": [],
    "titan graphs": ['compile.cuda_graphs="step"'],
    "titan lora": LORA,
    "titan bf16": ['training.dtype="bfloat16"'],
    "titan none": ['activation_checkpoint.mode="none"'],
    "titan equal": ['optimizer.state_dtype="float32"'],
    "titan float8": ['converters=[{type="float8_linear", recipe="tensorwise", skip=["output"]}]'],
}
TORCHTITAN = {
    f"torchtitan {version} {setting}": (version, setting)
    for version in ("0.2.2", "0.3.0")
    for setting in torchtitan_step.SETTINGS
}
OTHER_FLOPS = ("titan documents", "titan lora")
"""Variants that compute fewer than the model's FLOPs of a token: no MFU is reported."""
LONGEST = 2048
"""Tokens of a document, at most, in `titan documents`; the mean is half of it."""
VARIANTS = (*OVERRIDES, "titan train", "plain", "plain bf16", *TORCHTITAN)


@dataclass(frozen=True)
class Case:
    """One process: what it measures."""

    model: str
    variant: str
    repeat: int
    rows: int
    seq_len: int
    steps: int
    warmup: int
    curve: int
    """Losses of so many steps from the first are read, the ones after those that are timed; 0: none."""
    profile: int
    """So many more steps are profiled; 0: none."""
    device: str
    compile: bool


Step = Callable[..., Any]
"""`(tokens, targets, read=False) -> loss or None`, tensors [B, S] on the CPU; a loss is read if asked for."""


# ---------------------------------------------------------------------------------------------- variants


def recipe(case: Case, *more: str) -> Any:
    from titancli.recipe import load_recipe

    return load_recipe(RECIPES[case.model], [*overrides(case), *more]).recipe


def overrides(case: Case) -> list[str]:
    given = [f"training.seq_len={case.seq_len}", f"training.local_batch_size={case.rows}"]
    if case.device == "cpu":
        given += [f"compile.enable={str(case.compile).lower()}", "training.mixed_precision_param=bfloat16"]
        given += ["training.steps=1000", "lr_scheduler.warmup_steps=200", "optimizer.lr=3e-4"]
    return given + OVERRIDES.get(case.variant, [])


def titan(case: Case, device: torch.device) -> Step:
    from titancli.engine import Engine
    from titancli.protocols.batch import Batch

    made = recipe(case)
    if case.variant == "titan lora":
        made = replace(made, weights=base(case, device))
    engine = Engine.build(made, device=device)
    draw = torch.Generator().manual_seed(0)

    def step(tokens: torch.Tensor, targets: torch.Tensor, read: bool = False) -> Any:
        batch = {"tokens": tokens, "targets": targets}
        if case.variant == "titan documents":
            batch |= documents(*tokens.shape, draw)
        metrics = engine.forward_backward(Batch(batch))
        metrics |= engine.optim_step()
        return float(metrics["loss"]) if read else None

    return step


def base(case: Case, device: torch.device) -> Path:
    """Return a folder of weights for adapters, written once for each model: random ones, no speed depends on
    them."""
    from titancli.engine import Engine

    folder = Path(tempfile.gettempdir()) / f"titan-base-{case.model}"
    if not folder.exists():
        case = replace(case, variant="titan bf16")
        with tempfile.TemporaryDirectory() as name:
            words = words_in(Path(name), facts(case)[1])
            made = recipe(case, f'tokenizer={{type="hf", path="{words}"}}')
            with Engine.build(made, device=device) as engine:
                engine.export(folder)
        if device.type == "cuda":  # the peak that is reported is that of the steps
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return folder


def documents(rows: int, seq_len: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return `document_ids` and `positions` of rows packed with documents of 1 to `LONGEST` tokens."""
    begins = torch.zeros(rows, seq_len, dtype=torch.bool)
    for row in begins:
        row[torch.randint(1, LONGEST + 1, (seq_len,), generator=draw).cumsum(0).clamp(max=seq_len - 1)] = True
        row[0] = True
    places = torch.arange(seq_len).expand(rows, seq_len)
    return {
        "document_ids": begins.cumsum(1, dtype=torch.int32) - 1,
        "positions": places - torch.where(begins, places, 0).cummax(1).values,
    }


def plain(case: Case, device: torch.device, *, bf16: bool) -> Step:
    from plain_llama import SIZES, Llama
    from torch.nn.functional import cross_entropy

    with device:
        # Filled on the device: on the CPU the large ones take minutes.
        model = Llama(**SIZES[case.model], seq_len=case.seq_len)  # type: ignore[arg-type]
    if bf16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    rate = torchtitan_step.LR / torchtitan_step.WARMUP_STEPS
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    compiled = torch.compile(loss_of) if case.compile else loss_of

    def step(tokens: torch.Tensor, targets: torch.Tensor, read: bool = False) -> Any:
        tokens, targets = (given.to(device, non_blocking=True) for given in (tokens, targets))
        with nullcontext() if bf16 else torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        group = optimizer.param_groups[0]
        group["lr"] = min(group["lr"] + rate, torchtitan_step.LR)
        return float(loss) if read else None

    return step


def torchtitan(case: Case, device: torch.device) -> Step:
    version, setting = TORCHTITAN[case.variant]
    if torchtitan_step.version() != version:
        raise RuntimeError(f"torchtitan {torchtitan_step.version()} is imported, not {version}")
    return torchtitan_step.build(
        case.model,
        rows=case.rows,
        seq_len=case.seq_len,
        setting=setting,
        compile=case.compile,
        device=device,
    )


BUILD: dict[str, Callable[[Case, torch.device], Step]] = {
    **dict.fromkeys(OVERRIDES, titan),
    **dict.fromkeys(TORCHTITAN, torchtitan),
    "plain": partial(plain, bf16=False),
    "plain bf16": partial(plain, bf16=True),
}


# -------------------------------------------------------------------------------------------- the worker


def worker(case: Case) -> None:
    """Measure one case and print its numbers; exit with OUT_OF_MEMORY if it does not fit."""
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    sys.stdout = sys.stderr  # what others print; `side.answer` has the true one
    if case.variant == "titan train":
        side.answer(train(case))
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    from titancli.observe.profiler import is_out_of_memory

    try:
        numbers = measure(case, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(str(error).splitlines()[0], file=sys.stderr)
        sys.exit(OUT_OF_MEMORY)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    side.answer(numbers)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    began = time.perf_counter()
    step = BUILD[case.variant](case, device)
    flops, vocabulary = facts(case)
    timed = case.warmup + case.steps
    count = max(timed, case.curve) + case.profile
    tokens = rows_of(count, case.rows, case.seq_len, vocabulary)

    def run(number: int, read: bool = False) -> Any:
        row = tokens[number]
        return step(row[:, :-1].contiguous(), row[:, 1:].contiguous(), read)

    losses = [run(number, bool(case.curve)) for number in range(case.warmup)]
    synchronize(device)
    start = time.perf_counter()
    for number in range(case.warmup, timed):
        loss = run(number, number == timed - 1)
    synchronize(device)
    seconds = time.perf_counter() - start
    memory = peak_memory(device)
    rate = case.rows * case.seq_len * case.steps / seconds
    numbers = {
        "tokens_per_second": rate,
        "mfu": None if case.variant in OTHER_FLOPS else mfu(flops * rate, device),
        "flops_per_token": flops,
        "peak_memory_bytes": memory,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "step_seconds": seconds / case.steps,
        "start_seconds": start - began,
        "loss": loss,
    }
    if case.curve:  # those of the timed steps were not read: they would have waited for the device
        losses += [None] * (case.steps - 1) + [loss]
        numbers["losses"] = losses + [run(number, True) for number in range(timed, case.curve)]
    if case.profile:
        last = range(count - case.profile, count)
        steps = partial(list, map(run, last))
        numbers["spent"] = where_time_goes.profile(steps, device, case.profile)
    return numbers


def stream_of(rows: int, seq_len: int, vocabulary: int) -> torch.Tensor:
    """Return tokens [rows x seq_len + 1] that can be learned; more rows are these and others after them.

    Half of them follow from the one before by a fixed table, the others are drawn, small numbers more often.
    """
    generator = torch.Generator()
    words = min(vocabulary, WORDS)
    after = torch.randperm(words, generator=generator.manual_seed(0))
    drawn, follows = torch.empty(2, rows + 1, seq_len)
    for number in range(rows + 1):  # each from a seed of its own: the same however many there are
        drawn[number], follows[number] = torch.rand(2, seq_len, generator=generator.manual_seed(number + 1))
    tokens = (drawn**3 * words).long().T.contiguous()
    for place in range(1, seq_len):
        tokens[place] = torch.where(follows.T[place] < 0.5, after[tokens[place - 1]], tokens[place])
    return tokens.T.reshape(-1)[: rows * seq_len + 1]


def rows_of(count: int, rows: int, seq_len: int, vocabulary: int) -> torch.Tensor:
    """Return the stream as [count, rows, seq_len + 1]: a row's last token is also the next row's first."""
    stream = stream_of(count * rows, seq_len, vocabulary)
    return stream.unfold(0, seq_len + 1, seq_len).unflatten(0, (count, rows))


def words_in(folder: Path, vocabulary: int) -> Path:
    """Write a tokenizer that has a word for each token of `rows_of`."""
    from tokenizers import Tokenizer, models

    words = {"<end>": 0} | {str(number): number for number in range(1, min(vocabulary, WORDS))}
    Tokenizer(models.WordLevel(words, unk_token="<end>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


def facts(case: Case) -> tuple[float, int]:
    """FLOPs of a token and the vocabulary, by titan's own model."""
    from titancli.registry.component import build

    config = recipe(case).model
    with torch.device("meta"):
        return build(config, seq_len=case.seq_len).flops_per_token(case.seq_len), config.vocab_size


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Bytes: the most that the allocator has held on a GPU, else the process's peak resident set."""
    if device.type != "cuda":
        return side.peak_rss()
    return float(torch.cuda.max_memory_reserved(device))


def mfu(flops_per_second: float, device: torch.device) -> float | None:
    from titancli.observe.peaks import device_peak

    peak = device_peak(device)
    return flops_per_second / peak if peak else None


# ------------------------------------------------------------------------------------------- end to end


def train(case: Case) -> dict[str, Any]:
    """`titan train` on the same tokens, by its events: reading, logging and all that a run does."""
    flops, vocabulary = facts(case)
    count = case.warmup + case.steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = stream_of(count * case.rows, case.seq_len, vocabulary)
        tokens.to(torch.int32).numpy().tofile(folder / "tokens.bin")
        dataset = f'type="token_shards", format="raw", dtype="int32", paths=["{folder}/tokens.bin"]'
        command = [
            *(sys.executable, "-m", "titancli", "train", RECIPES[case.model], *overrides(case)),
            *("--run-dir", str(folder / "run"), f'dataset={{{dataset}, shuffle="off"}}'),
            f'tokenizer={{type="hf", path="{words_in(folder, vocabulary)}"}}',
            *("checkpoint.enable=false", f"training.steps={count}", f"metrics.log_freq={case.warmup or 1}"),
            f"lr_scheduler.total_steps={recipe(case).training.steps}",  # the rates of the other variants
        ]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole = time.perf_counter() - began
        if done.returncode:
            text = done.stdout + done.stderr
            print(text[-3000:], file=sys.stderr)
            sys.exit(OUT_OF_MEMORY if "out of memory" in text.lower() else 1)
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        run = json.loads((folder / "run" / "run.json").read_text())
    steps = [event for event in events if event["event"] == "step"]
    later = [event for event in steps if event["step"] > case.warmup]
    first = max((event["step"] for event in steps if event["step"] <= case.warmup), default=0)
    lengths = [b["step"] - a for a, b in zip([first, *(e["step"] for e in later)], later, strict=False)]
    spent = [event["metrics"]["step_seconds"] * n for event, n in zip(later, lengths, strict=True)]
    seconds = sum(spent) / sum(lengths)
    rate = case.rows * case.seq_len / seconds
    return {
        "tokens_per_second": rate,
        "mfu": mfu(flops * rate, torch.device(case.device)),
        "flops_per_token": flops,
        "peak_memory_bytes": max(event["metrics"]["memory_gib"] for event in steps) * 2**30,
        "step_seconds": seconds,
        "start_seconds": whole - seconds * count,
        "loss": later[-1]["metrics"]["loss"],
        "run": {key: run[key] for key in ("titan", "versions") if key in run},
    }
