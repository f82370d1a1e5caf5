"""Plan which rank writes which piece of which tensor. The plan is made from a few rows per rank, and kept for
the next save.

A rank sends its boxes, each with only a checksum of the names of its tensors. So rank 0 plans for thousands
of ranks in seconds; for later saves, each rank sends a single checksum.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from titancli.checkpoint.format.layout import tile
from titancli.checkpoint.format.metadata import Cell, Group
from titancli.checkpoint.format.tensorfile import ITEM_SIZE
from titancli.checkpoint.format.tensors import dtype_name
from titancli.distributed.together import Ranks
from titancli.errors import TitanError

SHARED = 1 << 24
"""Bytes up to which a single replica writes all: a load then opens the files of few ranks for small
tensors."""


class Box(NamedTuple):
    """A rank's part of tensors with the same dtype, shape and layout."""

    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensors."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of one tensor's part."""
        return math.prod(self.sizes) * ITEM_SIZE[self.dtype]


NamedBoxes = list[tuple[Box, str]]
"""A rank's boxes, each with the checksum of its tensors' names."""
Names = dict[str, tuple[str, ...]]
"""Names of tensors by their checksum."""
Task = tuple[int, tuple[str, ...] | tuple[int, int]]
"""The number of a box, and the tensors whose part in it a rank writes: by name, or by their positions."""


class _Holding(NamedTuple):
    """The parts of tensors that a rank holds."""

    boxes: NamedBoxes
    names: Names
    checksum: str
    """The checksum of `boxes`."""

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> _Holding:
        boxes: dict[Box, list[str]] = {}
        for item in items:
            box = _box(item)
            if math.prod(box.sizes) or not math.prod(box.shape):
                boxes.setdefault(box, []).append(item.index.fqn)
        named: NamedBoxes = []
        names: Names = {}
        for box, tensors in boxes.items():
            checksum = xxhash.xxh3_128("\0".join(sorted(tensors)).encode()).hexdigest()
            names[checksum] = tuple(sorted(tensors))
            named.append((box, checksum))
        return cls(named, names, xxhash.xxh3_128(repr(named).encode()).hexdigest())


