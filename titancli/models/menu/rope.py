"""Ways to carry rotary positions beyond the context of the first training, as data."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from titancli.registry.component import section


@section
class Yarn:
    """YaRN (arXiv 2309.00071): slow pairs are stretched, fast ones stay."""

    factor: Annotated[float, Gt(0)]
    """Slow pairs' frequencies are divided by this."""
    original_max_position: Annotated[int, Gt(0)] = 4096
    """Context of the first pretraining, in tokens."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """Pairs that turn more often than this in the original context stay."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """Pairs that turn less often than this are stretched whole."""
    truncate: bool = True
    """Whether the ramp between the two begins and ends at whole pairs."""
