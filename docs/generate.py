"""Write the generated parts of docs/, about titan's own components and fields: `python docs/generate.py`.

`components.md` and `commands.md` are generated completely, from what titan itself has, and the commands of
its own plugins. In `coming-from-torchtitan.md` the table between the two marks is generated, in
`coming-from-other-tools.md` those of three tools. A test compares them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from titan_migrate import axolotl_keys, llamafactory_keys, torchtune_keys
from titan_migrate.keys import Key
from titan_torchtitan.fields import FIELDS, Field
from titan_torchtitan.job import has_key
from titancli import builtin
from titancli.cli.group import ROWS, titan
from titancli.recipe.schema import Recipe, recipe_slots
from titancli.registry.component import component_info
from titancli.registry.fields import Field as ConfigField
from titancli.registry.fields import fields_of, nested_fields, plain, summary
from titancli.registry.kinds import KINDS
from titancli.tested_systems import ROWS as ROWS_TESTED

DOCS = Path(__file__).parent
BEGIN, END = "<!-- generated: the table -->", "<!-- end of the table -->"
HEAD = """\
# Components and sections

<!-- Written by docs/generate.py: change the docstrings, not this page. -->

All components that titan itself provides, with the type, default and meaning of each field. `titan show
NAME` prints the same for one component, including those of plugins; `titan list-components` lists what is
installed.
"""
COMMANDS_HEAD = """\
# Commands

<!-- Written by docs/generate.py: change the help texts, not this page. -->

