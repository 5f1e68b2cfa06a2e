"""Draws and computes the problems of each `--call NAME`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from preflash.cli.machine import Place

from . import (
    append_problems,
    cudnn_problems,
    cudnn_trial,
    decode_problems,
    fmha_problems,
    pod_problems,
    pod_trial,
    problems,
    wrapper_trial,
)
from .random_cases import Limits
from .wrapper_trial import Verdict

_LONGEST = 700
# Milliseconds in the oracle, and several tiles, splits and requests all the same.
_WORK = 2e7

WRAPPERS = "wrappers"


@dataclasses.dataclass(frozen=True)
class Call:
    """Random problems for something that is called."""

    draw: Callable[[int, int, Place], Any]  # of a seed and an index
    examine: Callable[[Any, Place], Verdict]


def _limits(place: Place) -> Limits:
    return Limits(_LONGEST, _WORK, place.dtypes)


def _of(drawn: Any, computed: Any = None) -> Call:
    """Makes a Call from drawn.draw() and the examine() of `computed`, if given, or of `drawn`."""
    computed = computed or drawn
    return Call(
        draw=lambda seed, index, place: drawn.draw(seed, index, _limits(place)),
        examine=lambda problem, place: computed.examine(
            problem, backend=place.backend, device=place.device
        ),
    )


def _examine_fmha(problem: fmha_problems.FmhaCase, place: Place) -> Verdict:
    # On a GPU lengths are there or on the host, by turns.
    lengths_on = "cpu" if problem.seed % 2 == 0 else None
    return fmha_problems.examine(
        problem, backend=place.backend, device=place.device, lengths_on=lengths_on
    )


CALLS = {
    WRAPPERS: _of(problems, wrapper_trial),
    "trtllm_fmha_v2_prefill": Call(
        draw=lambda seed, index, place: fmha_problems.draw(seed, index),
        examine=_examine_fmha,
    ),
    "decode": _of(decode_problems),
    "pod": _of(pod_problems, pod_trial),
    "append_paged_kv_cache": _of(append_problems),
    "cudnn_batch_prefill_with_kv_cache": _of(cudnn_problems, cudnn_trial),
}
