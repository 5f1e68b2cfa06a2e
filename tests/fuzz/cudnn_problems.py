"""Random problems for cudnn_batch_prefill_with_kv_cache, over all its options."""

# ruff: noqa: RUF009 (drawn() makes fields, as dataclasses.field() does)
from __future__ import annotations

import dataclasses
import enum
import random

import torch
from preflash.testing.case import Case, MaskKind
from preflash.testing.oracle import Pipeline

from .problems import Brought, RunOptions
from .random_cases import Limits, drawn, random_case, random_fields, unflattened, with_defaults

_ABSENT = ("window_left", "soft_cap", "position", "rope_scale", "rope_theta", "sinks",
           "head_scales", "fixed_split_size", "disable_split_kv", "batch_invariant")  # fmt: skip


class Ends(enum.Enum):
    """The form of the arrays of offsets."""

    WITH = "with"  # [batch_size + 1]
    WITHOUT = "without"  # [batch_size]
    NONE = "none"  # one request needs none


class Lse(enum.Enum):
    """The memory of the log-sum-exp."""

    ABSENT = "absent"  # the library's own
    PADDED = "padded"  # [batch_size, max_token_per_sequence, num_qo_heads]
    ROWS = "rows"  # [rows of q, num_qo_heads], with batch_offsets_stats


@dataclasses.dataclass(frozen=True)
class CudnnCall(RunOptions):
    """Arguments and forms of a case's call."""

    apart: bool = drawn(False, True)  # requests anywhere, in any order, in each tensor in another
    units: str = drawn("elements", "tokens")
    ends: Ends = drawn(Ends.WITH, *Ends)
    own_v_and_o: bool = drawn(True, False)  # their offsets are given; else k's and q's hold
    lengths: bool = drawn(True, False)  # given; else the offsets tell them
    four_dims: bool = drawn(False, False, True)  # lengths are [batch_size, 1, 1, 1]
    index_dtype: torch.dtype = drawn(torch.int32, torch.int64)
    index_on_device: bool = drawn(False, True)
    stats: bool = drawn(False, False, True)  # batch_offsets_stats is given
    out: Brought = drawn(*Brought)
    lse: Lse = drawn(*Lse)
    return_lse: bool = drawn(*[True] * 4, False)
    spare_length: int = drawn(0, 0, 1, 33)  # by which the longest lengths are exceeded
    capturable: bool = drawn(*[False] * 4, True)
    workspace: int = drawn(1 << 20, 1 << 12, 0)
    repeat: bool = drawn(*[False] * 4, True)  # two calls give the same bits


@dataclasses.dataclass(frozen=True)
class CudnnProblem:
    """A case without any option that the function does not have. Its keys are [tokens, heads,
    head_dim], or [pages, heads, page_size, head_dim]: `layout` is that of the memory."""

    case: Case
    call: CudnnCall
    seed: int

    @property
    def capturable(self) -> bool:
        """True if a graph may capture the call: ragged k and v have no gaps then."""
        return self.call.capturable and (self.case.paged or not self.call.apart)

    @property
    def pipeline(self) -> Pipeline:
        causal = self.case.mask is MaskKind.CAUSAL
        return self.call.scaled(Pipeline(sm_scale=self.case.scale, causal=causal))


def draw(seed: int, index: int, limits: Limits) -> CudnnProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"cudnn {seed} {index}")
    case = with_defaults(unflattened(random_case(rng, "problem", limits)), _ABSENT)
    mask = rng.choice([MaskKind.NONE, MaskKind.CAUSAL, MaskKind.CAUSAL])
    case = dataclasses.replace(case, mask=mask, layout="HND" if case.paged else "NHD")
    call = _possible(CudnnCall(**random_fields(rng, CudnnCall)), case)
    return CudnnProblem(case, call, rng.randrange(2**31))


def _possible(call: CudnnCall, case: Case) -> CudnnCall:
    """The call with forms of its arguments that go together."""
    if call.ends is Ends.NONE and case.batch_size > 1:
        call = dataclasses.replace(call, ends=Ends.WITH)
    in_tokens, apart = call.units == "tokens", call.apart and call.ends is not Ends.NONE
    told = in_tokens and call.ends is Ends.WITH and not apart and not case.paged
    return dataclasses.replace(
        call,
        apart=apart,
        own_v_and_o=call.own_v_and_o or apart or not in_tokens,  # k's and q's are tokens
        lengths=call.lengths or not told,
        lse=Lse.PADDED if call.lse is Lse.ROWS and not call.stats else call.lse,
    )
