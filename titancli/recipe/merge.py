"""Merging of a recipe's layers: its bases (`extends`), itself, and the overrides of the command line."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tomli

from titancli.errors import Location, PluginError, RecipeError
from titancli.recipe.find import NAMED, bundled_folder, named_recipe
from titancli.recipe.problems import Problems, nearest
from titancli.recipe.read import DEEPEST, FORMAT, parse, read_file
from titancli.recipe.schema import default_type, recipe_slots
from titancli.recipe.toml import DEFAULT, OVERRIDE, KeyPath, Node, Origin, Source, dotted, match_key, scan
from titancli.registry.kinds import BUILTIN

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


MOST_FILES = 64
"""Files of one recipe, bases included."""


def merge(low: Node, high: Node, problems: Problems, path: KeyPath = (), *, one_layer: bool = False) -> Node:
    """Return the upper layer merged over the lower one; neither is changed.

    `one_layer`: both are of one layer, so a `type` or `flavor` discards nothing.
    """
    if isinstance(high.value, dict):
        low = as_table(low, path)
    elif isinstance(low.value, dict):
        high = as_table(high, path)
    if isinstance(low.value, list) and _names_elements(high):
        return _merge_elements(low, high, problems, path, one_layer)
    if not isinstance(low.value, dict) or not isinstance(high.value, dict):
        return high
    merged = dict(low.value) if one_layer else _kept(low.value, high.value, path)
    for key, node in high.value.items():
        if key in merged:
            node = merge(merged[key], node, problems, (*path, key), one_layer=one_layer)
        merged[key] = node
    kept_type = low.value.get("type")
    if "type" in merged and kept_type and _same_type(kept_type.value, merged["type"].value):
        longest = max(kept_type.value, merged["type"].value, key=len)  # the full name, where one is known
        merged["type"] = Node(longest, merged["type"].origin)
    return Node(merged, low.origin if high.origin.kind == "override" else high.origin)


def as_table(node: Node, path: KeyPath) -> Node:
    """Return a component given as a string as the table it abbreviates; any other node unchanged."""
    nested = path[:2] in (("validation", "datasets"), ("checkpoint", "store"), ("checkpoint", "copies"))
    in_slot = nested or (path[:1] and path[0] in recipe_slots())
    if isinstance(node.value, str) and in_slot and path[-1] not in ("type", "flavor"):
        return Node({"type": node}, node.origin)
    return node


def _kept(low: dict[str, Node], high: dict[str, Node], path: KeyPath) -> dict[str, Node]:
    """Return the part of a lower layer's table that remains under the upper layer's."""
    if "type" in high and not _same_type(_type(low, path), high["type"].value):
        return {}
    # A URL with another scheme is another store's.
    if path == ("checkpoint",) and {"remote", "store"} <= low.keys() and "remote" in high:
        schemes = {str(table["remote"].value).partition("://")[0] for table in (low, high)}
        low = {key: node for key, node in low.items() if key != "store" or len(schemes) == 1}
    if path == ("training",) and len(lengths := {"steps", "epochs"} & high.keys()) == 1:
        low = {key: node for key, node in low.items() if key not in {"steps", "epochs"} - lengths}
    old, new = low.get("flavor"), high.get("flavor")
    if new is not None and (old is None or old.value != new.value):
        return {"type": low["type"]} if "type" in low else {}
    return dict(low)


def _type(table: dict[str, Node], path: KeyPath) -> object:
    if "type" in table:
        return table["type"].value
    return default_type(str(path[0])) if len(path) == 1 else None


def _same_type(old: object, new: object) -> bool:
    """Return whether two names mean one component; a bare name equals a full name that ends in it."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return old == new or (
        ("/" in old) != ("/" in new) and (old.endswith(f"/{new}") or new.endswith(f"/{old}"))
    )


def _names_elements(node: Node) -> bool:
    """Return whether a table of overrides addresses elements of an array:
    `converters.0.recipe=tensorwise`."""
    table = node.value
    return (
        isinstance(table, dict)
        and bool(table)
        and all(key.isdecimal() and below.origin.kind == "override" for key, below in table.items())
    )


def _merge_elements(low: Node, high: Node, problems: Problems, path: KeyPath, one_layer: bool) -> Node:
    elements = list(low.value)
    for key, node in high.value.items():
        index = int(key)
        if index < len(elements):
            elements[index] = merge(elements[index], node, problems, (*path, index), one_layer=one_layer)
            continue
        count = "is empty" if not elements else f"has {len(elements)}, numbered from 0"
        problems.add(
            "no-element",
            f"{dotted(path)} has no element {index}",
            node.origin.location("key"),
            f"it {count}; to add elements, give the whole array",
        )
    return Node(elements, low.origin)


# ---------------------------------------------------------------------------------------------------- extends


