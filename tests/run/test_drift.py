"""What differs between two resolved recipes."""

from __future__ import annotations

from titancli.run.drift import changes


def test_equal_recipes_do_not_drift() -> None:
    data = {"training": {"steps": 1}, "loggers": [{"type": "a"}]}
    assert changes(data, dict(data)) == []


def test_a_change_is_told_by_its_dotted_key_and_both_values() -> None:
    drift = changes(
        {"training": {"steps": 10, "seed": 0}, "converters": [{"type": "a", "skip": ["x"]}]},
        {"training": {"steps": 20, "seed": 0}, "converters": [{"type": "a", "skip": ["x", "y"]}]},
    )
    assert [str(change) for change in drift] == [
        "training.steps: 10 -> 20",
        "converters.0.skip: ['x'] -> ['x', 'y']",
    ]


def test_what_is_added_or_removed_is_a_change() -> None:
    drift = changes({"a": {"x": 1}}, {"a": {"y": "text"}})
    assert [str(change) for change in drift] == ["a.x: 1 -> (not set)", "a.y: (not set) -> 'text'"]


def test_the_sections_that_give_a_checkpoint_its_meaning_are_guarded() -> None:
    drift = changes(
        {"model": {"dim": 1}, "tokenizer": {"type": "a"}, "dataset": {"path": "p"}, "optimizer": {"lr": 1.0}},
        {"model": {"dim": 2}, "tokenizer": {"type": "b"}, "dataset": {"path": "q"}, "optimizer": {"lr": 2.0}},
    )
    assert [change.key for change in drift if change.guarded] == [
        "model.dim",
        "tokenizer.type",
        "dataset.path",
    ]
