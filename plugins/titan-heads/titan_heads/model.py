"""Using a head: the numbers of samples from an engine, and a reward of completions."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_heads import Reward
from titan_heads.hf import SCORE
from titan_heads.losses import Embedding, Scores
from titancli import IGNORE, Batch, Engine, Sample, build
from titancli.checkpoint import LOCK, newest_good, open_weights
from titancli.data.prompt import answered, prompt_ids
from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.state import named_state
from titancli.recipe import load_recipe

if TYPE_CHECKING:
    from titan_heads import RewardModel as Config
    from titancli.protocols.samples import Completion, Prompt

logger = logging.getLogger(f"titancli.plugins.{__name__}")


def outputs(engine: Engine, samples: Sequence[Sample | Sequence[int]], *, rows: int = 8) -> Tensor:
    """Return what a trained head says of samples, or lists of token ids. Collective: all ranks pass the same.

    Args:
        engine: of a recipe with the loss reward, classification or embedding; a frozen one, for example.
        rows: samples that are computed at a time.

    Returns:
        [N, classes] logits, [N, 1] scores or numbers, or [N, dim] embeddings of length 1; fp32, on the CPU.

    Raises:
        TitanError: the engine has no head, is a pipeline, or a sample has no tokens.
    """
    loss: Any = engine.loss
    if not isinstance(loss, (Scores, Embedding)):
        raise TitanError(
            f"the loss of this engine, {type(loss).__name__}, has no head of titan-heads",
            hint='build it from a run with loss.type = "reward", "classification" or "embedding"',
        )
    if engine.placement is not None:
        raise TitanError(
            "a pipeline does not return what a head says", hint="build the engine with mesh.pp=1"
        )
    lists = [sample.tokens if isinstance(sample, Sample) else sample for sample in samples]
    tokens = [torch.as_tensor(one, dtype=torch.int64) for one in lists]
    for number, one in enumerate(tokens):
        if not one.numel():
            raise TitanError(f"sample {number} has no tokens")
    # With mesh.tp each rank has a part of every row.
    multiple = math.lcm(engine.settings.limits.multiple, engine.mesh.degrees.tp)
    found = []
    for first in range(0, len(tokens), rows):
        some = tokens[first : first + rows]
        loss.kept = []
        try:
            engine.evaluate(loss.blank(_marked(some, rows, multiple)))
            found.append(torch.cat(loss.kept)[: len(some)].float().cpu())
        finally:
            loss.kept = None
    return torch.cat(found) if found else torch.empty(0, 1)


def _marked(documents: Sequence[Tensor], rows: int, multiple: int) -> dict[str, Tensor]:
    """Return a batch's tensors with a document in each row, and a target at its last token."""
    length = -(-max(map(len, documents)) // multiple) * multiple
    rows += rows % 2
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORE)
    for row, document in enumerate(documents):
        tokens[row, : len(document)] = document
        targets[row, len(document) - 1] = 0
    return {"tokens": tokens, "targets": targets}


class RewardModel:
    """The score that a reward model gives to a conversation. Each rank has the whole of it."""

    def __init__(self, config: Config) -> None:
        """
        Raises:
            RecipeError: the checkpoint is not of a reward model, or the run has none.
            EnvironmentProblem: it is damaged.
        """
        folder: Path | None = config.checkpoint
        if not (config.checkpoint / "manifest.json").is_file():
            folder = newest_good(config.checkpoint / "checkpoints", rejected=logger.warning)
        if folder is None or not (folder / LOCK).is_file():
            raise RecipeError(
                f"loop.rewards: {config.checkpoint} is neither a checkpoint with a recipe nor a run that has "
                "a good one",
                hint="give the run of a reward model, or RUN/checkpoints/step-N",
            )
        recipe = load_recipe(folder / LOCK, runnable=False).recipe
        if not isinstance(recipe.loss, Reward) or recipe.tokenizer is None:
            raise RecipeError(
                f"loop.rewards: {folder} is not of a reward model",
                hint='train one: loss.type = "reward"',
            )
        self._loss = build(recipe.loss, model=recipe.model)
        gpu = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self._tokenizer, self._longest = build(recipe.tokenizer), recipe.training.seq_len
        self._model = build(recipe.model, seq_len=self._longest)
        self._model.loss = self._loss
        weights = open_weights(folder, recipe.model, of_head=SCORE)
        with torch.no_grad():
            for name, value in named_state(self._model):
                value.copy_(weights.read(name))
        dtype = getattr(torch, recipe.training.mixed_precision_param) if gpu else torch.float32
        self._model.to(self._device, dtype).eval()

    @torch.no_grad()
    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """
        Raises:
            TitanError: the conversation is longer than the reward model's rows.
        """
        asked = [*prompt.messages] or [{"role": "user", "content": prompt.text}]
        talk = answered(asked, completion.text)
        ids = prompt_ids(self._tokenizer, talk, options=prompt.options, add_generation_prompt=False)
        if len(ids) > self._longest:
            raise TitanError(
                f"it has {len(ids)} tokens, more than {self._longest} of the reward model's rows"
            )
        tensors = _marked([torch.tensor(ids)], 2, 1)
        batch = Batch({name: value.to(self._device) for name, value in tensors.items()}, unit=2)
        self._loss.kept = []
        self._model(tokens=batch["tokens"], batch=batch, loss=self._loss)
        scores, self._loss.kept = self._loss.kept, None
        return float(scores[0][0, 0])
