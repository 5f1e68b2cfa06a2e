"""Outputs of run(): the caller's buffers, and the base and layout of the log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import validate


class Outputs(NamedTuple):
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    lse_base: str | float = "log2"  # a name, or what base-2 logarithms are multiplied by
    lse_layout: str = "NH"  # or "HN", or "STATS": [tokens, num_qo_heads, maximum and sum]


DEFAULT_OUTPUTS = Outputs()


def outputs_of(a: Any) -> Outputs:
    """Outputs from a call's out, lse, return_lse, lse_base and lse_layout."""
    return run_outputs(a.out, a.lse, a.return_lse, a.lse_base, a.lse_layout)


def run_outputs(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
) -> Outputs:
    """The outputs of one run. Called for every layer, so the usual forms take one test."""
    usual = lse_base == "log2" and lse_layout == "NH"
    if usual and out is None and lse is None and return_lse is False:
        return DEFAULT_OUTPUTS
    outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
    if not usual or (return_lse is not False and return_lse is not True):
        validate.flag("return_lse", return_lse)
        validate.one_of("lse_base", lse_base, tuple(validate.LSE_SCALES))
        validate.one_of("lse_layout", lse_layout, validate.LSE_LAYOUTS)
    return outputs
