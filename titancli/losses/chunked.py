"""Log-probabilities of targets straight from hidden states, in chunks of rows: the full logits never exist.

Functions for three kinds of loss:

- `linear_sum`: for a sum over rows whose gradient is known as soon as the logits are. It is made in forward,
  chunk by chunk, and each chunk's logits are used once.
- `linear_token_loss`: the same for −Σ w·log p.
- `linear_log_probs`: for any other loss, with the entropy of each row where one wants it. Keeps the
  log-sum-exp of each row, and makes the logits again in backward: one more matrix product, never the full
  logits.

The softmax is computed in place, in fp32; the weight's gradient is summed in fp32 whatever the dtype.

With a group the vocabulary is cut over its ranks: each has some rows of the weight, and for each chunk they
exchange the maximum, the sum and the target's logit of every row. The log-probabilities are then the same on
all ranks, and so must be what is made of them; the gradient of the hidden states is a part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titancli.distributed.collectives import Group, gather_same
from titancli.distributed.device import device_type
from titancli.losses import chunk

CHUNK_BYTES = {"cpu": 64 * 2**20}
"""The fp32 logits of one chunk take at most this, by device type."""
CHUNK_BYTES_GPU = 512 * 2**20
CHUNK_BYTES_COMPILED = 2**30
"""On a GPU, where compiled code makes no fp32 logits: those of one chunk, in their own dtype, take at most
this. For 128,256 words in bf16 it is 4,096 rows: each chunk reads and writes the weight's whole gradient."""
TILE = 128
"""Rows of a product that a GPU works on together."""
PARTS = 8
"""Number of parts of the vocabulary, if the weight's gradient is summed in another dtype than it is computed
in."""


