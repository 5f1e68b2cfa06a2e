"""Limits of a problem that is spelled out: one that makes no sense, or is too much to compute, is
refused before anything is computed, with the field, its value and the rule."""

from __future__ import annotations

import math

from preflash.testing.case import Case, Magnitude, Position

_LONGEST = 1 << 20
_HEADS = (1, 1024)
_HEAD_DIMS = (8, 512)
_INT32 = 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {
    "qo_lens": (0, _LONGEST),
    "kv_lens": (0, _LONGEST),
    "num_qo_heads": _HEADS,
    "num_kv_heads": _HEADS,
    "head_dim": _HEAD_DIMS,
    "head_dim_vo": _HEAD_DIMS,
    "page_size": (0, _LONGEST),
    "window_left": (-1, _INT32),
    "soft_cap": (0.0, 1e30),
    "sm_scale": (-1e30, 1e30),
    "fixed_split_size": (0, _INT32),
    "rope_scale": (1e-3, 1e30),
    "rope_theta": (1e-3, 1e30),
    "threads": (1, 256),
    "padding": (0, 1024),
    "q_scale": (-1e30, 1e30),
    "k_scale": (-1e30, 1e30),
    "v_scale": (-1e30, 1e30),
}
_WORDS = {"layout": ("NHD", "HND"), "lse_layout": ("NH", "HN"), "lse_base": ("log2", "ln")}
# 2 GiB in float64, in which the oracle has them all.
_MOST_NUMBERS = 1 << 28


def check_fields(values: dict[str, object]) -> None:
    """Raises ValueError for a field out of its range."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple) else (value,):
            _check_field(name, one)


def _check_field(name: str, value: object) -> None:
    if value is None:
        return
    if name in _WORDS and value not in _WORDS[name]:
        raise ValueError(f"{name}={value}: must be one of {', '.join(_WORDS[name])}")
    if name in _RANGES:
        least, most = _RANGES[name]
        if not least <= value <= most:
            raise ValueError(f"{name}={value}: must be in [{least}, {most}]")
    if name in ("head_dim", "head_dim_vo") and value % 8:
        raise ValueError(f"{name}={value}: must be a multiple of 8")


def check_size(case: Case) -> None:
    """Raises ValueError for more numbers than a small machine has room for."""
    page = max(case.page_size, 1)
    keys = sum(math.ceil(n / page) * page for n in case.kv_lens)
    rows = sum(case.qo_lens) * case.num_qo_heads
    pairs = sum(q * k for q, k in zip(case.qo_lens, case.kv_lens, strict=True))
    numbers = {
        "q": rows * case.head_dim,
        "k": keys * case.num_kv_heads * case.head_dim,
        "v": keys * case.num_kv_heads * case.dim_vo,
        "out": rows * case.dim_vo,
        "the logits": pairs * case.num_qo_heads,
    }
    for what, count in numbers.items():
        if count > _MOST_NUMBERS:
            raise ValueError(
                f"qo_lens, kv_lens, heads and head_dim make {count} numbers of {what}; must be at "
                f"most {_MOST_NUMBERS}, which the float64 oracle has room for"
            )


def contradiction(case: Case) -> str:
    """The rule of numbers that the dtypes and the position break together, if they do.

    Wrappers refuse some of this. The rest they compute, but no bound would tell right numbers
    from wrong ones.
    """
    fp8 = case.dtype_kv.itemsize == 1
    exact = case.magnitude is Magnitude.VERY_NEGATIVE
    if fp8 and (case.head_dim % 16 or case.dim_vo % 16):
        return "rows of 8 bits start on multiples of 16 bytes"
    if exact and (fp8 or case.position is Position.ROPE):
        return "logits that must be exact are not rotated, nor of 8 bits"
    if case.head_scales and not fp8:
        return "factors of heads are for fp8"
    if case.dtype.itemsize > 1 and case.o_dtype not in (None, case.dtype):
        return "the output has q's dtype, but for fp8"
    has_rope_options = case.rope_scale is not None or case.rope_theta is not None
    if has_rope_options and case.position is not Position.ROPE:
        return "rope_scale and rope_theta are for RoPE"
    return ""