def read_recipe(path: Path, registry: Registry, problems: Problems) -> Node:
    """Return a recipe file merged over all that it extends.

    Raises:
        RecipeError: one of the files cannot be read or is not TOML, is of another format version, or extends
            itself; the error holds the problems of all files.
    """
    root = _Bases(registry, problems).with_bases(path, (), None)
    problems.raise_any()  # keys of an unread file would be reported missing
    return root


class _Bases:
    """The files of one recipe; each is read and merged once, however many others extend it."""

    def __init__(self, registry: Registry, problems: Problems) -> None:
        self._registry, self._problems = registry, problems
        self._merged: dict[Path, Node] = {}

    def with_bases(self, path: Path, above: tuple[Path, ...], named_at: Location | None) -> Node:
        """Return a file merged over its bases.

        Args:
            above: the files that extend it, from the top.
            named_at: where it is named, for a file that cannot be read.
        """
        root = read_file(path, self._problems, named_at)
        if root is None:
            return Node({}, DEFAULT)
        version = root.value.get("recipe")
        if version is not None and type(version.value) is int and version.value != FORMAT:
            message = f"this recipe has format {version.value}; this version of titan reads format {FORMAT}"
            hint = "pip install --upgrade titancli"
            self._problems.add("bad-format", message, version.origin.location(), hint)
        layers = [
            self._base(reference, path, (*above, path.resolve()))
            for reference in _references(root, self._problems)
        ]
        own = Node({k: v for k, v in root.value.items() if k != "extends"}, root.origin)
        bundled = bundled_folder().resolve() in path.resolve().parents
        layers.append(_in_full(own, self._registry) if bundled else own)
        return functools.reduce(lambda low, high: merge(low, high, self._problems), layers, Node({}, DEFAULT))

    def _base(self, reference: Node, path: Path, above: tuple[Path, ...]) -> Node:
        """Return one base, merged over its own bases."""
        location, add = reference.origin.location(), self._problems.add
        try:
            base = _find(reference.value, path.parent, self._registry)
        except RecipeError as error:
            add("no-recipe", error.problems[0].message, location, error.problems[0].hint)
            return Node({}, DEFAULT)
        real = base.resolve()
        if real in above:
            chain = [*above[above.index(real) :], base]
            add("cycle", f"{path} extends itself: {' -> '.join(p.name for p in chain)}", location)
            return Node({}, DEFAULT)
        if real not in self._merged:
            if len(self._merged) + len(above) >= MOST_FILES:
                message = f"a recipe may extend at most {MOST_FILES} files"
                add("too-many-files", message, location, "join some of its bases")
                return Node({}, DEFAULT)
            self._merged[real] = self.with_bases(base, above, location)
        return self._merged[real]


def _in_full(root: Node, registry: Registry) -> Node:
    """Return a bundled recipe with `titan/` before its bare types. A plugin's component of the same bare name
    in an upper layer then replaces titan's and inherits none of its keys."""
    tables = dict(root.value)
    for name, slot in recipe_slots().items():
        table = as_table(tables[name], (name,)) if name in tables else None
        given = table.child("type") if table is not None else None
        if table is None or given is None or "/" in str(given.value):
            continue
        full = f"{BUILTIN}/{given.value}"
        with suppress(PluginError):  # of a plugin, which the recipe requires
            registry.find(slot.kind, full)
            tables[name] = Node({**table.value, "type": Node(full, given.origin)}, table.origin)
    return Node(tables, root.origin)


def _references(root: Node, problems: Problems) -> list[Node]:
    node = root.value.get("extends")
    if node is None:
        return []
    found = node.value if isinstance(node.value, list) else [node]
    for element in found:
        if not isinstance(element.value, str):
            hint = 'extends = "base.toml", or "titan:llama3_8b", or an array of these'
            problems.add("wrong-type", "extends must be a string", element.origin.location(), hint)
    return [element for element in found if isinstance(element.value, str)]


def _find(reference: str, folder: Path, registry: Registry) -> Path:
    if NAMED.match(reference) and not reference.endswith(".toml"):
        return named_recipe(reference, registry)
    if not reference.endswith(".toml"):  # not read, so that an error never shows its text
        raise RecipeError(f"{reference!r} is not a recipe file: its name does not end in .toml",
                          hint=_named_hint(reference))  # fmt: skip
    base = folder / os.path.expanduser(reference)
    if not os.path.isfile(base):
        names = [p.name for p in base.parent.glob("*.toml")] if os.path.isdir(base.parent) else []
        hint = nearest(base.name, sorted(names)) or _named_hint(reference)
        raise RecipeError(f"file {base} does not exist", hint=hint)
    return base


