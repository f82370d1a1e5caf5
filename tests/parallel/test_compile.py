"""Compiled blocks: the same numbers, and as many activations kept as the recipe allows."""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_families import DeepSeekV3
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.models import Llama3
from titancli.models.blocks.decoder import Decoder, build
from titancli.models.blocks.decoder import build as build_latent
from titancli.models.sections import MoE
from titancli.parallel.activation_checkpoint import apply_activation_checkpoint
from titancli.parallel.compile import check_inductor, compile_model, within_budget
from titancli.parallel.programs import COMPILER, missing_programs
from titancli.recipe.schema import ActivationCheckpoint, Compile

MODEL = Llama3(dim=64, n_layers=2, n_heads=4, hidden_dim=192, vocab_size=128)
CPU = torch.device("cpu")
BACKEND = "aot_eager_decomp_partition"
"""Runs inductor's partitioner, and then the graphs as they are."""


def model() -> Decoder:
    torch._dynamo.reset()
    made = build(MODEL, seq_len=32)
    made.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    return made


def step(made: Decoder) -> tuple[dict[str, Tensor], int]:
    """Gradients by name, and the bytes that backward needed of activations."""
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(3))
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = made(tokens)
    out.square().sum().backward()
    return {name: p.grad for name, p in made.named_parameters()}, sum(kept.values())


def test_a_smaller_budget_keeps_less_and_changes_no_gradient() -> None:
    reference, _ = step(model())
    kept = []
    for budget in (0.0, 0.5, 1.0):
        made = model()
        section = ActivationCheckpoint(mode="memory_budget", memory_budget=budget)
        compile_model(made, Compile(enable=True, backend=BACKEND), section, CPU)
        gradients, bytes_kept = step(made)
        for name, expected in reference.items():
            assert (gradients[name] - expected).norm() <= 1e-5 * expected.norm(), (budget, name)
        kept.append(bytes_kept)
    assert 2 * kept[0] < kept[1] and 1.5 * kept[1] < kept[2], kept


def test_a_budget_holds_for_its_own_graphs_only() -> None:
    seen = []

    @torch._dynamo.register_backend(name="titan_tests_budget")
    def backend(graph, inputs):
        seen.append(torch._functorch.config.activation_memory_budget)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return 2 * x

    before = torch._functorch.config.activation_memory_budget
    torch.compile(double, backend=within_budget("titan_tests_budget", 0.25))(torch.ones(3))
    assert seen == [0.25] and torch._functorch.config.activation_memory_budget == before


@pytest.mark.parametrize(
    ("components", "device", "compiled"),
    [(None, "cpu", False), (None, "cuda", True), (["model"], "cuda", False), (["loss"], "cpu", True)],
)
def test_the_loss_is_compiled_on_a_gpu_unless_the_recipe_says_otherwise(
    components: Any, device: str, compiled: bool
) -> None:
    made = model()
    section = Compile(enable=True, backend="eager", components=components)
    compile_model(made, section, ActivationCheckpoint(), torch.device(device))
    assert made.output.loss_backend == ("eager" if compiled else None)
    assert not Compile().loss(on_gpu=True) and not Compile(components=["loss"]).loss(on_gpu=True)


def test_blocks_share_compiled_code_under_a_budget() -> None:
    assert within_budget("inductor", 0.5) is within_budget("inductor", 0.5)


def test_an_unknown_backend_is_told_with_those_that_there_are() -> None:
    with pytest.raises(RecipeError, match="'indcutor' is not a backend") as caught:
        compile_model(model(), Compile(enable=True, backend="indcutor"), ActivationCheckpoint(), CPU)
    assert "inductor" in str(caught.value.hint)


def loss_over_ranks(backend: str | None) -> tuple[Tensor, ...]:
    """A loss whose vocabulary is cut over the ranks, in chunks of uneven length, and its gradients."""
    import torch.distributed as dist

    from titancli.distributed.collectives import Group
    from titancli.losses import chunked

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * 25 * 5)
        group = Group.of(dist.group.WORLD)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(13, 8, generator=generator).requires_grad_()
        weight = torch.randn(50, 8, generator=generator).chunk(2)[group.rank].clone().requires_grad_()
        targets = torch.randint(0, 50, (13,), generator=generator)
        total, _ = chunked.linear_token_loss(hidden, weight, targets, torch.ones(13), group, backend)
        log_probs = chunked.linear_log_probs(hidden, weight, targets, group, backend)
        (total + 2 * log_probs.sum()).backward()
        return total.detach(), log_probs.detach(), hidden.grad, weight.grad


