"""transformers' modules, taken apart so that titan's engine can train them.

What comes out of here is what transformers has for a `config.json`: the model under its output, the output,
and what must be known of both. What would be wrong in silence is refused by name: an output that is more than
a matrix, attention that is not causal or not torch's, random numbers in forward.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titancli.errors import RecipeError, TitanError
from titancli.models.hf_causal_lm.config_json import KERNEL_KEYS, faults
from titancli.models.quantization import KEY

ATTENTION = "titan"
"""What transformers knows our attention by: its own SDPA, with masks that `Rows` decides."""
UNREAD = ("position_ids", "sliding_window", "past_key_values", "use_cache", "cache_position")
"""What transformers' models hand to attention and SDPA has no use for: masks hold it already."""
STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "norm"}
"""transformers' ways to cut a module, by ours."""


@dataclass(frozen=True)
class Rows:
    """What attention must know of whole rows that are trained on."""

    documents: Tensor | None
    """[B, S]; None: a row is one document."""


@dataclass(frozen=True)
class Parts:
    """A model of transformers, on meta, and what it is made of."""

    config: Any
    """transformers' own."""
    base_name: str
    base: Any
    """A PreTrainedModel: tokens to hidden states."""
    head_name: str
    head: nn.Linear
    layers_path: str
    """Where the blocks are in the base."""
    buffers: dict[str, Tensor]
    """The values of all buffers of the base by name, on the CPU: on meta they would be lost."""
    rope: GrowingRope | None
    """Where a row's RoPE depends on the rows beside it."""


@dataclass(frozen=True)
class GrowingRope:
    """RoPE whose frequencies transformers chooses by the longest row in a batch."""

    kind: str
    """transformers' name: dynamic, or longrope."""
    length: int
    """Rows of at most so many tokens all have the same frequencies, whatever is beside them."""

    def refuse(self, config: Any, tokens: int) -> None:
        """
        Raises:
            TitanError: rows of so many tokens have others.
        """
        if tokens > self.length:
            raise TitanError(
                f"{config.model_type}: rows of {tokens} tokens; beyond {self.length}, RoPE of the type "
                f"{self.kind} depends on the longest row in a batch",
                hint=f"use rows of at most {self.length} tokens, or generate from one row at a time",
            )


def refused(values: Mapping[str, Any], what: str, hint: str | None = None) -> RecipeError:
    return RecipeError(f"model.config: {values.get('model_type')}: {what}", hint=hint)


def hf_config(values: Mapping[str, Any]) -> Any:
    """transformers' config of these values.

    Raises:
        RecipeError: they ask for what is refused, or transformers does not know them.
    """
    with quiet():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for fault in faults(values):
        raise RecipeError(f"model.config: {fault}")
    if values["model_type"] not in CONFIG_MAPPING:
        import transformers

        raise refused(values, f"transformers {transformers.__version__} has no such model")
    try:
        with quiet():
            # Kernels are titan's to choose, and transformers would download some of them.
            # Weights are read unquantized, whatever the folder holds.
            left_out = {*KERNEL_KEYS, KEY}
            chosen = {key: value for key, value in values.items() if str(key).lstrip("_") not in left_out}
            return CONFIG_MAPPING[values["model_type"]].from_dict(chosen)
    except Exception as error:  # whatever it is, it is of what was written
        raise refused(values, f"transformers rejects this config: {line_of(error)}") from error