class SavePlan:
    """The part that each rank writes, agreed on by all of them; see `agree`."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        """The contents of the index, on rank 0."""
        self.needed = 0
        """Bytes of data, on rank 0."""
        self._mine: set[tuple[str, tuple[int, ...]]] = set()
        self._agreed_on: str | None = None
        """The checksum of what this rank held when the plan was made; None if there is no plan."""
        self._name = ""
        """A random name of the plan, the same on all ranks that have agreed."""

    def agree(self, doing: str, items: Sequence[WriteItem], ranks: Ranks) -> list[WriteItem]:
        """Return those of this rank's items that it writes; collective.

        Raises:
            TitanError: on all ranks, if an item of one of them is not a tensor, or they contradict each
                other.
        """
        mine: list[_Holding] = []

        def current_plan() -> str | None:
            mine.append(_Holding.of(items))
            return self._name if mine[0].checksum == self._agreed_on else None

        plans = ranks.allgather_call(doing, current_plan)
        if plans[0] is None or len({*plans}) > 1:
            self._agreed_on = None
            self._plan(doing, mine[0], ranks)
        return [item for item in items if (item.index.fqn, _box(item).offsets) in self._mine]

    def _plan(self, doing: str, mine: _Holding, ranks: Ranks) -> None:
        """Let rank 0 divide the parts that ranks hold. The first rank with a checksum sends its names:
        most ranks have the same."""
        names = mine.names
        everyones: list[NamedBoxes] = []

        def senders(found: list[NamedBoxes]) -> list[int]:
            everyones.extend(found)
            first: dict[str, int] = {}
            for rank, boxes in enumerate(found):
                for _, checksum in boxes:
                    first.setdefault(checksum, rank)
            return sorted({*first.values()})

        for sender in ranks.reduce(doing, lambda: mine.boxes, senders):
            names = {**ranks.broadcast(names, sender), **names}

        def divide() -> tuple[str, list[str]]:  # each rank reads only its own tasks
            return secrets.token_hex(8), [json.dumps(tasks) for tasks in self._divide(everyones, names)]

        self._name, tasks = ranks.broadcast_call(doing, divide)
        self._mine = set(_mine(json.loads(tasks[ranks.rank]), mine.boxes, names))
        self._agreed_on = mine.checksum

    def _divide(self, everyones: list[NamedBoxes], names: Names) -> list[list[Task]]:
        """Return each rank's tasks, in which replicas share the work, and make the index of them. Rank 0
        only."""
        holders: dict[Box, list[tuple[int, int, str]]] = {}
        for rank, boxes in enumerate(everyones):
            for number, (box, checksum) in enumerate(boxes):
                holders.setdefault(box, []).append((rank, number, checksum))
        classes: dict[frozenset[str], list[tuple[tuple[str, ...], frozenset[str]]]] = {}
        cells: dict[tuple[str, tuple[int, ...], tuple[str, ...]], list[Cell]] = {}
        slices: dict[tuple[tuple[str, ...], int, int], tuple[str, ...]] = {}
        tasks: list[list[Task]] = [[] for _ in everyones]
        load = [0] * len(everyones)
        for box, found in holders.items():
            sets = frozenset(checksum for _, _, checksum in found)
            if sets not in classes:
                classes[sets] = list(_classes(sets, names))
            for tensors, among in classes[sets]:
                replicas = [one for one in found if one[2] in among]
                count = min(len(replicas), max(1, box.nbytes * len(tensors) // SHARED), len(tensors))
                if box.nbytes * len(tensors) >= SHARED:  # else the first rank, so that few files have them
                    replicas.sort(key=lambda one: (load[one[0]], one[0]))
                for part, (rank, number, checksum) in enumerate(replicas[:count]):
                    low, high = len(tensors) * part // count, len(tensors) * (part + 1) // count
                    mine = slices.setdefault((tensors, low, high), tensors[low:high])
                    rows = cells.setdefault((box.dtype, box.shape, mine), [])
                    if math.prod(box.sizes):
                        rows.append(Cell(rank, box.offsets, box.sizes))
                        load[rank] += box.nbytes * len(mine)
                        whole = tensors == names[checksum]
                        tasks[rank].append((number, (low, high) if whole else mine))
        self.needed = sum(load)
        self.groups = [Group.of(*key, rows) for key, rows in cells.items()]
        _check(cells)
        return tasks


def _box(item: WriteItem) -> Box:
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        raise TitanError(
            f"the checkpoint's entry {item.index.fqn!r} is not a tensor and would have to be pickled",
            hint="put tensors into the checkpoint, and everything else into its JSON state",
        )
    dtype = dtype_name(item.index.fqn, data.properties.dtype)
    return Box(dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _classes(sets: frozenset[str], names: Names) -> Iterable[tuple[tuple[str, ...], frozenset[str]]]:
    """Yield tensors of one box, by the ranks that have them: usually all ranks, or else disjoint ones."""
    lists: dict[str, list[str]] = {}
    for checksum in sorted(sets):
        for name in names[checksum]:
            lists.setdefault(name, []).append(checksum)
    classes: dict[tuple[str, ...], list[str]] = {}
    for name, among in sorted(lists.items()):
        classes.setdefault(tuple(among), []).append(name)
    for those, tensors in classes.items():
        yield tuple(tensors), frozenset(those)


def _mine(tasks: list[Task], boxes: NamedBoxes, names: Names) -> Iterable[tuple[str, tuple[int, ...]]]:
    for number, chosen in tasks:
        box, checksum = boxes[number]
        if chosen and isinstance(chosen[0], int):
            chosen = names[checksum][slice(*chosen)]
        for name in chosen:
            yield str(name), box.offsets


def _check(groups: dict[tuple[str, tuple[int, ...], tuple[str, ...]], list[Cell]]) -> None:
    """Check that each tensor is stored once, and whole.

    Raises:
        TitanError: the ranks disagree about one.
    """
    lists: dict[str, list[int]] = {}
    keys = list(groups)
    for number, (_, _, tensors) in enumerate(keys):
        for name in tensors:
            lists.setdefault(name, []).append(number)
    alike = {tuple(numbers): name for name, numbers in lists.items()}
    for numbers, name in alike.items():
        if len({keys[number][:2] for number in numbers}) > 1:
            raise TitanError(f"{name} has different dtypes or shapes on the ranks and cannot be saved")
        shape = keys[numbers[0]][1]
        boxes = Counter(cell[1:] for number in numbers for cell in groups[keys[number]])
        if math.prod(shape) and not tile(shape, boxes.elements()):
            raise TitanError(f"the parts of {name} that the ranks hold overlap or leave gaps")
