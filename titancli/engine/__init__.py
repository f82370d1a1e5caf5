"""The engine: it owns the sharded model and its optimizer, and offers verbs for loops."""

from titancli.engine.build import on_meta
from titancli.engine.engine import Engine, Metrics
from titancli.engine.grad_clip import norm_of
from titancli.engine.inputs import RESERVED, checked
from titancli.engine.optimizer_state import outside_of_state

__all__ = ["RESERVED", "Engine", "Metrics", "checked", "norm_of", "on_meta", "outside_of_state"]
