"""The outputs of a call: those that it is given, with memory around them, and what it returned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from preflash.testing.inputs import Inputs

from . import guarded
from .guarded import Guarded, Padding, bits
from .problems import Brought


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor | None  # [tokens, heads] whatever the layout of the call
    failures: list[str]

    def rows(self, begin: int, end: int) -> Result:
        return Result(self.out[begin:end], None if self.lse is None else self.lse[begin:end], [])

    def copy(self) -> Result:
        return Result(self.out.clone(), None if self.lse is None else self.lse.clone(), [])

    def same_bits(self, other: Result) -> bool:
        pairs = [(self.out, other.out)]
        if self.lse is not None and other.lse is not None:
            pairs.append((self.lse, other.lse))
        return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in pairs)


class GivenOutputs:
    """Fresh out and lse for one call; None where it makes its own."""

    def __init__(
        self,
        inputs: Inputs,
        *,
        out: Brought,
        lse: Brought,
        lse_layout: str,
        padding: Padding,
    ) -> None:
        self._inputs, self._padding, self._lse_layout = inputs, padding, lse_layout
        case = inputs.case
        shape = (inputs.q.shape[0], case.num_qo_heads)
        self._out = self._brought(out, (*shape, case.dim_vo), case.dtype_o)
        shape = shape if lse_layout == "NH" else shape[::-1]
        self._lse = self._brought(lse, shape, torch.float32)

    @property
    def out(self) -> torch.Tensor | None:
        return None if self._out is None else self._out.given

    @property
    def lse(self) -> torch.Tensor | None:
        return None if self._lse is None else self._lse.given

    def settle(self, returned, *, with_lse: bool) -> Result:
        """Returns the call's results and failures. with_lse: the call returned (out, lse)."""
        failures = []
        got_out, got_lse = returned if with_lse else (returned, None)
        for name, got, mine in (("out", got_out, self._out), ("lse", got_lse, self._lse)):
            failures += [] if mine is None else mine.failures(name, got)
        if got_out.dtype != self._inputs.case.dtype_o:
            failures.append(f"out is {got_out.dtype}")
        if got_lse is None:
            got_lse = self.lse
        if got_lse is not None and self._lse_layout == "HN":
            got_lse = got_lse.t()
        begin = self._padding.before
        end = begin + self._inputs.q.shape[0]
        for name, got, mine, blank in (
            ("out", got_out, self._out, 0.0),
            ("lse", got_lse, self._lse, -math.inf),
        ):
            if mine is None and got is not None:
                nobodys = torch.cat([got[:begin], got[end:]]).float()
                if bool((nobodys != blank).any()):
                    failures.append(f"{name}: rows of no request are not {blank}")
        own = Result(got_out, got_lse, []).rows(begin, end)
        return replace(own, failures=failures)

    def _brought(
        self, brought: Brought, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Guarded | None:
        if brought is Brought.ABSENT:
            return None
        return guarded.output(
            shape,
            dtype,
            self._inputs.q.device,
            self._inputs.case.garbage,
            strided=brought is Brought.STRIDED,
            padding=self._padding,
            tokens_last=len(shape) == 2 and self._lse_layout == "HN",
        )
