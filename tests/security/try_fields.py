"""Load recipes with hostile values in every field that takes text, and print what that did, as JSON.

Run as a process of its own: what Python's audit hooks see cannot be unseen.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from titan_testing import recipe
from titancli.errors import TitanError
from titancli.recipe import load_recipe
from titancli.recipe.schema import Recipe
from titancli.registry import current
from titancli.registry.component import component_info
from titancli.registry.fields import Type, fields_of

_STARTS = (
    "subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.startfile "
    "ctypes.dlopen socket.connect socket.getaddrinfo socket.bind urllib.Request pickle.find_class "
    "marshal.loads exec compile"
)
STARTS = _STARTS.split()
"""What a value could make Python do; `exec` and `compile` where they are not an import of installed code."""
AT = {
    **{kind: kind for kind in ("model", "tokenizer", "dataset", "parallelize", "loss", "optimizer", "loop")},
    "launcher": "launcher",
    "converter": "converters.0",
    "logger": "loggers.0",
    "callback": "callbacks.0",
    "schedule": "lr_scheduler",
    "store": "checkpoint.store",
    "copies": "checkpoint.copies",
    "task": "loop.task",
    "reward": "loop.rewards.0",
    "generator": "loop.generator",
    "advantage": "loop.advantage",
    "dispatcher": "parallelize.expert_dispatch",
}
NEEDS = {
    "model/titan-transformers/hf_causal_lm": 'config = {model_type = "llama"}',
    "tokenizer/titan/hf": 'path = "tok"',
    "callback/titan-proof/probe": "step = 1",
    "dataset/titan-flux/latents": 'paths = ["x"]',
    "dataset/titan-grain/grain": 'paths = ["x"]',
    "dataset/titan-heads/embedding_pairs": 'path = "./x.jsonl"',
    "dataset/titan-heads/labelled": 'path = "./x.jsonl"',
    "dataset/titan-heads/reward_pairs": 'path = "./x.jsonl"',
    "dataset/titan/chat": 'path = "./x.jsonl"',
    "dataset/titan/hf": 'path = "./x.jsonl"',
    "dataset/titan/jsonl": 'paths = ["x"]',
    "dataset/titan/concat": 'datasets = {a = {type = "python_stdlib"}}',
    "dataset/titan/mix": 'datasets = {a = {type = "python_stdlib"}}, weights = {a = 1.0}',
    "dataset/titan/parquet": 'paths = ["x"]',
    "dataset/titan-preference/preference": 'path = "./x.jsonl"',
    "dataset/titan-preference/unpaired": 'path = "./x.jsonl"',
    "dataset/titan/text_files": 'paths = ["x"]',
    "dataset/titan/token_shards": 'paths = ["x"]',
    "generator/titan/local": "max_new_tokens = 4",
    "loop/titan-distil/distil": 'teacher = {weights = "./w"}',
    "loop/titan-distil/distil_on_policy": 'teacher = {weights = "./w"}, task = {type = "sum"}, '
    'generator = {type = "local", max_new_tokens = 4}',
    "loop/titan-eval/lm_eval": 'tasks = ["arc_easy"]',
    "loop/titan-ft/ft": "replica = 0, replicas = 2",
    "optimizer/titan-optimizers/by_name": 'groups = [{match = ["*norm*"]}]',
    "task/titan-rl/prompts": 'path = "./x.jsonl"',
    "loss/titan-heads/classification": 'classes = ["a", "b"]',
    "reward/titan-heads/reward_model": 'checkpoint = "./x"',
    "reward/titan-rl/json_schema": 'schema = {type = "object"}',
    "reward/titan-rl/regex": 'pattern = "x"',
}
EXPERTS = 'model = {type = "qwen3", flavor = "debugmodel_moe"}\n'
BESIDE = {
    **{f"titan-float8/{name}_experts": EXPERTS for name in ("float8", "mxfp8", "nvfp4")},
    "titan-distil/distil": '[loss]\ntype = "distil"\n',
    "titan/best": 'validation.datasets.x = {type = "python_stdlib"}\ncheckpoint.enable = true\n',
    "titan/early_stop": 'validation.datasets.x = {type = "python_stdlib"}\n',
    "titan/lora": 'weights = "./w"\n',
    "titan-qlora/qlora": 'weights = "./w"\n',
    "titan-distil/distil_on_policy": 'loss = {type = "titan-distil/distil"}\n',
    "titan/evaluate": 'validation.datasets.x = {type = "python_stdlib"}\n',
    "titan-heads/embedding_pairs": 'loss = {type = "titan-heads/embedding"}\ntraining.local_batch_size = 4\n',
    "titan-heads/labelled": 'loss = {type = "titan-heads/classification", problem_type = "regression"}\n',
    "titan-heads/reward_pairs": 'loss = {type = "titan-heads/reward"}\n',
}
UNSET = {
    "titan-distil/distil_on_policy": ["dataset"],
    "titan-eval/lm_eval": ["dataset"],
    "titan/evaluate": ["dataset"],
    "titan-flux/latents": ["tokenizer"],
}
"""What a component needs to be valid: values of its own, other keys, and sections that are not there."""


def text_fields(config: type, prefix: str = "") -> Iterator[tuple[str, Type]]:
    """Yield the fields of a config, and of tables in it, whose values may be text that is not a choice."""
    for field in fields_of(config).values():
        name = f"{prefix}{field.name}"
        if field.type.slot is None and takes_text(field.type):
            yield name, field.type
        inner = [field.type, *filter(None, (field.type.element(0), field.type.element("")))]
        for i, type_ in enumerate(inner):
            for table in type_.tables:
                yield from text_fields(table, f"{name}.0." if i else f"{name}.")


def takes_text(type_: Type) -> bool:
    for arm in type_.alternatives:
        if arm is Any or arm is str or (isinstance(arm, type) and issubclass(arm, Path)):
            return True
        if get_origin(arm) is dict or (isinstance(arm, type) and issubclass(arm, dict)):
            return True  # its keys are
        element = Type(arm).element(0)
        if element is not None and element.slot is None and takes_text(element):
            return True
    return False


def places() -> Iterator[tuple[str, str, Type]]:
    """Yield each field by name, the key of a recipe at which it stands, and its type."""
    for name, type_ in text_fields(Recipe):
        yield name, name, type_
    for full, config in current().components():
        kind = component_info(config).kind
        for name, type_ in text_fields(config):
            yield f"{kind}/{full}.{name}", f"{AT[kind]}.{name}", type_


def written(type_: Type, value: str) -> Iterator[str]:
    """Yield a value as TOML, at every place that the type has for it."""
    text = json.dumps(value)
    for arm in type_.alternatives:
        if arm is str or (isinstance(arm, type) and issubclass(arm, Path)):
            yield text
        elif get_origin(arm) is dict or (isinstance(arm, type) and issubclass(arm, dict)):
            yield f"{{x = {text}}}"
            yield f"{{{text} = {text}}}"
        elif (element := Type(arm).element(0)) is not None and takes_text(element):
            yield from (f"[{below}]" for below in written(element, value))


def base(name: str, folder: Path) -> tuple[Path, list[str]]:
    """A valid recipe with the component of a field, and what it leaves out."""
    component = name.partition(".")[0] if "/" in name else ""
    kind, _, full = component.partition("/")
    own = f'{{type = "{full}"' + "".join(f", {NEEDS[c]}" for c in [component] if c in NEEDS) + "}"
    unset = []
    if kind in ("task", "reward", "generator", "advantage"):
        slots = {
            "task": '{type = "prompts", path = "./x.jsonl"}',
            "reward": '{type = "regex", pattern = "x"}',
            "generator": '{type = "local", max_new_tokens = 4}',
        } | ({kind: own} if kind != "reward" else {"reward": own})
        text = f'loss = "grpo"\n[loop]\ntype = "grpo"\ntask = {slots["task"]}\n'
        text += f"rewards = [{slots['reward']}]\ngenerator = {slots['generator']}\n"
        unset = ["dataset"]
    elif kind:
        array = AT[kind].endswith(".0")
        text = f"{AT[kind].removesuffix('.0')} = {f'[{own}]' if array else own}\n"
        text += BESIDE.get(full, "")
        unset = UNSET.get(full, [])
    else:
        text = ""
    return recipe(folder, text), unset


def main(folder: Path) -> None:
    os.chdir(folder)
    values = json.loads((folder / "values.json").read_text())
    found: dict[str, dict[str, Any]] = {}
    events: list[str] = []
    watching = False
    current().components()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event in STARTS and not (event in ("exec", "compile", "marshal.loads") and "import" in frames()):
            events.append(f"{event} {given!r:.200}")
        if event == "import" and "canary" in str(given[0]):
            events.append(f"import {given[0]}")
        if event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR):
            events.append(f"open for writing {given[0]}")

    def frames() -> str:
        frame, names = sys._getframe(2), []
        while frame is not None:
            names.append(frame.f_code.co_filename)
            frame = frame.f_back
        return "import" if any(name.startswith("<frozen importlib") for name in names) else ""

    sys.addaudithook(hook)
    for name, key, type_ in places():
        path, unset = base(name, folder)
        row = found[name] = {"base": None, "refused": [], "taken": [], "events": events}
        for value in [None, *values]:
            for text in [None] if value is None else written(type_, value):
                overrides = [] if text is None else [f"{key}={text}"]
                watching = value is not None  # the first time, what it needs is imported
                try:
                    loaded = load_recipe(path, overrides, unset=unset)
                    if text is not None:
                        row["taken"].append(
                            [value, json.dumps(loaded.data, default=str).count("canary-home")]
                        )
                except TitanError as error:
                    if text is None:
                        row["base"] = str(error)
                    else:
                        row["refused"].append(value)
                finally:
                    watching = False
        events = []
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
