"""Draws and computes the problems of each `--call NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """Random problems for something that is called."""

    draw_within: Callable[[int, int, Limits], Any]  # of a seed and an index
    compute: Callable[..., Verdict]

    def draw(self, seed: int, index: int, place: Place) -> Any:
        return self.draw_within(seed, index, Limits(_LONGEST, _WORK, place.dtypes))

    def examine(self, problem: Any, place: Place) -> Verdict:
        return self.compute(problem, backend=place.backend, device=place.device)


CALLS = {
    WRAPPERS: Call(problems.draw, wrapper_trial.examine),
    "trtllm_fmha_v2_prefill": Call(fmha_problems.draw, fmha_problems.examine),
    "decode": Call(decode_problems.draw, decode_problems.examine),
    "pod": Call(pod_problems.draw, pod_trial.examine),
    "append_paged_kv_cache": Call(append_problems.draw, append_problems.examine),
    "cudnn_batch_prefill_with_kv_cache": Call(cudnn_problems.draw, cudnn_trial.examine),
}
