"""Optional members: what an owner has, and what it has not."""

from __future__ import annotations

from typing import ClassVar

import pytest

from titancli.protocols import LossDefaults
from titancli.registry.component import is_config
from titancli.registry.defaults import ConfigDefaults, DatasetConfigDefaults, with_defaults


class Own:
    needs: ClassVar = {"advantages": "BS"}
    steady = False

    def token_weights(self, batch: object) -> str:
        return f"of {batch}"


def test_an_owners_members_come_before_the_defaults() -> None:
    own = with_defaults(LossDefaults, Own())
    assert own.needs == {"advantages": "BS"} and own.steady is False and own.entropy is False
    assert own.token_weights("rows") == "of rows"  # type: ignore[arg-type, comparison-overlap]
    assert own.check_batch("rows") is None  # type: ignore[arg-type, func-returns-value]


def test_a_class_may_be_the_owner_and_nothing_too() -> None:
    assert (
        with_defaults(DatasetConfigDefaults, type("Data", (), {"needs_tokenizer": False})).needs_tokenizer
        is False
    )
    assert with_defaults(DatasetConfigDefaults, None).needs_tokenizer is True


@pytest.mark.parametrize("value", [None, True, "all"])
def test_a_field_that_has_a_methods_name_is_no_method(value: object) -> None:
    config = type("Config", (), {"check": value, "explicit": value})()
    declared = with_defaults(ConfigDefaults, config)
    assert declared.check(None) == () and declared.explicit() is config  # type: ignore[arg-type]


def test_what_is_not_declared_cannot_be_asked() -> None:
    with pytest.raises(AttributeError, match="neads"):
        with_defaults(LossDefaults, Own()).neads  # type: ignore[attr-defined]  # noqa: B018


def test_what_is_no_component_is_no_config() -> None:
    assert not is_config(Own()) and not is_config(None)
