"""Memory around a tensor that nobody may write, memory that nobody may write at all, and the
outputs of a call in such memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from preflash.testing.case import Garbage
from preflash.testing.inputs import PAD_COLUMNS, Inputs, fill_poison

from .problems import Brought

_BESIDE = 256  # bytes on each side of a workspace
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL = slice(None)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Views the memory as integers, in which NaN equals itself and -0 is not 0."""
    return t.view(_INTEGERS[t.element_size()])


def memory_of(t: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of the storage that the tensor is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


class Guarded:
    """A tensor `given` to a call, cut out of a larger one. The call may write `given[own]`."""

    def __init__(
        self, whole: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor], own: object = _ALL
    ) -> None:
        self._whole, self._cut, self._own = whole, cut, own
        self._before = whole.clone()
        self.given = cut(whole)

    def failures(self, name: str, got: torch.Tensor | None = None) -> list[str]:
        """Returns what is wrong with the memory after the call. got: the returned tensor."""
        found = []
        if got is not None and got is not self.given:
            found.append(f"{name} is not the tensor that was given")
        changed = bits(self._whole) != bits(self._before)
        self._cut(changed)[self._own] = False
        if spilled := int(changed.sum()):
            found.append(f"{name}: {spilled} elements around it were written")
        return found


def output(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    garbage: Garbage,
    *,
    strided: bool = False,
    own: object = _ALL,
) -> Guarded:
    """Makes garbage with guards before and behind it, and with `strided` also behind every row."""
    rows, *middle, columns = shape
    behind = PAD_COLUMNS if strided else 0
    whole = torch.empty(rows + 2, *middle, columns + behind, dtype=dtype, device=device)
    fill_poison(whole, torch.Generator().manual_seed(0), garbage)
    return Guarded(whole, lambda t: t[1 : 1 + rows, ..., :columns], own)


def workspace(num_bytes: int, device: torch.device | str) -> Guarded:
    """Makes exactly that much scratch memory, all bits set, so that whatever reads it gets NaN."""
    whole = torch.full((num_bytes + 2 * _BESIDE,), 255, dtype=torch.uint8, device=device)
    return Guarded(whole, lambda t: t[_BESIDE : _BESIDE + num_bytes])


def watched(tensors: dict[str, object]) -> Callable[[], list[str]]:
    """Returns a function that returns a failure for each tensor whose memory has changed since."""
    given = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    memory = {name: memory_of(t) for name, t in given.items()}
    before = {name: t.clone() for name, t in memory.items()}
    return lambda: [
        f"{name}, an input, was written"
        for name, t in memory.items()
        if not torch.equal(t, before[name])
    ]


def watched_inputs(inputs: Inputs) -> Callable[[], list[str]]:
    scales = {f"scale_{name}": scale for name, scale in vars(inputs.scales).items()}
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks")}
    return watched(tensors | scales | {"packed mask": inputs.packed_custom_mask})


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor | None  # [tokens, heads] whatever the layout of the call
    failures: list[str]

    def rows(self, begin: int, end: int) -> Result:
        return Result(self.out[begin:end], None if self.lse is None else self.lse[begin:end], [])

    def same_bits(self, other: Result) -> bool:
        pairs = [(self.out, other.out)]
        if self.lse is not None and other.lse is not None:
            pairs.append((self.lse, other.lse))
        return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in pairs)


class GivenOutputs:
    """Fresh out and lse for one call, with `padding` rows at both ends; None if absent."""

    def __init__(
        self, inputs: Inputs, lse_layout: str, padding: int, *, out: Brought, lse: Brought
    ) -> None:
        self._inputs, self._lse_layout, case = inputs, lse_layout, inputs.case
        tokens, heads = inputs.q.shape[:2]
        rows = tokens + 2 * padding
        self._begin, self._end = padding, padding + tokens
        own = slice(self._begin, self._end)
        self._out = self._brought(out, (rows, heads, case.dim_vo), case.dtype_o, own)
        if lse_layout == "NH":
            self._lse = self._brought(lse, (rows, heads), torch.float32, own)
        else:
            self._lse = self._brought(lse, (heads, rows), torch.float32, (slice(None), own))
        self.out, self.lse = (None if t is None else t.given for t in (self._out, self._lse))

    def settle(self, returned, *, with_lse: bool) -> Result:
        """Returns the call's results and failures. with_lse: the call returned (out, lse)."""
        out, lse = returned if with_lse else (returned, None)
        failures = [] if out.dtype == self._inputs.case.dtype_o else [f"out is {out.dtype}"]
        for name, got, mine in (("out", out, self._out), ("lse", lse, self._lse)):
            failures += [] if mine is None else mine.failures(name, got)
        lse = self.lse if lse is None else lse
        if lse is not None and self._lse_layout == "HN":
            lse = lse.t()
        rows, blanks = slice(self._begin, self._end), {"out": 0.0, "lse": -math.inf}
        for name, got, mine in (("out", out, self._out), ("lse", lse, self._lse)):
            if mine is None and got is not None:
                nobodys = torch.cat([got[: rows.start], got[rows.stop :]]).float()
                if bool((nobodys != blanks[name]).any()):
                    failures.append(f"{name}: rows of no request are not {blanks[name]}")
        return Result(out[rows], None if lse is None else lse[rows], failures)

    def _brought(
        self, brought: Brought, shape: tuple[int, ...], dtype: torch.dtype, own: object
    ) -> Guarded | None:
        if brought is Brought.ABSENT:
            return None
        garbage, strided = self._inputs.case.garbage, brought is Brought.STRIDED
        device = self._inputs.q.device
        return output(shape, dtype, device, garbage, strided=strided, own=own)
