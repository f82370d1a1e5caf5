"""A torchtitan job config becomes a recipe, and whatever does not is reported with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torchtitan_jobs as jobs
from torchtitan_reference import FIELDS

from titan_torchtitan import fields as ours
from titan_torchtitan.translate import Translation, translate
from titancli import component
from titancli.errors import RecipeError
from titancli.recipe import Loaded, install_command, load_recipe

REGISTRY = jobs.registry_of(("titan-float8", jobs.Float8))
Translate = Callable[..., tuple[Translation, dict[str, Any]]]


@pytest.fixture
def translated(tmp_path: Path) -> Translate:
    """`translated(job)`: the translation of a job's text, and the recipe's data."""

    def of(text: str, registry: Any = REGISTRY) -> tuple[Translation, dict[str, Any]]:
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        found = translate(path, "mine", registry)
        return found, tomli.loads(found.text)

    return of


@pytest.fixture
def load(translated: Translate, tmp_path: Path) -> Callable[..., Loaded]:
    """`load(job)`: the recipe, which must be a good one."""

    def of(text: str, *overrides: str, registry: Any = REGISTRY) -> Loaded:
        found, _ = translated(text, registry)
        path = tmp_path / "recipe.toml"
        path.write_text(found.text, encoding="utf-8")
        return load_recipe(path, overrides, registry=registry)

    return of


def names(remarks: list[Any]) -> set[str]:
    return {remark.name for remark in remarks}


def job_with(name: str, value: Any) -> str:
    data: dict[str, Any] = {"training": {"steps": 1000}}
    table = data
    *above, last = name.split(".")
    for key in above:
        table = table.setdefault(key, {})
    table[last] = value
    return tomli_w.dumps(data)


def test_a_job_of_llama3_8b_becomes_a_recipe(translated: Translate, load: Callable[..., Loaded]) -> None:
    recipe = load(jobs.LLAMA3_8B).recipe
    assert recipe.model.n_layers == 32 and recipe.tokenizer.path.name == "Llama-3.1-8B"
    assert (recipe.dataset.path, recipe.dataset.name, recipe.dataset.streaming) == ("allenai/c4", "en", True)
    assert (recipe.training.seq_len, recipe.training.local_batch_size, recipe.training.seed) == (8192, 1, 42)
    assert recipe.optimizer.lr == 3e-4 and recipe.parallelize.reshard_after_forward == "always"
    assert recipe.checkpoint.enable and recipe.checkpoint.async_mode == "async"
    assert recipe.compile.enable and recipe.activation_checkpoint.selective_ac_option == "op"
    assert [type(logger).__name__ for logger in recipe.loggers] == ["TensorBoard"]
    assert recipe.profiling.enable_profiling and recipe.profiling.profile_freq == 100
    found, _ = translated("[fault_tolerance]\nenable = true\n" + jobs.LLAMA3_8B)
    lines = found.lines("job.toml")
    lost = next(line for line in lines if "fault_tolerance.enable" in line)
    assert lost.startswith("job.toml:2: not carried over: fault_tolerance.enable = true: ")
    assert all(f"# {line}\n" in found.text for line in lines)
    assert "checkpoint.folder" in names(found.idle) and recipe.compile.components == ["model", "loss"]


def test_torchtitans_defaults_hold_where_titan_has_others(
    translated: Translate, load: Callable[..., Loaded]
) -> None:
    recipe = load("[training]\n").recipe
    assert recipe.training.steps == 10000 and not recipe.checkpoint.enable
    assert recipe.activation_checkpoint.selective_ac_option == "2"
    assert recipe.model.dim == 256 and recipe.dataset.path.endswith("/tests/assets/c4_test")
    found, _ = translated("[training]\n")
    assert not any(remark.line is None for remark in found.lost)
    found, _ = translated("[checkpoint]\nenable = true\n")
    assert {remark.name for remark in found.lost if remark.line is None} == {
        "checkpoint.last_save_model_only"
    }
    assert any("torchtitan's default" in line for line in found.lines("job.toml"))


def test_float8_becomes_a_converter(load: Callable[..., Loaded]) -> None:
    (converter,) = load(jobs.FLOAT8).recipe.converters
    assert converter.recipe == "tensorwise" and converter.emulate is None
    assert converter.enable_fsdp_float8_all_gather and converter.precompute_float8_dynamic_scale_for_fsdp
    assert converter.skip == ["output", "attention.wk", "*layers.0*"]


def test_float8_that_is_not_installed_is_told_and_the_rest_is_good(
    translated: Translate, load: Callable[..., Loaded]
) -> None:
    plain = jobs.registry_of()
    assert load(jobs.FLOAT8, registry=plain).recipe.converters == []
    found, _ = translated(jobs.FLOAT8, plain)
    section = "quantize.linear.float8."
    assert {n.removeprefix(section) for n in names(found.lost) if section in n} == {
        "enable_fsdp_float8_all_gather",
        "precompute_float8_dynamic_scale_for_fsdp",
        "filter_fqns",
    }
    assert any(install_command("titan-float8") in line for line in found.lines("x"))


def test_a_converter_section_that_nothing_names_has_no_effect(translated: Translate) -> None:
    found, data = translated('[quantize.linear.float8]\nrecipe_name = "rowwise"\n')
    assert "converters" not in data
    assert [remark.text for remark in found.lost if remark.line] == [
        "no effect: model.converters does not name it"
    ]


@pytest.mark.parametrize(("text", "model"), [(jobs.QWEN3, "qwen3"), (jobs.DEEPSEEK, "deepseek_v3")])
def test_a_model_that_is_not_installed_is_a_reason_and_the_rest_is_translated(
    translated: Translate, load: Callable[..., Loaded], text: str, model: str
) -> None:
    found, data = translated(text)
    reason = next(remark.text for remark in found.lost if remark.name == "model.name")
    assert f"no installed plugin provides the model '{model}'" in reason
    assert data["model"]["type"] == model
    with pytest.raises(RecipeError) as caught:
        load(text)
    assert [problem.code for problem in caught.value.problems] == ["unknown-component"]
    without = ("mesh.ep=1", "debug.moe_force_load_balance=false")
    recipe = load(text, "model=llama3", "model.flavor=debugmodel", *without).recipe
    assert recipe.training.steps == tomli.loads(text)["training"]["steps"]


def test_a_flux_job_is_reported_field_by_field(translated: Translate) -> None:
    found, data = translated(jobs.FLUX)
    lost = names(found.lost)
    assert {"model.name", "training.dataset", "job.custom_config_module", "encoder.t5_encoder"} <= lost
    [why] = [remark for remark in found.lost if "training.dataset" in names([remark])]
    assert "titan flux-encode IMAGES SHARDS" in str(why)
    assert {"training.img_size", "training.classifier_free_guidance_prob"} <= lost
    assert data["training"]["steps"] == 30000


def test_names_of_before_0_2_2_are_known(translated: Translate, load: Callable[..., Loaded]) -> None:
    recipe = load(jobs.OLD).recipe
    assert recipe.training.local_batch_size == 4 and recipe.lr_scheduler.warmup_steps == 2
    assert recipe.compile.enable and recipe.checkpoint.enable
    assert recipe.optimizer.implementation == "foreach"
    assert str(recipe.tokenizer.path).endswith("assets/llama")
    assert len(recipe.converters) == 1
    found, _ = translated(jobs.OLD)
    assert {"job.use_for_integration_test", "model.norm_type", "checkpoint.interval_type"} <= names(
        found.lost
    )
    assert {"model.name", "model.tokenizer_path"} <= names(found.changed)
    assert "metrics.rank_0_only" in names(found.idle)


def test_the_table_is_torchtitans() -> None:
    assert set(ours.FIELDS) == set(FIELDS) and len(FIELDS) == 149
    for name, (default, _) in FIELDS.items():
        assert ours.FIELDS[name].default == default, name


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_carried_or_reported(translated: Translate, name: str) -> None:
    default, other = FIELDS[name]
    _, plain = translated(job_with("training.steps", 1000))
    found, data = translated(job_with(name, other))
    remarks = names(found.lost + found.changed + found.idle)
    assert data != plain or name in remarks
    assert any(name in line for line in found.lines("x")) == (name in remarks)
    assert name in {*found.moved, *remarks}
    if default is not None:
        found, _ = translated(job_with(name, default))
        assert name in {*found.moved, *names(found.lost + found.changed + found.idle)}


NO_RECIPES = {
    ("model.name", "other"),
    ("model.flavor", "other"),
    ("training.dataset", "other"),
    ("activation_checkpoint.selective_ac_option", "other"),
    ("training.global_batch_size", 3),
}
"""Values that mean nothing in torchtitan either."""


@pytest.mark.parametrize("name", FIELDS)
def test_a_recipe_with_any_one_field_is_a_good_one(load: Callable[..., Loaded], name: str) -> None:
    for value in FIELDS[name]:
        if value is not None and [name, value] not in map(list, NO_RECIPES):
            load(job_with(name, value))


def test_defaults_that_are_left_out_are_titans_own(load: Callable[..., Loaded]) -> None:
    data = load("[training]\n").data
    for field in ours.FIELDS.values():
        section, _, key = (field.to or "").partition(".")
        if not key or section not in data or field.name == "debug.seed":
            continue
        assert data[section].get(key) == field.default, field.name


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("[training]\nstepz = 3\n", "training.stepz", "did you mean 'steps'?"),
        ("[optimizer]\nstate_dtype = 1\n", "optimizer.state_dtype", "no such field; is it from a custom"),
        ("[quantize.linear.fp8]\nemulate = true\n", "quantize.linear.fp8.emulate", "did you mean 'quantize."),
        ('[training]\nsteps = "3"\n', "training.steps", "torchtitan expects int here"),
        (
            "[training]\nbatch_size = 3\nlocal_batch_size = 4\n",
            "training.local_batch_size",
            "sets the same value",
        ),
        ('[optimizer]\nname = "Adam"\n', "optimizer.name", "adamw is used instead"),
        (
            '[activation_checkpoint]\nmode = "memory_budget"\n',
            "activation_checkpoint.mode",
            "is used instead",
        ),
        ('[model]\nflavor = "9B"\n', "model.flavor", "llama3 has no flavor '9B'"),
        ('[model]\nconverters = "other"\n', "model.converters", "provides the converter 'other'"),
        ('[model]\nconverters = "mx"\n', "model.converters", '[[converters]] type = "mxfp8_linear"'),
        (
            '[model]\nconverters = ["quantize.grouped_mm.float8"]\n'
            '[quantize.grouped_mm.float8]\nfqns = ["experts"]\n',
            "quantize.grouped_mm.float8.fqns",
            "set the fields of float8_experts by hand: fqns says what is converted",
        ),
        (
            '[checkpoint]\nenable = true\ninitial_load_path = "old/step-100"\n',
            "checkpoint.initial_load_path",
            "which titan does not read",
        ),
        (
            "[checkpoint]\ninitial_load_in_hf = true\n",
            "checkpoint.initial_load_in_hf",
            "loads nothing when checkpoint.enable is false",
        ),
        (
            "[parallelism]\npipeline_parallel_schedule = 'Zigzag'\n",
            "parallelism.pipeline_parallel_schedule",
            "titan runs GPipe, 1F1B,",
        ),
        (
            "[parallelism]\nenable_async_tensor_parallel = true\n",
            "parallelism.enable_async_tensor_parallel",
            "no effect without compile.enable",
        ),
    ],
)
def test_what_cannot_be_carried_has_a_reason(translated: Translate, text: str, name: str, words: str) -> None:
    found, _ = translated(text)
    (reason,) = [remark.text for remark in found.lost if remark.name == name]
    assert words in reason


@pytest.mark.parametrize(("degree", "name"), [("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")])
def test_a_degree_is_carried(translated: Translate, degree: str, name: str) -> None:
    _, data = translated(job_with(f"parallelism.{name}_parallel_degree", 2))
    assert data["mesh"][degree] == 2


def test_a_layout_is_carried_whole(load: Callable[..., Loaded]) -> None:
    recipe = load(jobs.LAYOUT).recipe
    assert (recipe.mesh.pp, recipe.mesh.tp, recipe.mesh.cp) == (2, 2, 2)
    assert (recipe.pipeline.schedule, recipe.pipeline.microbatch_size) == ("Interleaved1F1B", 2)
    assert recipe.pipeline.last_stage_less_layers == 0 and recipe.parallelize.context_parallel == "ring"
    assert recipe.parallelize.async_tp and recipe.parallelize.cpu_offload
    assert (recipe.activation_checkpoint.mode, recipe.activation_checkpoint.memory_budget) == (
        "memory_budget",
        0.25,
    )
    assert recipe.compile.components == ["model"]


def test_experts_are_spread_where_a_model_has_some(translated: Translate) -> None:
    found, data = translated(jobs.DEEPSEEK)
    assert data["mesh"]["ep"] == 8
    found, data = translated(job_with("parallelism.expert_parallel_degree", 2))
    assert data["mesh"]["ep"] == 1 and "parallelism.expert_parallel_degree" in names(found.lost)


@component("dispatcher", "deepep", target="torchtitan_jobs:build")
class DeepEP:
    """Stands for titan-deepep's."""


