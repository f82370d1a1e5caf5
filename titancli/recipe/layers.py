"""One layer of a recipe over another: what `extends` and overrides do.

Tables merge deep, arrays are replaced whole, and a changed `type` or `flavor` discards the lower layer's
other keys of that table.
"""

from __future__ import annotations

from titancli.recipe.hints import recipe_slots
from titancli.recipe.problems import Problems
from titancli.recipe.scan import KeyPath
from titancli.recipe.tree import Node, dotted
from titancli.registry.kinds import KINDS


def merge(low: Node, high: Node, problems: Problems, path: KeyPath = (), *, one_layer: bool = False) -> Node:
    """The upper layer over the lower one; neither is changed.

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
    """A string where a component stands, as the table that it is short for; any other node as it is."""
    if (
        isinstance(node.value, str)
        and path
        and path[0] in recipe_slots()
        and path[-1] not in ("type", "flavor")
    ):
        return Node({"type": node}, node.origin)
    return node


def _kept(low: dict[str, Node], high: dict[str, Node], path: KeyPath) -> dict[str, Node]:
    """What a table of the upper layer leaves of the lower one's."""
    if "type" in high and not _same_type(_type(low, path), high["type"].value):
        return {}
    old, new = low.get("flavor"), high.get("flavor")
    if new is not None and (old is None or old.value != new.value):
        return {"type": low["type"]} if "type" in low else {}
    return dict(low)


def _type(table: dict[str, Node], path: KeyPath) -> object:
    if "type" in table:
        return table["type"].value
    kind = KINDS.get(str(path[0])) if len(path) == 1 else None
    return kind.default if kind else None


def _same_type(old: object, new: object) -> bool:
    """Whether two names mean one component; a bare name equals a full name that ends in it."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return old == new or (
        ("/" in old) != ("/" in new) and (old.endswith(f"/{new}") or new.endswith(f"/{old}"))
    )


def _names_elements(node: Node) -> bool:
    """Whether a table of overrides means elements of an array: `converters.0.recipe=tensorwise`."""
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
        count = "is empty" if not elements else f"has {len(elements)}, counted from 0"
        problems.add(
            "no-element",
            f"{dotted(path)} has no element {index}",
            node.origin.location("key"),
            f"it {count}; to add elements, write the whole array",
        )
    return Node(elements, low.origin)
