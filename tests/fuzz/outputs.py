"""The outputs of a call: those that it is given, with memory around them, and what it returned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from preflash.testing.inputs import Inputs

from . import guarded
from .guarded import Guarded, bits
from .problems import Brought


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
    """Fresh out and lse for one call, with `padding` rows before and behind those of requests; None
    where the call makes its own."""

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
        failures = []
        for name, got, mine in (("out", out, self._out), ("lse", lse, self._lse)):
            failures += [] if mine is None else mine.failures(name, got)
        if out.dtype != self._inputs.case.dtype_o:
            failures.append(f"out is {out.dtype}")
        lse = self.lse if lse is None else lse
        if lse is not None and self._lse_layout == "HN":
            lse = lse.t()
        for name, got, mine, blank in (
            ("out", out, self._out, 0.0),
            ("lse", lse, self._lse, -math.inf),
        ):
            if mine is None and got is not None:
                nobodys = torch.cat([got[: self._begin], got[self._end :]]).float()
                if bool((nobodys != blank).any()):
                    failures.append(f"{name}: rows of no request are not {blank}")
        return replace(Result(out, lse, []).rows(self._begin, self._end), failures=failures)

    def _brought(
        self, brought: Brought, shape: tuple[int, ...], dtype: torch.dtype, own: object
    ) -> Guarded | None:
        if brought is Brought.ABSENT:
            return None
        garbage, strided = self._inputs.case.garbage, brought is Brought.STRIDED
        device = self._inputs.q.device
        return guarded.output(shape, dtype, device, garbage, strided=strided, own=own)
