"""Words of other tools: options that were meant as overrides (`--lr 1e-3` for `optimizer.lr=1e-3`), and
commands that titan calls differently."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from titancli.cli.completion import RecipeOrOverride
from titancli.errors import TitanError

EXPORT = "titan convert-checkpoint {} OUT --to hf"
BEGIN = "titan recipe new my.toml --from-hf FOLDER --sft DATA, then titan train my.toml"
GENERATE = 'titan generate {} --chat "PROMPT"'
COMMANDS = {
    **dict.fromkeys(("export", "merge", "merge-lora", "merge-adapters", "save"), EXPORT),
    **dict.fromkeys(("finetune", "fine-tune", "sft", "lora", "tune", "cp", "init"), BEGIN),
    **dict.fromkeys(("chat", "inference", "infer", "predict", "webchat"), GENERATE),
    **dict.fromkeys(("serve", "api", "vllm-serve"), f"{EXPORT}; vLLM or SGLang serves OUT"),
    "pretrain": "titan train RECIPE; titan recipe list shows the bundled ones",
    "plugins": "titan plugin list",
    "recipes": "titan recipe list",
    "convert": EXPORT,
    "quantize": "titan convert-checkpoint {} OUT --to gguf",
    **dict.fromkeys(("preprocess", "tokenize"), "titan data tokenize"),
    "config": "titan recipe show {}",
    "evaluate": "titan eval {}; tasks of lm-evaluation-harness: titan lm-eval {} --tasks TASK",
}
"""Commands of other tools, and titan's; `{}` is the argument of the command."""
OPTIONS = {
    ("train", "--config"): "the recipe has no option before it: titan train {}",
    ("eval", "--tasks"): "tasks of lm-evaluation-harness: titan lm-eval {SRC} --tasks {}",
}
"""Options of other tools by titan's command, and what to write; `{}` is the value, `{SRC}` the argument."""


def command_hint(name: str, rest: Sequence[str]) -> str | None:
    """Return titan's form of another tool's command; None if it is not known.

    Args:
        rest: the words after it; the first one that is no option is shown as its argument.
    """
    said = COMMANDS.get(name.lower().replace("_", "-"))
    argument = next((word for word in rest if not word.startswith("-")), "RUN")
    return said and said.replace("{}", shlex.quote(argument))


def hint_for(option: str, arguments: Sequence[str], command: click.Command) -> str | None:
    """Return the override to write instead of an option; None if there is no such key.

    Args:
        arguments: the command line that the option stands in.
    """
    name = option.lstrip("-").partition("=")[0]
    if (said := OPTIONS.get((str(command.name), f"--{name}"))) is not None:
        value = _value(option, arguments, None)
        words = [word for word in arguments[1:] if not word.startswith("-") and word != value]
        return said.replace("{}", shlex.quote(value)).replace("{SRC}", shlex.quote((words or ["SRC"])[0]))
    if not any(isinstance(known.type, RecipeOrOverride) and known.nargs == -1 for known in command.params):
        return f"an override has no dashes: {name}=VALUE" if "." in name else None
    from titancli.recipe.foreign import in_titan
    from titancli.registry import current

    recipe = _recipe(arguments)
    value = _value(option, arguments, recipe)
    key = _key(name.replace("-", "_"), recipe)
    if key is not None:
        return f"an override has no dashes: {shlex.quote(f'{key}={value}')}"
    return (in_titan(name, current(), value) or (None, None))[1]


def _value(option: str, arguments: Sequence[str], recipe: str | None) -> str:
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        given, equals, value = word.partition("=")
        if given == option.partition("=")[0]:
            takes = not equals and not following.startswith("--") and "=" not in following
            return value or (following if takes and following != recipe else "VALUE")
    return "VALUE"


def _recipe(arguments: Sequence[str]) -> str | None:
    """Return the argument that is a recipe; None if there is none."""
    from titancli.recipe import find_recipe

    for word in arguments:
        if not word.startswith("-") and "=" not in word:
            try:
                find_recipe(word)
                return word
            except TitanError:  # the value of an option, or the name of the command
                continue
    return None


def _key(name: str, recipe: str | None) -> str | None:
    """Return the key of a recipe that ends in a name: top level first, then [training], then the
    only other section that has it; None if there is none, or several."""
    from titancli.recipe import load_recipe
    from titancli.recipe.json_schema import override_keys
    from titancli.registry import current

    try:
        data = load_recipe(recipe).data if recipe else {}
    except TitanError:  # a wrong recipe has keys too
        data = {}
    keys = override_keys(data, current())
    if name in keys:
        return name
    found = [key for key in keys if key.count(".") == 1 and key.endswith(f".{name}")]
    return f"training.{name}" if f"training.{name}" in found else found[0] if len(found) == 1 else None