class OfChunk(Protocol):
    """A sum over rows, of some of them."""

    def __call__(self, logits: Tensor, rows: slice, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Return what each row adds to the sum, [n] fp32, and the gradient of the sum by the logits, or None
        if it is not wanted.

        Args:
            logits: [n, V], in the dtype of the product, or fp32 if they are capped; may be overwritten, with
                their gradient, too.
            rows: which of all rows they are.
        """
        ...


def linear_sum(
    hidden: Tensor,
    weight: Tensor,
    of_chunk: OfChunk,
    *,
    tensors: int = 1,
    backend: str | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a sum over rows of any function of hidden · weightᵀ, with its gradient made in forward.

    Args:
        hidden: [..., D], any float dtype.
        weight: [V, D], the same dtype.
        of_chunk: called with the logits of some rows after those of others.
        tensors: number of fp32 tensors of the size of a chunk's logits that it holds at once, with them.
        backend: of torch.compile, if `of_chunk` is compiled: chunks are then larger on a GPU.
        cap: logits x are cap · tanh(x / cap), in fp32; None: they are as they are.

    Returns:
        The sum (fp32 scalar, with gradient, to be used once), and what each row adds to it, [...] fp32,
        without.
    """
    if not torch.is_grad_enabled():
        # An autograd Function sees requires_grad all the same, and this one would compute them.
        hidden, weight = hidden.detach(), weight.detach()
    total, each = _Sum.apply(hidden.flatten(0, -2), weight, of_chunk, tensors, backend, cap)
    return total, each.view(hidden.shape[:-1])


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    group: Group | None = None,
    backend: str | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−Σ w·log softmax(hidden · weightᵀ)[target].

    Args:
        hidden: [..., D], any float dtype.
        weight: [V, D], the same dtype; with a group this rank's rows of it.
        targets: [...] int64; negative is no target.
        token_weights: [...]; what stands where there is no target is not read.
        group: the ranks that the vocabulary is cut over, evenly.
        backend: of torch.compile, for what is done with each chunk's logits; None: nothing is compiled.
        cap: logits x are cap · tanh(x / cap), in fp32; None: they are as they are.

    Returns:
        The sum (fp32 scalar, with gradient), and the log-probabilities [...] (fp32, without; 0 where there is
        no target).
    """
    token_weights = token_weights.float().masked_fill(targets < 0, 0.0)  # before NaN is multiplied by 0
    own, weights = targets.flatten(), token_weights.flatten()
    log_probs = torch.empty_like(weights)
    token_loss = chunk.compiled(chunk.token_loss, backend)

    def of_chunk(logits: Tensor, rows: slice, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        log_probs[rows], at_targets = token_loss(logits, own[rows], weights[rows], group, wants_gradient)
        gradient = None if at_targets is None else chunk.put(logits, own[rows], at_targets, group)
        return -(log_probs[rows] * weights[rows]), gradient

    total, _ = linear_sum(hidden, weight, of_chunk, backend=backend, cap=cap)
    return total, log_probs.view(targets.shape)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: Group | None = None,
    backend: str | None = None,
    cap: float | None = None,
) -> Tensor:
    """log softmax(hidden · weightᵀ)[target], [...] fp32, 0 where there is no target; arguments as above."""
    found, _ = _LogProbs.apply(hidden.flatten(0, -2), weight, targets.flatten(), group, backend, cap, False)
    return found.view(targets.shape)


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: Group | None = None,
    backend: str | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same, and the entropy −Σ p·log p of softmax(hidden · weightᵀ) over the whole vocabulary, in
    nats: [...] fp32, 0 for rows without a target. Both carry their gradient; the gradient of an unused
    entropy costs nothing."""
    rows = hidden.flatten(0, -2)
    found, entropy = _LogProbs.apply(rows, weight, targets.flatten(), group, backend, cap, True)
    return found.view(targets.shape), entropy.view(targets.shape)


@torch.no_grad()
def linear_topk(
    hidden: Tensor, weight: Tensor, k: int, group: Group | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest of log softmax(hidden · weightᵀ), the largest first, and their ids: [..., k] fp32
    and int64, without gradient; arguments as above."""
    flat = hidden.flatten(0, -2)
    values = torch.empty(len(flat), k, dtype=torch.float32, device=hidden.device)
    ids = torch.empty(len(flat), k, dtype=torch.int64, device=hidden.device)
    for rows in _chunks(hidden, *_sizes(flat, weight), tensors=2, cap=cap):
        logits = capped(flat[rows] @ weight.t(), cap)[0].float()
        normaliser = logits.logsumexp(-1, keepdim=True)
        best, at = logits.topk(min(k, weight.shape[0]))
        if group is not None:  # of the largest on each rank
            normaliser = gather_same(normaliser, 1, group).logsumexp(-1, keepdim=True)
            best, at = (gather_same(x, 1, group) for x in (best, at + group.rank * weight.shape[0]))
            best, places = best.topk(k)
            at = at.gather(1, places)
        values[rows], ids[rows] = best - normaliser, at
    return values.view(*hidden.shape[:-1], k), ids.view(*hidden.shape[:-1], k)


@torch.no_grad()
def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) for rows with a target, [...] fp32, without gradient.

    Args:
        logits: [..., V], which are whole; not overwritten.
        targets: [...] int64; negative is no target.
    """
    flat, wanted = logits.flatten(0, -2), targets.flatten()
    found = torch.empty(wanted.shape, dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits, flat.shape[0], flat.shape[1], tensors=2):
        _, _, of_rows = chunk.log_probs(flat[rows].float().clone(), wanted[rows], None, True)
        found[rows] = of_rows
    return found.view(targets.shape)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        of_chunk: OfChunk,
        tensors: int,
        backend: str | None,
        cap: float | None,
    ) -> Any:
        each = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        gradients = _Gradients(hidden, weight, wants_hidden, wants_weight)
        for rows in _chunks(hidden, *_sizes(hidden, weight), tensors=tensors, backend=backend, cap=cap):
            logits, slope = capped(hidden[rows] @ weight.t(), cap)
            each[rows], gradient = of_chunk(logits, rows, wants_hidden or wants_weight)
            if gradient is not None:
                gradients.add(rows, _uncapped(gradient, slope, hidden))
            del logits, gradient, slope  # or they would lie beside the next chunk's
        ctx.gradients = gradients
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor | None) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked loss can be used only once, without retain_graph")
        gradients = ctx.gradients
        # Pipeline schedules that split backward come twice: for the hidden states, and for the weight.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.gradients = None
        return *gradients.times(scale), None, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: Group | None,
        backend: str | None,
        cap: float | None,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        normalisers = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if wants_entropy else log_probs.new_empty(0)
        of_chunk = chunk.compiled(chunk.log_probs, backend)
        tensors = 2 if wants_entropy else 1
        for rows in _chunks(hidden, *_sizes(hidden, weight), tensors=tensors, backend=backend, cap=cap):
            # No name for the logits: they would lie beside what is made of them.
            made = of_chunk(capped(hidden[rows] @ weight.t(), cap)[0], targets[rows], group, wants_entropy)
            log_probs[rows], normalisers[rows], found = made
            if wants_entropy:
                entropy[rows] = found
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropy)
        ctx.group, ctx.backend, ctx.cap = group, backend, cap
        ctx.set_materialize_grads(False)
        if not wants_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> Any:
        hidden, weight, targets, normalisers, entropy = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, *ctx.needs_input_grad[:2])
        none = targets < 0
        grad = torch.zeros_like(normalisers) if grad is None else grad.masked_fill(none, 0.0)
        if entropy_grad is not None:
            entropy_grad = entropy_grad.masked_fill(none, 0.0)
        of_chunk = chunk.compiled(chunk.log_probs_gradient, ctx.backend)
        tensors = 1 if entropy_grad is None else 2
        for rows in _chunks(
            hidden, *_sizes(hidden, weight), tensors=tensors, backend=ctx.backend, cap=ctx.cap
        ):
            logits, slope = capped(hidden[rows] @ weight.t(), ctx.cap)
            more = () if entropy_grad is None else (entropy[rows], entropy_grad[rows])
            at_targets = of_chunk(logits, normalisers[rows], targets[rows], grad[rows], ctx.group, *more)
            gradients.add(
                rows, _uncapped(chunk.put(logits, targets[rows], at_targets, ctx.group), slope, hidden)
            )
            del logits, slope  # or they would lie beside the next chunk's
        return *gradients.values(), None, None, None, None, None


