"""A mixer that ignores the cache trains, and is not sampled from; that of docs/your-own-model.md is."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.docs.markdown import ROOT, blocks
from tests.engine import cases
from titancli import Engine
from titancli.errors import PluginError, TitanError
from titancli.generate.source import _bare
from titancli.models import Llama3
from titancli.models.blocks.attention import Attention
from titancli.models.blocks.attention_window import WHOLE
from titancli.models.blocks.cache import keeps_cache
from titancli.models.blocks.decoder import Decoder
from titancli.protocols.shape import Attention as Spec
from titancli.protocols.shape import Block
from titancli.registry.component import build
from titancli.rl import Local

SIZES: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 48, "vocab_size": 64,
}  # fmt: skip


class Mean(nn.Module):
    """The mean of the row so far: right in training, wrong of a single token."""

    reach, angles = WHOLE, None
    styles: ClassVar = {"wo": "replicate"}

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.wo = nn.Linear(spec.dim, spec.dim, bias=False)

    def forward(self, x: Tensor, cos: None, sin: None, mask: Any, cache: Any = None) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        out: Tensor = self.wo(x.cumsum(1) / counts)
        return out


class OtherForward(Attention):
    """Derived from attention, with a forward of its own."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Any = None) -> Tensor:
        return super().forward(x, cos, sin, mask)


class OtherCore(Attention):
    """Derived from attention, whose forward it keeps."""

    def core_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().core_attention(*args, **kwargs)


class DeclaresAgain(OtherForward):
    keeps_cache = True


class DeclaresNot(Attention):
    keeps_cache = False


@dataclass(frozen=True, kw_only=True)
class MeanSpec(Spec):
    module: ClassVar[str] = "tests.models.test_keeps_cache:Mean"


@dataclass(frozen=True, kw_only=True)
class OtherForwardSpec(Spec):
    module: ClassVar[str] = "tests.models.test_keeps_cache:OtherForward"


class Mixed(Llama3):
    """A Llama 3 whose last block has another mixer."""

    kind: ClassVar[type[Spec]] = MeanSpec

    def layer(self, number: int) -> Block:
        block = super().layer(number)
        return replace(block, attention=self.kind(**vars(block.attention))) if number else block


class Wrapped(Mixed):
    kind = OtherForwardSpec


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [
        (Attention, True),
        (OtherCore, True),
        (OtherForward, False),
        (DeclaresAgain, True),
        (DeclaresNot, False),
    ],
)
def test_declarations(kind: type[nn.Module], keeps: bool) -> None:
    """One is not inherited by another forward."""
    assert keeps_cache(kind(Llama3(**SIZES).layer(0).attention)) is keeps  # type: ignore[arg-type]
    assert not keeps_cache(nn.Linear(1, 1))


@pytest.mark.parametrize("config", [Mixed(**SIZES), Wrapped(**SIZES)], ids=["mean", "wrapped"])
def test_sampling_is_refused_by_name(config: Any) -> None:
    """It trains; no door samples from it."""
    why = r"layers\.1\.attention \((Mean|OtherForward)\) does not declare keeps_cache"
    with Engine.build(cases.recipe(cases.Layout(config=config))) as engine:
        assert engine.forward_backward(cases.my_batches(engine))["loss"] > 0
        with pytest.raises(TitanError, match=why):
            engine.sample([[1, 2]])
        with pytest.raises(TitanError, match=why), engine.sampling():
            pass
        with pytest.raises(TitanError, match=why):  # as GRPO does before its first step
            build(Local(), engine=engine, tokenizer=None)
    with pytest.raises(PluginError, match=why):
        _bare(config, seq_len=16)


def test_learned_positions_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixer of the page gives the logits of whole rows, token by token; documents begin at 0."""
    page = blocks(ROOT / "docs" / "your-own-model.md")
    [text] = [block.text for block in page if block.value == "titan_learned.py"]
    (tmp_path / "titan_learned.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    learned = importlib.import_module("titan_learned")
    monkeypatch.setitem(sys.modules, "titan_learned", learned)  # other tests import their own
    model: Any = Decoder(learned.Learned(**SIZES, max_seq_len=16))
    model.init_weights(lambda name: torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        cache = model.new_cache()
        row = cache.begin()
        found = [model(tokens[:, :4], cache=cache.extend([row], [4], tokens.device))]
        for at in range(4, 12):
            extension = cache.extend([row], [1], tokens.device)
            found.append(model(tokens[:, at : at + 1], cache=extension))
        torch.testing.assert_close(torch.cat(found), whole[0, 3:])
        ids = torch.tensor([[0] * 5 + [1] * 7])
        places = torch.tensor([[*range(5), *range(7)]])
        torch.testing.assert_close(
            model(tokens, places, ids)[:, 5:], model(tokens[:, 5:]), rtol=1e-4, atol=1e-5
        )
        assert not torch.equal(model(tokens[:, 5:], torch.arange(5, 12)[None]), model(tokens[:, 5:]))
