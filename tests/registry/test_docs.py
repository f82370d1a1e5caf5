"""docs/plugins.md says what is true."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from titancli import hookimpl, protocols
from titancli.registry import hookspecs, kinds
from titancli.registry.component import component_info, load_target
from titancli.registry.discover import load_plugins
from titancli.registry.fields import nested_fields, summary

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kinds_builder_is_told_as_it_is(kind: str) -> None:
    builder = getattr(protocols, f"{kind.capitalize()}Builder")
    parameters = list(inspect.signature(builder.__call__).parameters)[1:]
    call = ", ".join([parameters[0], *(["*"] if parameters[1:] else []), *parameters[1:]])
    assert f"\n| {kind} | `build({call})` |" in TEXT


def test_every_hook_is_told() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("titan_")}
    assert set(re.findall(r"^\| `(titan_\w+)\(", TEXT, re.MULTILINE)) == hooks


def test_the_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    menu, kitchen = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[:2]
    package = tmp_path / "titan_lab"
    package.mkdir()
    (package / "__init__.py").write_text(menu)
    (package / "z_loss.py").write_text(kitchen)
    info = tmp_path / "titan_lab-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: titan-lab\nVersion: 0.1.0\n")
    entry_points = re.findall(r"\[project.entry-points.titancli\]\n(.*)\n", TEXT)[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[titancli]\n{entry_points}\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        config = load_plugins().find("loss", "titan-lab/z_loss")
        assert summary(config) == "Cross-entropy with a penalty on the size of the logits."
        assert nested_fields(config)[0].doc == "How much the penalty counts."
        loss = load_target(component_info(config).target)(config(weight=0.0))
        logits = torch.randn(2, 3, 5)
        targets = torch.tensor([[1, 2, -100], [0, -100, 4]])
        result = loss(logits, {"targets": targets})
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(result.sum, expected)
        assert result.weight == 4
    finally:
        for name in [name for name in sys.modules if name.startswith("titan_lab")]:
            del sys.modules[name]


def test_the_public_names_are_there() -> None:
    import titancli

    for name in re.findall(r"titancli\.([A-Za-z]+)\b(?!\.)", TEXT):
        assert importlib.util.find_spec(f"titancli.{name}") or hasattr(titancli, name), name
    assert hookimpl is hookspecs.hookimpl
