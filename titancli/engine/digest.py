"""The digest of a step: hashes of its rows, gradients and weights, computed on the device and read later.

A hash is the sum of the values' bits, each multiplied by an odd factor that depends on its position, modulo
2^64: any single bit changes it, and integer sums do not depend on the order. Tensors with more than `SAMPLES`
values are sampled at positions that change each step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titancli.engine.skip_step import Copy

if TYPE_CHECKING:
    from titancli.engine.step import Backward, Step
    from titancli.observe.digests import DigestWriter
    from titancli.protocols import Converter
    from titancli.protocols.batch import Batch

SAMPLES = 1 << 14
"""Maximum number of values read per tensor."""
BUDGET = 1 << 22
"""Maximum number of values read over all tensors; they are copied, 8 bytes each."""
PERIOD = 1 << 16
"""Number of values after which the factors repeat."""
MIX = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1)
"""Odd numbers with irregular bits (xxhash's primes)."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """A callback (`titancli.protocols.Callback`) that computes the digests of an engine's steps and passes
    them to a writer, in order, without waiting."""

    def __init__(
        self, writer: DigestWriter, named: Iterable[tuple[str, Tensor]], converters: Sequence[Converter] = ()
    ) -> None:
        """
        Args:
            named: the trained parameters, in the order of the writer's `names`.
        """
        self._writer, self._named, self._converters = writer, list(named), converters
        self._pending: deque[tuple[int, Copy]] = deque()
        self._rows = self._gradients = torch.zeros(())
        """Sums of the hashes of this rank's rows and of its gradients, in the current step."""

    @torch.no_grad()
    def run_start(self, step: int) -> None:
        """Hash the initial weights of training, after `step` steps."""
        most = _most(len(self._named))
        sampled = any(_local(parameter).numel() > most for _, parameter in self._named)
        self._writer.start_with([n % 2**32 for n in self._of_weights(step).tolist()], sampled=sampled)

    @contextmanager
    def around_backward(self, backward: Backward) -> Iterator[None]:
        yield
        rows = torch.stack([row_hashes(batch).sum() for batch in backward.batches]).sum()
        self._rows = rows if backward.is_first else self._rows + rows

    @torch.no_grad()
    def gradients_ready(self, step: Step) -> None:
        self._gradients = sums([(name, parameter.grad) for name, parameter in self._named], step.number)

    @torch.no_grad()
    def step_applied(self, step: Step) -> None:
        """Hash the weights after a step, and write the digests that have reached the host."""
        weights = self._of_weights(step.number)
        numbers = torch.stack((step.average.float(), step.norm.float())).view(torch.int32).long()
        whether = torch.zeros_like(self._rows) if step.skipped is None else step.skipped.long()
        hashes = (self._gradients.to(step.norm.device), weights.to(step.norm.device))
        record = torch.cat((numbers, torch.stack((whether, self._rows)), *hashes))
        self._pending.append((step.number, Copy(record)))
        self.write()

    def run_end(self, why: str) -> None:
        self.write(wait=True)

    def close(self, error: BaseException | None) -> None:
        self._writer.close()

    def write(self, *, wait: bool = False) -> None:
        """Write the digests that have reached the host, or with `wait` all of them."""
        while self._pending:
            step, copy = self._pending[0]
            found: Any = copy.wait() if wait else copy.read()
            if found is None:
                return
            self._pending.popleft()
            loss, norm, skipped, rows, *hashes = (int(number) for number in found)
            self._writer.write(
                step,
                loss=_float(loss),
                grad_norm=_float(norm),
                skipped=skipped,
                rows=rows % 2**64,
                gradients=[number % 2**32 for number in hashes[:2]],
                weights=[number % 2**32 for number in hashes[2:]],
            )

    def _of_weights(self, step: int) -> Tensor:
        return sums([(name, self._plain(name, parameter)) for name, parameter in self._named], step)

    def _plain(self, name: str, parameter: Tensor) -> Tensor:
        tensor = parameter.detach()
        for converter in reversed(self._converters):
            tensor = converter.plain(name, tensor)
        return tensor


def row_hashes(batch: Batch) -> Tensor:
    """Return a hash of each row, [B] int64, over its tokens and targets, or over all inputs if it has
    neither.

    Positions and entries added by a loss are excluded, so that equal rows have equal hashes in every run.
    """
    names = [name for name in ("tokens", "targets") if name in batch] or sorted(batch)
    total = torch.zeros(batch.rows, dtype=torch.int64, device=batch[names[0]].device)
    for number, name in enumerate(names):
        values = batch[name].reshape(batch.rows, -1).contiguous()
        bits = values if values.dtype == torch.int64 else _bits(values)
        total += (bits * _factors(bits.shape[1], bits.device, number)).sum(1)
    return _mixed(total)


def sums(named: Sequence[tuple[str, Tensor | None]], step: int) -> Tensor:
    """Return the sum of the tensors' hashes, and the sum weighted by position in the list (from 1): [2]
    int64, of which the lower 32 bits count. None hashes to 0."""
    most = _most(len(named))
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for place, (_, tensor) in enumerate(named, 1):
        local = None if tensor is None else _local(tensor)
        if local is not None and local.numel():
            sample = _sample(local.detach(), most, step)
            groups.setdefault((local.dtype, local.device), []).append((place, sample))
    parts = [_sums_of(found) for found in groups.values()]
    total = parts[0] if parts else torch.zeros(2, dtype=torch.int64)
    for part in parts[1:]:
        total = total + part.to(total.device)
    return total


def _most(count: int) -> int:
    """Return the maximum number of values to read of each of `count` tensors."""
    return max(1, min(SAMPLES, BUDGET // max(1, count)))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sums_of(samples: list[tuple[int, Tensor]]) -> Tensor:
    """Return the sums of samples of one dtype and device, each with its position: [2] int64."""
    device = samples[0][1].device
    ends, places = _numbers(tuple((place, sample.numel()) for place, sample in samples), device)
    bits = _bits(torch.cat([sample for _, sample in samples])).add_(1)  # so that zeros count
    whole = bits.numel() // PERIOD * PERIOD
    factors = _factors(min(PERIOD, bits.numel()), device, 0)
    bits[:whole].view(-1, factors.numel()).mul_(factors)
    bits[whole:].mul_(factors[: bits.numel() - whole])
    totals = bits.cumsum_(0)[ends]
    hashes = _mixed(torch.diff(totals, prepend=totals.new_zeros(1))) & 0xFFFFFFFF
    return torch.stack((hashes.sum(), (hashes * places).sum()))


@functools.lru_cache(maxsize=16)
def _numbers(places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where each sample ends, and its position: on the device, because a copy each step would wait for
    it."""
    counts = torch.tensor([count for _, count in places])
    return (counts.cumsum(0) - 1).to(device), torch.tensor([place for place, _ in places], device=device)


def _sample(tensor: Tensor, most: int, step: int) -> Tensor:
    """Return up to `most` values of a tensor, evenly spaced from an offset that moves with the step; the
    count is the same each step."""
    flat = tensor.contiguous().view(-1)
    stride = -(-flat.numel() // most)
    count = flat.numel() // stride
    begins = flat.numel() - stride * (count - 1)  # possible offsets; the last value can be read too
    return flat[step % begins :: stride][:count]


def _bits(values: Tensor) -> Tensor:
    """Return the bits of each value as int64, in new memory."""
    if values.is_complex():
        values = torch.view_as_real(values)
    kind = torch.uint8 if values.dtype == torch.bool else BITS[values.element_size()]
    return values.view(kind).to(torch.int64, copy=True)


def _factors(count: int, device: torch.device, number: int) -> Tensor:
    """Return [count] odd int64 factors."""
    return _mixed(torch.arange(1 + number * count, 1 + (number + 1) * count, device=device)) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """Return int64 with all bits mixed, one to one (the finalizer of xxhash)."""
    mixed = numbers * MIX[0]
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    mixed = mixed * MIX[1]
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


def _float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
