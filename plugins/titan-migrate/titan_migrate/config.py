"""A config during translation: its values, their lines, and the results so far."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_migrate.account import Remark
from titan_migrate.document import Leaf
from titan_migrate.keys import Key, described, fits
from titancli.errors import PluginError
from titancli.recipe import nearest

if TYPE_CHECKING:
    from titancli.registry.lookup import Registry


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line says."""

    model: str | None = None
    """Folder of the base model; None: as the config names it."""
    gpus: int = 1
    """GPUs that the config was run on."""


class Config:
    """Reads values by the tool's names, and collects the recipe and the remarks."""

    def __init__(
        self,
        leaves: list[Leaf],
        keys: dict[str, Key],
        tool: str,
        registry: Registry,
        asked: Asked = Asked(),
        path: Path = Path("config.yaml"),
    ) -> None:
        self.recipe: dict[str, Any] = {}
        self.lost: list[Remark] = []
        self.changed: list[Remark] = []
        self.idle: list[Remark] = []
        self.unset: list[Remark] = []
        self.moved: set[str] = set()
        self.entries: dict[str, Leaf] = {}
        """Values that are set, and of the right type."""
        self.near = path.absolute()
        """The config's file."""
        self.keys, self.tool, self.registry, self.asked = keys, tool, registry, asked
        for leaf in leaves:
            self._read(leaf)

    def _read(self, leaf: Leaf) -> None:
        key = described(leaf.name, self.keys)
        if leaf.value is None and (key or any(name.startswith(f"{leaf.name}.") for name in self.keys)):
            self.unset.append(Remark(leaf.name, leaf.line, None, ""))  # a section without a key, too
        elif key is None:
            near = nearest(leaf.name, self.keys)
            text = f"{self.tool} has no such key that titan knows" + (f": {near}" if near else "")
            self.lost.append(Remark(leaf.name, leaf.line, leaf.value, text))
        elif not fits(leaf.value, key.types):
            words = " or ".join({"str": "text", "int": "a whole number", "float": "a number", "bool":
                                 "true or false", "list": "a list", "dict": "a table"}[kind.__name__]
                                for kind in key.types)  # fmt: skip
            self.lost.append(Remark(leaf.name, leaf.line, leaf.value, f"{self.tool} expects {words} here"))
        else:
            self.entries[leaf.name] = leaf

    # ------------------------------------------------------------------------------------------- reading

    def written(self, name: str) -> bool:
        return name in self.entries

    def value(self, name: str) -> Any:
        """Return a value: as set in the config, or the tool's default."""
        if name in self.entries:
            return self.entries[name].value
        key = described(name, self.keys)
        assert key is not None, f"{name} is in no table"
        return key.default

    def below(self, prefix: str) -> list[str]:
        """Return the names of the values that are set below a table."""
        return [name for name in self.entries if name.startswith(f"{prefix}.")]

    def elements(self, name: str) -> list[str]:
        """Return the names of a list's tables, in their order."""
        count = len(name.split("."))
        numbers = {below.split(".")[count] for below in self.below(name)}
        return [f"{name}.{number}" for number in sorted(filter(str.isdecimal, numbers), key=int)]

    # ------------------------------------------------------------------------------------------- results

    def put(self, key: str, value: Any, *sources: str) -> None:
        """Set a key of the recipe; `sources` are the keys of the config that it comes from."""
        table = self.recipe
        *above, last = key.split(".")
        for name in above:
            table = table.setdefault(name, {})
        table[last] = value
        self.take(*sources)

    def take(self, *names: str) -> None:
        """Mark keys as carried over."""
        self.moved.update(name for name in names if name in self.entries)

    def lose(self, name: str, why: str) -> None:
        """Mark a key as not carried over, with the reason; or the tool's default, if it is not set."""
        self.moved.discard(name)
        if not any(remark.name == name for remark in self.lost):
            self.lost.append(self._remark(name, why))

    def change(self, name: str, how: str) -> None:
        """Mark a key as expressed differently, with the explanation."""
        self.take(name)
        self.changed.append(self._remark(name, how))

    def ignore(self, *names: str) -> None:
        """Mark keys as changing nothing in what titan trains."""
        for name in names:
            if name in self.entries and name not in self.handled():
                self.idle.append(self._remark(name, ""))

    def note(self, name: str, how: str) -> None:
        """Add a remark about a key that is not set, or is null."""
        line = next((row.line for row in self.unset if row.name == name), None)
        self.changed.append(Remark(name, line, None, how))

    def _remark(self, name: str, text: str) -> Remark:
        leaf = self.entries.get(name)
        if leaf is not None:
            return Remark(name, leaf.line, leaf.value, text)
        return Remark(name, None, self.value(name), text)

    def handled(self) -> set[str]:
        """Return the keys of which it has been said what became of them."""
        return self.moved | {row.name for rows in (self.lost, self.changed, self.idle) for row in rows}

    def finish(self) -> None:
        """Account for the keys that no code has read, as their table says."""
        handled = self.handled()
        for name, leaf in self.entries.items():
            if name in handled:
                continue
            key = described(name, self.keys)
            assert key is not None
            if key.idle or leaf.value in key.same:
                self.idle.append(self._remark(name, ""))
            elif key.to is not None:
                self.put(key.to, leaf.value, name)
            else:
                self.lost.append(self._remark(name, key.why or "titan has nothing for this value"))
        self._pad()
        self._keep_quantized()
        self._require_plugins()

    def _pad(self) -> None:
        """Pad rows to one length under pipelines and expert parallelism, which need that."""
        mesh, dataset = self.recipe.get("mesh", {}), self.recipe.get("dataset", {})
        if mesh.get("pp", 1) > 1 or mesh.get("ep", 1) > 1:
            for table in (dataset, *dataset.get("datasets", {}).values()):
                table.pop("padding", None)

    # ---------------------------------------------------------------------------------------- components

    def has(self, kind: str, name: str, *needed_by: str, what: str = "") -> bool:
        """Return whether a component is installed; if not, mark the keys that need it as lost.

        Args:
            what: what happens without it, for the remark.
        """
        try:
            self.registry.find(kind, name)
        except PluginError as error:
            for key in needed_by:
                hint = f": {error.hint}" if error.hint else ""
                self.lose(key, f"{error.message}{hint}" + (f"; {what}" if what else ""))
            return False
        return True

    def convert(self, table: dict[str, Any]) -> None:
        """Add a converter."""
        self.recipe.setdefault("converters", []).append(table)

    def _keep_quantized(self) -> None:
        """Leave out what a base in 4 bits excludes: CPU offload, and compilation."""
        if not any(table["type"] == "qlora" for table in self.recipe.get("converters", [])):
            return
        offload = self.recipe.get("parallelize", {}).pop("cpu_offload", False)
        compiled = self.recipe.pop("compile", {}).get("enable", False)
        for name in self.entries:
            last = name.rpartition(".")[2]
            if offload and last.removeprefix("fsdp_") in ("offload_params", "cpu_offload", "deepspeed"):
                self.lose(name, "a base in 4 bits stays on the GPU")
            if compiled and last in ("torch_compile", "compile"):
                self.lose(name, "products with weights in 4 bits are not compiled")

    def _require_plugins(self) -> None:
        """Write the plugins of the recipe's components into [requires]."""
        kinds = {"lr_scheduler": "schedule", "converters": "converter", "loggers": "logger", "callbacks":
                 "callback"}  # fmt: skip
        needed = set()
        for section, value in self.recipe.items():
            kind = kinds.get(section, section)
            for table in value if isinstance(value, list) else [value]:
                if isinstance(table, dict):
                    needed |= self._plugins_of(kind, table)
        if needed:
            self.put("requires.plugins", sorted(needed))

    def _plugins_of(self, kind: str, table: dict[str, Any]) -> set[str]:
        found: set[str] = set()
        if isinstance(name := table.get("type"), str):
            try:
                full = self.registry.full_name(self.registry.find(kind, name))
            except PluginError:
                return found
            plugin = full.partition("/")[0]
            found |= {p.distribution for p in self.registry.plugins if p.name == plugin and p.distribution}
        for value in table.values():
            if isinstance(value, dict):
                found |= self._plugins_of(kind, value)
        return found - {"titancli"}