@pytest.mark.ranks
def test_a_compiled_loss_over_ranks_equals_the_eager_one(ranks: Any) -> None:
    eager, compiled = ranks(2, loss_over_ranks, None), ranks(2, loss_over_ranks, "aot_eager")
    for expected, found in zip(eager, compiled, strict=True):
        for a, b in zip(expected, found, strict=True):
            assert (a - b).norm() <= 1e-5 * a.norm()


def test_many_kinds_of_blocks_that_run_again_are_compiled_with_and_without_gradients() -> None:
    """A dense block and the four parts of one of experts, each in both modes: more than torch allows."""
    torch._dynamo.reset()
    experts = MoE(num_experts=4, top_k=2, hidden_dim=16, num_shared_experts=1)
    sizes = dict(dim=32, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=64, kv_lora_rank=16)
    heads = dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    made = build_latent(DeepSeekV3(**sizes, **heads, moe=experts), seq_len=16)
    made.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(3))
    expected = made(tokens).detach()
    section = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    apply_activation_checkpoint(made.layers, section)
    compile_model(made, Compile(enable=True, backend="eager"), section, CPU)
    with torch.no_grad():
        torch.testing.assert_close(made(tokens), expected)
    out = made(tokens)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected)


def test_models_that_keep_different_products_are_compiled_in_one_process() -> None:
    """A teacher and its student, say: torch makes a number symbolic that differs in the second model."""
    expected = model()(torch.arange(32)[None]).detach()
    for option in ("products", "op"):
        made = build(MODEL, seq_len=32)
        made.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
        section = ActivationCheckpoint(mode="selective", selective_ac_option=option)
        apply_activation_checkpoint(made.layers, section)
        compile_model(made, Compile(enable=True, backend="eager"), section, CPU)
        out = made(torch.arange(32)[None])
        out.square().sum().backward()
        torch.testing.assert_close(out, expected)


@pytest.fixture
def programs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with a compiler and openssl."""
    for name in (COMPILER, "openssl"):
        stub(tmp_path / "bin" / name)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def stub(program: Path) -> None:
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("installed", "environ", "missing"),
    [
        ((), {}, [COMPILER, "openssl"]),
        ((COMPILER,), {}, ["openssl"]),
        (("openssl",), {}, [COMPILER]),
        (("openssl", COMPILER), {}, []),
        (("openssl", COMPILER), {"CXX": "clang++-99"}, ["clang++-99"]),
        (("openssl", "clang++-99"), {"CXX": "clang++-99"}, []),
        (("openssl",), {"TORCH_INDUCTOR_INSTALL_GXX": "1"}, []),
    ],
    ids=str,
)
def test_missing_programs(
    tmp_path: Path, installed: tuple[str, ...], environ: dict[str, str], missing: list[str]
) -> None:
    for name in installed:
        stub(tmp_path / name)
    assert missing_programs({"PATH": str(tmp_path), **environ}) == missing


def test_compiling_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path / COMPILER)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EnvironmentProblem, match="inductor needs openssl on a CPU, not found") as caught:
        check_inductor("inductor", CPU)
    assert "apt install g++ openssl" in str(caught.value.hint)
    check_inductor("aot_eager", CPU)


@pytest.mark.usefixtures("programs_here")
@pytest.mark.parametrize("name", ["two words", "o'brien"])
@pytest.mark.parametrize("moved", ["torch", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_inductor_is_refused_where_it_cannot_call_the_compiler(
    name: str, moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"torch": "a", "TMPDIR": "b", "TORCHINDUCTOR_CACHE_DIR": "c"} | {moved: name}
    monkeypatch.setattr(torch, "__file__", str(tmp_path / folders["torch"] / "__init__.py"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folders["TMPDIR"]))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folders["TORCHINDUCTOR_CACHE_DIR"]))
    with pytest.raises(RecipeError, match=f"torch passes .*{name}.* without quotes") as caught:
        check_inductor("inductor", torch.device("cpu"))
    assert ("install" if moved == "torch" else f"set {moved} to") in str(caught.value.hint)
    check_inductor("aot_eager", torch.device("cpu"))
    check_inductor("inductor", torch.device("cuda"))  # whose kernels no C++ compiler makes


@pytest.mark.usefixtures("programs_here")
def test_inductor_is_taken_where_no_path_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/opt/venv/lib/torch/__init__.py")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "/opt/python/lib")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp")
    check_inductor("inductor", torch.device("cpu"))
