"""Any causal language model of transformers, trained by titan's engine; and its Hugging Face form.

The modules are transformers' own, under their own names, so that a folder's tensors are the parameters as
they are. titan provides the output, with the loss inside it; document masks; initialization that does not
depend on the layout; and tensor-parallel styles, from the plan that transformers declares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from titan_transformers import HFCausalLM
from titan_transformers.attention import Rows
from titan_transformers.cache import Cache
from titan_transformers.parts import run_base, take_apart
from titan_transformers.roles import declared_roles
from titan_transformers.rope import GrowingRope
from titan_transformers.stages import AFTER, BEFORE, Border, Passed, stage_of
from titan_transformers.tensor_plan import Sharded, plan_fault, prepare, sharded, tensor_plan
from titan_transformers.trial import Tried, try_cache_once, try_once
from titan_transformers.values import initial_values
from titancli.distributed.collectives import gather_same
from titancli.distributed.local import SEQUENCE
from titancli.errors import RecipeError
from titancli.models.blocks.attention_window import document_positions
from titancli.models.blocks.head import Output
from titancli.models.blocks.init import fill
from titancli.models.blocks.masks import document_masks
from titancli.models.blocks.moe import Experts

if TYPE_CHECKING:
    from titancli import LossResult
    from titancli.distributed.collectives import Group
    from titancli.distributed.local import RowCut
    from titancli.protocols import Loss, Role
    from titancli.protocols.batch import Batch


JOINS = (
    "rows cannot be sharded, because not only titan's attention joins tokens (recurrent layers, "
    "convolutions, or attention in the model's own code do)"
)


class Blocks(nn.ModuleList):
    """A list of blocks with the dict interface of a model's `layers`."""

    def items(self) -> Iterable[tuple[str, nn.Module]]:
        return [(name, block) for name, block in self._modules.items() if not isinstance(block, Passed)]

    def values(self) -> Iterable[nn.Module]:
        return [block for _, block in self.items()]


