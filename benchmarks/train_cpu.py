"""Training steps on one CPU thread: titan beside a plain loop, Hugging Face's Trainer, and torchtitan.

    python benchmarks/train_cpu.py [--starts N] [--rounds N] [--only fp32 short compiled bf16 135M]
    python benchmarks/train_cpu.py --instructions [--only short]

What is compared: whole optimizer steps (forward, backward, clipping to 1, fused AdamW) of the 6.16 M
parameter Llama 3 (`llama3` debugmodel: dim 256, 6 layers, 16 heads, feed-forward 768, vocabulary 2048) on
2 rows of 512 random tokens, the same for all, and on 1 row of 32 (`short`), where what is not the model's
arithmetic weighs most. No activation checkpointing anywhere, no logging, no saving.

- titan: `Engine.of`, then `forward_backward` and `optim_step`; bf16 by cast parameters (FSDP2),
  compile block by block.
- plain: `plain_llama.py` and the loop anybody would write; bf16 under autocast, `torch.compile` of the model.
- Trainer: transformers' `Trainer` with `LlamaForCausalLM`, SDPA attention, bf16 as it does it.
- torchtitan: 0.2.2's Trainer with its debugmodel (`torchtitan_step.py`), if it can be imported.

- 135M: a Llama of SmolLM2-135M's sizes on 2 rows of 256 tokens in fp32, where parameters weigh more than
  activations, beside a plain loop over transformers' `LlamaForCausalLM`.

Prints one table: tokens per CPU-second, the ratio of titan's to them within each round with its interval
(`sidebyside.py`), peak resident memory. `--instructions` prints those of one step instead, which no other
process disturbs; callgrind's are those of AVX2, so they are not for bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import sidebyside as side

ROWS, LENGTH, VOCABULARY = 2, 512, 2048
SHORT = (1, 32)
"""Rows and length of the unkind shape."""
SMOL = {"dim": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "hidden_dim": 1536, "vocab_size": 49152}
SMOL_ROWS, SMOL_LENGTH = 2, 256
GROUPS = {
    "fp32": ("titan fp32", "plain fp32", "trainer fp32", "torchtitan fp32"),
    "short": ("titan short", "plain short", "trainer short"),
    "compiled": ("titan fp32 compile", "plain fp32 compile", "torchtitan fp32 compile"),
    "bf16": ("titan bf16", "plain bf16", "trainer bf16", "titan bf16 compile", "plain bf16 compile"),
    "135M": ("titan 135M", "transformers 135M"),
}


def batches(rows: int = ROWS, length: int = LENGTH) -> Any:
    """An endless stream of (tokens, targets), the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextmanager
def engine(
    *, bf16: bool = False, compile: bool = False, rows: int = ROWS, length: int = LENGTH, smol: bool = False
) -> Iterator[Callable[[Any, Any], Any]]:
    """Yield titan's optimizer step, `(tokens, targets) -> metrics`, on one rank."""
    import torch

    from titancli.engine import Engine
    from titancli.models import Llama3
    from titancli.optimizers import AdamW
    from titancli.protocols.batch import Batch
    from titancli.recipe.schema import Compile, Training

    torch.set_num_threads(1)
    sizes = {**SMOL, "tied": True} if smol else {**Llama3.flavors["debugmodel"], "rope_scaling": None}
    training = Training(
        seq_len=length,
        local_batch_size=rows,
        mixed_precision_param="bfloat16" if bf16 else "float32",
    )
    with Engine.of(
        Llama3(**sizes),
        device="cpu",
        optimizer=AdamW(lr=1e-3),
        training=training,
        compile=Compile(enable=compile),
    ) as built:

        def step(tokens: Any, targets: Any) -> Any:
            metrics = built.forward_backward(Batch({"tokens": tokens, "targets": targets}))
            return metrics | built.optim_step()

        yield step


def titan(*, rows: int = ROWS, length: int = LENGTH, **chosen: bool) -> None:
    stream = batches(rows, length)
    with engine(rows=rows, length=length, **chosen) as step_on:

        def step() -> None:
            step_on(*next(stream))

        side.serve(step)


def transformers_smol() -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=SMOL["dim"],
        intermediate_size=SMOL["hidden_dim"],
        num_hidden_layers=SMOL["n_layers"],
        num_attention_heads=SMOL["n_heads"],
        num_key_value_heads=SMOL["n_kv_heads"],
        vocab_size=SMOL["vocab_size"],
        max_position_embeddings=SMOL_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    stream = batches(SMOL_ROWS, SMOL_LENGTH)

    def step() -> None:
        tokens, targets = next(stream)
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    side.serve(step)


def plain(*, bf16: bool = False, compile: bool = False, rows: int = ROWS, length: int = LENGTH) -> None:
    import torch
    from plain_llama import SIZES, Llama
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(**SIZES["debugmodel"], seq_len=length)
    forward = torch.compile(model) if compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    stream = batches(rows, length)

    def step() -> None:
        tokens, targets = next(stream)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = forward(tokens)
        loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    side.serve(step)


