"""A chat template is tried in a process of its own: good ones pass, bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.small_tokenizers import CHATML, CHATML_TOKENS, byte_level
from tests.data.templates import FOLDER, says, user
from titancli.data import template_trial
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.data.row_formats import Talk
from titancli.data.template_trial import try_template
from titancli.errors import EnvironmentProblem, RecipeError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))


def tokenizer(folder: Path, template: str) -> HFTokenizer:
    end = "<|endoftext|>"
    return HFTokenizer(byte_level(folder, CHATML_TOKENS, eos=end, bos=end, template=template))


def test_public_templates_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that TRL ships, of many families; transformers is asked about few."""
    asked, ask = [], template_trial._require_one
    monkeypatch.setattr(template_trial, "_require_one", lambda *words: (asked.append(path.stem), ask(*words)))
    for path in sorted(FOLDER.glob("*_training.jinja")):  # with `{% generation %}`
        try_template(tokenizer(tmp_path / path.stem, path.read_text()), [])
    assert asked == ["llava_next_training"]  # its contents are parts


def test_one_conversation_that_renders_is_enough(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "tok", "{{ messages[0].extra.upper() }}{{ messages[1].content }}")
    try_template(made, [Talk([user("a"), says("b")]), Talk([user("a") | {"extra": "x"}, says("b")])])
    with pytest.raises(RecipeError, match="has no attribute 'extra'"):
        try_template(made, [Talk([user("a"), says("b")])])


def test_contents_as_parts(tmp_path: Path) -> None:
    """transformers renders what fails on contents as text, in another form of the messages."""
    try_template(
        tokenizer(tmp_path / "tok", "{% for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}"), []
    )


def test_a_template_that_refuses_is_not_broken(tmp_path: Path) -> None:
    try_template(tokenizer(tmp_path / "tok", "{{ raise_exception('only one message') }}"), [])


def test_several_templates_are_left_to_the_run(tmp_path: Path) -> None:
    made = tokenizer(tmp_path / "tok", CHATML)
    config = json.loads((tmp_path / "tok/tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "{{"},
        {"name": "tool_use", "template": CHATML},
    ]
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps(config))
    try_template(made, [])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "5 CPU-seconds"),
        ("{{ 'a' * 10 ** 11 }}", "takes all memory"),
        ("{{ ('a' * messages[0].content | length) * 10 ** 11 }}", "takes all memory"),
    ],
)
def test_a_template_without_bounds(tmp_path: Path, template: str, why: str) -> None:
    made = tokenizer(tmp_path / "tok", template)
    for use in (lambda: try_template(made, []), lambda: made.chat([user("a")])):
        with pytest.raises(EnvironmentProblem, match=f"tok cannot be used: .*{why}"):
            use()


def test_nothing_is_executed(tmp_path: Path) -> None:
    """The environment is a sandbox, as that of transformers."""
    mark = tmp_path / "executed"
    call = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
    try_template(tokenizer(tmp_path / "tok", call), [])
    assert not mark.exists()
