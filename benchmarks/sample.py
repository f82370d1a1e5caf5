"""Greedy completions: titan's sampler beside transformers' `generate` and, if it is there, vLLM.

    python benchmarks/sample.py [--rounds N] [--only one batch ends long group] [--layers N] [--products]
                                [--vllm FOLDER/bin/python]

A Llama of 135 M parameters (SmolLM's sizes) with random values, fp32, one thread. All have the same weights
and give the same tokens, which is checked:

- `one`: one prompt of 32 tokens, 64 new tokens.
- `batch`: 32 prompts of 8-64 tokens, 64 new tokens each.
- `ends`: 64 prompts of 8-64 tokens whose completions end after 8-256 tokens, 32 together. transformers goes
  on until the last of its 32 ends; titan begins the next prompt where one has ended.
- `long` (unkind): a prompt of 1024 tokens beside 15 of 8, 32 new tokens each.
- `group`: 4 prompts of 256 tokens, 8 completions of each (greedy, so alike), 32 new tokens each.

Prints one table: CPU-seconds of the process (`time.process_time`) on all sides, taken in turn within one
run, and the ratios of the medians to titan's; with `--products` also the share of titan's time in operators
that its matrix products take, by torch's profiler, which is slow where completions are many. vLLM runs in a
process of its own, in the environment that `vllm_environment.sh` makes, whose Python `--vllm` names.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria
from vllm_completions import Vllm

from titancli.models import Llama3
from titancli.models.blocks.decoder import Decoder, build
from titancli.models.blocks.hf import DecoderHF
from titancli.protocols.samples import SamplingParams
from titancli.rl.decode import Row, decode

SIZES: dict[str, Any] = dict(
    dim=576, n_heads=9, n_kv_heads=3, hidden_dim=1536, vocab_size=49152, max_seq_len=2048, tied=True
)
CPU = torch.device("cpu")


class Shape(NamedTuple):
    """Prompts, how many new tokens each gets, and how many are continued together."""

    prompts: list[list[int]]
    limits: list[int]
    together: int
    samples: int = 1


def shapes() -> dict[str, Shape]:
    """The shapes by name."""
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(SIZES["vocab_size"]) for _ in range(length)]

    few = [text(draw.randint(8, 64)) for _ in range(32)]
    many = [text(draw.randint(8, 64)) for _ in range(64)]
    return {
        "one": Shape([text(32)], [64], 1),
        "batch": Shape(few, [64] * 32, 32),
        "ends": Shape(many, [draw.randint(8, 256) for _ in many], 32),
        "long": Shape([text(1024), *(text(8) for _ in range(15))], [32] * 16, 16),
        "group": Shape([text(256) for _ in range(4)], [32] * 4, 32, 8),
    }


def models(layers: int) -> tuple[Decoder, LlamaForCausalLM]:
    """The model in titan and in transformers; values are wide apart, so that no rounding decides a token."""
    ours = build(Llama3(**SIZES, n_layers=layers), seq_len=2048).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)
    form = DecoderHF(ours.config)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(form.config_json())).eval()
    state = dict(pair for name, p in ours.named_parameters() for pair in form.to_hf(name, p.detach()))
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    return ours, theirs


class Ends(StoppingCriteria):
    """A row ends when it has its number of new tokens."""

    def __init__(self, longest: int, limits: list[int]) -> None:
        self._ends = torch.tensor(limits) + longest

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


@torch.no_grad()
def with_transformers(model: LlamaForCausalLM, shape: Shape) -> list[list[int]]:
    """The new tokens of each row."""
    rows = [(p, n) for p, n in zip(shape.prompts, shape.limits, strict=True) for _ in range(shape.samples)]
    found: list[list[int]] = []
    for start in range(0, len(rows), shape.together):
        batch = rows[start : start + shape.together]
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
        limits = [limit for _, limit in batch]
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(limits),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=[Ends(longest, limits)],
        )
        found += [row[longest : longest + n].tolist() for row, n in zip(out, limits, strict=True)]
    return found


def with_titan(model: Decoder, shape: Shape) -> list[list[int]]:
    """The new tokens of each row."""
    rows = [Row(i, 0, n) for i, n in enumerate(shape.limits) for _ in range(shape.samples)]
    made: list[list[int]] = [[] for _ in rows]

    def keep(row: int, token: int) -> bool:
        made[row].append(token)
        return True

    decode(
        model,
        shape.prompts,
        rows,
        SamplingParams(temperature=0.0),
        keep,
        device=CPU,
        batch_size=shape.together,
    )
    return made


def share_of_products(call: Callable[[], Any]) -> float:
    """The share of the time in operators that products take."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    by_name = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    names = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
    return sum(by_name.get(name, 0.0) for name in names) / sum(by_name.values())


Side = Callable[[Shape], tuple[list[list[int]], float]]
"""The new tokens of each row, and the CPU-seconds that they took."""


def table(known: dict[str, Shape], rounds: int, sides: dict[str, Side]) -> Iterator[str]:
    """Print a row for each shape; yields its name afterwards."""
    others = [side for side in sides if side != "titan"]
    print(line("shape", *sides, *(f"{side}/titan" for side in others), "tokens/s"))
    for name, shape in known.items():
        found = [{side: call(shape) for side, call in sides.items()} for _ in range(rounds)]
        seconds = {side: statistics.median(one[side][1] for one in found) for side in sides}
        made, ours = found[-1]["titan"][0], seconds["titan"]
        ratios = [f"{seconds[side] / ours:.2f}" for side in others]
        times = [f"{one:.2f}s" for one in seconds.values()]
        print(line(name, *times, *ratios, f"{sum(map(len, made)) / ours:.1f}"), flush=True)
        for side in others:
            if differ := sum(a != b for a, b in zip(made, found[-1][side][0], strict=True)):
                print(f"  of {len(made)} completions {differ} differ from those of {side}", flush=True)
        yield name


def line(name: str, *cells: str) -> str:
    """A line of the table."""
    return f"{name:<8}" + "".join(f"{cell:>18}" for cell in cells)


def timed(complete: Callable[..., list[list[int]]], *arguments: Any) -> tuple[list[list[int]], float]:
    """The new tokens of each row, and the CPU-seconds that they took."""
    start = time.process_time()
    made = complete(*arguments)
    return made, time.process_time() - start


def with_vllm(vllm: Vllm, shape: Shape) -> tuple[list[list[int]], float]:
    """The new tokens of each row, and the CPU-seconds that they took."""
    made = vllm.complete(shape.prompts, shape.limits, shape.samples)
    return made.tokens, made.cpu_seconds


def main() -> None:
    """Print the table."""
    known = shapes()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of vllm_environment.sh's environment")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = models(asked.layers)
    sides: dict[str, Side] = {
        "transformers": lambda shape: timed(with_transformers, theirs, shape),
        "titan": lambda shape: timed(with_titan, ours, shape),
    }
    with ExitStack() as stack:
        if asked.vllm:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "model")
            theirs.save_pretrained(folder)
            vllm = stack.enter_context(Vllm(asked.vllm, folder, together=32))
            sides["vLLM"] = lambda shape: with_vllm(vllm, shape)
        for name in table({name: known[name] for name in asked.only}, asked.rounds, sides):
            if asked.products:
                share = share_of_products(lambda shape=known[name]: with_titan(ours, shape))
                print(f"  products are {share:.0%} of titan's time", flush=True)


if __name__ == "__main__":
    main()