def take_apart(values: Mapping[str, Any]) -> Parts:
    """Build a model on meta, and see to it that titan can train it.

    Raises:
        RecipeError: it cannot; says why.
    """
    whole = _made(values)
    config = whole.config
    base_name = whole.base_model_prefix
    base, head = getattr(whole, base_name, None), whole.get_output_embeddings()
    children = dict(whole.named_children())
    head_name = next((name for name, child in children.items() if child is head), None)
    if base is None or head_name is None or type(head) is not nn.Linear or head.bias is not None:
        raise refused(
            values, f"{type(whole).__name__} has no output layer that is a single matrix without a bias"
        )
    others = [
        name for name in children if name not in (base_name, head_name) and any(children[name].parameters())
    ]
    if others or any(True for _ in whole.parameters(recurse=False)):
        raise refused(
            values, f"{type(whole).__name__} has parameters outside its blocks: {', '.join(others)}"
        )
    _refuse_more_than_a_matrix(values, whole, base, head)
    layers_path = _longest_list(values, base)
    _refuse_odd_blocks(values, base, base.get_submodule(layers_path))
    rope = _growing_rope(base)
    return Parts(config, base_name, base, head_name, head, layers_path, _buffer_values(values, base), rope)


def _made(values: Mapping[str, Any]) -> Any:
    config = hf_config(values)
    with quiet():
        from transformers import AutoModelForCausalLM

        kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise refused(values, "transformers has no causal language model of this type")
    if config.get_text_config() is not config:
        raise refused(
            values,
            "a multimodal model",
            hint="use its text_config, if transformers has a model for it",
        )
    if not getattr(kind, "_supports_attention_backend", False) or not kind._supports_sdpa:
        raise refused(values, f"{kind.__name__} has its own attention, not that of torch")
    try:
        with quiet(), torch.device("meta"):
            _register_attention()
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION
            )
    except Exception as error:  # whatever it is, it is of what was written
        raise refused(values, f"transformers cannot build it: {line_of(error)}") from error
    return model


def line_of(error: Exception) -> str:
    told = " ".join(str(error).split())
    return f"{type(error).__name__}: {told[:300]}" if told else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers warns of along the way: kernels that are not there, for one."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------ what is refused


