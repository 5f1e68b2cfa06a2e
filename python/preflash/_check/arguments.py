"""What callers gave, before any check. calls.py has the parameters of plan(), forward() and the
single functions; here are those of run(), and what calls have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

Scale = float | torch.Tensor | None
KvCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Arguments = TypeVar("Arguments")


class CheckedAlone(NamedTuple):
    """An option that one check takes, without others."""

    name: str
    check: Callable[[str, Any], Any]
    field: str  # of AttentionOptions, which the check returns; "": none
    default: Any  # of a call that has no such parameter


def converted(a: Any, kind: type[Arguments], **given: Any) -> Arguments:
    """A call converted to another kind: the given values, the arguments that both have, defaults
    for the rest."""
    pair = (type(a), kind)
    both = _in_both.get(pair)
    if both is None:
        both = _in_both[pair] = tuple(name for name in pair[0].__slots__ if name in kind.__slots__)
    return kind(**{**{name: getattr(a, name) for name in both}, **given})


_in_both: dict[tuple[type, type], tuple[str, ...]] = {}


class GivenScales(NamedTuple):
    """The calibration scales of a run."""

    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def given(self) -> bool:
        q_scale, k_scale, v_scale = self
        return not (q_scale is None and k_scale is None and v_scale is None)


class PerHead(NamedTuple):
    """The tensors of a run that hold one float32 for each head; None: absent."""

    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None

    @property
    def given(self) -> bool:
        sinks, scale_q, scale_k, scale_v = self
        return not (sinks is None and scale_q is None and scale_k is None and scale_v is None)

    @property
    def scaled(self) -> bool:
        """Whether heads have factors."""
        return not (self.scale_q is None and self.scale_k is None and self.scale_v is None)


def scales_of(a: Any) -> GivenScales:
    """From a call that has all three arguments."""
    return GivenScales(a.q_scale, a.k_scale, a.v_scale)


def per_head_of(a: Any) -> PerHead:
    """From a call that has all of these arguments."""
    return PerHead(*_per_head_of(a))


_per_head_of = operator.attrgetter(*PerHead._fields)


class HeadTensor(NamedTuple):
    """Describes a tensor of PerHead, for its checks and for the table of features."""

    heads: str  # the option that tells how many elements it has
    element: str
    why_float32: str
    of: str | None  # the fp8 operand that it is for; None: it goes with every run


_OF_QUERY_HEADS = HeadTensor("num_qo_heads", "one factor per head", "factors of the heads", "q")
_OF_KV_HEADS = _OF_QUERY_HEADS._replace(heads="num_kv_heads")
_LOGITS = HeadTensor(
    "num_qo_heads", "one logit per query head", "natural logarithms, like logits", of=None
)

# NOTE: kHeadTensors in params.h is the C++ side.
PER_HEAD = PerHead(
    sinks=_LOGITS,
    scale_q=_OF_QUERY_HEADS,
    scale_k=_OF_KV_HEADS._replace(of="k"),
    scale_v=_OF_KV_HEADS._replace(of="v"),
)


class RunArguments(NamedTuple):
    """What a run() has beside tensors where it is not the usual one."""

    scales: GivenScales
    window_left: int | None = None
    per_head: PerHead = PerHead()
    sm_scale: Scale = None  # None: that of the plan


class RunOptions(NamedTuple):
    """What run() of the batch wrappers has beside tensors of the batch and outputs, as it was
    called."""

    extra: tuple[None, ...] = ()  # positional arguments for kernels that are compiled at run time
    window_left: int | None = None
    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None
    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    # Of these this build serves the neutral values alone.
    enable_pdl: bool | None = None
    kv_cache_sf: torch.Tensor | None = None
    o_scale: float | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    use_fp16_softmax: bool | None = None
    uses_spcompress: bool | None = None


def with_scales_by_position(given: RunOptions, scale: torch.Tensor) -> RunOptions:
    """A run() in the newer order, with scale_q, scale_k and scale_v of an fp8 batch behind the
    tensors. scale: the scale in the place of return_lse."""
    if given.extra:  # a ragged run(): return_lse is the first of the three
        found = (scale, *given.extra)
    else:  # a paged one: k_scale, v_scale, return_lse
        found = (given.k_scale, given.v_scale, scale)
        given = given._replace(k_scale=None, v_scale=None)
    named = (given.scale_q, given.scale_k, given.scale_v)
    if len(found) != 3 or any(value is not None for value in named):
        raise TypeError(
            "run(): a tensor stands where return_lse would. By position, q, k and v may be "
            "followed by scale_q, scale_k and scale_v, all three of them; or give them by name"
        )
    scale_q, scale_k, scale_v = found
    return given._replace(extra=(), scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)


class Qkv(NamedTuple):
    """The tensors of one request."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
