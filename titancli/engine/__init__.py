"""The engine: it owns the sharded model and its optimizer, and offers verbs for loops."""

from titancli.engine.engine import Engine, Metrics

__all__ = ["Engine", "Metrics"]
