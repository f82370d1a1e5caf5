"""Fine-tuning beside TRL and peft: the same losses step for step, and CPU-seconds a step.

    python benchmarks/beside_trl.py [--rounds N] [--only sft lora qlora dpo] [--shapes even ragged]

A Qwen 3 of 4 layers with random weights (fp32, written by transformers), a byte-level BPE tokenizer with
ChatML's template that is trained here, and conversations of random words. Both sides get the same folder,
rows in the same order, AdamW, linear schedule and clipping, each in a process of one thread; they take turns,
one step each. No activation checkpointing, no saves. TRL pads a batch to its longest row.

- titan: `titan train` with `pack = false` and `padding = "longest"`, in multiples of 64.
- script: the same recipe's engine, which is given lists of samples, and packs those of a step into rows of at
  most `training.seq_len` tokens, without padding between them.

- `sft`: all weights; `lora`: adapters of all linear layers, rank 8, which titan has drawn and peft loads;
  `qlora`: the same adapters beside a base in NF4 with double quantization, by bitsandbytes on TRL's side;
  products and adapters are fp32 on both (TRL would round its adapters to bfloat16);
- `dpo`: all weights, with a frozen copy as the reference.
- `even`: conversations of equal length, where packing has nothing to save and its masks cost.
- `ragged`: one of eight in every other batch is long, all others are short: unkind to padding.

Prints one table: the largest difference of the losses to TRL's over all rounds, CPU-seconds a step as means
without the first two rounds, and their ratio to TRL's.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sidebyside as side

from titancli import component, hookimpl

CASES, SHAPES = ("sft", "lora", "qlora", "dpo"), ("even", "ragged")
ROWS, LONGEST, SHORTEST = 8, 256, 24
WARM = 2
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
RECIPE = """
recipe = 1
name = "beside_trl"
weights = "{folder}/model"
loss = "{loss}"
loop = "{loss}"
{loggers}
{converters}

[tokenizer]
type = "hf"
path = "{folder}/model"

[dataset]
type = "{dataset}"
path = "{folder}/{rows}-{shape}.jsonl"
shuffle = false
strict = true
trailing_newline = true
padding = "longest"
{pack}

[optimizer]
type = "adamw"
lr = {lr}
beta2 = 0.999
weight_decay = 0.01
no_decay = [{no_decay}]

[lr_scheduler]
warmup_steps = 0
total_steps = {steps}

[training]
steps = {steps}
seq_len = {seq_len}
local_batch_size = {rows_of_batch}
max_norm = 1.0
mixed_precision_param = "float32"

[activation_checkpoint]
mode = "none"

[checkpoint]
enable = false

