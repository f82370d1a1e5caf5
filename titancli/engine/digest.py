"""A step's digest: hashes of its rows, gradients and weights, made on the device and read later.

They are sums of the values' bits, each times an odd number that depends on its place, modulo 2^64: any single
bit changes them, and integers are added in any order to the same sum. Of a tensor with more values than
`SAMPLES` a part is read, at other places each step.
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
"""Values that are read of a tensor, at most."""
BUDGET = 1 << 22
"""Values that are read of all tensors, at most: they are copied, 8 bytes each."""
PERIOD = 1 << 16
"""After so many values the factors repeat."""
MIX = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1)
"""Odd numbers with irregular bits (xxhash's primes)."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digests:
    """Makes the digests of an engine's steps and hands them to a writer, in order, without waiting; a hook
    (`titancli.engine.step`)."""

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
        """Of the step under way: the sum of the hashes of this rank's rows, and those of its gradients."""

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Hash the weights that training starts with, after `step` steps."""
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
        """Hash the weights after a step, and write what has arrived on the host."""
        weights = self._of_weights(step.number)
        numbers = torch.stack((step.average.float(), step.norm.float())).view(torch.int32).long()
        whether = torch.zeros_like(self._rows) if step.skipped is None else step.skipped.long()
        hashes = (self._gradients.to(step.norm.device), weights.to(step.norm.device))
        told = torch.cat((numbers, torch.stack((whether, self._rows)), *hashes))
        self._pending.append((step.number, Copy(told)))
        self.write()

    def write(self, *, wait: bool = False) -> None:
        """Write what has arrived on the host, or with `wait` everything."""
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
    """Return a hash of each row, [B] int64: of its tokens and targets, or of everything where it has none.

    Positions and what a loss has added are left out, so that the same rows have the same hash in any run.
    """
    names = [name for name in ("tokens", "targets") if name in batch] or sorted(batch)
    total = torch.zeros(batch.rows, dtype=torch.int64, device=batch[names[0]].device)
    for number, name in enumerate(names):
        values = batch[name].reshape(batch.rows, -1).contiguous()
        bits = values if values.dtype == torch.int64 else _bits(values)
        total += (bits * _factors(bits.shape[1], bits.device, number)).sum(1)
    return _mixed(total)


def sums(named: Sequence[tuple[str, Tensor | None]], step: int) -> Tensor:
    """Return the sum of the tensors' hashes, and the same with each one times its place (from 1) in the list:
    [2] int64, of which the lower 32 bits count. What is None has the hash 0."""
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
    """Values that are read of each of so many tensors, at most."""
    return max(1, min(SAMPLES, BUDGET // max(1, count)))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sums_of(samples: list[tuple[int, Tensor]]) -> Tensor:
    """[2] int64 of samples of one dtype and device, each with its place."""
    device = samples[0][1].device
    ends, places = _numbers(tuple((place, sample.numel()) for place, sample in samples), device)
    bits = _bits(torch.cat([sample for _, sample in samples])).add_(1)  # a zero counts too
    whole = bits.numel() // PERIOD * PERIOD
    factors = _factors(min(PERIOD, bits.numel()), device, 0)
    bits[:whole].view(-1, factors.numel()).mul_(factors)
    bits[whole:].mul_(factors[: bits.numel() - whole])
    totals = bits.cumsum_(0)[ends]
    hashes = _mixed(torch.diff(totals, prepend=totals.new_zeros(1))) & 0xFFFFFFFF
    return torch.stack((hashes.sum(), (hashes * places).sum()))


@functools.lru_cache(maxsize=16)
def _numbers(places: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each sample ends, and its place: on the device, which a copy at each step would wait for."""
    counts = torch.tensor([count for _, count in places])
    return (counts.cumsum(0) - 1).to(device), torch.tensor([place for place, _ in places], device=device)


def _sample(tensor: Tensor, most: int, step: int) -> Tensor:
    """At most `most` values of a tensor, evenly spaced, from a place on that moves with the step; as many
    each step."""
    flat = tensor.contiguous().view(-1)
    stride = -(-flat.numel() // most)
    count = flat.numel() // stride
    begins = flat.numel() - stride * (count - 1)  # places to begin at, so that the last value is read too
    return flat[step % begins :: stride][:count]


def _bits(values: Tensor) -> Tensor:
    """The bits of each value as int64, in memory of their own."""
    if values.is_complex():
        values = torch.view_as_real(values)
    kind = torch.uint8 if values.dtype == torch.bool else BITS[values.element_size()]
    return values.view(kind).to(torch.int64, copy=True)


def _factors(count: int, device: torch.device, number: int) -> Tensor:
    """[count] odd int64."""
    return _mixed(torch.arange(1 + number * count, 1 + (number + 1) * count, device=device)) | 1


def _mixed(numbers: Tensor) -> Tensor:
    """int64 with all bits mixed, one to one (the end of xxhash)."""
    mixed = numbers * MIX[0]
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    mixed = mixed * MIX[1]
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


def _float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
