"""Learning from what a model writes itself: the menu of tasks, generators, rewards and advantages.

Torch-free. How tokens are drawn is in `sampling.py` and `decode.py`, which `titan generate` shares.
"""

from __future__ import annotations

from titancli.registry.component import component


@component("advantage", "group_mean", target="titancli.rl.advantages:GroupMean")
class GroupMean:
    """A reward less the mean of its prompt's samples (Dr. GRPO)."""


@component("advantage", "group_norm", target="titancli.rl.advantages:GroupNorm")
class GroupNorm:
    """The same over the samples' standard deviation (GRPO, DAPO)."""


@component("advantage", "leave_one_out", target="titancli.rl.advantages:LeaveOneOut")
class LeaveOneOut:
    """A reward less the mean of the prompt's other samples (RLOO)."""


COMPONENTS: list[type] = [GroupMean, GroupNorm, LeaveOneOut]
