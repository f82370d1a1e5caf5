"""titan's own plugins and their contents: the answer to a missing name says what to install."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

COMMANDS = {
    "bisect": "titan-proof",
    "convert-checkpoint --to gguf": "titan-gguf",
    "flux-encode": "titan-flux",
    "hub": "titan-hub",
    "launch": "titan-slurm",
    "lm-eval": "titan-eval",
    "plugin new": "titan-testing",
    "prove": "titan-proof",
    "recipe from-axolotl": "titan-migrate",
    "recipe from-llamafactory": "titan-migrate",
    "recipe from-torchtune": "titan-migrate",
    "recipe from-torchtitan": "titan-torchtitan",
    "replay": "titan-proof",
    "report": "titan-report",
    "reproduce": "titan-proof",
    "rollouts": "titan-rl",
    "sweep": "titan-sweep",
}
"""Commands, with the plugin that provides each."""
COMPONENTS = {
    "advantage/gae": "titan-ppo",
    "advantage/global_norm": "titan-rl",
    "advantage/group_mean": "titan-rl",
    "advantage/group_norm": "titan-rl",
    "advantage/leave_one_out": "titan-rl",
    "callback/activation_offload": "titan-offload",
    "callback/ema": "titan-optimizers",
    "callback/param_norm": "titan-optimizers",
    "callback/probe": "titan-proof",
    "callback/recheck": "titan-proof",
    "converter/float8_experts": "titan-float8",
    "converter/float8_linear": "titan-float8",
    "converter/mxfp8_experts": "titan-float8",
    "converter/mxfp8_linear": "titan-float8",
    "converter/neftune": "titan-optimizers",
    "converter/nvfp4_experts": "titan-float8",
    "converter/nvfp4_linear": "titan-float8",
    "converter/qlora": "titan-qlora",
    "copies/peers": "titan-peers",
    "dataset/embedding_pairs": "titan-heads",
    "dataset/grain": "titan-grain",
    "dataset/labelled": "titan-heads",
    "dataset/latents": "titan-flux",
    "dataset/preference": "titan-preference",
    "dataset/random_latents": "titan-flux",
    "dataset/reward_pairs": "titan-heads",
    "dataset/unpaired": "titan-preference",
    "dispatcher/deepep": "titan-deepep",
    "launcher/slurm": "titan-slurm",
    "logger/trackio": "titan-trackio",
    "logger/wandb": "titan-wandb",
    "loop/distil": "titan-distil",
    "loop/distil_on_policy": "titan-distil",
    "loop/distil_store": "titan-distil",
    "loop/dpo": "titan-preference",
    "loop/ft": "titan-ft",
    "loop/grpo": "titan-rl",
    "loop/kto": "titan-preference",
    "loop/lm_eval": "titan-eval",
    "loss/apo_zero_unpaired": "titan-preference",
    "loss/cispo": "titan-rl",
    "loss/classification": "titan-heads",
    "loss/distil": "titan-distil",
    "loss/dpo": "titan-preference",
    "loss/embedding": "titan-heads",
    "loss/flow_matching": "titan-flux",
    "loss/grpo": "titan-rl",
    "loss/gspo": "titan-rl",
    "loss/importance_sampling": "titan-rl",
    "loss/ipo": "titan-preference",
    "loss/kto": "titan-preference",
    "loss/orpo": "titan-preference",
    "loss/ppo": "titan-ppo",
    "loss/reward": "titan-heads",
    "loss/simpo": "titan-preference",
    "model/deepseek_v3": "titan-families",
    "model/flux": "titan-flux",
    "model/glm4_moe": "titan-families",
    "model/granite": "titan-families",
    "model/hf_causal_lm": "titan-transformers",
    "model/llama4": "titan-families",
    "model/mixtral": "titan-families",
    "model/olmo3": "titan-families",
    "model/qwen3_next": "titan-qwen3-next",
    "optimizer/adafactor": "titan-optimizers",
    "optimizer/adamw_8bit": "titan-optimizers",
    "optimizer/by_name": "titan-optimizers",
    "optimizer/lion": "titan-optimizers",
    "optimizer/muon": "titan-muon",
    "optimizer/schedule_free": "titan-optimizers",
    "reward/exact_match": "titan-rl",
    "reward/json_schema": "titan-rl",
    "reward/length": "titan-rl",
    "reward/numeric": "titan-rl",
    "reward/regex": "titan-rl",
    "reward/reward_model": "titan-heads",
    "schedule/from_zero": "titan-migrate",
    "task/digit": "titan-rl",
    "task/prompts": "titan-rl",
    "task/sum": "titan-rl",
}
"""Components, `kind/name`, with the plugin that provides each."""
MODEL_TYPES = {
    **dict.fromkeys(
        (
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa"),
            *("glm4_moe", "glm4v_moe", "glm4v_moe_text", "granite", "llama4", "llama4_text"),
            *("mixtral", "olmo3"),
        ),
        "titan-families",
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), "titan-qwen3-next"
    ),
}
"""Values of `model_type` in config.json, with the plugin that reads them."""
PLUGINS = frozenset({*COMMANDS.values(), *COMPONENTS.values()})
COMMANDS_ALONE = PLUGINS - set(COMPONENTS.values())
"""Plugins without components, recipes or checks, which need not be loaded to look for one."""
FOLDER = Path(__file__).resolve().parents[2] / "plugins"
"""Folder of the plugins in a checkout; an installed titan has none."""


def install_command(requirement: str, *options: str) -> str:
    """Return the command that installs a plugin: from the checkout if it is one of titan's own, together with
    those that it requires."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = _with_required(FOLDER / canonicalize_name(Requirement(requirement).name))
    targets = [_from_here(folder) for folder in found] or [requirement]
    return " ".join(["pip install", *options, *map(shlex.quote, targets)])


def _with_required(folder: Path) -> list[Path]:
    """Return the folder of a plugin in the checkout after those of the plugins that it requires; none if it
    is not in the checkout."""
    import tomli
    from packaging.requirements import Requirement

    try:
        about = tomli.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    needed = about.get("project", {}).get("dependencies", ())
    required = sorted(PLUGINS & {Requirement(one).name for one in needed})
    return [*(FOLDER / name for name in required), folder]


def _from_here(folder: Path) -> str:
    near = os.path.relpath(folder)
    return str(folder) if near.startswith("..") else f"./{near}"
