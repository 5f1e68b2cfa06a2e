"""Properties of vLLM's attention layers that decide how preflash plans for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

FP8_CACHES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class LayerForm(NamedTuple):
    """Options of plan() that layers of one model may differ in; equal forms share a plan."""

    num_qo_heads: int
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    fp8_queries: bool = False


class CacheForm(NamedTuple):
    """Options of plan() that all layers of an attention group share."""

    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    o_dtype: torch.dtype  # the model's, also of queries that are not quantised


def position_encoding(slopes: list[float] | None) -> str:
    """Returns pos_encoding_mode for a layer's ALiBi slopes, one a query head.

    Raises:
        NotImplementedError: other slopes than those of the paper (arXiv:2108.12409), such as a
            tensor-parallel rank's part of them.
    """
    if slopes is None:
        return "NONE"
    n = 1 << (len(slopes).bit_length() - 1)
    powers = [-8 * (i + 1) / n for i in range(n)]
    powers += [-4 * (2 * i + 1) / n for i in range(len(slopes) - n)]
    if not all(math.isclose(s, 2.0**p, rel_tol=1e-5) for s, p in zip(slopes, powers, strict=True)):
        raise NotImplementedError(
            f"ALiBi slopes of {len(slopes)} heads are not those of the ALiBi paper for that many "
            "heads, the only ones that preflash has; with tensor parallelism each rank has a part "
            "of the slopes"
        )
    return "ALIBI"