class TransformersModel(nn.Module):
    """The children of a transformers `…ForCausalLM`, under their names."""

    inputs = ("tokens", "positions", "document_ids")
    sequence_dim: ClassVar = {"tokens": 1, "positions": 1}
    row_cut: RowCut | None = None
    """How rows are split over ranks; set by context parallelism."""
    tensor_group: Group | None = None
    """The ranks that each have a part of a row between regions; set by tensor parallelism."""
    apart = False
    """Whether documents must be rows of their own, as needed by layers that are not attention."""
    stage_ends = ((BEFORE,), (AFTER,))
    first = last = True
    """Whether this stage has the modules before the blocks, and after them."""
    border: Border | None = None
    """Input and output of a pipeline stage."""
    embeds_alone = True
    """Whether the modules before the blocks can be a stage of their own."""
    sharded: Sharded
    """Tensor-parallel sharding; set by `build`."""
    mesh_faults: Mapping[str, str] = {}
    """See `titancli.protocols.ModelDefaults`; set by `build`."""

    def __init__(self, config: HFCausalLM) -> None:
        """Create the model on meta; see `build`."""
        super().__init__()
        self.config = config
        parts = take_apart(config.values)
        self._parts = parts
        self.add_module(parts.base_name, parts.base)
        self.add_module(parts.head_name, parts.head)
        self.layers.__class__ = Blocks
        self._tied = self.tied

    @property
    def base(self) -> Any:
        """Return the module from tokens to hidden states."""
        return getattr(self, self._parts.base_name)

    @property
    def output(self) -> Output:
        return getattr(self, self._parts.head_name)

    @property
    def whole(self) -> Any:
        """Return transformers' own model of these modules, without values of its own."""
        return self._parts.whole

    @property
    def head_name(self) -> str:
        return self._parts.head_name

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Stacked experts by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Experts)}

    def stage(self, names: Collection[str]) -> TransformersModel:
        """Return a pipeline stage's part of the model.

        Raises:
            RecipeError: blocks pass more than hidden states, or the first and last stage would share a
                weight.
        """
        if (fault := self.mesh_faults.get("pp")) is not None:
            raise RecipeError(f"mesh.pp: {fault}", hint="set mesh.pp = 1")
        if not self.embeds_alone and (BEFORE in names) != ("layers.0" in names):
            raise RecipeError(
                f"mesh.pp: {self._parts.config.model_type}: embeddings are changed before the first block",
                hint="have the first stage begin with embeddings and layers.0",
            )
        if self.tied:
            raise RecipeError(
                "mesh.pp: tied weights cannot be split into pipeline stages: the first and last stage would "
                "share a parameter",
                hint="set mesh.pp = 1, or model.config.tie_word_embeddings = false",
            )
        part: TransformersModel = stage_of(self, names, self._parts.gives_tuples)
        return part

    @property
    def rope(self) -> GrowingRope | None:
        """RoPE that depends on the other rows in a batch, if the model has it."""
        return self._parts.rope

    @property
    def layers(self) -> Any:
        """Return the blocks."""
        return self.base.get_submodule(self._parts.layers_path)

    @property
    def tied(self) -> bool:
        """Return whether the output uses the embedding's weight."""
        if self.border is not None:
            return False
        return self.output.weight is self.base.get_input_embeddings().weight

    def tie(self) -> None:
        """Tie the output's weight to the embedding's again, if they are tied but were reallocated."""
        if self._tied:
            self.output.weight = self.base.get_input_embeddings().weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        batch: Batch | None = None,
        loss: Loss | None = None,
        cache: Cache | None = None,
    ) -> Tensor | LossResult:
        """Return logits [B, S, V], or a LossResult if a loss is given; with a cache, the logits of the last
        token of each row, [R, V].

        Args:
            tokens: [B, S] int64.
            positions: [B, S] int64; None counts from 0 in every row.
            document_ids: [B, S]; None means that a row is one document, whatever its positions are.
            batch: the batch that the loss is computed on.
            loss: computed inside the output module.
            cache: holds the tokens before these; its `extend` says to which rows these, [1, N], are added.
        """
        if cache is not None:
            logits: Tensor = self.output(cache.run(self.base, tokens)[None])
            return logits[0]
        if self.border is not None:
            return self._stage(self.border, tokens, positions, document_ids, batch, loss)
        if self.rope is not None:
            ranks = 1 if self.row_cut is None else self.row_cut.group.size
            self.rope.refuse(self._parts.config, tokens.shape[1] * ranks)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if self.apart and document_ids is not None:
            hidden = self._documents_apart(tokens, document_ids)
        else:
            hidden = self._hidden(tokens, positions, document_ids)
        return self.output(hidden, batch, loss)

    def _stage(
        self,
        border: Border,
        entering: Tensor,
        positions: Tensor | None,
        document_ids: Tensor | None,
        batch: Batch | None,
        loss: Loss | None,
    ) -> Any:
        """Run `forward` of a stage: the first takes tokens, the others hidden states, and all but the last
        return hidden states."""
        if positions is None:
            raise TypeError("a stage needs positions")
        if self.rope is not None:
            ranks = 1 if self.row_cut is None else self.row_cut.group.size
            self.rope.refuse(self._parts.config, positions.shape[1] * ranks)
        border.received, border.sent = None if self.first else entering, None
        tokens = entering if self.first else torch.zeros_like(positions)
        hidden, sent = self._hidden(tokens, positions, document_ids), border.sent
        border.received = border.sent = None
        return self.output(hidden, batch, loss) if self.last else sent

    def _hidden(self, tokens: Tensor, positions: Tensor, document_ids: Tensor | None) -> Tensor:
        pieces = None
        if self.row_cut is not None and document_ids is not None:
            pieces = self.row_cut.queries(document_ids.shape[1])
        rows = Rows(document_ids, document_masks(document_ids, pieces))
        self._length = tokens.shape[1]
        # Bases also ask tokens for the number that they work on. Rows of unequal parts are rejected at the
        # embedding.
        if (group := self.tensor_group) is not None and self._length % group.size == 0:
            tokens = tokens.chunk(group.size, 1)[group.rank]
        return run_base(self.base, self._parts.config, tokens, positions, rows)

    def tensor_parallel(self, group: Group, style: str | None) -> None:
        """Shard the model; called by the `decoder` plan. The base gets this rank's part of the tokens, but
        embeds all of them, since a rank has a part of the vocabulary."""
        self.tensor_group = group
        for module in self.base.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._whole_row)

    def _whole_row(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tokens of all ranks; positions are already whole."""
        if self.tensor_group is None or args[0].shape[-1] == self._length:
            return args
        return gather_same(args[0], SEQUENCE, self.tensor_group), *args[1:]

    def _documents_apart(self, tokens: Tensor, document_ids: Tensor) -> Tensor:
        """Return hidden states [B, S, dim], computed with each document as a row of its own, padded to the
        longest: reading its length waits for the device, but no layer sees another document. Padding comes
        after the document, which does not see it."""
        begins = torch.ones_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        row = begins.flatten().cumsum(0) - 1
        position = document_positions(document_ids).flatten()
        count, longest = (torch.stack((row[-1], position.max())) + 1).tolist()
        place = row * longest + position
        apart = tokens.new_zeros(count * longest).index_copy(0, place, tokens.flatten())
        counted = torch.arange(longest, device=tokens.device)[None]
        hidden = self._hidden(apart.view(count, longest), counted, None)
        return hidden.flatten(0, 1)[place].view(*tokens.shape, -1)

    def new_cache(self) -> Cache:
        """Return an empty cache for `forward(tokens, cache=…)`; its memory grows with the rows.

        Raises:
            RecipeError: a tiny copy gives other logits with transformers' cache.
        """
        try_cache_once(self.config.values, _on_meta)
        return Cache(self._parts)

    # ------------------------------------------------------------------------------------------- values

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Initialize as transformers does.

        A block, or a module before or after the blocks, is drawn whole from the generator of its first
        parameter, on a second model that has memory for one of them at a time.
        """
        mine = dict(self.named_parameters())
        with torch.device("meta"):
            plain = TransformersModel(self.config)
        for path, unit, whole in plain._units():
            first = next((name for name, _ in unit.named_parameters(path, recurse=whole)), None)
            if first is None or first not in mine:
                continue  # without parameters, or tied to a parameter drawn elsewhere
            for name, value in initial_values(plain.base, unit, path, generator_for(first), whole=whole):
                fill(mine[name], lambda whole, value=value: whole.copy_(value))  # type: ignore[misc]

    def _units(self) -> Iterable[tuple[str, nn.Module, bool]]:
        """Return the blocks, every module above them, and those modules' other children, by name; and
        whether a module's submodules belong to it."""
        found: list[tuple[str, nn.Module, bool]] = []
        above: nn.Module = self
        path = ""
        for step in f"{self._parts.base_name}.{self._parts.layers_path}".split("."):
            found += [(f"{path}{n}", child, n != step) for n, child in above.named_children()]
            path, above = f"{path}{step}.", above.get_submodule(step)
        return found + [(f"{path}{name}", block, True) for name, block in above.named_children()]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep buffers' values and dtypes: rotary frequencies in bfloat16 would differ. Coming from meta,
        they get the values that transformers computes."""
        before = dict(self.base.named_buffers())
        super()._apply(fn, recurse)
        for name, now in list(self.base.named_buffers()):
            if not now.is_meta:
                path, _, key = name.rpartition(".")
                value = self._parts.buffers[name] if before[name].is_meta else before[name]
                self.base.get_submodule(path)._buffers[key] = value.to(now.device, copy=True)
        return self

    # -------------------------------------------------------------------------------------- what it says

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Return the styles of layers from transformers' plan, or by usual names; without shardable
        layers, only those of modules that need none."""
        parts = self._parts
        experts = set(parts.experts.values())
        return tensor_plan(self, self.base, self.output, experts, self.sharded)

    @property
    def roles(self) -> dict[str, Role]:
        """Return the roles of routers, and of GPT-2's linear layers, which are not nn.Linear."""
        return dict(declared_roles(self, self.whole))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs per token: 6 per matrix weight applied to a token, and 12 · layers · width of
        attention · seq_len.

        Source: PaLM (arXiv 2204.02311), appendix B.
        """
        config = self._parts.config
        matrices = float(sum(p.numel() for p in self.parameters()))
        looked_up = (module.weight for module in self.modules() if isinstance(module, nn.Embedding))
        matrices -= sum(weight.numel() for weight in looked_up if weight is not self.output.weight)
        chosen = getattr(config, "num_experts_per_tok", None)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((n for name in names if (n := getattr(config, name, None))), None)
        if isinstance(chosen, list):  # one per layer
            chosen = sum(chosen) / len(chosen)
        if chosen and experts:
            stacked = sum(p.numel() for n, p in self.named_parameters() if ".experts." in n)
            matrices -= (1 - chosen / experts) * stacked
        # If layers differ, transformers raises on attributes of the whole config.
        differ = getattr(config, "is_heterogeneous", False)
        widths = sum(map(_width, config.per_layer_config if differ else [config] * len(self.layers)))
        return 6.0 * matrices + 12.0 * widths * seq_len


def _width(config: Any) -> int:
    """Return the width of queries in a layer, over all heads."""
    heads: int = getattr(config, "num_attention_heads", None) or 0  # a recurrent model has none
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def build(config: HFCausalLM, *, seq_len: int) -> TransformersModel:
    """Build the model on the current device, without initializing it.

    Raises:
        RecipeError: transformers has no such model, or titan cannot train it; says why.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = TransformersModel(config)
    tried = try_once(config.values, _on_meta)
    model.apart, model.embeds_alone = tried.apart, tried.embeds_alone
    model.sharded = sharded(model._parts.config, model.base, tried.unlike)
    readers = set(model.layers) if tried.reads_weights else set()
    prepare(model.base, set(model._parts.experts.values()), model.sharded, readers)
    model.mesh_faults = dict(_mesh_faults(model, tried))
    if device.type != "meta":
        model.to_empty(device=device)
        model.tie()
    return model


def _mesh_faults(model: TransformersModel, tried: Tried) -> Iterator[tuple[str, str]]:
    parts = model._parts
    kind = parts.config.model_type
    if tried.apart:
        yield "pp", f"{kind}: documents are computed as rows of their own, which stages do not do"
    elif not tried.staged:
        yield "pp", f"{kind}: blocks pass each other more than hidden states"
    if not tried.tokenwise:
        yield from dict.fromkeys(("cp", "tp"), f"{kind}: {JOINS}").items()
        return
    if parts.untraced is not None:
        yield "cp", f"{kind}: its attention is not known before it runs on data ({parts.untraced})"
    if fault := plan_fault(parts.config, model.sharded):
        yield "tp", fault


def _on_meta(values: Mapping[str, Any]) -> TransformersModel:
    with torch.device("meta"):
        return TransformersModel(HFCausalLM(config=dict(values)))
