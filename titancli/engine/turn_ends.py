"""The ends of trained turns: sampling, checkpoints and exports stop at the tokens that a run learns to end
turns with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from titancli.checkpoint.hf.sidecar_files import end_ids, with_ends
from titancli.data.turn_ends import PROBE, Learned
from titancli.distributed.together import Ranks

if TYPE_CHECKING:
    from titancli.engine.core import EngineCore
    from titancli.recipe.schema import Recipe

logger = logging.getLogger(__name__)


def trains_on_turns(recipe: Recipe) -> bool:
    """Return whether a recipe says that its model learns to write the assistant's turns."""
    dataset, task = recipe.dataset, recipe.loop.task
    if dataset is not None:
        return bool(dataset.of_conversations and dataset.predicts_tokens)
    return bool(getattr(task, "of_conversations", False))  # a loop may call something else its task


def stop_at_turns(engine: EngineCore) -> None:
    """Have sampling, checkpoints and exports stop where trained turns end, and report what is not as users
    would expect. Collective."""
    if engine.learned is None and engine.recipe.tokenizer is not None:
        engine.learned = Ranks().broadcast_call("finding the ends of turns", lambda: _learned(engine))
    keep_ends(engine)


def keep_ends(engine: EngineCore) -> None:
    """Add the ends that the engine knows to the files that it keeps for checkpoints and exports."""
    if engine.learned is not None:
        engine.kept = with_ends(engine.kept, *engine.learned)


def _learned(engine: EngineCore) -> Learned | None:
    """Return the ends of turns, on rank 0; None if the tokenizer does not know them."""
    tokenizer: Any = engine.tokenizer
    if tokenizer.turn_ends is None:
        return None
    ends = tuple(tokenizer.turn_ends)
    if not ends:
        logger.warning(
            "no single token ends a turn under the tokenizer's chat template, so the model does not learn to "
            "stop: put an end marker, such as <|im_end|>, after the assistant's messages in "
            "chat_template.jinja, or give sampling texts to stop at (stop)"
        )
    elif tokenizer.chat_with_mask is not None:
        ids, mask = tokenizer.chat_with_mask(list(PROBE))
        if not set(ends) & {one for one, trained in zip(ids, mask, strict=True) if trained}:
            logger.warning(
                "the chat template leaves %s, which ends a turn, out of what is trained on, so the model "
                "does not learn to stop: put it inside {%% generation %%} … {%% endgeneration %%}",
                _names(tokenizer, ends),
            )
    if new := sorted(set(ends) - end_ids(engine.kept, tokenizer.eos_id)):
        logger.warning(
            "a turn ends with %s, at which neither the tokenizer nor the weights' folder stops: sampling, "
            "checkpoints and exports stop there too",
            _names(tokenizer, new),
        )
    return Learned(ends, tokenizer.eos_id, tokenizer.bos_id)


def _names(tokenizer: Any, ids: Any) -> str:
    return " and ".join(f"{tokenizer.decode_special([one])} ({one})" for one in ids)