def _named_hint(reference: str) -> str | None:
    if "/" in reference or reference.endswith(".toml"):
        return None
    return f"a path is relative to this file and ends in .toml; a bundled recipe is titan:{reference}"


# -------------------------------------------------------------------------------------------------- overrides


def read_overrides(arguments: Sequence[str], problems: Problems) -> Node:
    """Return all overrides as one layer; invalid ones are added to `problems`.

    `optimizer=muon optimizer.lr=0.02` means the same in either order; of two values for one key the last
    wins.
    """
    found: list[tuple[KeyPath, Node]] = []
    for argument in arguments:
        read = _read(argument, problems)
        named = {(*path, "type") for path, node in read if isinstance(node.value, str)}
        found = [one for one in found if one[0] not in named]  # loss={type="sft"} loss=dpo
        found += read
    layer = Node({}, Origin("override"))
    for path, node in sorted(found, key=lambda pair: len(pair[0])):  # whole values first, then parts of them
        layer = merge(layer, _wrapped(path, node), problems, one_layer=True)
    return layer


def _wrapped(path: KeyPath, node: Node) -> Node:
    """Return the tree that has only this value."""
    for key in reversed(path):
        node = Node({key: node}, Origin("override", node.origin.source, node.origin.key, node.origin.value))
    return node


def _read(argument: str, problems: Problems) -> list[tuple[KeyPath, Node]]:
    """Return the keys that one argument sets: one, or those of an inline table."""
    argument = argument.replace("\r\n", "\n")
    source = Source(OVERRIDE, argument)
    path = _key(source, problems, ends_with="=")
    if path is None:
        return []
    if path[0] == "extends":
        message = "extends can only be set in a recipe file"
        problems.add("bad-override", message, source.location((0, 7)), "create a recipe file that extends it")
        return []
    try:
        node = _one_value(source)
    except (RecipeError, tomli.TOMLDecodeError):
        node = None
    if node is None:
        start = _value_start(argument)
        node = Node(argument[start:], Origin("override", source, (0, start - 1), (start, len(argument))))
        return [(path, node)]
    below, _ = node.follow(path)
    return [((*path, *rest), leaf) for rest, leaf in _settings(below)]


def _settings(node: Node) -> list[tuple[KeyPath, Node]]:
    """Return the keys of a table, each with its value; an array is one value."""
    if not isinstance(node.value, dict) or not node.value:
        return [((), node)]
    return [((key, *rest), leaf) for key, below in node.value.items() for rest, leaf in _settings(below)]


def _one_value(source: Source) -> Node | None:
    """Return the argument as TOML, if exactly one TOML value follows the `=`; else None."""
    node = parse(source, "override")
    key = match_key(source.text)
    if key is None or len(node.value) != 1:
        return None
    span = scan(source.text).values.get(tuple(key[0]))
    return node if span is not None and span[1] == len(source.text.rstrip()) else None


def _key(source: Source, problems: Problems, *, ends_with: str) -> KeyPath | None:
    """Return the dotted key at the start of a text, which `ends_with` must follow."""
    text = source.text
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add("bad-override", f"{text!a} is not UTF-8", hint="use UTF-8")
        return None
    found = match_key(text)
    if found is not None:
        parts, end = found
        rest = text[end:].lstrip(" \t")
        if len(parts) <= DEEPEST and (rest.startswith(ends_with) if ends_with else not rest):
            return tuple(parts)
    end = text.find("=") if ends_with else len(text)
    problems.add(
        "bad-override",
        f"{text[:end]!r} is not a key",
        source.location((0, max(end, 1))),
        'a key is written like training.steps, converters.0.recipe or "a b".c',
    )
    return None


def _value_start(argument: str) -> int:
    found = match_key(argument)
    return argument.index("=", found[1] if found else 0) + 1


def read_unset(arguments: Sequence[str], problems: Problems) -> dict[KeyPath, Source]:
    """Return the keys of `--unset`, each with its text."""
    found: dict[KeyPath, Source] = {}
    for argument in arguments:
        source = Source(OVERRIDE, argument)
        path = _key(source, problems, ends_with="")
        if path is not None:
            found[path] = source
    return found


def without(root: Node, path: KeyPath) -> tuple[Node, bool]:
    """Return the tree without one key, and whether it had that key."""
    if not isinstance(root.value, dict) or not path or path[0] not in root.value:
        if isinstance(root.value, list) and len(path) > 1 and (element := root.child(path[0])) is not None:
            changed, found = without(element, path[1:])
            index = int(path[0])
            return Node([*root.value[:index], changed, *root.value[index + 1 :]], root.origin), found
        return root, False
    table = dict(root.value)
    if len(path) == 1:
        del table[path[0]]
        return Node(table, root.origin), True
    table[path[0]], found = without(table[path[0]], path[1:])
    return Node(table, root.origin), found
