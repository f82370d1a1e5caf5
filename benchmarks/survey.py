"""Every causal language model of transformers under `hf_causal_lm`, against transformers itself.

    python benchmarks/survey.py [--only TYPE ...] [--json FILE] [--layouts NAME ...] [--write]

Of each type a tiny copy of its default config is made, with dropout and noise at 0 and random weights, and
its logits are compared with those of transformers' eager forward: whole rows longer than any window, rows of
three documents (each of which transformers is given by itself), and rows padded on the right. Then its
weights are read from a folder that transformers has saved, and exported to one that transformers reads.
A type takes seconds, and is given up after `--limit`. With `--layouts`, what is accepted takes a step on two
ranks in each of these layouts as well, and its gradients are compared with those of one rank.

Prints a table: accepted, or refused and why; and whether what was accepted is right. `--json` keeps the
results, and adds to those that a file has already; `--write` puts all of them into docs/hf-causal-lm.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from titan_transformers import HFCausalLM
from titan_transformers.config_json import text_part
from titan_transformers.model import build
from titan_transformers.tiny import tiny
from titan_transformers.weights import FolderForm
from titancli.checkpoint import export_hf, read_hf
from titancli.errors import TitanError
from titancli.models.blocks.state import named_state

LIMIT = 60
"""Seconds that a type may take, unless `--limit` says otherwise."""
CLOSE = 1e-4
"""The largest difference of logits, relative to the largest one."""
ROWS, LENGTH, CUTS = 2, 40, (0, 9, 17, 40)
PAGE = Path(__file__).parents[1] / "docs" / "hf-causal-lm.md"
UNKNOWN = "not known"
MARKS = ("<!-- survey: made by benchmarks/survey.py -->", "<!-- end of survey -->")

LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "dots1": {**LATENT, "n_shared_experts": 1},
    "ministral": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": [2] * 32},
    "phimoe": {"input_jitter_noise": 0.0, "router_jitter_noise": 0.0},
}
"""What a default config lacks to be a model that anybody has."""


@dataclass
class Found:
    """What came out for a type."""

    model_type: str
    accepted: bool = False
    wrong: str | None = None
    """What differs though it was accepted."""
    why: str = ""
    """Why it is refused."""
    weights: str = ""
    """"yes", or why not."""
    layouts: dict[str, str] = field(default_factory=dict)
    """By technique: "yes", "", or what went wrong."""
    seconds: float = 0.0


class TooLong(BaseException):
    """A type has taken too long; not an error of its, which others would handle."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def values_of(model_type: str) -> dict[str, Any]:
    """A tiny copy of a type's default values."""
    values = CONFIG_MAPPING[model_type]().to_dict()
    values |= {"model_type": model_type, **LACKING.get(model_type, {})}
    values |= {key: 0.0 for key, v in values.items() if "drop" in key and isinstance(v, float)}
    return tiny(values)


def made(values: dict[str, Any]) -> Any:
    """titan's model, with random weights under which everything shows."""
    with torch.device("meta"):
        model = build(HFCausalLM(config=values), seq_len=LENGTH)
    model.to_empty(device="cpu")
    model.tie()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.uniform_(0.6, 1.4, generator=generator)
            else:
                parameter.normal_(0, max(parameter.shape[-2:]) ** -0.5, generator=generator)
    return model.eval()


def in_transformers(model: Any) -> Any:
    values = model.config.values
    config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    theirs.load_state_dict(model.state_dict())
    return theirs.eval()


