"""Resolution of the merged layers: look up every component, fill in its flavor, complete names.

A slot's string becomes a table, its `type` a full name. Problems are reported here, and each such place is
left out of the binding, so that the rest of the recipe is still checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import PluginError, RecipeError
from titancli.recipe.find import LOCK_HEADER, beside, bundled_folder, store_type
from titancli.recipe.merge import without
from titancli.recipe.problems import Problems
from titancli.recipe.read import taken_as_text
from titancli.recipe.schema import Recipe, default_type, recipe_slots
from titancli.recipe.toml import DEFAULT, KeyPath, Node, Origin, dotted, from_python
from titancli.registry.defaults import ConfigDefaults
from titancli.registry.fields import Type, fields_of
from titancli.registry.kinds import BUILTIN, KINDS

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry

VALIDATION = ("validation", "datasets")


@dataclasses.dataclass
class Resolved:
    """A recipe's data, ready to bind."""

    root: Node
    classes: dict[KeyPath, Any] = dataclasses.field(default_factory=dict)
    """The config class of every table that has one."""
    types: dict[KeyPath, Type] = dataclasses.field(default_factory=dict)
    """The type of every value of a known key."""
    holes: set[KeyPath] = dataclasses.field(default_factory=set)
    """Values already reported."""
    incomplete: set[KeyPath] = dataclasses.field(default_factory=set)
    """Tables with an unknown flavor, whose missing keys are not reported."""


def resolve(root: Node, registry: Registry, problems: Problems, unset: Collection[KeyPath] = ()) -> Resolved:
    """Look up every component of a recipe.

    `unset`: keys that a flavor must not fill in either.

    Raises:
        PluginError: a plugin that the recipe needs is broken.
    """
    resolver = _Resolver(registry, problems, unset)
    tables = dict(root.value)
    for name in recipe_slots():
        default = default_type(name)
        if default is None:
            continue
        table = tables.get(name, Node({}, DEFAULT))
        if isinstance(table.value, dict) and "type" not in table.value:
            table = Node({"type": Node(default, DEFAULT), **table.value}, table.origin)
        tables[name] = table
    if "checkpoint" in tables:
        tables["checkpoint"] = _with_store_type(tables["checkpoint"], registry)
    resolver.result.root = resolver.fields(Recipe, Node(tables, root.origin), ())
    return resolver.result


def _with_store_type(section: Node, registry: Registry) -> Node:
    """Return [checkpoint] with the type of its store, which the scheme of `remote` names. The default is
    filled in only where the store has other keys."""
    if not isinstance(section.value, dict):
        return section
    remote, store = section.child("remote"), section.child("store")
    url = remote.value if remote is not None and isinstance(remote.value, str) else ""
    if store is not None and (not isinstance(store.value, dict) or "type" in store.value):
        return section
    name = store_type(url, registry)
    if store is None and name == KINDS["store"].full_default:
        return section
    given = store or Node({}, DEFAULT)
    typed = Node({"type": Node(name, DEFAULT), **given.value}, given.origin)
    return Node({**section.value, "store": typed}, section.origin)