def capped(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return cap · tanh(logits / cap) in fp32, and its derivative; without a cap the logits, and None.

    Source: Gemma 2 (arXiv 2408.00118, section 2).
    """
    if cap is None:
        return logits, None
    bent = torch.tanh(logits.float() / cap)
    return bent * cap, 1 - bent * bent


def _uncapped(grad: Tensor, slope: Tensor | None, hidden: Tensor) -> Tensor:
    """Return the gradient by logits before they were capped, in the dtype of the products."""
    return grad if slope is None else grad.mul_(slope).to(hidden.dtype)


class _Gradients:
    """Gradients of hidden states and weight, added to chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self.hidden = torch.empty_like(hidden) if wants_hidden else None
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self.weight = make(weight, dtype=torch.float32) if wants_weight else None
        self._is_empty = True
        """True if nothing has been added: the first product is written, not added to zeros."""
        self._scale: Tensor | None = None
        """Their factor so far."""

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add what the gradient of some rows' logits, [rows, V] in their dtype, gives both."""
        if self.hidden is not None:
            torch.mm(grad, self._weight, out=self.hidden[rows])
        if self.weight is None:
            return
        beta, hidden = 0 if self._is_empty else 1, self._hidden[rows]
        if grad.dtype == torch.float32:
            self.weight.addmm_(grad.t(), hidden, beta=beta)
        elif device_type(grad) != "cpu" and sums_in_float32(grad.device, grad.dtype):
            torch.addmm(self.weight, grad.t(), hidden, torch.float32, beta=beta, out=self.weight)
        else:
            # In parts: the product, of another dtype than the sum, would be a second copy of the weight.
            for total, part in zip(self.weight.chunk(PARTS), grad.chunk(PARTS, dim=1), strict=True):
                product = part.t() @ hidden
                total.copy_(product) if self._is_empty else total.add_(product)
        self._is_empty = False

    def values(self) -> tuple[Tensor | None, Tensor | None]:
        return self.hidden, None if self.weight is None else self.weight.to(self._weight.dtype)

    def times(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self._scale is not None:  # in use since the first time: a copy
            ratio = torch.where(scale == self._scale, 1.0, scale / self._scale)
            hidden, weight = self.values()
            return None if hidden is None else hidden * ratio, None if weight is None else weight * ratio
        self._scale = scale
        for gradient in (self.hidden, self.weight):
            if gradient is not None:
                gradient.mul_(scale)
        return self.values()


def _sizes(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    return hidden.shape[0], weight.shape[0]


def rows_at_once(most: int) -> int:
    """Return the number of rows of a chunk of at most `most` rows: a multiple of the tiles of matrix
    products, if there are enough."""
    return most - most % TILE if most > TILE else max(1, most)


def _chunks(
    beside: Tensor,
    rows: int,
    columns: int,
    *,
    tensors: int = 1,
    backend: str | None = None,
    cap: float | None = None,
) -> Iterator[slice]:
    """Yield slices of rows of which `tensors` fp32 tensors of logits fit in the limit of the device of
    `beside`; compiled code on a GPU has them in the dtype of `beside`. With a cap, their derivative counts
    too."""
    kind = device_type(beside)
    on_gpu = kind not in CHUNK_BYTES
    limit = CHUNK_BYTES.get(kind, CHUNK_BYTES_GPU)
    of_row = 4 * columns * (tensors if cap is None else tensors + 1)
    if on_gpu and backend is not None and cap is None:
        limit, of_row = CHUNK_BYTES_COMPILED, beside.element_size() * columns
    size = rows_at_once(limit // of_row)
    return (slice(start, start + size) for start in range(0, rows, size))


@cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device adds products of matrices in this dtype to an fp32 sum; it is tried once.

    torch has the operator for GPUs alone, and early versions of it took no sum of another dtype.
    """
    if device.type == "cpu":
        return False
    factor = torch.zeros(TILE, TILE, device=device, dtype=dtype)
    total = torch.zeros(TILE, TILE, device=device)
    try:
        torch.addmm(total, factor, factor, torch.float32, out=total)
    except (RuntimeError, TypeError):  # no such kernel, or no such argument
        return False
    return True
