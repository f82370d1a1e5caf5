"""Training steps on one CPU thread: titan beside a plain loop, Hugging Face's Trainer, and torchtitan.

    python benchmarks/train_cpu.py [--rounds N] [--only fp32 compiled bf16 135M]

What is compared: whole optimizer steps (forward, backward, clipping to 1, fused AdamW) of the 6.16 M
parameter Llama 3 (`llama3` debugmodel: dim 256, 6 layers, 16 heads, feed-forward 768, vocabulary 2048) on
8 rows of 512 random tokens, the same for all. No activation checkpointing anywhere, no logging, no saving.

- titan: `Engine.build` on a process group of one gloo rank, then `forward_backward` and `optim_step`; bf16 by
  cast parameters (FSDP2), compile block by block.
- plain: `plain_llama.py` and the loop anybody would write; bf16 under autocast, `torch.compile` of the model.
- Trainer: transformers' `Trainer` with `LlamaForCausalLM`, SDPA attention, bf16 as it does it.
- torchtitan: 0.2.2's Trainer with its debugmodel (`torchtitan_step.py`), if it can be imported.

- 135M: a Llama of SmolLM2-135M's sizes on 2 rows of 256 tokens in fp32, where parameters weigh more than
  activations, beside a plain loop over transformers' `LlamaForCausalLM`.

Prints one table: tokens per CPU-second, their ratio to titan's within each round, peak resident memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sidebyside as side

ROWS, LENGTH, VOCABULARY = 8, 512, 2048
SMOL = {"dim": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "hidden_dim": 1536, "vocab_size": 49152}
SMOL_ROWS, SMOL_LENGTH = 2, 256
GROUPS = {
    "fp32": ("titan fp32", "plain fp32", "trainer fp32", "torchtitan fp32"),
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
def engine(built_from: Any) -> Iterator[Callable[[Any, Any], Any]]:
    """Titan's optimizer step, `(tokens, targets) -> metrics`, on one gloo rank."""
    import torch
    import torch.distributed as dist

    from titancli.engine import Engine
    from titancli.protocols.batch import Batch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        built = Engine.build(built_from)

        def step(tokens: Any, targets: Any) -> Any:
            metrics = built.forward_backward(Batch({"tokens": tokens, "targets": targets}))
            return metrics | built.optim_step()

        yield step
        dist.destroy_process_group()


def titan(*, bf16: bool, compile: bool) -> None:
    stream = batches()
    with engine(recipe(bf16=bf16, compile=compile)) as step_on:

        def step() -> None:
            step_on(*next(stream))

        side.serve(step)


def titan_smol() -> None:
    stream = batches(SMOL_ROWS, SMOL_LENGTH)
    with engine(smol()) as step_on:

        def step() -> None:
            step_on(*next(stream))

        side.serve(step)


def smol() -> Any:
    """The recipe of titan's 135M."""
    from dataclasses import replace

    from titancli.models import Llama3

    made = recipe(bf16=False, compile=False)
    training = replace(made.training, seq_len=SMOL_LENGTH, local_batch_size=SMOL_ROWS)
    return replace(made, model=Llama3(**SMOL, tied=True), training=training)  # type: ignore[arg-type]


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


def recipe(*, bf16: bool, compile: bool) -> Any:
    from titancli.loops import Pretrain
    from titancli.losses import CrossEntropy
    from titancli.models import Llama3
    from titancli.optimizers import AdamW
    from titancli.parallel import Decoder
    from titancli.recipe.schema import ActivationCheckpoint, Compile, Recipe, Training

    flavor = {**Llama3.flavors["debugmodel"], "rope_scaling": None}
    return Recipe(
        model=Llama3(**flavor),
        tokenizer=None,
        dataset=None,
        parallelize=Decoder(),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=Compile(enable=compile),
        optimizer=AdamW(lr=1e-3),
        loss=CrossEntropy(),
        training=Training(
            steps=1000,
            seq_len=LENGTH,
            local_batch_size=ROWS,
            mixed_precision_param="bfloat16" if bf16 else "float32",
        ),
        loop=Pretrain(),
        launcher=None,
    )


def plain(*, bf16: bool, compile: bool) -> None:
    import torch
    from plain_llama import SIZES, Llama
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(**SIZES["debugmodel"], seq_len=LENGTH)
    forward = torch.compile(model) if compile else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    stream = batches()

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


def trainer(*, bf16: bool) -> None:
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
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
    )

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            for tokens, _ in batches():
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
            per_device_train_batch_size=ROWS,
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
    "titan fp32": partial(titan, bf16=False, compile=False),
    "titan fp32 compile": partial(titan, bf16=False, compile=True),
    "titan bf16": partial(titan, bf16=True, compile=False),
    "titan bf16 compile": partial(titan, bf16=True, compile=True),
    "plain fp32": partial(plain, bf16=False, compile=False),
    "plain fp32 compile": partial(plain, bf16=False, compile=True),
    "plain bf16": partial(plain, bf16=True, compile=False),
    "plain bf16 compile": partial(plain, bf16=True, compile=True),
    "titan 135M": titan_smol,
    "transformers 135M": transformers_smol,
    "torchtitan fp32": partial(torchtitan, compile=False),
    "torchtitan fp32 compile": partial(torchtitan, compile=True),
    "trainer fp32": partial(trainer, bf16=False),
    "trainer bf16": partial(trainer, bf16=True),
}


def torchtitan_can_run() -> bool:
    from importlib.util import find_spec

    return find_spec("torchtitan") is not None


def main() -> None:
    if side.run_worker(WORKERS):
        return
    parser = side.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each variant")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS))
    arguments = parser.parse_args()
    rounds = arguments.rounds
    print(side.machine("titancli", "torch", "transformers", "torchtitan"))
    print(f"one thread, {ROWS} x {LENGTH} tokens a step, medians of {rounds} rounds\n")
    print("| variant | tokens per CPU-second | titan is faster by | peak RSS, MiB |\n|---|---|---|---|")
    results = {}
    for group in arguments.only:
        names = [name for name in GROUPS[group] if "torchtitan" not in name or torchtitan_can_run()]
        results.update(side.measure(names, rounds=rounds, warmup=2))
        for name in names:
            steps = results[name]
            ours = results["titan " + name.partition(" ")[2]]
            # time over time: above 1 where titan takes less
            factor = side.ratio(steps, ours, "cpu")
            tokens = SMOL_ROWS * SMOL_LENGTH if group == "135M" else ROWS * LENGTH
            rate = tokens / side.median(steps, "cpu")
            rss = side.median(steps, "rss") / 2**20
            shown = "" if name.startswith("titan") else f"{factor:.3f} x"
            print(f"| {name} | {rate:,.0f} | {shown} | {rss:,.0f} |", flush=True)
    if "bf16" in arguments.only:
        gain = side.ratio(results["titan bf16"], results["titan bf16 compile"], "cpu")
        print(f"\ntitan: compile is {gain:.3f} x eager (bf16)")


if __name__ == "__main__":
    main()