`titan COMMAND --help` prints the same. Before or after any command: `-p FILE.py` adds a plugin and
`-p no:NAME` blocks one, `-v` and `-q` say more and less, `--color` is `auto`, `always` or `never`, and
`--traceback` shows where an error was raised. Commands of titan's own plugins are on this page, too; where a
plugin is not installed, its commands say how to install it.
"""
EXAMPLE = "<!-- not run: an example of the command's help -->"
PARTS = {
    "model.name": "`model.type`",
    "model.flavor": "`model.flavor`; the attention mask is `dataset.document_mask`",
    "model.hf_assets_path": "`tokenizer.path`",
    "model.tokenizer_path": "`tokenizer.path`",
    "model.converters": "one `[[converters]]` table each",
    "optimizer.name": "`optimizer.type`",
    "training.dataset": "`dataset.type`, and its keys",
    "training.dataset_path": "`dataset.path`",
    "training.global_batch_size": "`training.global_batch_size`; omitted for -1",
    "lr_scheduler.warmup_steps": "`lr_scheduler.warmup_steps`",
    "lr_scheduler.decay_ratio": "`lr_scheduler.decay_ratio`",
    "checkpoint.initial_load_path": "`weights`, if it is a Hugging Face folder",
    "checkpoint.initial_load_in_hf": "`weights`",
    "checkpoint.last_save_model_only": "`checkpoint.last_save_model_only`, if set; saved in addition to "
    "the whole state",
    "checkpoint.last_save_in_hf": "`checkpoint.last_save_in_hf`; saved in addition to the whole state",
    "checkpoint.export_dtype": "`checkpoint.export_dtype`",
    "checkpoint.exclude_from_loading": "`checkpoint.exclude_from_loading`, with other names",
    "checkpoint.enable_first_step_checkpoint": "`checkpoint.enable_first_step_checkpoint`",
    "checkpoint.create_seed_checkpoint": "`checkpoint.create_seed_checkpoint`",
    "checkpoint.load_only": "`checkpoint.enable = false`",
    "activation_checkpoint.mode": "`activation_checkpoint.mode`",
    "activation_checkpoint.selective_ac_option": "`activation_checkpoint.selective_ac_option`; default `op`",
    "parallelism.enable_async_tensor_parallel": "`parallelize.async_tp`; needs `compile.enable`",
    "parallelism.pipeline_parallel_schedule": "`pipeline.schedule`, in torch's capitalization",
    "parallelism.expert_parallel_comm_backend": '`parallelize.expert_dispatch`; `"standard"` is '
    '`"all_to_all"`, `"deepep"` that of [titan-deepep](../plugins/titan-deepep/README.md)',
    "parallelism.context_parallel_rotate_method": '`parallelize.context_parallel`; `"alltoall"` is `"ring"`',
    "validation.enable": "`[validation.datasets.NAME]`; without a dataset nothing is evaluated",
    "validation.dataset": "`type` in `[validation.datasets.NAME]`",
    "validation.dataset_path": "`path` in `[validation.datasets.NAME]`",
    "validation.seq_len": "none: rows are as long as `training.seq_len`",
    "validation.local_batch_size": "`validation.local_batch_size`; default that of `training`",
    "validation.freq": "`validation.freq`; default 100",
    "validation.steps": "`validation.steps`; left out for -1",
    "compile.components": "`compile.components`; default the same on a GPU, only `model` on a CPU",
    "metrics.enable_tensorboard": '`[[loggers]]` with `type = "tensorboard"`',
    "metrics.enable_wandb": '`[[loggers]]` with `type = "wandb"` (plugin titan-wandb)',
    "quantize.linear.float8": '`[[converters]]` with `type = "float8_linear"` (plugin titan-float8)',
    "quantize.linear.mx": "`[[converters]]` of type `mxfp8_linear` (plugin titan-float8), by hand",
    "quantize.grouped_mm.float8": "`[[converters]]` of type `float8_experts` (plugin titan-float8), by hand",
    "quantize.grouped_mm.mx": "`[[converters]]` of type `mxfp8_experts` (plugin titan-float8), by hand",
}
"""What the fields become that `titan_torchtitan.parts` reads."""


def components_page() -> str:
    return "\n".join([HEAD, *_components(), *_sections()])


def _components() -> Iterator[str]:
    for kind in KINDS.values():
        default = f" Default: `{kind.default}`." if kind.default else ""
        yield f"## {kind.name}\n\n{kind.summary[:1].upper()}{kind.summary[1:]}.{default}\n"
        for config in builtin.titan_components():
            if component_info(config).kind == kind.name:
                yield from _component(config)


def _component(config: type) -> Iterator[str]:
    yield f"### {component_info(config).kind}/{component_info(config).name}\n"
    yield f"{inspect.cleandoc(config.__doc__ or '')}\n"
    yield from _table(nested_fields(config))
    if flavors := getattr(config, "flavors", {}):
        yield f"Flavors: {', '.join(f'`{name}`' for name in flavors)}.\n"


def _sections() -> Iterator[str]:
    yield "## Sections\n"
    fields = fields_of(Recipe)
    top = [field for name, field in fields.items() if name not in recipe_slots() and not field.type.tables]
    yield "### At the top\n"
    yield from _table(top)
    for name, field in fields.items():
        for section in field.type.tables:
            yield f"### [{name}]\n"
            if words := summary(section):
                yield f"{words}\n"
            yield from _table(nested_fields(section))


def _table(fields: list[ConfigField]) -> Iterator[str]:
    if fields:
        rows = [f"| `{f.name}` | {_cell(str(f.type))} | {_default(f)} | {_cell(f.doc)} |" for f in fields]
        yield "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _default(field: ConfigField) -> str:
    if field.required:
        return "required"
    return "" if field.default is None else f"`{json.dumps(plain(field.default), ensure_ascii=False)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def torchtitan_table() -> str:
    rows = [f"| `{field.name}` | {_shown(field.default)} | {_became(field)} |" for field in FIELDS.values()]
    return "\n".join(["| torchtitan 0.2.2 | default | titan |", "|---|---|---|", *rows])


def _became(field: Field) -> str:
    if field.to is not None and not has_key(field.to):
        return f"none: {_cell(field.why)}"
    if field.to is not None:
        default = ", always written because titan's default differs" if field.always else ""
        return f"`{field.to}`{default}"
    for name in (field.name, field.name.rpartition(".")[0], field.name.partition(".")[0]):
        if not field.why and name in PARTS:
            return PARTS[name]
    return f"none: {_cell(field.why)}"


def _shown(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def torchtitan_page(text: str) -> str:
    """The page with its table anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{torchtitan_table()}\n\n{END}{after}"