@torch.no_grad()
def differences(model: Any, theirs: Any) -> Iterator[tuple[str, float]]:
    """How far logits are from those of transformers, by what the rows are."""
    vocabulary = theirs.get_input_embeddings().weight.shape[0]
    text = torch.randint(0, vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = torch.cat([theirs(row[None], use_cache=False).logits for row in text])
    yield "whole rows", far(model(text), whole)
    parts = list(pairwise(CUTS))
    places = torch.cat([torch.arange(end - start) for start, end in parts]).expand(ROWS, -1)
    ids = torch.cat([torch.full((end - start,), n) for n, (start, end) in enumerate(parts)]).int()
    apart = torch.cat([theirs(text[:, a:b], use_cache=False).logits for a, b in parts], dim=1)
    yield "documents", far(model(text, places, ids.expand(ROWS, -1)), apart)
    lengths = (LENGTH - 13, LENGTH)
    padding = torch.stack([(torch.arange(LENGTH) >= length).int() for length in lengths])
    places = torch.where(padding > 0, torch.arange(LENGTH) - (LENGTH - 13), torch.arange(LENGTH))
    found = model(text, places, padding)
    rows = [found[row, :length] for row, length in enumerate(lengths)]
    padded = theirs(text, attention_mask=1 - padding, use_cache=False).logits
    meant = [padded[row, :length] for row, length in enumerate(lengths)]
    yield "right padding", far(torch.cat(rows), torch.cat(meant))


def far(found: Tensor, meant: Tensor) -> float:
    return float((found - meant).abs().max() / meant.abs().max())


@torch.no_grad()
def through_folders(model: Any, theirs: Any) -> str | None:
    """Read a folder that transformers has written, and write one that it reads; what differs, if anything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder / "theirs")
        config = HFCausalLM(config=folder / "theirs")
        form = FolderForm(config)
        mine = dict(named_state(model))
        reader = read_hf(folder / "theirs", form)
        reader.check({key: tuple(value.shape) for key, value in mine.items()})
        for key, value in mine.items():
            if not torch.equal(reader.parameter(key), value):
                return f"{key} is read wrongly"
        export_hf(mine, form, {}, folder / "ours")
        again = AutoModelForCausalLM.from_pretrained(folder / "ours", dtype=torch.float32)
        found = again.state_dict()
        for key, value in theirs.state_dict().items():
            if not torch.equal(found[key], value):
                return f"{key} is written wrongly"
    return None


def survey(model_type: str, limit: int = LIMIT) -> Found:
    found, start = Found(model_type), time.monotonic()
    try:
        with at_most(limit):
            look(found)
    except TooLong as error:
        found.accepted, found.wrong, found.why = False, None, f"{UNKNOWN}: {error}"
    found.seconds = time.monotonic() - start
    return found


def look(found: Found) -> None:
    try:
        values = values_of(found.model_type)
    except Exception as error:  # whatever it is, it is of transformers
        found.why = f"transformers has no default config: {error}"
        return
    if (text := text_part(values)) is not values:
        kind = text["model_type"]
        what = "its text model" if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else "no causal language model"
        found.why = f"a multimodal model; the text part is {kind}, {what}"
        return
    try:
        model = made(values)
    except TitanError as error:
        found.why = " ".join(error.message.split()).removeprefix(f"model.config: {found.model_type}: ")
        return
    found.accepted = True
    theirs = in_transformers(model)
    wrong = [f"{what}: {value:.1e}" for what, value in differences(model, theirs) if not value < CLOSE]
    found.wrong = ", ".join(wrong) or None
    try:
        found.weights = through_folders(model, theirs) or "yes"
    except TitanError as error:
        found.weights = error.message
    except Exception as error:  # whatever it is, weights do not come through
        found.weights = f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {"tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}, "ep": {"dp_shard": 2, "ep": 2}}
SAME = 1e-4
"""The largest difference of a gradient from that of one rank, relative to its norm."""
NOTHING = 1e-2
"""The least norm of a gradient that it is compared with, relative to that of all of them."""
REFUSED = ("refused", "RecipeError", "TitanError")
"""How what is said of a layout that is refused by name begins."""


def gradients(values: dict[str, Any], mesh: dict[str, int]) -> dict[str, Tensor] | str:
    """On a rank: gradients of a step on rows of documents, and the loss; or why there are none."""
    from tests.engine import cases
    from titancli.engine import Engine

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        layout = cases.Layout(mesh=mesh, config=HFCausalLM(config=values), documents=True)
        engine = Engine.build(cases.recipe(layout))
        metrics = engine.forward_backward(cases.my_batches(engine, 0, documents=True))
    except Exception as error:  # whatever it is, the layout is not for this type
        return " ".join(f"{type(error).__name__}: {error}".split())
    found = cases.wholes((n, p.grad) for n, p in engine.named_parameters() if p.grad is not None)
    return {**found, "loss": metrics["loss"].clone()}


def try_layouts(found: Found, ranks: Any, only: list[str]) -> None:
    # A row of zeros, as transformers makes that of padding, has gradients that norm after norm overflow.
    values = {**values_of(found.model_type), "tie_word_embeddings": False, "pad_token_id": None}
    with torch.device("meta"):
        model = build(HFCausalLM(config=values), seq_len=LENGTH)
    faults = {**model.mesh_faults, **({} if model.experts else {"ep": "no stacked experts"})}
    found.layouts |= {name: f"refused: {faults[name]}" for name in only if name in faults}
    names = [name for name in only if name not in found.layouts]
    try:
        alone = ranks(1, gradients, values, {})[0] if names else {}
    except AssertionError as error:
        found.layouts |= dict.fromkeys(names, " ".join(str(error).split())[-200:])
        return
    for name in names:
        try:
            answers = ranks(2, gradients, values, LAYOUTS[name])
        except AssertionError as error:
            found.layouts[name] = " ".join(str(error).split())[-200:]
            continue
        told = [answer for answer in (alone, *answers) if isinstance(answer, str)]
        found.layouts[name] = told[0] if told else unlike(alone, answers[1] | answers[0]) or "yes"


def unlike(alone: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    if unknown := [name for name, value in alone.items() if not value.isfinite().all()]:
        return f"{unknown[0]} is not finite on one rank"
    if alone.keys() != found.keys():
        return f"WRONG: other gradients, {sorted(alone.keys() ^ found.keys())[:3]}"
    # What is 0 but for rounding, as the gradient of a bias of keys, is no measure of its own.
    norms = [value.norm() for name, value in alone.items() if name != "loss"]
    least = NOTHING * float(torch.stack(norms).norm())
    for name, meant in alone.items():
        difference = float((found[name] - meant).norm()) / max(float(meant.norm()), least)
        if not difference <= SAME:
            return f"WRONG: {name} differs by {difference:.1e}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds for each type")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layouts", nargs="*", default=[], choices=LAYOUTS, help="on 2 ranks, too")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    ranks = None
    if args.layouts:
        sys.path.insert(0, str(PAGE.parents[1]))
        sys.modules.setdefault("survey", sys.modules[__name__])
        gradients.__module__ = "survey"
        sys.path.insert(0, str(Path(__file__).parent))
        import tests.ranks

        tests.ranks.TIMEOUT = 10.0 * args.limit
        ranks = tests.ranks.Ranks()
    kept: dict[str, Found] = {}
    if args.json and args.json.exists():
        kept = {row["model_type"]: Found(**row) for row in json.loads(args.json.read_text())}
    for model_type in args.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        kept[model_type] = found = survey(model_type, args.limit)
        if ranks is not None and found.accepted and not found.wrong:
            try_layouts(found, ranks, args.layouts)
        state = "refused" if not found.accepted else "WRONG" if found.wrong else "accepted"
        told = found.why or found.wrong or f"weights: {found.weights}"
        told = "; ".join([told[:100], *(f"{name}: {what[:150]}" for name, what in found.layouts.items())])
        print(f"{model_type:28} {state:9} {found.seconds:5.1f} s  {told}", flush=True)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in kept.values()], indent=1))
    rows = [kept[name] for name in sorted(kept)]
    good = [row for row in rows if row.accepted]
    print(
        f"{len(rows)} types: {len(good)} accepted, {sum(bool(r.wrong) for r in good)} wrong, "
        f"{sum(r.weights == 'yes' for r in good)} with weights"
    )
    if args.write:
        if missing := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - kept.keys():
            parser.error(f"--write needs the results of all types; {len(missing)} are not in --json")
        write(rows)
    return 1 if any(row.wrong for row in rows) else 0


def write(rows: list[Found]) -> None:
    """Put the tables into the page."""
    good = [row for row in rows if row.accepted and not row.wrong]
    tried = [row for row in good if "yes" in row.layouts.values()]
    lines = [
        f"Of the {len(rows)} types of causal language models in transformers {transformers.__version__}, "
        f"{len(good)} are accepted, {sum(row.weights == 'yes' for row in good)} with weights. On two ranks "
        f"{len(tried)} of them have been compared with one, gradients included: a dash is refused, with the "
        f"reason in the message; an error is one that the run ends with, or there are no finite gradients on "
        f"one rank to compare with; an empty cell has not been tried. "
        f"{sum(all_three(row) for row in good)} did so under each of tensor, context and "
        f"pipeline parallel, {sum(row.layouts.get('ep') == 'yes' for row in good)} under expert parallel.",
        "",
        f"| type | weights | {' | '.join(LAYOUTS)} |",
        f"|---|---|{'---|' * len(LAYOUTS)}",
        *(f"| {row.model_type} | {' | '.join(cells(row))} |" for row in good),
        "",
        "| not accepted | why |",
        "|---|---|",
        *(f"| {row.model_type} | {plain(row.why or row.wrong or '')} |" for row in rows if row not in good),
    ]
    text = PAGE.read_text()
    before, after = text.partition(MARKS[0])[0], text.partition(MARKS[1])[2]
    PAGE.write_text("".join([before, MARKS[0], "\n", "\n".join(lines), "\n", MARKS[1], after]))


def all_three(row: Found) -> bool:
    return all(row.layouts.get(name) == "yes" for name in ("tp", "cp", "pp"))


def cells(row: Found) -> list[str]:
    """Weights and layouts."""
    found = ["yes" if row.weights == "yes" else "–"]
    for what in (row.layouts.get(name) for name in LAYOUTS):
        if what is None or what == "yes":
            found.append(what or "")
        else:
            word = "wrong" if what.startswith("WRONG") else "error"
            found.append("–" if what.startswith(REFUSED) else word)
    return found


def plain(why: str) -> str:
    """The first words of a reason, for a table's cell."""
    words = " ".join(why.replace("|", "\\|").split()).removeprefix("model.config: ")
    return words if len(words) <= 120 else words[:120].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    sys.exit(main())
