"""An optimizer step of torchtitan's own Trainer, of 0.2.2 or 0.3.0, whichever can be imported.

What is replaced, in both: the tokenizer and the dataset (the caller's rows), what is printed and logged, and
on a CPU what has no CPU form (`on_cpu`). The model, its parallelize function, loss, optimizer, schedule and
`Trainer.train_step` are torchtitan's. 0.2.2 has sizes of 8B and up: the smaller ones are made with its own
arguments, embeddings tied as Llama 3.2 has them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import socket
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

Step = Callable[..., Any]

SETTINGS = ("own", "none", "budget")
"""Activation checkpointing: its recipe's (selective, by operator), none, by a memory budget of one half."""

SMALL_02: dict[str, dict[str, Any]] = {
    "1B": dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=1024),
    "3B": dict(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0, multiple_of=1024),
}
TIED = tuple(SMALL_02)
LR, WARMUP_STEPS = 3e-4, 200


def version() -> str | None:
    """The version that can be imported; None if there is none."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return None


def build(
    size: str,
    *,
    rows: int,
    seq_len: int,
    setting: str,
    compile: bool,
    device: torch.device,
    dtype: str = "bfloat16",
) -> Step:
    """Build the Trainer and return `step(tokens, targets, read=False)`, for tensors [B, S] on the CPU.

    `setting` is one of `SETTINGS`, `dtype` what is computed in. If `read`, the step returns the loss, and
    waits for the device. As torchtitan's loop does, it collects garbage every 50 steps.

    Raises:
        RuntimeError: neither 0.2 nor 0.3 can be imported.
    """
    found = version()
    if device.type == "cpu":
        on_cpu()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    recorder = Recorder()
    make = {"0.2": _trainer_02, "0.3": _trainer_03}.get(".".join((found or "").split(".")[:2]))
    if make is None:
        raise RuntimeError(f"this drives torchtitan 0.2.2 and 0.3.0; {found or 'none'} is installed")
    trainer = make(size, rows, seq_len, setting, compile, dtype, recorder)
    if device.type == "cpu" and found and found.startswith("0.3"):
        dense_attention(trainer.model_parts[0])

    def step(tokens: torch.Tensor, targets: torch.Tensor, read: bool = False) -> float | None:
        inputs = {"input": tokens}
        if found and found.startswith("0.3"):  # its attention is masked by document: a row is one
            inputs["positions"] = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        recorder.reads = read
        trainer.train_step(trainer.batch_generator([(inputs, targets)]))
        return recorder.loss if read else None

    return step


class Recorder:
    """In place of torchtitan's metrics: keeps the loss that it is given, and prints nothing."""

    color = SimpleNamespace(red="", blue="", reset="")
    device_name = "H100"
    num_flops_per_token = ntokens_since_last_log = 0

    def __init__(self) -> None:
        self.reads, self.loss = False, float("nan")
        self.data_loading_times: list[float] = []
        self.device_memory_monitor = self

    def build(self, **given: Any) -> Recorder:
        return self

    def get_peak_stats(self) -> Any:
        return SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)

    def should_log(self, step: int) -> bool:
        return self.reads

    def log(self, step: int, loss: float, *rest: Any, **more: Any) -> None:
        self.loss = loss


class Nothing:
    """A config whose component is not there: no tokenizer, no dataset."""

    def build(self, **given: Any) -> list[Any]:
        return []


def _trainer_02(
    size: str, rows: int, seq_len: int, setting: str, compile: bool, dtype: str, recorder: Recorder
) -> Any:
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    class Tied(Transformer):
        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            self.tok_embeddings.weight = self.output.weight

    spec = get_train_spec()
    small = {name: TransformerModelArgs(**given, rope_theta=500000) for name, given in SMALL_02.items()}
    register_train_spec(
        "measured",
        replace(
            spec,
            model_cls=Tied if size in TIED else Transformer,
            model_args={**spec.model_args, **small},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **given: [],
            build_metrics_processor_fn=lambda *given, **more: recorder,
        ),
    )
    config = JobConfig()  # and what llama3_8b.toml, its recipe, changes
    config.model.name, config.model.flavor = "measured", size
    config.optimizer.lr, config.lr_scheduler.warmup_steps = LR, WARMUP_STEPS
    config.training.local_batch_size, config.training.seq_len = rows, seq_len
    config.training.steps, config.training.mixed_precision_param = 1000, dtype
    config.compile.enable = compile
    modes = {"own": "selective", "none": "none", "budget": "memory_budget"}
    config.activation_checkpoint.mode = modes[setting]
    config.activation_checkpoint.selective_ac_option = "op"
    config.checkpoint.enable_ft_dataloader_checkpoints = False
    config.job.dump_folder = tempfile.mkdtemp()
    return Trainer(config)


def _trainer_03(
    size: str, rows: int, seq_len: int, setting: str, compile: bool, dtype: str, recorder: Recorder
) -> Any:
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_8b

    config = llama3_8b()
    config.model_spec = spec = model_registry(size)
    words = decoder_vocab_size(spec)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=words))
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=WARMUP_STEPS)
    config.training.local_batch_size, config.training.seq_len = rows, seq_len
    config.training.mixed_precision_param = dtype
    config.compile.enable = compile
    if setting == "none":
        config.activation_checkpoint = None
    elif setting == "budget":
        config.activation_checkpoint = MemoryBudgetAC.Config()
    config.metrics, config.tokenizer, config.dataloader = recorder, Nothing(), Nothing()
    config.dump_folder = tempfile.mkdtemp()
    return config.build()


# ------------------------------------------------------------------------------------------ without a GPU


def on_cpu() -> None:
    """Let torchtitan be imported where there is no GPU and no triton: nothing on the CPU calls it."""
    import_module("torch._inductor.compile_fx")  # it asks for triton, and remembers that there is none
    from torch import _utils
    from torch.utils import _triton

    _utils._get_available_device_type = lambda: "cpu"  # torchtitan takes CUDA for granted where it is None

    if _triton.has_triton_package():
        return

    class Stand(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *given, **more: given[0] if given and callable(given[0]) else lambda made: made

    for name in ("triton", "triton.language"):
        sys.modules[name] = Stand(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]


def dense_attention(model: torch.nn.Module) -> None:
    """Causal attention by torch's own function: flex_attention has no backward on a CPU."""
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common.attention import FlexAttention

    def forward(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **rest: Any) -> Any:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)

    for module in model.modules():
        if isinstance(module, FlexAttention):
            module.forward = forward  # type: ignore[method-assign]
