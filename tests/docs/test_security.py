"""What SECURITY.md says is so."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.errors import RecipeError
from titancli.recipe import env

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
SOURCES = [*(ROOT / "titancli").rglob("*.py"), *(ROOT / "plugins").glob("*/titan_*/**/*.py")]
UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def dangers(source: str) -> Iterator[tuple[int, str]]:
    """Return what could run code out of data: line, and name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [module or ""] if module else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names if name.partition(".")[0] in UNPICKLE)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("eval", "exec", "torch.load", "pd.read_pickle", "os.system"):
                yield node.lineno, name
            for keyword in node.keywords:
                given = ast.unparse(keyword.value)
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and given != "False":
                    yield node.lineno, f"{keyword.arg}={given}"


def test_nothing_but_messages_of_ranks_is_unpickled_or_evaluated() -> None:
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): name for path in SOURCES for _, name in dangers(path.read_text())}
    assert found == {
        "titancli/distributed/together.py": "pickle"
    }  # what ranks send each other, see SECURITY.md


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "torch.load(f)", "eval(x)", "f(trust_remote_code=True)"],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert list(dangers(line))


def test_the_variables_that_security_md_names_are_refused() -> None:
    section = re.search(r"in `\[env\]`: (.*?)\n- ", TEXT, re.DOTALL)
    assert section is not None
    named = re.findall(r"`([A-Z0-9_]+)`", section[1])
    assert len(named) > 5
    refused = [path[1] for path, _, _ in env.check_env(dict.fromkeys(named, "x"))]
    assert refused == named


def test_the_variables_that_a_recipe_may_set_are_listed() -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    section = re.search(r"list of titancli/recipe/env.py -->\n(.*?)\n\n", page, re.DOTALL)
    assert section is not None
    assert re.findall(r"`(\w+)`", section[1]) == sorted(env.ALLOWED)


def test_a_chat_template_is_rendered_in_a_sandbox(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<e>": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<e>", "chat_template": "{{ messages.__class__.__mro__ }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HFTokenizer(tmp_path)
    with pytest.raises(RecipeError, match="unsafe"):
        tokenizer.chat([{"role": "user", "content": "a"}])
