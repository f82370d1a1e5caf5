"""Whatever a job config says, each of its fields is carried over or told, and nothing else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
import torchtitan_jobs as jobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchtitan_reference import FIELDS

from tests.recipe.test_scan import documents
from titan_torchtitan.older import GONE, RENAMED
from titan_torchtitan.translate import translate
from titancli.errors import RecipeError

REGISTRIES = [jobs.registry_of(), jobs.registry_of(("titan-float8", jobs.Float8))]
QUIET = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NAMES = [*FIELDS, *RENAMED, *GONE, "model.other", "more.tables.deep"]
ODD = st.one_of(
    st.booleans(),
    st.integers(-3, 3000),
    st.floats(0, 2),
    st.sampled_from(
        ["", "float8", "mx,float8", "8B_flex", "qwen3", "a/b.model", "Adam", "memory_budget", "\x7f"]
    ),
    st.lists(st.sampled_from(["float8", "output", "x.y", "quantize.linear.mx", ""]), max_size=2),
)


@st.composite
def job_configs(draw: st.DrawFn) -> dict[str, Any]:
    written = {}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=12, unique=True)):
        usual = st.sampled_from([value for value in FIELDS.get(name, ()) if value is not None] or [1])
        written[name] = draw(st.one_of(usual, usual, ODD))
    return written


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {"job": {}}
    for name, value in fields.items():
        table = data
        *above, last = name.split(".")
        for key in above:
            table = table.setdefault(key, {})
        table[last] = value
    return data


@QUIET
@given(job_configs(), st.sampled_from(REGISTRIES))
def test_every_field_of_any_job_is_accounted_for(
    tmp_path: Path, fields: dict[str, Any], registry: Any
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(nested(fields)), encoding="utf-8")
    found = translate(path, "mine", registry)
    told = {remark.name for remark in found.lost + found.changed + found.idle}
    assert set(fields) - told - set(found.moved) == set()
    account = "\n".join(found.lines("job.toml"))
    assert all(name in account for name in told)


@QUIET
@given(documents())
def test_any_toml_document_is_a_job_or_a_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    try:
        translate(path, "mine", REGISTRIES[0])
    except RecipeError as error:
        assert error.problems
