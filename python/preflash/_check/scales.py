"""Every scale of a call, folded into the two factors that kernels know."""

from __future__ import annotations

import math
from typing import NamedTuple

from .. import _core
from . import values as check
from .arguments import GivenScales, Scale


class Scales(NamedTuple):
    """Factors of a run: on the logits (sm_scale, q_scale, k_scale) and on the output (v_scale)."""

    logits: float
    output: float


def softmax_scale(sm_scale: Scale, options: _core.AttentionOptions) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(options.head_dim_qk)
    return check.logits_scale("sm_scale", check.scale("sm_scale", sm_scale), options)


def folded_scales(sm_scale: float, given: GivenScales, options: _core.AttentionOptions) -> Scales:
    q_scale, k_scale, v_scale = given
    if q_scale is not None:
        sm_scale *= check.scale("q_scale", q_scale)
    if k_scale is not None:
        sm_scale *= check.scale("k_scale", k_scale)
    check.logits_scale("sm_scale * q_scale * k_scale", sm_scale, options)
    return Scales(sm_scale, 1.0 if v_scale is None else check.scale("v_scale", v_scale))
