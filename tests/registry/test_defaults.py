"""Optional members: a config's class gets them by `@component`, and what is built by `build`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from typing import Any, ClassVar

import pytest
import torch

from titancli import component
from titancli.engine.inputs import loss_of
from titancli.errors import PluginError
from titancli.protocols import LossDefaults, ModelDefaults, TaskDefaults
from titancli.registry.component import build, completed, is_config, section
from titancli.registry.defaults import CONFIGS, ConfigDefaults, fill_in, members
from titancli.registry.kinds import KINDS

HERE = __name__


class Own:
    needs: ClassVar = {"advantages": "BS"}
    steady = False

    def token_weights(self, batch: object) -> str:
        return f"of {batch}"


class Slotted:
    __slots__ = ("count",)


class Delegate:
    """Has what another object has."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    steady: bool = False


@component("loss", "of_tests", target=f"{HERE}:made")
class Plain:
    """Without any optional member."""

    kind: str = "own"


MADE: dict[str, Any] = {
    "own": Own,
    "frozen": Frozen,
    "slots": Slotted,
    "function": lambda: lambda out, batch: None,
    "partial": lambda: functools.partial(print),
    "delegate": lambda: Delegate(Own()),
}


def made(config: Plain) -> Any:
    return MADE[config.kind]()


# ------------------------------------------------------------------------------------------------ configs


def test_a_config_and_its_class_have_the_members_that_they_lack() -> None:
    for config in (Plain, Plain()):
        assert config.needs_reference is False and config.learns_from_pairs is False and config.flavors == {}  # type: ignore[attr-defined]
    assert Plain().check(None) == () and Plain().explicit() == Plain()  # type: ignore[attr-defined]


def test_they_are_no_fields() -> None:
    assert [field.name for field in dataclasses.fields(Plain)] == ["kind"]  # type: ignore[arg-type]
    assert dataclasses.asdict(Plain()) == {"kind": "own"} and "needs_reference" not in repr(Plain())  # type: ignore[call-overload]
    assert Plain() == Plain() and pickle.loads(pickle.dumps(Plain(kind="slots"))) == Plain(kind="slots")


def test_a_subclass_may_make_a_required_field_of_one() -> None:
    @component("loss", "below", target=f"{HERE}:made")
    class Below(Plain):
        needs_reference: bool

    with pytest.raises(TypeError, match="needs_reference"):
        Below()
    assert Below(needs_reference=True).needs_reference and not Plain().needs_reference  # type: ignore[attr-defined]


def test_a_subclass_may_have_members_of_its_own() -> None:
    @component("loss", "below", target=f"{HERE}:made")
    class Below(Plain):
        flavors: ClassVar[dict[str, dict[str, Any]]] = {"big": {"kind": "slots"}}
        learns_from_pairs: ClassVar[bool] = True

    assert Below.flavors and Below.learns_from_pairs and not Plain.learns_from_pairs  # type: ignore[attr-defined]


def test_a_property_and_a_base_sections_method_count_as_its_own() -> None:
    @section
    class Base:
        def check(self, recipe: Any) -> Any:
            return [("", "of the base")]

    @component("dataset", "of_tests", target=f"{HERE}:made")
    class Data(Base):
        @property
        def skips_rows(self) -> bool:
            return False

    assert Data().check(None) == [("", "of the base")] and Data().skips_rows is False
    assert not hasattr(Base, "flavors")


@pytest.mark.parametrize("name", ["check", "explicit", "try_out"])
def test_no_field_is_named_as_a_method_is(name: str) -> None:
    for body in (
        {"__annotations__": {name: "bool"}, name: True},
        {"__annotations__": {name: "int"}},
        {name: 3},
    ):
        cls = type("Wrong", (), {**body, "__module__": HERE})
        with pytest.raises(PluginError, match=f"{name} is the name of a method"):
            component("loss", "wrong", target=f"{HERE}:made")(cls)


def test_every_class_of_optional_members_is_of_a_kind() -> None:
    assert CONFIGS.keys() <= KINDS.keys()
    assert not members(ConfigDefaults).keys() & {name for cls in CONFIGS.values() for name in members(cls)}


def test_what_is_no_component_is_no_config() -> None:
    assert not is_config(Own()) and not is_config(None)


# ------------------------------------------------------------------------------------------- what is built


@pytest.mark.parametrize("kind", MADE)
def test_what_is_built_has_the_members_that_it_lacks(kind: str) -> None:
    loss = build(Plain(kind=kind))
    own = kind in ("own", "delegate")
    assert loss.entropy is False and loss.check_batch(None) is None
    assert loss.needs == ({"advantages": "BS"} if own else ())
    assert loss.steady is (not own and kind != "frozen")
    assert loss.token_weights("rows") == ("of rows" if own else None)


def test_two_that_delegate_have_each_what_is_behind_it() -> None:
    without, behind = Delegate(object()), Delegate(Own())
    assert fill_in(without, LossDefaults).needs == () and fill_in(behind, LossDefaults).needs
    assert fill_in(without, LossDefaults).needs == ()


def test_torchs_own_classes_stay_as_they_are() -> None:
    model = completed("model", torch.nn.Sequential())
    assert model.roles == {} and not hasattr(torch.nn.Sequential, "roles")
    assert model.state_dict() == {} and copy.deepcopy(model).token_counts() == {}


def test_a_built_object_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        alive = weakref.ref(completed("model", torch.nn.Linear(2, 2)))
        assert alive() is None
    finally:
        gc.enable()


def test_a_built_object_can_be_pickled() -> None:
    loss = pickle.loads(pickle.dumps(build(Plain(kind="frozen"))))
    assert loss == Frozen() and loss.check_batch(None) is None


@pytest.mark.parametrize(("built", "match"), [(3, "cannot be given it"), (None, "cannot be given it")])
def test_what_takes_no_attributes_is_refused_by_name(built: Any, match: str) -> None:
    with pytest.raises(PluginError, match=match):
        completed("task", built)


def test_something_else_in_place_of_a_method_is_refused_by_name() -> None:
    model = torch.nn.Module()
    model.token_counts = {}  # type: ignore[assignment]
    with pytest.raises(PluginError, match="token_counts of Module is a dict, but must be a method"):
        fill_in(model, ModelDefaults)


def test_a_loss_of_a_script_gets_them_as_well() -> None:
    def function(out: Any, batch: Any) -> None: ...

    class Callable(Own):
        output = "logprobs"

        def __call__(self, out: Any, batch: Any) -> None: ...

    for given in (function, lambda out, batch: None, functools.partial(function, None), Callable().__call__):
        assert loss_of(given).needs == () and loss_of(given).token_weights(None) is None
    assert not hasattr(function, "needs")
    assert loss_of(Callable()).steady is False and loss_of(Callable()).entropy is False


def test_kinds_name_classes_of_protocols() -> None:
    assert {kind.optional for kind in KINDS.values()} >= {LossDefaults.__name__, TaskDefaults.__name__}
    for kind in KINDS.values():
        if kind.optional is not None:
            completed(kind.name, Own())
