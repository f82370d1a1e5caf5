"""The kinds of component, by name, and the type that a recipe gets that names none.

A plugin offers components of these kinds, not new kinds. What each kind's builder is given, and what it must
return, is in `titancli.protocols`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUILTIN = "titan"
"""The plugin that titan itself is."""


@dataclass(frozen=True)
class Kind:
    """One kind of component."""

    name: str
    summary: str
    default: str | None = None
    """The type a recipe gets that names none: titan's own of this name, whoever else has one."""
    effect: Literal["numbers", "speed", "running", "watching"] = "numbers"
    """What another component of it changes, as `titancli.registry.fields.Effect` does."""
    optional: str | None = None
    """The class in `titancli.protocols` of the optional members of what is built; None: there are none."""

    @property
    def full_default(self) -> str | None:
        """The same with titan's name, so that no plugin can be meant."""
        return self.default and f"{BUILTIN}/{self.default}"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("model", "the model to train", optional="ModelDefaults"),
        Kind("tokenizer", "converts text to token ids and back", optional="TokenizerDefaults"),
        Kind("dataset", "the source of batches", optional="DatasetDefaults"),
        Kind(
            "converter",
            "changes a model before it is sharded (float8, LoRA)",
            optional="ConverterDefaults",
        ),
        Kind("parallelize", "how a model is distributed over devices", default="decoder", effect="speed"),
        Kind("dispatcher", "how tokens reach the experts of other ranks", "all_to_all", effect="speed"),
        Kind("loss", "the objective to minimize", default="cross_entropy", optional="LossDefaults"),
        Kind("optimizer", "how weights are updated", default="adamw"),
        Kind("schedule", "the learning rate over the run", default="wsd"),
        Kind("store", "where checkpoints are uploaded", "fsspec", effect="running", optional="StoreDefaults"),
        Kind("copies", "keeps the state of a run between checkpoints", effect="running"),
        Kind("logger", "receives the metrics and events of a run", effect="watching"),
        Kind("callback", "takes part in the steps of a run"),
        Kind("loop", "the training program", default="pretrain"),
        Kind("launcher", "starts the workers", default="local", effect="running"),
        Kind("task", "the source of prompts", optional="TaskDefaults"),
        Kind("generator", "generates completions", optional="GeneratorDefaults"),
        Kind("reward", "scores a completion"),
        Kind(
            "advantage",
            "rates a completion relative to the others of its prompt",
            optional="AdvantageDefaults",
        ),
    )
}
