"""The classes of transformers that have these heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titancli.errors import EnvironmentProblem, UsageError
from titancli.protocols import HFHead

SCORE = {"loss.score.weight": "score.weight"}


def classifier(
    config_json: Mapping[str, Any], classes: list[str], problem_type: str, pad_id: int | None
) -> HFHead:
    """Return the `…ForSequenceClassification` of a model, with one logit for each of the classes.

    Args:
        config_json: the language model's.
        pad_id: `pad_token_id`; None: that of the folder that the weights once came from.
    """
    names = dict(enumerate(classes))
    entries: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": {str(number): name for number, name in names.items()},
        "label2id": {name: number for number, name in names.items()},
        "problem_type": problem_type,
    }
    if pad_id is not None:
        entries["pad_token_id"] = pad_id
    return HFHead(
        architecture=_class("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", config_json),
        loader="AutoModelForSequenceClassification",
        tensors=SCORE,
        config=entries,
    )


def base_model(config_json: Mapping[str, Any]) -> HFHead:
    """Return the class of a model without an output layer."""
    return HFHead(architecture=_class("MODEL_MAPPING_NAMES", config_json), loader="AutoModel")


def _class(table: str, config_json: Mapping[str, Any]) -> str:
    """Return the class that transformers has for a model in one of its tables.

    Raises:
        EnvironmentProblem: transformers is not installed.
        UsageError: it has none.
    """
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise EnvironmentProblem(
            "transformers is not installed, which names the class of a head", hint="pip install transformers"
        ) from error
    found = getattr(modeling_auto, table).get(config_json["model_type"])
    if found is None:
        raise UsageError(
            f"transformers has no class of this kind for the model_type {config_json['model_type']!r}",
            hint="titan itself can use the checkpoint; its weights alone are exported by --to titan",
        )
    return found if isinstance(found, str) else found[0]