def test_how_tokens_reach_experts_is_carried_where_its_plugin_is(translated: Translate) -> None:
    name = "parallelism.expert_parallel_comm_backend"
    found, data = translated(jobs.DEEPSEEK, jobs.registry_of(("titan-deepep", DeepEP)))
    assert data["parallelize"]["expert_dispatch"] == "deepep" and name in found.moved
    found, data = translated(jobs.DEEPSEEK)
    (reason,) = [remark.text for remark in found.lost if remark.name == name]
    assert "titan-deepep, and convert again" in reason and "expert_dispatch" not in str(data)
    found, data = translated(job_with(name, "standard"))
    assert name in found.moved and "parallelize" not in data
    found, _ = translated(job_with(name, "hybridep"))
    assert name in names(found.lost)


def test_what_is_left_out_of_a_checkpoint_has_its_name_here(translated: Translate) -> None:
    job = "[checkpoint]\nenable = true\nexclude_from_loading = "
    for written in ('"optimizer, dataloader,lr_scheduler"', '["optimizer", "dataloader", "lr_scheduler"]'):
        found, data = translated(f"{job}{written}\n")
        assert data["checkpoint"]["exclude_from_loading"] == ["optimizer", "data", "step"]
        assert "checkpoint.exclude_from_loading" in found.moved
    found, data = translated(f'{job}["mine"]\n')
    assert "no part 'mine'" in found.lost[0].text


