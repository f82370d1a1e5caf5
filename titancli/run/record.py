"""Make the record of a run and of an attempt in `run.json`, before it starts. Torch-free."""

from __future__ import annotations

import secrets
import uuid
from typing import TYPE_CHECKING, Any

from titancli.checkpoint import read_manifest
from titancli.checkpoint.format.manifest import last_serial
from titancli.provenance import keep_sources, provenance
from titancli.run.code_drift import code_changes
from titancli.runs import RunFolder, timestamp

if TYPE_CHECKING:
    from titancli.launch import LaunchRequest
    from titancli.run.prepare import Plan


def write_attempt(folder: RunFolder, plan: Plan, request: LaunchRequest) -> dict[str, Any]:
    """Add an attempt to `run.json` in a folder, keep the sources of its plugin files there, and return it.

    Raises:
        EnvironmentProblem: the folder cannot be written.
    """
    attempt = new_attempt(plan, request)
    folder.write_record(new_record(plan, attempt))
    keep_sources(folder.path, attempt, patch=plan.loaded.recipe.debug.uncommitted_patch)
    return attempt


def new_record(plan: Plan, attempt: dict[str, Any]) -> dict[str, Any]:
    """Return `run.json` with a further attempt."""
    record = {} if plan.new else plan.folder.record()
    record.setdefault("format", 1)
    # A run that was downloaded from an object store without its record is the one that wrote its checkpoint.
    before = read_manifest(plan.checkpoint).run_id if plan.checkpoint else None
    record.setdefault("run_id", before or uuid.uuid4().hex)
    record.setdefault("name", plan.loaded.recipe.name)
    record.setdefault("created", timestamp())
    record.setdefault("attempts", []).append(attempt)
    return record


def new_attempt(plan: Plan, request: LaunchRequest) -> dict[str, Any]:
    """Return the facts about an attempt that are known before it starts.

    `serial` is that of the newest checkpoint: those above it will be this attempt's own. `token` is unique,
    see `titancli.runs.Claim`. `loaded` becomes true when its recipe becomes that of the run.
    """
    made_by = provenance(request.plugin_files)
    # The planned folder of a new run may belong to another run by now.
    before = (None if plan.new else plan.folder.last_loaded()) or made_by
    return {
        "started": timestamp(),
        "token": secrets.token_hex(8),
        **made_by,
        "recipe": str(plan.loaded.path),
        "origins": {
            key: str(origin) for key, origin in plan.loaded.origins.items() if origin.kind != "default"
        },
        "drift": [str(change) for change in plan.drift],
        "code_drift": [str(change) for change in code_changes(plan.loaded.data, before, made_by)],
        "allow_drift": plan.request.allow_drift,
        "from_scratch": plan.from_scratch,
        "serial": 0 if plan.from_scratch else last_serial(plan.folder.checkpoints),
        "checkpoint": str(plan.checkpoint) if plan.checkpoint else None,
        "step": plan.request.step,
        **request.recorded(),
        "loaded": False,
        "outcome": None,
    }