TOOLS = {
    "axolotl": axolotl_keys.KEYS,
    "llamafactory": llamafactory_keys.KEYS,
    "torchtune": torchtune_keys.KEYS,
}
"""The keys of the tools that titan-migrate reads."""


def tools_page(text: str) -> str:
    """The page on other tools with its tables anew."""
    for tool, keys in TOOLS.items():
        begin, end = f"<!-- generated: {tool} -->", f"<!-- end of {tool} -->"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        rows = [f"| `{key.name}` | {_shown(key.default)} | {_key(key)} |" for key in keys.values()]
        table = "\n".join(["| key | default | titan |", "|---|---|---|", *rows])
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def _key(key: Key) -> str:
    if key.to is not None:
        return f"`{key.to}`"
    return key.says or f"{'not needed' if key.idle else 'none'}: {_cell(key.why)}"


def commands_page() -> str:
    """docs/commands.md, from the help of each command."""
    return "\n".join([COMMANDS_HEAD, *_commands()])


def _commands() -> Iterator[str]:
    section = ""
    for row in ROWS:
        if row.section != section:
            section = row.section
            yield f"## {section}\n"
        for name in row.modules:
            found = titan.get_command(click.Context(titan), name)
            assert found is not None, f"{name} is in ROWS, and no plugin brings it"
            yield from _command(f"titan {name}", found)


def _command(name: str, command: click.Command) -> Iterator[str]:
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    yield f"### {name}\n"
    if arguments:
        shown = (f"`{one.make_metavar(click.Context(command))}`" for one in arguments)
        yield f"Arguments: {', '.join(shown)}\n"
    yield f"{_prose(command.help or '')}\n"
    if options:
        rows = [_option(command, one) for one in options]
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for other in command.list_commands(context):
            found = command.get_command(context, other)
            if found is not None:
                yield from _command(f"{name} {other}", found)


def _prose(help_text: str) -> str:
    """Click's help as Markdown: a block that is not to be wrapped becomes one of code."""
    paragraphs = inspect.cleandoc(help_text).replace("<", "&lt;").split("\n\n")
    code = [p.removeprefix("\b\n") for p in paragraphs if p.startswith("\b\n")]
    blocks = iter(f"{EXAMPLE}\n```sh\n{text.replace('&lt;', '<')}\n```" for text in code)
    return "\n\n".join(next(blocks) if p.startswith("\b\n") else p for p in paragraphs)


def _option(command: click.Command, option: click.Option) -> str:
    names, words = option.get_help_record(click.Context(command)) or ("", "")
    return f"| `{_cell(names)}` | {_cell(words).replace('<', '&lt;')} |"


def main() -> None:
    (DOCS / "commands.md").write_text(commands_page(), encoding="utf-8")
    (DOCS / "components.md").write_text(components_page(), encoding="utf-8")
    page = DOCS / "tested.md"
    page.write_text(tested_page(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "coming-from-other-tools.md"
    page.write_text(tools_page(page.read_text(encoding="utf-8")), encoding="utf-8")
    page = DOCS / "coming-from-torchtitan.md"
    page.write_text(torchtitan_page(page.read_text(encoding="utf-8")), encoding="utf-8")


def tested_page(text: str) -> str:
    """docs/tested.md with its table anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    rows = [
        f"| {row.what} | {row.on.replace('](', '](../')} | {row.date} | `{row.command}` |"
        for row in ROWS_TESTED
    ]
    table = "\n".join(["| what | on | last run | command |", "|---|---|---|---|", *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    main()