def test_the_weights_at_the_end_are_saved_beside_the_state(
    load: Callable[..., Loaded], translated: Translate
) -> None:
    job = "[checkpoint]\nenable = true\nexport_dtype = 'bfloat16'\n"
    section = load(f"{job}last_save_model_only = true\n").recipe.checkpoint
    assert (section.last_save_model_only, section.export_dtype) == (True, "bfloat16")
    section = load(f"{job}last_save_in_hf = true\n").recipe.checkpoint
    assert (section.last_save_model_only, section.last_save_in_hf) == (False, True)
    found, data = translated(job)
    assert "last_save_model_only" not in data["checkpoint"]
    assert {"checkpoint.last_save_model_only", "checkpoint.export_dtype"} <= names(found.lost)


def test_a_job_that_only_loads_saves_nothing(load: Callable[..., Loaded]) -> None:
    job = "[checkpoint]\nenable = true\nload_only = true\ncreate_seed_checkpoint = true\n"
    assert not load(job).recipe.checkpoint.enable
    job = "[checkpoint]\nenable = true\ncreate_seed_checkpoint = true\nenable_first_step_checkpoint = true\n"
    section = load(job).recipe.checkpoint
    assert section.create_seed_checkpoint and section.enable_first_step_checkpoint


def test_weights_of_hugging_face_are_carried(load: Callable[..., Loaded]) -> None:
    job = '[model]\nhf_assets_path = "./assets/m"\n[checkpoint]\nenable = true\ninitial_load_in_hf = true\n'
    assert str(load(job).recipe.weights).endswith("/assets/m")
    assert str(load(f'{job}initial_load_path = "./other"\n').recipe.weights).endswith("/other")


