"""Convert job configs of torchtitan to recipes: `titan recipe from-torchtitan`."""

from __future__ import annotations

from titancli import Command, hookimpl


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            "recipe from-torchtitan",
            "Convert a job config of torchtitan 0.2.2 or earlier.",
            "titan_torchtitan.command:command",
        )
    ]


@hookimpl
def titan_foreign_keys() -> dict[str, str]:
    from titan_torchtitan.known_keys import KEYS

    return KEYS


@hookimpl
def titan_foreign_config(text: str) -> tuple[str, str] | None:
    from titan_torchtitan.known_keys import SECTIONS

    return ("torchtitan", "recipe from-torchtitan") if SECTIONS.search(text) else None
