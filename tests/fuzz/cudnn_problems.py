"""Random problems for cudnn_batch_prefill_with_kv_cache, over all its options."""

from __future__ import annotations

import dataclasses
import enum
import random

import torch
from preflash.testing.case import Case, MaskKind
from preflash.testing.oracle import Pipeline

from .problems import SCALES, Brought, with_scales
from .random_cases import Limits, random_case, unflattened, with_defaults

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
class CudnnCall:
    """Arguments and forms of a case's call."""

    apart: bool = False  # requests anywhere and in any order, in each tensor in another
    units: str = "elements"
    ends: Ends = Ends.WITH
    own_v_and_o: bool = True  # their offsets are given; else k's and q's hold, which are tokens
    lengths: bool = True  # given; else the offsets tell them
    four_dims: bool = False  # lengths are [batch_size, 1, 1, 1]
    index_dtype: torch.dtype = torch.int32
    index_on_device: bool = False
    stats: bool = False  # batch_offsets_stats is given
    out: Brought = Brought.ABSENT
    lse: Lse = Lse.ABSENT
    return_lse: bool = True
    lse_base: str = "log2"
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    scales_in_tensors: bool = False
    spare_length: int = 0  # by which the longest lengths are exceeded
    capturable: bool = False
    workspace: int = 1 << 20
    repeat: bool = False  # two calls give the same bits


@dataclasses.dataclass(frozen=True)
class CudnnProblem:
    """A case without any option that the function does not have. Its keys are [tokens, heads,
    head_dim], or [pages, heads, page_size, head_dim]: `layout` is that of the memory."""

    case: Case
    call: CudnnCall
    seed: int

    @property
    def capturable(self) -> bool:
        """True if a graph may capture the call: ragged requests lie one after the other in k and
        v."""
        return self.call.capturable and (self.case.paged or not self.call.apart)

    @property
    def pipeline(self) -> Pipeline:
        causal = self.case.mask is MaskKind.CAUSAL
        return with_scales(Pipeline(sm_scale=self.case.scale, causal=causal), self.call)


def draw(seed: int, index: int, limits: Limits) -> CudnnProblem:
    """Problem `index` of `seed`."""
    rng = random.Random(f"cudnn {seed} {index}")
    case = with_defaults(unflattened(random_case(rng, "problem", limits)), _ABSENT)
    mask = rng.choice([MaskKind.NONE, MaskKind.CAUSAL, MaskKind.CAUSAL])
    case = dataclasses.replace(case, mask=mask, layout="HND" if case.paged else "NHD")
    return CudnnProblem(case, _random_call(rng, case), rng.randrange(2**31))


def _random_call(rng: random.Random, case: Case) -> CudnnCall:
    apart = rng.random() < 0.4
    units = rng.choice(["elements", "tokens"])
    in_tokens = units == "tokens"
    ends = rng.choice([Ends.WITH, Ends.WITH, Ends.WITHOUT])
    if case.batch_size == 1 and rng.random() < 0.4:
        ends, apart = Ends.NONE, False
    own = apart or not in_tokens or rng.random() < 0.6
    told = in_tokens and ends is Ends.WITH and not apart and not case.paged
    stats = rng.random() < 0.35
    return CudnnCall(
        apart=apart,
        units=units,
        ends=ends,
        own_v_and_o=own,
        lengths=not told or rng.random() < 0.5,
        four_dims=rng.random() < 0.3,
        index_dtype=rng.choice([torch.int32, torch.int64]),
        index_on_device=rng.random() < 0.5,
        stats=stats,
        out=rng.choice(list(Brought)),
        lse=rng.choice(list(Lse) if stats else [Lse.ABSENT, Lse.PADDED]),
        return_lse=rng.random() < 0.8,
        lse_base=rng.choice(["log2", "ln"]),
        q_scale=rng.choice(SCALES),
        k_scale=rng.choice(SCALES),
        v_scale=rng.choice([*SCALES, 0.0]),
        scales_in_tensors=rng.random() < 0.2,
        spare_length=rng.choice([0, 0, 1, 33]),
        capturable=rng.random() < 0.2,
        workspace=rng.choice([0, 1 << 12, 1 << 20]),
        repeat=rng.random() < 0.2,
    )
