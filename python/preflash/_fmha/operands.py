"""q, k and v of trtllm_fmha_v2_prefill, out of its input layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._check import values as check
from .._check.arguments import KvCache

Qkv = (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
)

LAYOUTS = (
    "PACKED_QKV",
    "CONTIGUOUS_Q_KV",
    "SEPARATE_Q_K_V",
    "Q_PAGED_KV_NHD",
    "Q_PAGED_KV_HND",
)


class Operands(NamedTuple):
    """q, k and v, whatever layout they came in."""

    q: torch.Tensor  # [tokens, num_heads, head_dim]
    kv: KvCache
    kv_layout: str
    page_size: int  # 0: ragged
    num_kv_heads: int
    head_dim_vo: int
    kv_extent: int  # tokens, or pages
    kv_dtype: torch.dtype
    packed: bool  # a request's keys are its own rows


def operands_of(qkv: Any, layout: Any) -> Operands:
    check.one_of("input_layout", layout, LAYOUTS)
    if layout == "PACKED_QKV":
        packed = check.tensor("qkv", qkv) if isinstance(qkv, torch.Tensor) else _wrong(layout, qkv)
        _shaped("qkv", packed, 4, 3, "[tokens, 3, num_heads, head_dim]", layout)
        q, k, v = packed.unbind(1)
        return _ragged(q, k, v, packed=True)
    parts = qkv if isinstance(qkv, (tuple, list)) else _wrong(layout, qkv)
    for part in parts:
        if not isinstance(part, (tuple, list)):
            check.tensor("qkv", part)
    if layout == "CONTIGUOUS_Q_KV":
        q, kv = parts if len(parts) == 2 else _wrong(layout, qkv)
        check.is_tensor("qkv[1]", kv)
        _shaped("qkv[1]", kv, 4, 2, "[kv tokens, 2, num_kv_heads, head_dim]", layout)
        return _ragged(_query(q), *kv.unbind(1), packed=False)
    if layout == "SEPARATE_Q_K_V":
        q, k, v = parts if len(parts) == 3 else _wrong(layout, qkv)
        for name, part in (("qkv[1]", k), ("qkv[2]", v)):
            check.is_tensor(name, part)
            if part.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(part.shape)}; must be [kv tokens, num_kv_heads, "
                    f"head_dim] in {layout}"
                )
        return _ragged(_query(q), k, v, packed=False)
    return _paged(parts, layout)


def one_tensor(name: str, value: Any) -> Any:
    """A tensor, or what a list that should hold one holds."""
    if not isinstance(value, (tuple, list)):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} holds {len(value)} tensors; must be one, or a list of one")
    return value[0]


_SHAPES = {
    "PACKED_QKV": "one tensor [tokens, 3, num_heads, head_dim]",
    "CONTIGUOUS_Q_KV": "a tuple (q, kv)",
    "SEPARATE_Q_K_V": "a tuple (q, k, v)",
}


def _wrong(layout: str, qkv: Any) -> Any:
    got = type(qkv).__name__
    if isinstance(qkv, (tuple, list)):
        got += f" of {len(qkv)}"
    wanted = _SHAPES.get(layout, "a tuple (q, kv), (q, (k, v)) or (q, k, v)")
    raise TypeError(f"qkv must be {wanted} with input_layout={layout!r}; got {got}")


def _shaped(name: str, t: torch.Tensor, dims: int, planes: int, shape: str, layout: str) -> None:
    if t.dim() != dims or t.shape[1] != planes:
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}; must be {shape} with input_layout={layout!r}"
        )


def _query(q: Any) -> torch.Tensor:
    check.is_tensor("qkv[0]", q)
    if q.dim() != 3:
        raise ValueError(
            f"qkv[0] has shape {tuple(q.shape)}; must be [tokens, num_heads, head_dim]"
        )
    return q


def _ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, packed: bool) -> Operands:
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"qkv: v has shape {tuple(v.shape)} and k {tuple(k.shape)}; must have as many tokens "
            "and heads"
        )
    return _of_one_kind(
        Operands(q, (k, v), "NHD", 0, k.shape[1], v.shape[2], k.shape[0], k.dtype, packed), k, v
    )


def _paged(parts: Sequence[Any], layout: str) -> Operands:
    kv_layout = layout.rpartition("_")[2]
    if len(parts) == 3:
        parts = (parts[0], tuple(parts[1:]))
    q, kv = parts if len(parts) == 2 else _wrong(layout, parts)
    q = _query(q)
    order = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
    if isinstance(kv, (tuple, list)):
        k, v = kv if len(kv) == 2 else _wrong(layout, parts)
        for name, pool in (("k", k), ("v", v)):
            check.tensor(name, pool)
            if pool.dim() != 4:
                raise ValueError(
                    f"qkv: {name} has shape {tuple(pool.shape)}; must be [pages, {order}, "
                    f"head_dim] with input_layout={layout!r}"
                )
        cache: KvCache = (k, v)
    else:
        _shaped("qkv[1]", kv, 5, 2, f"[pages, 2, {order}, head_dim]", layout)
        k, v, cache = kv[:, 0], kv[:, 1], kv
    tokens, heads = (1, 2) if kv_layout == "NHD" else (2, 1)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"qkv: v has shape {tuple(v.shape)} and k {tuple(k.shape)}; must have as many pages, "
            "tokens and heads"
        )
    if k.shape[tokens] < 1:
        raise ValueError(f"qkv: pages of {k.shape[tokens]} tokens; must hold at least 1")
    operands = Operands(
        q, cache, kv_layout, k.shape[tokens], k.shape[heads], v.shape[3], k.shape[0], k.dtype, False
    )
    return _of_one_kind(operands, k, v)


def _of_one_kind(operands: Operands, k: torch.Tensor, v: torch.Tensor) -> Operands:
    q = operands.q
    check.query_dtype("qkv", q.dtype)
    for name, part in (("k", k), ("v", v)):
        if part.dtype != q.dtype:
            raise TypeError(f"qkv: {name} is {part.dtype} and q {q.dtype}; must be of one dtype")
        if part.device != q.device:
            raise ValueError(f"qkv: {name} is on {part.device} and q on {q.device}")
    if k.shape[-1] != q.shape[2]:
        raise ValueError(
            f"qkv: k has head_dim {k.shape[-1]} and q {q.shape[2]}; must be equal, or another "
            "input_layout was meant"
        )
    if operands.num_kv_heads < 1 or q.shape[1] % operands.num_kv_heads:
        raise ValueError(
            f"qkv: q has {q.shape[1]} heads and k {operands.num_kv_heads}; must be a multiple, or "
            "another input_layout was meant"
        )
    return operands
