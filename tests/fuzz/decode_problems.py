"""Problems for the decode functions: those of the wrappers with one query per request, by
BatchDecodeWithPagedKVCacheWrapper, with the buffers of a CUDA graph too, or, for Entry.SINGLE, by
single_decode_with_kv_cache."""

from __future__ import annotations

import dataclasses
import functools
import random

import preflash
import torch
import wrapper_options
from preflash.testing import runner

from . import problems, wrapper_trial
from .problems import Also, Entry, Problem
from .random_cases import Limits, unflattened, with_defaults
from .wrapper_trial import Trial, scale_arguments

_CHECKS = (Also.NOTHING, Also.REPEAT, Also.SPOILT, Also.ALONE)
_NOT_OF_DECODE = ("head_dim_vo", "mask", "padding", "hints", "bounds", "other_mask", "long_mask")
_NOT_OF_SINGLE = ("sinks", "head_scales", "o_dtype", "out", "lse", "lse_base", "lse_layout")


def draw(seed: int, index: int, limits: Limits) -> Problem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"decode {seed} {index}")
    drawn = problems.draw(seed, index, limits)
    case, call = (with_defaults(part, _NOT_OF_DECODE) for part in (drawn.case, drawn.call))
    case = dataclasses.replace(case, qo_lens=(1,) * case.batch_size)
    if call.entry is Entry.SINGLE:
        case, call = (with_defaults(part, _NOT_OF_SINGLE) for part in (unflattened(case), call))
    else:
        page_size = case.page_size or rng.choice([1, 3, 16, 64])
        case = dataclasses.replace(case, page_size=page_size)
    served = drawn.also in _CHECKS and drawn.also in problems.checks(case, call)
    return Problem(case, call, drawn.also if served else Also.NOTHING, drawn.seed)


class _DecodeTrial(Trial):
    """A problem ready to run. Every other seed has use_tensor_cores, which changes nothing."""

    def plan(self, **overrides: object) -> None:
        arguments, options = self._plan_arguments()
        self.wrapper.plan(*arguments, **{**options, **overrides})

    def _wrapper(self, buffer: torch.Tensor):
        buffers = wrapper_options.graph_options(self.inputs) if self.call.graph else {}
        return preflash.BatchDecodeWithPagedKVCacheWrapper(
            buffer,
            self.inputs.case.layout,
            use_cuda_graph=self.call.graph,
            use_tensor_cores=self.problem.seed % 2 == 1,
            backend=self.backend,
            **{
                name.replace("_buf", "_buffer"): array
                for name, array in buffers.items()
                if name.startswith("paged_kv")
            },
        )

    def _plan_arguments(self) -> tuple[tuple, dict]:
        (_, *arguments), options = runner.plan_arguments(self.inputs)
        for name in ("custom_mask", "packed_custom_mask", "causal"):
            del options[name]
        return tuple(arguments), options

    def compute(self, **outputs):
        if self.call.entry is not Entry.SINGLE:
            return super().compute(**outputs)
        inputs, case, return_lse = self.inputs, self.inputs.case, self.call.return_lse
        tokens = 0 if case.layout == "NHD" else 1
        returned = preflash.single_decode_with_kv_cache(
            inputs.q[0],
            *(t.narrow(tokens, 0, case.kv_lens[0]) for t in (inputs.k, inputs.v)),
            kv_layout=case.layout,
            use_tensor_cores=self.problem.seed % 2 == 1,
            **self._logits_options(),
            **scale_arguments(self.call, self.device),
            return_lse=return_lse,
        )
        return tuple(one[None] for one in returned) if return_lse else returned[None]


examine = functools.partial(wrapper_trial.examine, trial=_DecodeTrial)
