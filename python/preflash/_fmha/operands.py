"""q, k and v of trtllm_fmha_v2_prefill, out of its input layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._check import values as check
from .._check.arguments import KvCache
from .._check.tensors import kv_of

Qkv = (
    torch.Tensor
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
    | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
)


_IN_PAGES = "a tuple (q, kv), (q, (k, v)) or (q, k, v)"
LAYOUTS = {  # and what q, k and v are in them
    "PACKED_QKV": "one tensor [tokens, 3, num_heads, head_dim]",
    "CONTIGUOUS_Q_KV": "a tuple (q, kv)",
    "SEPARATE_Q_K_V": "a tuple (q, k, v)",
    "Q_PAGED_KV_NHD": _IN_PAGES,
    "Q_PAGED_KV_HND": _IN_PAGES,
}


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


def operands_of(qkv: Any, layout: Any, *, mixed: bool) -> Operands:
    """mixed: whether k and v may have a dtype of their own."""
    q, kv = _q_and_kv(qkv, layout)
    k, v = kv_of(kv)
    paged = "PAGED" in layout
    kv_layout = "HND" if layout.endswith("HND") else "NHD"
    tokens, heads = (-3, -2) if kv_layout == "NHD" else (-2, -3)
    num_kv_heads = k.shape[heads]
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"qkv: v has shape {tuple(v.shape)} and k {tuple(k.shape)}; must have as many "
            f"{'pages, ' if paged else ''}tokens and heads"
        )
    if paged and k.shape[tokens] < 1:
        raise ValueError(f"qkv: pages of {k.shape[tokens]} tokens; must hold at least 1")
    check.query_dtype("qkv", q.dtype)
    if mixed:
        check.kv_dtype("qkv", k.dtype, q.dtype)
        check.has_dtype("qkv: v", v, k.dtype, "k's")
    for name, part in (("k", k), ("v", v)):
        if part.dtype != q.dtype and not mixed:
            raise TypeError(f"qkv: {name} is {part.dtype} and q {q.dtype}; must be of one dtype")
        if part.device != q.device:
            raise ValueError(f"qkv: {name} is on {part.device} and q on {q.device}")
    if k.shape[-1] != q.shape[2]:
        raise ValueError(
            f"qkv: k has head_dim {k.shape[-1]} and q {q.shape[2]}; must be equal, or another "
            "input_layout was meant"
        )
    if num_kv_heads < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"qkv: q has {q.shape[1]} heads and k {num_kv_heads}; must be a multiple, or another "
            "input_layout was meant"
        )
    return Operands(
        q=q,
        kv=kv,
        kv_layout=kv_layout,
        page_size=k.shape[tokens] if paged else 0,
        num_kv_heads=num_kv_heads,
        head_dim_vo=v.shape[-1],
        kv_extent=k.shape[0],
        kv_dtype=k.dtype,
        packed=layout == "PACKED_QKV",
    )


def _q_and_kv(qkv: Any, layout: Any) -> tuple[torch.Tensor, KvCache]:
    check.one_of("input_layout", layout, LAYOUTS)
    if layout == "PACKED_QKV":
        packed = check.tensor("qkv", qkv) if isinstance(qkv, torch.Tensor) else _wrong(layout, qkv)
        _shaped("qkv", packed, 4, "[tokens, 3, num_heads, head_dim]", layout, planes=3)
        q, k, v = packed.unbind(1)
        return q, (k, v)
    parts = qkv if isinstance(qkv, (tuple, list)) else _wrong(layout, qkv)
    for part in parts:
        if not isinstance(part, (tuple, list)):
            check.tensor("qkv", part)
    if layout == "CONTIGUOUS_Q_KV":
        q, kv = parts if len(parts) == 2 else _wrong(layout, qkv)
        check.is_tensor("qkv[1]", kv)
        _shaped("qkv[1]", kv, 4, "[kv tokens, 2, num_kv_heads, head_dim]", layout, planes=2)
        return _query(q), kv.unbind(1)
    if layout == "SEPARATE_Q_K_V":
        q, k, v = parts if len(parts) == 3 else _wrong(layout, qkv)
        for name, part in (("qkv[1]", k), ("qkv[2]", v)):
            check.is_tensor(name, part)
            check.has_dims(name, part, 3, f"[kv tokens, num_kv_heads, head_dim] in {layout}")
        return _query(q), (k, v)
    if len(parts) == 3:
        parts = (parts[0], tuple(parts[1:]))
    q, kv = parts if len(parts) == 2 else _wrong(layout, parts)
    _query(q)
    inner = "page_size, num_kv_heads" if layout.endswith("NHD") else "num_kv_heads, page_size"
    if not isinstance(kv, (tuple, list)):
        _shaped("qkv[1]", kv, 5, f"[pages, 2, {inner}, head_dim]", layout, planes=2)
        return q, kv
    k, v = kv if len(kv) == 2 else _wrong(layout, parts)
    for name, pool in (("k", k), ("v", v)):
        check.tensor(name, pool)
        _shaped(f"qkv: {name}", pool, 4, f"[pages, {inner}, head_dim]", layout)
    return q, (k, v)


def one_tensor(name: str, value: Any) -> Any:
    """A tensor, or what a list that should hold one holds."""
    if not isinstance(value, (tuple, list)):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} holds {len(value)} tensors; must be one, or a list of one")
    return value[0]


def _wrong(layout: str, qkv: Any) -> Any:
    got = type(qkv).__name__
    if isinstance(qkv, (tuple, list)):
        got += f" of {len(qkv)}"
    raise TypeError(f"qkv must be {LAYOUTS[layout]} with input_layout={layout!r}; got {got}")


def _shaped(
    name: str, t: torch.Tensor, dims: int, shape: str, layout: str, planes: int | None = None
) -> None:
    """planes: the size of dimension 1, which tells q, k and v, or k and v; None: it does not."""
    if t.dim() != dims or planes not in (None, t.shape[1]):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}; must be {shape} with input_layout={layout!r}"
        )


def _query(q: Any) -> torch.Tensor:
    check.is_tensor("qkv[0]", q)
    check.has_dims("qkv[0]", q, 3, "[tokens, num_heads, head_dim]")
    return q
