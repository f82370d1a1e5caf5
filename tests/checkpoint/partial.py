"""What ranks do to measure what each reads of a Hugging Face folder, and the memory that this takes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.tensors import bits
from titan_families.deepseek_v3 import DeepSeekV3
from titancli.checkpoint.hf.detect_model import hf_form
from titancli.checkpoint.hf.folder import read_hf
from titancli.checkpoint.hf.load import load_hf_weights
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem
from titancli.models.gpt_oss import GptOss
from titancli.models.sections import MoE
from titancli.protocols import HFForm

MIB = 1 << 20


def gpt_oss(dim: int = 2048, hidden_dim: int = 512) -> HFForm:
    moe = MoE(num_experts=4, top_k=2, hidden_dim=hidden_dim)
    return hf_form(GptOss(dim=dim, n_layers=1, n_heads=4, n_kv_heads=4, vocab_size=64, moe=moe))


def deepseek() -> HFForm:
    sizes: dict[str, Any] = dict(dim=2048, n_layers=1, n_heads=8, hidden_dim=64, vocab_size=64)
    moe = MoE(num_experts=4, top_k=2, hidden_dim=128, score_func="sigmoid")
    return hf_form(DeepSeekV3(**sizes, n_dense_layers=0, q_lora_rank=2048, moe=moe))


def numbers(*shape: int, high: int = 256) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def mxfp4(form: HFForm, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    many, outer, inner = shape
    (source,) = form.sources(name)
    return {
        f"{source}_blocks": numbers(many, outer, inner // 32, 16).byte(),
        f"{source}_scales": numbers(many, outer, inner // 32, high=20).add(110).byte(),
    }


def fp8(form: HFForm, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    found = {}
    many = form.sources(name)
    rows, columns = shape[-2:]
    for number, source in enumerate(many):
        codes = numbers(rows + number, columns, high=126)[number:].byte()
        found[source] = codes.view(torch.float8_e4m3fn)
        found[f"{source}_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.1
    return found


def plain(form: Any, name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    values = numbers(*shape).bfloat16()
    return {source: tensor.contiguous() for source, tensor in form.to_hf(name, values)}


W13, W2 = "layers.0.moe.experts.w13", "layers.0.moe.experts.w2"
QUERIES, LATENT = "layers.0.attention.wq_b.weight", "layers.0.attention.wkv_a.weight"
Case = tuple[Callable[[], Any], Callable[..., dict[str, Tensor]], dict[str, tuple[int, ...]], str]
CASES: dict[str, Case] = {
    "bf16": (gpt_oss, plain, {W13: (4, 1024, 2048), W2: (4, 2048, 512)}, ""),
    "mxfp4": (gpt_oss, mxfp4, {W13: (4, 1024, 2048), W2: (4, 2048, 1024)}, "mxfp4"),
    "fp8": (
        deepseek,
        fp8,
        {"layers.0.moe.experts.w1": (4, 128, 2048), QUERIES: (1536, 2048), LATENT: (576, 2048)},
        "fp8",
    ),
}


def folder(path: Path, case: str) -> Path:
    make, tensors_of, shapes, method = CASES[case]
    form = make()
    tensors = {key: t for name, shape in shapes.items() for key, t in tensors_of(form, name, shape).items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    table = {"quant_method": method} if method else None
    (path / "config.json").write_text(json.dumps({"quantization_config": table}))
    return path


def parameters(shapes: dict[str, tuple[int, ...]], placements: list[Any]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2) if len(placements) > 1 else (torch.distributed.get_world_size(),))
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return {name: distribute_tensor(t, mesh, placements, src_data_rank=None) for name, t in whole.items()}


def rchar() -> int:
    """Bytes that this process has read, by system calls of whatever kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load(path: str, case: str, placements: list[Any]) -> tuple[int, int]:
    """Bytes that the rank reads, and its share of them; what it gets is compared with whole tensors' part."""
    make, _, shapes, _ = CASES[case]
    form = make()
    mine = parameters(shapes, placements)
    before = rchar()
    load_hf_weights(Path(path), form, mine, together=True)
    read = rchar() - before
    reader = read_hf(Path(path), form)
    for name, tensor in mine.items():
        assert isinstance(tensor, DTensor)
        whole = reader.parameter(name).float()
        wanted = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        assert bits(tensor.to_local()) == bits(wanted.to_local()), name
    local = sum(tensor.to_local().numel() for tensor in mine.values())  # type: ignore[attr-defined]
    total = sum(tensor.numel() for tensor in mine.values())
    return read, (Path(path) / "model.safetensors").stat().st_size * local // total


def peak(path: str, case: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """How much more memory than before a load takes, and the bytes of what it fills."""
    mine = parameters(shapes, [Shard(0)])
    local = [tensor.to_local().fill_(1) for tensor in mine.values()]  # type: ignore[attr-defined]
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    load_hf_weights(Path(path), gpt_oss(1024, 4096), mine)
    return _status("VmHWM") - before, max(tensor.nbytes for tensor in local)


def _status(key: str) -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[key].split()[0]) * 1024


def failing(path: str, case: str, dim: int) -> str:
    """Rank 1's disk fails in the middle of a load."""
    make, _, shapes, _ = CASES[case]
    mine = parameters(shapes, [Shard(dim)])
    if torch.distributed.get_rank() == 1:
        preadv = os.preadv

        def fails(descriptor: int, buffers: Any, offset: int) -> int:
            if offset > 100_000:
                raise OSError(errno.EIO, "Input/output error")
            return preadv(descriptor, buffers, offset)

        os.preadv = fails  # type: ignore[assignment]
    try:
        Ranks().allgather_call(
            f"loading {path}", lambda: load_hf_weights(Path(path), make(), mine, together=True)
        )
    except EnvironmentProblem as error:
        return error.message
    finally:
        if torch.distributed.get_rank() == 1:
            os.preadv = preadv
    return "loaded"
