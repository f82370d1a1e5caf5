"""Cross-entropy over a large vocabulary: titan's chunked loss beside plain logits and `F.cross_entropy`.

    python benchmarks/loss.py [--rounds N] [--only large small]

What is compared: output projection and loss, forward and backward, of 2,048 tokens of width 256 over a
vocabulary of 128,256, and of 64 tokens over 2,048, where one chunk holds all and nothing is saved; down to
the gradients of hidden states and weight; fp32 and bf16 (hidden states and weight in bf16, softmax in fp32 on
both sides). `log-probs` is the function that other losses use: log-probabilities of the targets, whose logits
are made again in backward.

Prints one table: CPU-seconds, and the most memory beyond what was resident before the first call (gradients
included), each with its ratio to plain within the same rounds. The targets are 1.0 x time and 1/6 memory
for the large shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import sidebyside as side

WIDTH = 256
SHAPES = {"large": (2048, 128256, 1), "small": (64, 2048, 50)}
"""Tokens, vocabulary, and calls in a measured step."""
DTYPES = ("float32", "bfloat16")
KINDS = ("plain", "chunked", "log-probs")


def worker(kind: str, dtype_name: str, shape: str) -> None:
    import torch
    from torch.nn.functional import cross_entropy, linear

    from titancli.losses.chunked import linear_log_probs, linear_token_loss

    tokens, vocabulary, calls = SHAPES[shape]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH) / WIDTH**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    ones = torch.ones(tokens)

    def call() -> None:
        hidden.grad = weight.grad = None
        if kind == "plain":
            total = cross_entropy(linear(hidden, weight).float(), targets, reduction="sum")
        elif kind == "chunked":
            total, _ = linear_token_loss(hidden, weight, targets, ones)
        else:
            total = -linear_log_probs(hidden, weight, targets).sum()
        total.backward()

    def step() -> None:
        for _ in range(calls):
            call()

    side.serve(step)


WORKERS: dict[str, Callable[[], None]] = {
    f"{kind} {dtype}, {shape}": partial(worker, kind, dtype, shape)
    for shape in SHAPES
    for dtype in DTYPES
    for kind in KINDS
}


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measured calls of each variant")
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    arguments = parser.parse_args()
    rounds = arguments.rounds
    print(side.machine("titancli", "torch"))
    print(f"one thread; width {WIDTH}; medians of {rounds} rounds\n")
    print("| variant | CPU-seconds | x plain | peak memory, MiB | x plain |\n|---|---|---|---|---|")
    for shape, dtype in itertools.product(arguments.only, DTYPES):
        results = side.measure([f"{kind} {dtype}, {shape}" for kind in KINDS], rounds=rounds)
        reference, calls = results[f"plain {dtype}, {shape}"], SHAPES[shape][-1]
        for name, steps in results.items():
            time = "" if steps is reference else f"{side.ratio(steps, reference, 'cpu'):.2f}"
            memory = side.ratio(steps, reference, "memory").value
            print(
                f"| {name} | {side.median(steps, 'cpu') / calls:.3g} | {time} "
                f"| {side.median(steps, 'memory') / 2**20:,.0f} | {memory:.3f} (1/{1 / memory:.1f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