def test_a_flavor_for_flex_attention_is_a_mask_of_the_data(load: Callable[..., Loaded]) -> None:
    recipe = load('[model]\nflavor = "8B_flex"\n').recipe
    assert recipe.model.n_layers == 32 and recipe.dataset.document_mask


def test_a_schedule_that_torchtitan_shortens_is_short(load: Callable[..., Loaded]) -> None:
    short = load("[training]\nsteps = 10\n").recipe.lr_scheduler
    assert short.warmup_steps == 10
    job = "[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 40\ndecay_ratio = 0.8\n"
    assert load(job).recipe.lr_scheduler.decay_ratio is None
    assert load(job.replace("0.8", "0.5")).recipe.lr_scheduler.decay_ratio == 0.5


def test_a_dataset_path_is_one_on_disk(load: Callable[..., Loaded]) -> None:
    data = load('[training]\ndataset = "c4"\ndataset_path = "data/c4"\n').recipe.dataset
    assert data.path == str(Path("data/c4").absolute()) and data.name is None


@pytest.mark.parametrize("text", ["", "[x]\ny = 1\n", "recipe = 1\n[model]\ntype = 'llama3'\n", "[job\n"])
def test_what_is_no_job_config_is_refused(translated: Translate, text: str) -> None:
    with pytest.raises(RecipeError):
        translated(text)


def test_a_converters_distribution_is_required(translated: Translate) -> None:
    from titancli.registry import hookspecs
    from titancli.registry.lookup import Registry
    from titancli.registry.plugins import Plugin

    class Offer:
        @staticmethod
        @hookspecs.hookimpl
        def titan_components() -> list[type]:
            return [jobs.Float8]

    _, data = translated(jobs.FLOAT8, Registry([Plugin("f8", lambda: Offer, distribution="titan-float8")]))
    assert data["requires"] == {"plugins": ["titan-float8"]}