def torchtitan(*, compile: bool) -> None:
    import torch
    import torchtitan_step

    torch.set_num_threads(1)
    step_on = torchtitan_step.build(
        "debugmodel",
        rows=ROWS,
        seq_len=LENGTH,
        setting="none",
        compile=compile,
        device=torch.device("cpu"),
        dtype="float32",
    )
    stream = batches()

    def step() -> None:
        step_on(*next(stream))

    side.serve(step)


def trainer(*, bf16: bool = False, rows: int = ROWS, length: int = LENGTH) -> None:
    import sys
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
    )

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for tokens, _ in batches(rows, length):
                for row in tokens:
                    yield {"input_ids": row, "labels": row}

    class Turns(TrainerCallback):
        """Waits for its turn before each step; one step is from the end of the last to its own end."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 0:
                side.answer({})
            if not sys.stdin.readline():
                control.should_training_stop = True
            self.wall = time.perf_counter()
            self.cpu = getattr(self, "cpu", time.process_time())

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            now = time.process_time()
            wall = time.perf_counter() - self.wall
            if not control.should_training_stop:
                side.answer({"cpu": now - self.cpu, "wall": wall, "rss": side.peak_rss()})
            self.cpu = now

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            per_device_train_batch_size=rows,
            bf16=bf16,
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-3,
            adam_beta2=0.95,
            weight_decay=0.1,
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(
            model=LlamaForCausalLM(config), args=arguments, train_dataset=Rows(), callbacks=[Turns()]
        ).train()


WORKERS: dict[str, Callable[[], None]] = {
    "titan fp32": titan,
    "titan fp32 compile": partial(titan, compile=True),
    "titan bf16": partial(titan, bf16=True),
    "titan bf16 compile": partial(titan, bf16=True, compile=True),
    "titan short": partial(titan, rows=SHORT[0], length=SHORT[1]),
    "plain fp32": plain,
    "plain fp32 compile": partial(plain, compile=True),
    "plain bf16": partial(plain, bf16=True),
    "plain bf16 compile": partial(plain, bf16=True, compile=True),
    "plain short": partial(plain, rows=SHORT[0], length=SHORT[1]),
    "titan 135M": partial(titan, rows=SMOL_ROWS, length=SMOL_LENGTH, smol=True),
    "transformers 135M": transformers_smol,
    "torchtitan fp32": partial(torchtitan, compile=False),
    "torchtitan fp32 compile": partial(torchtitan, compile=True),
    "trainer fp32": trainer,
    "trainer bf16": partial(trainer, bf16=True),
    "trainer short": partial(trainer, rows=SHORT[0], length=SHORT[1]),
}


def torchtitan_can_run() -> bool:
    from importlib.util import find_spec

    return find_spec("torchtitan") is not None


def tokens_of(group: str) -> int:
    """Return the tokens of one step."""
    rows, length = {"short": SHORT, "135M": (SMOL_ROWS, SMOL_LENGTH)}.get(group, (ROWS, LENGTH))
    return rows * length


def count_instructions(groups: Sequence[str], variants: Callable[[str], list[str]]) -> None:
    """Print the instructions of a step of each variant."""
    print(f"counted by {side.counter()}\n")
    print("| variant | millions of instructions a step | titan executes |\n|---|---|---|")
    for group in groups:
        found: dict[str, float] = {}
        for name in variants(group):
            found[name] = side.instructions(name)
            ours = found["titan " + name.partition(" ")[2]]
            shown = "" if name.startswith("titan") else f"{ours / found[name]:.3f} x"
            print(f"| {name} | {found[name] / 1e6:,.1f} | {shown} |", flush=True)


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--starts", type=int, default=6, help="times that every variant is started anew")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each variant after a start")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS))
    parser.add_argument("--instructions", action="store_true", help="count instructions instead of seconds")
    arguments = parser.parse_args()

    def variants(group: str) -> list[str]:
        return [name for name in GROUPS[group] if "torchtitan" not in name or torchtitan_can_run()]

    print(side.machine("titancli", "torch", "transformers", "torchtitan"))
    if arguments.instructions:
        count_instructions(arguments.only, variants)
        return
    print(f"one thread; {arguments.starts} starts of {arguments.rounds} rounds\n")
    print("| variant | tokens per CPU-second | titan is faster by | peak RSS, MiB |\n|---|---|---|---|")
    results = {}
    for group in arguments.only:
        names = variants(group)
        results.update(side.measure(names, rounds=arguments.rounds, warmup=2, starts=arguments.starts))
        for name in names:
            steps = results[name]
            ours = results["titan " + name.partition(" ")[2]]
            rate = tokens_of(group) / side.median(steps, "cpu")
            rss = side.median(steps, "rss") / 2**20
            # time over time: above 1 where titan takes less
            shown = "" if steps is ours else f"{side.ratio(steps, ours, 'cpu'):.3f}"
            print(f"| {name} | {rate:,.0f} | {shown} | {rss:,.0f} |", flush=True)
    if "bf16" in arguments.only:
        gain = side.ratio(results["titan bf16"], results["titan bf16 compile"], "cpu")
        print(f"\ntitan: compile beside eager (bf16): {gain:.3f}")


if __name__ == "__main__":
    main()
