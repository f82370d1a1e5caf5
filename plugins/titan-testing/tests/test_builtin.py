"""Titan's own components behave as the kit asks of a plugin's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_testing import check_plugin
from titan_testing.behaviour import behaviour_faults, checks_of
from titan_testing.behaviour.ranks import run_jobs, take_jobs
from titan_testing.behaviour.subject import Subject
from titancli import registry

SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64}
ROUTING: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden_dim": 16}
OWN: dict[str, Any] = {**ROUTING, "score_func": "softmax", "route_norm": True, "score_before_experts": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {**SIZES, "hidden_dim": 48},
    "qwen3": {**SIZES, "head_dim": 8, "hidden_dim": 48},
    "gpt_oss": {**SIZES, "head_dim": 8, "sliding_window": 4, "moe": {**OWN, "gate_bias": True}},
    "llama4": {**SIZES, "head_dim": 8, "moe": {**ROUTING, "top_k": 1}},
    "mixtral": {**SIZES, "moe": OWN},
    "gemma3": {**SIZES, "head_dim": 8, "n_layers": 6, "hidden_dim": 48, "sliding_window": 4},
    "granite": {**SIZES, "hidden_dim": 48},
    "olmo3": {**SIZES, "n_layers": 4, "hidden_dim": 48, "sliding_window": 4},
    "glm4_moe": {**SIZES, "hidden_dim": 48, "moe": {**ROUTING, "score_before_experts": False}},
    "deepseek_v3": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 64,
        "hidden_dim": 48,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe": ROUTING,
    },
}


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Values for all components that need some, but models; the data that they name are there."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"text": f"row {i} " * (1 + i % 7), "messages": talk, "prompt": f"{i}"} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines, table = str(tmp_path / "rows.jsonl"), tmp_path / "rows.parquet"
    raw = tmp_path / "tokens.bin"
    raw.write_bytes(b"".join(row["text"].encode() for row in rows))
    pq.write_table(pa.table({"text": [row["text"] for row in rows]}), table)
    return {
        "dataset/text_files": {"paths": [lines], "format": "text"},
        "dataset/jsonl": {"paths": [lines]},
        "dataset/parquet": {"paths": [str(table)]},
        "dataset/token_shards": {"paths": [str(raw)], "format": "raw", "dtype": "uint8"},
        "dataset/mix": {
            "datasets": {
                "text": {"type": "jsonl", "paths": [lines]},
                "talk": {"type": "chat", "path": lines},
            },
            "weights": {"text": 2.0, "talk": 1.0},
        },
        "dataset/hf": {"path": lines},
        "dataset/chat": {"path": lines},
    }


def test_titan_itself_passes(configs: dict[str, dict[str, Any]]) -> None:
    check_plugin("titan", configs=configs, seq_len=48, seconds=30.0)


def test_each_model_of_titans_has_small_sizes_here() -> None:
    names = [name.rpartition("/") for name in registry.current().names("model")]
    assert {bare for owner, _, bare in names if owner in ("titan", "titan-families")} == set(MODELS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "llama3")) for n in MODELS]
)
def test_a_model_of_titans_is_itself_on_every_layout(name: str, tmp_path: Path) -> None:
    from titancli.registry.binding import bind
    from titancli.registry.component import load_target

    cls = registry.current().find("model", name)
    config = bind(cls, MODELS[name], registry.current())
    target = load_target(cls.__component__.target)  # type: ignore[attr-defined]
    subject = Subject(f"model/{name}", "model", config, target, tmp_path)
    assert list(behaviour_faults(subject, frozenset())) == []
    jobs = take_jobs()
    assert [job.check for job in jobs] == ["layouts"] and "layouts" in checks_of("model")
    assert list(run_jobs(jobs, [])) == []