class _Anything(tuple):
    """Stands for what a base returns: hidden states first, and None for everything else."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None


def _refuse_more_than_a_matrix(values: Mapping[str, Any], whole: Any, base: Any, head: nn.Linear) -> None:
    """The loss is computed inside the output, from what the base returns: nothing may be done between the
    two, or to logits afterwards. Seen by running what is around the base, on meta."""
    hidden = torch.empty(1, 2, head.in_features, device="meta")
    returned = _Anything((hidden,))
    returned.last_hidden_state = hidden
    seen: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, inputs, out: seen.extend((inputs[0], out)))
    base.forward = lambda *args, **kwargs: returned
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        logits = whole(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        raise refused(
            values, f"{type(whole).__name__}'s forward cannot be traced: {line_of(error)}"
        ) from error
    finally:
        del base.forward
        handle.remove()
    same = len(seen) == 2 and seen[1] is logits
    if not same or seen[0].untyped_storage()._cdata != hidden.untyped_storage()._cdata:
        raise refused(
            values,
            f"between its blocks and the loss {type(whole).__name__} does more than multiply by one "
            f"matrix, such as scaling or capping logits, which titan's chunked loss does not support",
        )


def _longest_list(values: Mapping[str, Any], base: nn.Module) -> str:
    """The path of the blocks: the longest list of modules that all have attention (experts have not)."""
    lists = {
        path: len(module)
        for path, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and all(_causal(block) for block in module)
    }
    if not any(lists.values()):
        raise refused(values, f"{type(base).__name__} has no list of blocks that all have attention")
    return max(lists, key=lambda path: lists[path])


def _causal(block: nn.Module) -> list[bool]:
    """Of each attention in it, whether it is causal, as transformers says."""
    return [bool(module.is_causal) for module in block.modules() if hasattr(module, "is_causal")]


def _refuse_odd_blocks(values: Mapping[str, Any], base: Any, blocks: Any) -> None:
    takes = inspect.signature(base.forward).parameters
    lacking = [name for name in ("input_ids", "position_ids", "attention_mask") if name not in takes]
    if lacking:
        raise refused(values, f"{type(base).__name__} does not take {' or '.join(lacking)}")
    for block in blocks:
        if not all(_causal(block)):
            raise refused(values, f"{type(block).__name__} has no causal attention")
        if any(isinstance(module, nn.Conv1d) for module in block.modules()):
            what = f"{type(block).__name__} mixes tokens with a convolution, also across documents"
            raise refused(values, what)
    if draws := sorted(_random(base)):
        told = base.config.to_dict()  # its defaults too
        keys = [k for k, v in told.items() if "drop" in k and isinstance(v, float) and v > 0]
        named = ", ".join(f"{key} = {told[key]}" for key in sorted(keys)) or ", ".join(draws)
        raise refused(
            values,
            f"it uses dropout ({named}), which titan does not support",
            hint="set these to 0.0 in [model.config]",
        )


def _random(base: nn.Module) -> Iterator[str]:
    """The names of what draws random numbers in forward."""
    for path, module in base.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            yield path.rpartition(".")[2]
        yield from (k for k, v in vars(module).items() if "drop" in k and isinstance(v, float) and v > 0)


# ------------------------------------------------------------------------------------------------- RoPE


def _growing_rope(base: nn.Module) -> GrowingRope | None:
    """The one that reaches least far. `dynamic` is kept from growing: what it once grew to, it would keep for
    shorter rows, and it reads positions to the host in every forward."""
    found = []
    modules: Iterator[Any] = base.modules()
    for module in modules:
        types = getattr(module, "rope_type", None)
        by_layer = types if isinstance(types, dict) else {None: types or ""}
        for layer, kind in by_layer.items():
            if kind == "longrope":
                told = module.config.rope_parameters
                told = told if layer is None else told[layer]
                found.append(GrowingRope(kind, int(told["original_max_position_embeddings"])))
            elif "dynamic" in kind:
                found.append(GrowingRope(kind, int(module.original_max_seq_len)))
        if any("dynamic" in kind for kind in by_layer.values()):
            still = {layer: "default" if "dynamic" in kind else kind for layer, kind in by_layer.items()}
            module.rope_type = still if isinstance(types, dict) else still[None]
    return min(found, key=lambda rope: rope.length, default=None)


# ------------------------------------------------------------------------------------------ attention


def _register_attention() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = partial(_attention, ALL_ATTENTION_FUNCTIONS["sdpa"])
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, plain)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


def _attention(
    sdpa: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' SDPA, for models that ask it for nothing else than attention.

    Raises:
        RecipeError: a model gives it what it would leave out without a word: sinks, capped scores, a choice
            of keys, a bias.
    """
    other = [
        name
        for name, given in more.items()
        if name not in UNREAD and given is not None and given is not False
    ]
    if dropout:
        other.append("dropout")
    if is_causal is False and attention_mask is None:
        other.append("is_causal")
    if other:
        raise RecipeError(
            f"model.config: {type(module).__name__} is not plain attention: it also takes {', '.join(other)}",
            hint="hf_causal_lm only supports models whose attention is torch's scaled_dot_product_attention",
        )
    return sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, is_causal=is_causal)


def _mask(*, config: Any, kv_length: int, q_length: int, attention_mask: Tensor | None, **rest: Any) -> Any:
    """transformers' mask for SDPA, None where causality says it all.

    In training `attention_mask` is there only so that transformers does not look for documents itself: it
    would read positions to the host, and take every restart for a document. It holds ones, and is not read;
    and its length is that of the row, where tensor parallel has cut hidden states along it.
    """
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask

    rows: Rows | None = getattr(config, "titan_rows", None)
    if rows is None:
        return sdpa_mask(q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **rest)
    if rows.documents is not None:
        same = packed_sequence_mask_function(rows.documents)
        rest |= {"mask_function": and_masks(rest["mask_function"], same), "allow_is_causal_skip": False}
    return sdpa_mask(q_length=kv_length, kv_length=kv_length, attention_mask=None, **rest)


@contextmanager
def seen_by_attention(config: Any, rows: Rows) -> Iterator[None]:
    """While a base runs on whole rows."""
    config.titan_rows = rows
    try:
        yield
    finally:
        config.titan_rows = None


# -------------------------------------------------------------------------------------------- values


