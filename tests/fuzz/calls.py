"""Draws and computes the problems of each `--call NAME`."""

from __future__ import annotations

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

_LONGEST = 700
# Milliseconds in the oracle, and several tiles, splits and requests all the same.
_WORK = 2e7

WRAPPERS = "wrappers"
# By name draw(seed, index, limits) and examine(problem, backend=, device=).
CALLS = {
    WRAPPERS: (problems.draw, wrapper_trial.examine),
    "trtllm_fmha_v2_prefill": (fmha_problems.draw, fmha_problems.examine),
    "decode": (decode_problems.draw, decode_problems.examine),
    "pod": (pod_problems.draw, pod_trial.examine),
    "append_paged_kv_cache": (append_problems.draw, append_problems.examine),
    "cudnn_batch_prefill_with_kv_cache": (cudnn_problems.draw, cudnn_trial.examine),
}


def limits(place: Place) -> Limits:
    """Limits of the random problems of a place."""
    return Limits(_LONGEST, _WORK, place.dtypes)
