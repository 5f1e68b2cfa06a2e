"""Where the results of run() go, and in which form the log-sum-exp is wanted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import values as check


class Outputs(NamedTuple):
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    lse_base: str | float = "log2"  # a name, or what base-2 logarithms are multiplied by
    lse_layout: str = "NH"  # or "HN", or "STATS": [tokens, num_qo_heads, maximum and sum]


DEFAULT_OUTPUTS = Outputs()


def run_outputs(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
) -> Outputs:
    """The outputs of one run. Called for every layer: the usual forms are not looked at twice."""
    usual = lse_base == "log2" and lse_layout == "NH"
    if usual and out is None and lse is None and return_lse is False:
        return DEFAULT_OUTPUTS
    outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
    if not usual or (return_lse is not False and return_lse is not True):
        check.flag("return_lse", return_lse)
        check.one_of("lse_base", lse_base, tuple(check.LSE_SCALES))
        check.one_of("lse_layout", lse_layout, check.LSE_LAYOUTS)
    return outputs