def _buffer_values(values: Mapping[str, Any], base: Any) -> dict[str, Tensor]:
    """What transformers' own initialisation puts into each buffer; it promises to, for models that it loads.

    Tried on zeros and on ones: a buffer that is left as it was is refused.
    """
    found: list[dict[str, Tensor]] = []
    for number in (0, 1):
        with torch.device("cpu"), torch.no_grad():
            for module in base.modules():
                own = dict(module.named_buffers(recurse=False))
                for name, buffer in own.items():
                    module._buffers[name] = torch.full(buffer.shape, number, dtype=buffer.dtype)
                if own:
                    base._init_weights(module)  # parameters are on meta, where nothing is drawn
            found.append({name: buffer.clone() for name, buffer in base.named_buffers()})
    left = [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]
    if left:
        raise refused(values, f"transformers does not define the contents of the buffers {', '.join(left)}")
    base.to("meta")
    return found[0]


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Draw from torch's default generators as from a fresh one with this one's seed."""
    devices = [generator.device] if generator.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(generator.initial_seed())
        yield


def initial_values(
    base: Any, unit: nn.Module, path: str, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Whole fp32 values of a unit's parameters, by name, as transformers would draw them.

    Args:
        base: whose `_init_weights` it is.
        unit: on meta, and not needed afterwards.

    Raises:
        RecipeError: transformers leaves a parameter without a value.
    """
    unit.to_empty(device=generator.device)
    with torch.no_grad(), torch.device(generator.device), seeded(generator):
        for parameter in unit.parameters():
            parameter.fill_(float("nan"))
        unit.apply(base._init_weights)
    for name, parameter in unit.named_parameters(prefix=path):
        if bool(parameter.isnan().any()):
            raise RecipeError(
                f"model.config: transformers does not define the initial value of {name}", hint="give weights"
            )
        yield name, parameter.detach()
    unit.to("meta")


# ------------------------------------------------------------------------------- what a config's check asks


def conversion_fault(values: Mapping[str, Any]) -> str | None:
    """Why the tensors of a Hugging Face folder are not the modules' parameters; None: they are."""
    with quiet():
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model_type = values["model_type"]
        names = (model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""))
        converted = any(get_checkpoint_conversion_mapping(name) for name in names)
    if not converted:
        return None
    return (
        f"transformers converts the tensors of a {model_type} folder (it has stacked experts, or names "
        f"that differ from the files), which hf_causal_lm does not"
    )


def plan_fault(values: Mapping[str, Any]) -> str | None:
    """Why a model cannot be cut by tensor parallelism, as far as its config says; None: it may."""
    try:
        config = hf_config(values)
    except RecipeError as error:
        return error.message
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        return f"transformers declares no tensor parallel plan for {config.model_type}"
    other = sorted({style for style in plan.values() if style not in STYLES})
    if other:
        return (
            f"transformers' plan for {config.model_type} uses {', '.join(other)}, which titan does "
            f"not support"
        )
    return None


def is_norm(module: nn.Module) -> bool:
    """Whether it norms single tokens, or heads; by its name, as transformers itself finds them."""
    own = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(own) and all(p.ndim == 1 for p in own)


def tensor_plan(config: Any, model: nn.Module, base: Any, output: nn.Module) -> dict[str, str]:
    """Every parameter's style, from the plan that transformers declares for a base's modules.

    What it says nothing of, and is no norm, is left out: tensor parallelism then refuses it by name.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    declared = {pattern: STYLES[style] for pattern, style in plan.items() if style in STYLES}
    paths = {module: path for path, module in base.named_modules()}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        place = paths.get(module, "")
        style = next((style for pattern, style in declared.items() if fnmatchcase(place, pattern)), None)
        if module in (output, base.get_input_embeddings()):
            found |= dict.fromkeys(own, "vocab")
        elif is_norm(module):
            found |= dict.fromkeys(own, "norm")
        elif style is not None and isinstance(module, nn.Linear):
            found |= dict.fromkeys(own, style)
    return found
