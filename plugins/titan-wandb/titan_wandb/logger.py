"""A run of titan as a run of W&B: `wandb.init`, a `log` for each logged step, `finish`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import wandb

from titancli import TitanError

from . import WandB

LOCK = "recipe.lock.toml"
ENVIRONMENT = ("host", "platform", "device", "world", "mesh", "versions", "git", "argv")

logger = logging.getLogger(
    "titancli.wandb"
)  # below titancli, so that its messages are shown with titan's own


class WandBLogger:
    """A W&B run with titan's steps and the id in run.json, which every attempt continues."""

    def __init__(self, config: WandB, run_folder: Path) -> None:
        """Check the credentials.

        Raises:
            TitanError: there is no API key. W&B would prompt for one during the start.
        """
        self._config = config
        self._folder = run_folder
        self._mode: Any = config.mode or os.environ.get("WANDB_MODE") or "online"
        if self._mode == "online" and not wandb.api.api_key:
            raise TitanError(
                "the logger 'wandb' has no API key",
                hint='run `wandb login`, set WANDB_API_KEY, or use mode = "offline"',
            )

    def run_start(self, info: dict[str, Any]) -> None:
        config, step = self._config, int(info.get("step") or 0)
        run_id = info.get("run_id") or self._folder.name
        again = config.rewind and last_step(self._folder / "events.jsonl") > step
        which: dict[str, Any] = {"resume_from": f"{run_id}?_step={step}"} if again else {"resume": "allow"}
        newest = {**(info.get("attempts") or [{}])[-1], **info}
        environment = {name: newest[name] for name in ENVIRONMENT if newest.get(name) is not None}
        recipe = info.get("recipe") or {}
        self._run = wandb.init(
            id=run_id,
            project=config.project or recipe.get("name"),
            name=self._folder.name,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            config={**recipe, "environment": environment},
            allow_val_change=True,  # a resume may change the recipe
            dir=str(self._folder),
            mode=self._mode,
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),  # the terminal is titan's
            **which,
        )
        if (self._folder / LOCK).is_file():
            copy = Path(self._run.dir) / LOCK
            copy.write_bytes((self._folder / LOCK).read_bytes())
            self._run.save(str(copy), base_path=self._run.dir, policy="now")
        logger.info("wandb: %s", self._run.url or f"offline, in {self._run.dir}")

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def run_end(self, outcome: dict[str, Any]) -> None:
        self._run.summary.update({name: outcome.get(name) for name in ("why", "checkpoint")})
        self._run.finish()
        if self._run.offline:
            logger.info("send it to W&B with: wandb sync %s", Path(self._run.dir).parent)


def last_step(events: Path) -> int:
    """Return the last step in an event log, or 0 if there is none."""
    last = 0
    if events.is_file():
        for line in events.read_bytes().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # its writer was killed
            if isinstance(event, dict) and event.get("event") in ("step", "validation"):
                last = max(last, event["step"])
    return last


def build(config: WandB, *, run_folder: Path, is_main: bool) -> Any:
    """Return a WandBLogger on rank 0, and a logger without methods elsewhere.

    Raises:
        TitanError: see WandBLogger.
    """
    return WandBLogger(config, run_folder) if is_main else object()
