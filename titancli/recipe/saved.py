"""What a checkpoint holds, by the names that `checkpoint.exclude_from_loading` has for it."""

from __future__ import annotations

PARTS = {
    "model": "the weights",
    "optimizer": "its moments and step counts",
    "data": "the position in the dataset",
    "step": "the count of steps, which the schedule follows, and of tokens",
    "guard": "the window that a step's numbers are compared with",
}
TORCHTITAN = {"dataloader": "data", "lr_scheduler": "step", "train_state": "step"}
"""Its names for what is called otherwise here."""
