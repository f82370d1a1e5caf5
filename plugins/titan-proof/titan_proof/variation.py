"""What may differ when `titan replay` tries a step with other settings."""

from __future__ import annotations

from collections.abc import Sequence

from titancli.errors import UsageError

VARIABLE = ("optimizer", "lr_scheduler", "loss", "stability", "activation_checkpoint", "compile", "debug")
"""Sections whose values can be varied; of other sections, only the keys in `VARIABLE_KEYS`."""
VARIABLE_KEYS = ("training.max_norm", "training.mixed_precision_param", "training.mixed_precision_reduce")


def check_variation(overrides: Sequence[str]) -> None:
    """Check that the settings to try keep the model and the rows.

    Raises:
        UsageError: with one of these settings, the model or the rows would be others.
    """
    for override in overrides:
        key, sign, _ = override.partition("=")
        section = key.split(".")[0]
        if not sign:
            raise UsageError(f"--with takes KEY=VALUE, not {override!r}", hint="--with optimizer.lr=1e-4")
        if (section in VARIABLE or key in VARIABLE_KEYS) and key != "optimizer.type":
            continue
        raise UsageError(
            f"--with {key}: a step can be tried with other settings of {', '.join(VARIABLE)}, and "
            f"{', '.join(VARIABLE_KEYS)}",
            hint="for anything else, resume a copy of the run: titan train COPY --resume --step N KEY=VALUE",
        )
