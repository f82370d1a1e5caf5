"""`KEY=VALUE` arguments: one layer over the files, and `--unset KEY`, which takes keys away again."""

from __future__ import annotations

from collections.abc import Sequence

import tomli

from titancli.errors import RecipeError
from titancli.recipe.layers import merge
from titancli.recipe.problems import Problems
from titancli.recipe.read import DEEPEST, parse
from titancli.recipe.scan import KeyPath, match_key, scan
from titancli.recipe.tree import OVERRIDE, Node, Origin, Source


def read_overrides(arguments: Sequence[str], problems: Problems) -> Node:
    """All overrides as one layer; what is wrong with one is added to `problems`.

    `optimizer=muon optimizer.lr=0.02` means the same in either order; of two values for one key the last
    wins.
    """
    found: list[tuple[KeyPath, Node]] = []
    for argument in arguments:
        found += _read(argument, problems)
    layer = Node({}, Origin("override"))
    for path, node in sorted(found, key=lambda pair: len(pair[0])):  # whole values first, then parts of them
        layer = merge(layer, _wrapped(path, node), problems, one_layer=True)
    return layer


def _wrapped(path: KeyPath, node: Node) -> Node:
    """The tree that has only this value."""
    for key in reversed(path):
        node = Node({key: node}, Origin("override", node.origin.source, node.origin.key, node.origin.value))
    return node


def _read(argument: str, problems: Problems) -> list[tuple[KeyPath, Node]]:
    """The keys that one argument sets: one, or those of an inline table."""
    argument = argument.replace("\r\n", "\n")
    source = Source(OVERRIDE, argument)
    path = _key(source, problems, ends_with="=")
    if path is None:
        return []
    if path[0] == "extends":
        message = "extends stands in recipe files only"
        problems.add("bad-override", message, source.location((0, 7)), "write a recipe file that extends it")
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
    """The keys of a table, each with its value; an array is one value."""
    if not isinstance(node.value, dict) or not node.value:
        return [((), node)]
    return [((key, *rest), leaf) for key, below in node.value.items() for rest, leaf in _settings(below)]


def _one_value(source: Source) -> Node | None:
    """The argument as TOML, if what follows the `=` is exactly one TOML value."""
    node = parse(source, "override")
    key = match_key(source.text)
    if key is None or len(node.value) != 1:
        return None
    span = scan(source.text).values.get(tuple(key[0]))
    return node if span is not None and span[1] == len(source.text.rstrip()) else None


def _key(source: Source, problems: Problems, *, ends_with: str) -> KeyPath | None:
    """The dotted key that a text begins with, and that `ends_with` must follow."""
    text = source.text
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add("bad-override", f"{text!a} is not UTF-8", hint="write it in UTF-8")
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
        f"{text[:end]!r} is no key",
        source.location((0, max(end, 1))),
        'a key is written like training.steps, converters.0.recipe or "a b".c',
    )
    return None


def _value_start(argument: str) -> int:
    found = match_key(argument)
    return argument.index("=", found[1] if found else 0) + 1


def read_unset(arguments: Sequence[str], problems: Problems) -> dict[KeyPath, Source]:
    """The keys of `--unset`, each with its text."""
    found: dict[KeyPath, Source] = {}
    for argument in arguments:
        source = Source(OVERRIDE, argument)
        path = _key(source, problems, ends_with="")
        if path is not None:
            found[path] = source
    return found


def without(root: Node, path: KeyPath) -> tuple[Node, bool]:
    """The tree without one key, and whether it was there."""
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
