"""Every scale of a call, folded into the two factors that kernels know."""

from __future__ import annotations

import math
from typing import NamedTuple

from .. import _core
from . import validate
from .arguments import GivenScales, Scale


class Scales(NamedTuple):
    """Factors of a run: on the logits (sm_scale, q_scale, k_scale) and on the output (v_scale)."""

    logits: float
    output: float


def softmax_scale(sm_scale: Scale, options: _core.AttentionOptions) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(options.head_dim_qk)
    return validate.logits_scale("sm_scale", validate.scale("sm_scale", sm_scale), options)


def folded_scales(
    sm_scale: float, given: GivenScales, options: _core.AttentionOptions | None
) -> Scales:
    q_scale, k_scale, v_scale = given
    if q_scale is not None:
        sm_scale *= validate.scale("q_scale", q_scale)
    if k_scale is not None:
        sm_scale *= validate.scale("k_scale", k_scale)
    validate.logits_scale("sm_scale * q_scale * k_scale", sm_scale, options)
    return Scales(sm_scale, 1.0 if v_scale is None else validate.scale("v_scale", v_scale))