class _Resolver:
    def __init__(self, registry: Registry, problems: Problems, unset: Collection[KeyPath]) -> None:
        self.registry = registry
        self.problems = problems
        self.unset = [tuple(map(str, key)) for key in unset]
        self.result = Resolved(Node({}, DEFAULT))

    def fields(self, cls: type, table: Node, path: KeyPath) -> Node:
        """Resolve the members of a table that belongs to a config class."""
        self.result.classes[path] = cls
        known = fields_of(cls)
        members = {
            key: self.value(known[key].type, node, (*path, key)) if key in known else node
            for key, node in table.value.items()
        }
        return Node(members, table.origin)

    def value(self, type_: Type, node: Node, path: KeyPath) -> Node:
        """Resolve a value of any annotation."""
        self.result.types[path] = type_
        if type_.slot is not None:
            return self.slot(type_.slot.kind, node, path)
        choice = _false_choice(type_, node.value)
        if choice is not None:
            message = f"{dotted(path)} must be {choice!r}, not {node.origin.text or node.value}"
            self.problems.add("wrong-type", message, node.origin.location(), f"use {choice!r}")
            self.result.holes.add(path)
        if isinstance(node.value, dict) and type_.tables:
            return self.fields(type_.tables[0], node, path)
        if isinstance(node.value, dict) and (inner := type_.element("")):
            members = {key: self.value(inner, below, (*path, key)) for key, below in node.value.items()}
            return Node(members, node.origin)
        if isinstance(node.value, list) and type_.element(0):
            elements = [
                self.value(type_.element(i) or Type(Any), below, (*path, i))
                for i, below in enumerate(node.value)
            ]
            return Node(elements, node.origin)
        if isinstance(node.value, str) and (Path in type_.alternatives or type_.local_path):
            return self.path(node, path)
        return node

    def path(self, node: Node, path: KeyPath) -> Node:
        """Resolve a path, which may be relative to the file it is written in."""
        try:
            return Node(beside(node), node.origin)
        except RecipeError as error:
            self.problems.add("bad-value", error.message, node.origin.location(), error.problems[0].hint)
            self.result.holes.add(path)
            return node

    def slot(self, kind: str, node: Node, path: KeyPath) -> Node:
        """Resolve a component's table, with its full name as `type`."""
        if isinstance(node.value, str):
            node = Node({"type": node}, node.origin)
        cls = self._component(kind, node, path)
        if cls is None:
            self.result.holes.add(path)
            return node
        name = self.registry.full_name(cls)
        given = node.value["type"]
        node = Node({**node.value, "type": Node(name, given.origin)}, node.origin)
        if "flavor" in node.value:
            node = self._with_flavor(cls, name, node, path)
        if path[:2] == VALIDATION and "repeat" in fields_of(cls) and "repeat" not in node.value:
            # Else an evaluation would never end.
            node = Node({**node.value, "repeat": Node(False, DEFAULT)}, node.origin)
        return self.fields(cls, node, path)

    def _component(self, kind: str, node: Node, path: KeyPath) -> type | None:
        if not isinstance(node.value, dict):
            message = f"{dotted(path)} must be a table with a type, or the name of a {kind}"
            self.problems.add("wrong-type", message, node.origin.location())
            return None
        given = node.value.get("type")
        if given is None:
            instead = "use type, not name; " if "name" in node.value else ""
            hint = f"{instead}known: {self.registry.choices(kind)}"
            message = f"{dotted(path)} needs a type, the name of a {kind}"
            self.problems.add("missing-key", message, node.origin.location("key"), hint)
            return None
        if not isinstance(given.value, str):
            message = f"{dotted(path)}.type must be a string, the name of a {kind}"
            self.problems.add("wrong-type", message, given.origin.location())
            return None
        try:
            first = () if "/" in given.value else self._owners(given.origin)
            return self.registry.find(kind, given.value, first=first)
        except PluginError as error:
            self._not_found(kind, given, error)
            return None

    def _owners(self, origin: Origin) -> list[str]:
        """Return the plugins in which a bundled recipe's bare names are looked up first: its own, and
        titan."""
        if origin.kind != "file" or origin.source is None:
            return []
        folders = Path(origin.source.path).resolve().parents
        if bundled_folder().resolve() in folders:
            return [BUILTIN]
        owners = [name for name, at in self.registry.recipe_folders() if at.resolve() in folders]
        return [*owners, BUILTIN] if owners else []

    def _not_found(self, kind: str, given: Node, error: PluginError) -> None:
        """Report a missing component; raise an error if a broken plugin may be the reason."""
        owner, _, bare_name = given.value.rpartition("/")
        offered = [name for name in self.registry.names(kind) if name.rpartition("/")[2] == bare_name]
        ambiguous = not owner and len(offered) > 1
        suspects = [p for p in self.registry.plugins if p.state == "broken" and owner in ("", p.name)]
        near = (error.hint or "").startswith("did you mean")
        if suspects and not ambiguous and not near:
            raise error
        code = "ambiguous-component" if ambiguous else "unknown-component"
        message = error.message.partition("\n")[0]
        self.problems.add(code, message, given.origin.location(), taken_as_text(given) or error.hint)

    def _with_flavor(self, cls: type[ConfigDefaults], name: str, node: Node, path: KeyPath) -> Node:
        """Return the table merged over its flavor's values."""
        flavors = cls.flavors
        given = node.value["flavor"]
        if not isinstance(given.value, str) or given.value not in flavors:
            self._bad_flavor(name, given, list(flavors), path)
            rest = {key: below for key, below in node.value.items() if key != "flavor"}
            return Node(rest, node.origin)
        at = given.origin
        origin = Origin("flavor", at.source, at.key, at.value, f"flavor {given.value!r} of {name}")
        row = flavors[given.value]
        if at.source is not None and at.source.text.startswith(LOCK_HEADER):
            row = _not_null(row, cls)  # a lock file says None by leaving a key out
        filled = _under(node, from_python(row, origin))
        for key in self.unset:
            if key[: len(path)] == tuple(map(str, path)):
                filled, found = without(filled, key[len(path) :])
                if found:  # the row would bring it back when the lock file is read
                    filled, _ = without(filled, ("flavor",))
        return filled

    def _bad_flavor(self, name: str, given: Node, flavors: list[str], path: KeyPath) -> None:
        self.result.incomplete.add(path)
        location = given.origin.location()
        if not flavors:
            message = f"{name} has no flavors"
            self.problems.add("unknown-key", message, given.origin.location("key"), "remove the key")
        elif not isinstance(given.value, str):
            message = f"{dotted(path)}.flavor must be a string"
            self.problems.add("wrong-type", message, location, f"one of {', '.join(flavors)}")
        else:
            hint = f"one of {', '.join(flavors)}"  # '70B' looks most like '7B', and is not meant
            self.problems.add("bad-choice", f"{name} has no flavor {given.value!r}", location, hint)


def _false_choice(type_: Type, value: Any) -> Any | None:
    """Return the choice that only equals a value of another type (`1` and `true`, `-1` and `-1.0`).

    pydantic takes such a value even in strict mode.
    """
    equal = [choice for choice in type_.choices if choice == value]
    if not equal or type(value) in (*type_.alternatives, *map(type, equal)):
        return None
    return equal[0]


def _not_null(row: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return a flavor's values without the fields that are None unless given."""
    nullable = {field.name for field in fields_of(cls).values() if field.declared.default is None}
    return {key: value for key, value in row.items() if key not in nullable}


def _under(node: Node, row: Node) -> Node:
    """Return a table with the keys that it lacks filled in from another."""
    members = dict(node.value)
    for key, below in row.value.items():
        if key not in members:
            members[key] = below
        elif isinstance(members[key].value, dict) and isinstance(below.value, dict):
            members[key] = _under(members[key], below)
    return Node(members, node.origin)