[metrics]
log_freq = 1
"""


class Job(NamedTuple):
    """What one process trains."""

    case: str
    shape: str
    folder: Path
    steps: int


# --------------------------------------------------------------------------------------------------- the data


def prepare(folder: Path, steps: int, layers: int = 4) -> None:
    """Write the model, its tokenizer, rows for so many steps, and initial adapters."""
    import argparse

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    text = Path(argparse.__file__).read_text(encoding="utf-8")
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokens.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    torch.manual_seed(0)
    sizes = {**QWEN3, "num_hidden_layers": layers, "vocab_size": 2048, "eos_token_id": fast.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    for shape in SHAPES:
        write_rows(folder, shape, steps, text.split(), fast)
    write_adapters(folder)


def write_rows(folder: Path, shape: str, steps: int, words: list[str], tokenizer: Any) -> None:
    """Write conversations, and pairs, each in the form of both sides."""
    draw = random.Random(shape)

    def said(role: str, length: int) -> dict[str, str]:
        """A message of so many tokens."""
        ids = tokenizer(" ".join(draw.choices(words, k=length)), add_special_tokens=False)["input_ids"]
        return {"role": role, "content": tokenizer.decode(ids[:length])}

    def lengths(row: int) -> tuple[int, int]:
        """Tokens of a question and an answer; markers take 11 more, and decoding may change some."""
        if shape == "even":
            return LONGEST // 4, 3 * LONGEST // 4 - 32
        long = row % (2 * ROWS) == 3
        whole = draw.randint(LONGEST // 2, LONGEST - 32) if long else draw.randint(8, SHORTEST)
        return whole // 3 + 1, whole - whole // 3

    chats, pairs = [], []
    for row in range(steps * ROWS):
        asked, told = lengths(row)
        prompt, answer = [said("user", asked)], [said("assistant", told)]
        chats.append({"messages": prompt + answer, "prompt": prompt, "completion": answer})
        if row % ROWS < ROWS // 2:
            pairs.append({"prompt": prompt, "chosen": answer, "rejected": [said("assistant", told)]})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}-{shape}.jsonl").write_text(text, encoding="utf-8")


def rows_of(folder: Path, name: str, shape: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows in TRL's form."""
    lines = (folder / f"{name}-{shape}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: row[key] for key in keys} for row in map(json.loads, lines)]


def write_adapters(folder: Path) -> None:
    """Write the adapters that titan draws, in peft's form."""
    from titancli import Engine

    path = folder / "lora.toml"
    path.write_text(recipe(Job("lora", "even", folder, 1), loggers=False), encoding="utf-8")
    with Engine.build(path) as engine:
        engine.export(folder / "adapters", form="peft")


# ----------------------------------------------------------------------------------------------------- titan


@component("logger", "turns", target="beside_trl:Turns")
class TurnsConfig:
    """Waits for its turn after each step."""


class Turns:
    """Tells what a step cost, and its loss."""

    def __init__(self, config: TurnsConfig, **runtime: Any) -> None:
        self._cpu = 0.0

    def run_start(self, info: dict[str, Any]) -> None:
        side.turn({})
        self._cpu = time.process_time()

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        now = time.process_time()
        side.turn({"cpu": now - self._cpu, "loss": metrics["loss"]})
        self._cpu = now


@hookimpl
def titan_components() -> list[type]:
    return [TurnsConfig]


def rate(case: str) -> float:
    """Return the learning rate at the first step."""
    return 1e-4 if case == "dpo" else 1e-3


def recipe(job: Job, *, loggers: bool = True) -> str:
    """Return the recipe of a case."""
    dpo, lora = job.case == "dpo", job.case in ("lora", "qlora")
    converter = f'{{type = "{job.case}", rank = 8, alpha = 16.0}}'
    return RECIPE.format(
        folder=job.folder,
        shape=job.shape,
        steps=job.steps,
        loggers='loggers = [{type = "turns"}]' if loggers else "",
        loss="dpo" if dpo else "sft",
        dataset="preference" if dpo else "chat",
        rows="pairs" if dpo else "chats",
        pack="" if dpo else "pack = false",
        converters=f"converters = [{converter}]" if lora else "",
        no_decay="" if lora else '"*norm*"',
        lr=rate(job.case),
        seq_len=LONGEST,
        rows_of_batch=ROWS,
    )


def titan(job: Job) -> None:
    """Train by `titan train`."""
    from titancli.cli import main

    path = job.folder / f"{job.case}-{job.shape}.toml"
    path.write_text(recipe(job), encoding="utf-8")
    folder = str(job.folder / f"run-{job.case}-{job.shape}")
    code = main(["train", str(path), "-p", __file__, "--run-dir", folder])
    if code:
        raise SystemExit(f"titan train {path} returned {code}")


def script(job: Job) -> None:
    """Train by an engine that is given samples."""
    import torch

    from titancli import Engine, LossResult, Sample

    torch.set_num_threads(1)
    path = job.folder / f"script-{job.case}-{job.shape}.toml"
    path.write_text(recipe(job, loggers=False), encoding="utf-8")

    def dpo(logprobs: list[torch.Tensor], samples: list[Sample]) -> LossResult:
        gained = torch.stack([one.sum() for one in logprobs])
        gained = 0.1 * (gained - torch.tensor([sample.extra["reference"] for sample in samples]))
        each = -torch.nn.functional.logsigmoid(gained[0::2] - gained[1::2])
        return LossResult(each.sum(), torch.tensor(float(len(each))))

    with Engine.build(path) as engine:
        encode = partial(engine.tokenizer.chat_with_mask, trailing_newline=True)
        samples = [Sample(*encode(talk)) for talk in conversations(job)]
        frozen = engine.snapshot() if job.case == "dpo" else None
        side.turn({})
        cpu = time.process_time()
        for first in range(0, job.steps * ROWS, ROWS):
            given, loss = samples[first : first + ROWS], "sft"
            if frozen is not None:
                sums = [one.sum().item() for one in frozen.forward(given)]
                known = [{"reference": number} for number in sums]
                given, loss = [replace(a, extra=b) for a, b in zip(given, known, strict=True)], dpo
            metrics = engine.forward_backward(given, loss=loss).metrics
            engine.optim_step()
            now = time.process_time()
            side.turn({"cpu": now - cpu, "loss": float(metrics["loss"])})
            cpu = now
        if frozen is not None:
            frozen.close()


def conversations(job: Job) -> list[list[dict[str, str]]]:
    """Return the conversations of a case; of pairs the chosen one first."""
    if job.case != "dpo":
        return [row["messages"] for row in rows_of(job.folder, "chats", job.shape, ("messages",))]
    pairs = rows_of(job.folder, "pairs", job.shape, ("prompt", "chosen", "rejected"))
    return [row["prompt"] + row[answer] for row in pairs for answer in ("chosen", "rejected")]


# ------------------------------------------------------------------------------------------------------- TRL


def trl(job: Job) -> None:
    """Train by TRL's trainer."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    load = partial(AutoModelForCausalLM.from_pretrained, job.folder / "model", dtype=torch.float32)
    losses: list[float] = []

    class Turn(TrainerCallback):
        """Waits for its turn after each step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            side.turn({})
            self._cpu = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            now = time.process_time()
            side.turn({"cpu": now - self._cpu, "loss": losses[-1]})
            self._cpu = now

    options: dict[str, Any] = dict(
        output_dir=str(job.folder / "trl"),
        max_steps=job.steps,
        per_device_train_batch_size=ROWS // 2 if job.case == "dpo" else ROWS,
        learning_rate=rate(job.case),
        weight_decay=0.01,
        lr_scheduler_type="linear",
        warmup_steps=0,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        max_length=None,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    given: dict[str, Any] = {
        "processing_class": AutoTokenizer.from_pretrained(job.folder / "model"),
        "callbacks": [Turn()],
    }
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = load(quantization_config=four_bits if job.case == "qlora" else None)
    if job.case == "dpo":
        rows = rows_of(job.folder, "pairs", job.shape, ("prompt", "chosen", "rejected"))
        given |= {"train_dataset": Dataset.from_list(rows), "ref_model": load()}
        trainer: Any = DPOTrainer(model=model, args=DPOConfig(beta=0.1, **options), **given)
    else:
        if job.case in ("lora", "qlora"):
            model = PeftModel.from_pretrained(model, job.folder / "adapters", is_trainable=True)
        rows = rows_of(job.folder, "chats", job.shape, ("prompt", "completion"))
        given["train_dataset"] = Dataset.from_list(rows)
        drawn = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        trainer = SFTTrainer(model=model, args=SFTConfig(**options), **given)
        for name, parameter in trainer.model.named_parameters() if job.case == "qlora" else ():
            if parameter.requires_grad:  # TRL rounds adapters beside such a base to bfloat16
                parameter.data = drawn[name]
    step = trainer.training_step

    def with_loss(*arguments: Any, **more: Any) -> Any:
        """The trainer's log rounds losses to four digits."""
        loss = step(*arguments, **more)
        losses.append(float(loss))
        return loss

    trainer.training_step = with_loss
    trainer.train()


PEERS = {"titan": titan, "script": script, "trl": trl}


# ------------------------------------------------------------------------------------------------- the parent


def compare(folder: Path, case: str, shape: str, steps: int) -> dict[str, list[side.Numbers]]:
    """Train on both sides, taking turns: what each step cost, and its loss."""
    variants = []
    for peer in PEERS:
        variants.append(side.Variant(peer, [case, shape, str(folder), str(steps)]))
        variants[-1].ready()
    found: dict[str, list[side.Numbers]] = {peer: [] for peer in PEERS}
    for _ in range(steps):
        for variant in variants:
            found[variant.name].append(variant.step())
    for variant in variants:
        variant.close()
    return found


def row(case: str, shape: str, found: dict[str, list[side.Numbers]]) -> str:
    """Return a row of the table."""
    theirs = found["trl"]
    cells = [f"{theirs[0]['loss']:.4f} → {theirs[-1]['loss']:.4f}"]
    for peer in ("titan", "script"):
        differences = [abs(a["loss"] - b["loss"]) for a, b in zip(found[peer], theirs, strict=True)]
        cells.append(f"{max(differences):.1e}")
    costs = {peer: statistics.mean(step["cpu"] for step in steps[WARM:]) for peer, steps in found.items()}
    cells += [f"{cost:.3f}" for cost in costs.values()]
    cells += [f"{costs[peer] / costs['trl']:.2f}" for peer in ("titan", "script")]
    return f"| {case}, {shape} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--worker"]:
        sys.stdout = sys.stderr
        peer, case, shape, folder, steps = sys.argv[2:]
        PEERS[peer](Job(case, shape, Path(folder), int(steps)))
        return
    parser = side.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    asked = parser.parse_args()
    print(side.machine("titancli", "torch", "transformers", "trl", "peft", "bitsandbytes"))
    print(f"one thread, {ROWS} rows of at most {LONGEST} tokens a step, {asked.rounds} steps\n")
    print("| | loss of TRL | Δ titan | Δ script | titan, CPU-s | script | TRL | titan / TRL | script / TRL |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), asked.rounds)
        for case in asked.only:
            for shape in asked.shapes:
                print(row(case, shape, compare(Path(folder), case, shape, asked.rounds)), flush=True)


if __name__ == "__main__":
    main()
