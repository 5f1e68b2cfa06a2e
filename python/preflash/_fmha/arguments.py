"""The arguments of trtllm_fmha_v2_prefill, checked: all but its lengths."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import dtypes, torch_modes, validate
from .._check.arguments import KvCache, PerHead
from .._check.scales import Scales
from .._check.tensors import check_per_head, kv_of, refuse_shared, sizes_of
from .._device import backends
from .._device.workspace import check_buffer

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
_MASK_MODES = ("causal", "sliding_window", "chunked", "padding")
_POSITIONS = {"none": _core.Position.none, "alibi": _core.Position.alibi}
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


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


class FmhaCall(NamedTuple):
    """Checked arguments of one call."""

    operands: Operands
    options: _core.AttentionOptions
    scales: Scales
    per_head: PerHead
    given: SimpleNamespace  # the arguments of checked()
    out_dtype: torch.dtype
    wants_stats: bool
    stats_scale: float | None  # of the row max in base 2; None: the kernels write no statistics
    backend: str
    return_lse: bool


def checked(a: SimpleNamespace) -> FmhaCall:
    """Checks the arguments `a`, by name. Beside those of trtllm_fmha_v2_prefill it has lse,
    return_lse, mixed (whether k and v may have a dtype of their own) and draft_mask: None, or bool
    [batch_size, q_len, q_len] on the CPU, which queries keep which of the request's last keys."""
    per_head = PerHead(sinks=_one_tensor("sinks", a.sinks))
    operands = _operands_of(a.qkv, a.input_layout, mixed=a.mixed)
    device = operands.q.device
    workspace = check_buffer("workspace_buffer", a.workspace_buffer, device)
    q_dtype = operands.q.dtype
    out_dtype = out_dtype_of(a.out, a.out_dtype, q_dtype)
    # The dtype that kernels write: any output dtype for 8-bit queries, else that of the queries.
    written = out_dtype if q_dtype == dtypes.FP8_QUERY else q_dtype
    options = _options(a, operands, written)
    bmm1 = validate.scale("bmm1_scale", a.bmm1_scale)
    validate.logits_scale("bmm1_scale", bmm1, options)
    bmm2 = validate.scale("bmm2_scale", a.bmm2_scale)
    check_per_head(per_head, options, device)
    wants_stats = validate.flag("save_softmax_stats", a.save_softmax_stats)
    stats_scale = None
    if wants_stats:
        stats_scale = _stats_scale(bmm1, options)
    elif per_head.given and options.position != _core.Position.none:
        # Beside a logit of no key it matters where biases count from, and with statistics that is
        # key 0.
        stats_scale = 1.0
    if stats_scale is not None:
        # The maximum of a row is that of one pass over its keys.
        options = options.replace(disable_split=True)
    if a.out is not None:
        torch_modes.forward_only(out=a.out)  # rows that are converted do not go through a run
        known = sizes_of(options) | {"rows of q": operands.q.shape[0]}
        # An output that is converted is copied into, which takes any strides and dtype.
        rule = "out" if out_dtype == written else "converted_out"
        validate.conforms("out", a.out, rule, device, known)
        refuse_shared("out", a.out, "workspace_buffer", workspace)
    if a.lse is not None:
        validate.tensor("lse", a.lse)
        refuse_shared("lse", a.lse, "workspace_buffer", workspace)
    return FmhaCall(
        operands=operands,
        options=options,
        scales=Scales(bmm1, bmm2),
        per_head=per_head,
        given=a,
        out_dtype=out_dtype,
        wants_stats=wants_stats,
        stats_scale=stats_scale,
        backend=backends.requested(a.backend).name,
        return_lse=validate.flag("return_lse", a.return_lse),
    )


def _options(
    a: SimpleNamespace, operands: Operands, o_dtype: torch.dtype
) -> _core.AttentionOptions:
    q = operands.q
    mode = _mode("mask_mode", a.mask_mode, _MASK_MODES)
    position = "none" if a.pos_encoding_mode is None else a.pos_encoding_mode
    window = validate.window_left("window_left", a.window_left)
    return _core.AttentionOptions(
        num_qo_heads=q.shape[1],
        num_kv_heads=operands.num_kv_heads,
        head_dim_qk=q.shape[2],
        head_dim_vo=operands.head_dim_vo,
        q_dtype=dtypes.CORE_DTYPES[q.dtype],
        kv_dtype=dtypes.CORE_DTYPES[operands.kv_dtype],
        o_dtype=dtypes.CORE_DTYPES[o_dtype],
        causal=mode != "padding" and a.draft_mask is None,
        mask=_core.Mask.bounds if a.draft_mask is None else _core.Mask.custom,
        window_left=window if mode == "sliding_window" else -1,
        chunk_size=_chunk_size(a.chunked_attention_size, mode == "chunked"),
        position=_POSITIONS[_mode("pos_encoding_mode", position, _POSITIONS)],
        soft_cap=_soft_cap(a.logits_soft_cap_scale),
        skip_factor=_skip_factor(a),
        disable_split=validate.ALWAYS_INVARIANT,
    )


def _chunk_size(value: Any, effective: bool) -> int:
    size = validate.size("chunked_attention_size", value)
    if size & (size - 1):
        raise ValueError(f"chunked_attention_size={size}: must be a power of two")
    if effective and size == 0:
        raise ValueError(
            "chunked_attention_size=0 with mask_mode='chunked': must be a power of two; "
            "mask_mode='causal' has no chunks"
        )
    return size if effective else 0


def _mode(name: str, value: Any, allowed: Collection[str]) -> str:
    """Checks a mode, in letters of either case."""
    return validate.one_of(name, value.lower() if isinstance(value, str) else value, allowed)


def _soft_cap(value: Any) -> float:
    if value is None:
        return 0.0
    cap = validate.real("logits_soft_cap_scale", value)
    if cap != 0.0 and not validate.SMALLEST_SOFT_CAP <= cap <= validate.LARGEST_SOFT_CAP:
        raise ValueError(
            f"logits_soft_cap_scale={cap}: must be in [{validate.SMALLEST_SOFT_CAP}, "
            f"{validate.LARGEST_SOFT_CAP}], or None or 0 for none"
        )
    return cap


def _skip_factor(a: SimpleNamespace) -> float:
    factor = validate.skip_factor(a.skip_softmax_threshold_scale_factor)
    if factor > 0.0 and a.save_softmax_stats:
        raise ValueError(
            f"skip_softmax_threshold_scale_factor={factor} with save_softmax_stats=True: the sum "
            "of a row whose tiles are left out is not the sum of its weights; ask for one of the "
            "two"
        )
    return factor


def _stats_scale(bmm1: float, options: _core.AttentionOptions) -> float:
    """Factor from a row max in base 2 to the row max that the statistics report."""
    if bmm1 <= 0.0:
        raise ValueError(
            f"bmm1_scale={bmm1} with save_softmax_stats=True: must be positive, so that the "
            "largest product has the largest logit"
        )
    unscaled = 1.0 if options.soft_cap > 0.0 else 1.0 / bmm1
    scale = math.log(2.0) * unscaled / math.sqrt(options.head_dim_qk)
    if scale > validate.FLOAT32_MAX:
        raise ValueError(f"bmm1_scale={bmm1}: its inverse must be finite in float32")
    return scale


def out_dtype_of(out: Any, out_dtype: Any, q_dtype: torch.dtype) -> torch.dtype:
    if out is not None:
        validate.tensor("out", out)
    if out_dtype is None:
        wanted = q_dtype if out is None else out.dtype
    else:
        eight_bits = isinstance(out_dtype, str) and out_dtype == "fp8"
        wanted = validate.dtype("out_dtype", "float8_e4m3fn" if eight_bits else out_dtype)
    if wanted not in _OUT_DTYPES and wanted != q_dtype:
        raise TypeError(
            f"{'out' if out_dtype is None else 'out_dtype'} is {wanted}; must be float16, "
            "bfloat16 or float8_e4m3fn"
        )
    if out is not None and out.dtype != wanted:
        raise TypeError(f"out is {out.dtype} and out_dtype {wanted}; must be equal")
    return wanted


def _operands_of(qkv: Any, layout: Any, *, mixed: bool) -> Operands:
    """mixed: whether k and v may have a dtype of their own."""
    q, kv = _q_and_kv(qkv, layout)
    k, v = kv_of(kv)
    paged = "PAGED" in layout
    kv_layout = "HND" if layout.endswith("HND") else "NHD"
    tokens, heads = (-3, -2) if kv_layout == "NHD" else (-2, -3)
    page_size, num_kv_heads = k.shape[tokens] if paged else 0, k.shape[heads]
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"qkv: v has shape {tuple(v.shape)} and k {tuple(k.shape)}; must have as many "
            f"{'pages, ' if paged else ''}tokens and heads"
        )
    if paged and page_size < 1:
        raise ValueError(f"qkv: pages of {page_size} tokens; must hold at least 1")
    validate.query_dtype("qkv", q.dtype)
    if mixed:
        validate.kv_dtype("qkv", k.dtype, q.dtype)
        validate.conforms("qkv: v", v, "v_like_k", known={"k_dtype": k.dtype})
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
    sizes = page_size, num_kv_heads, v.shape[-1], k.shape[0]
    return Operands(q, kv, kv_layout, *sizes, k.dtype, packed=layout == "PACKED_QKV")


def _q_and_kv(qkv: Any, layout: Any) -> tuple[torch.Tensor, KvCache]:
    validate.one_of("input_layout", layout, LAYOUTS)
    if layout == "PACKED_QKV":
        if not isinstance(qkv, torch.Tensor):
            _wrong(layout, qkv)
        q, k, v = validate.conforms("qkv", qkv, "packed_qkv").unbind(1)
        return q, (k, v)
    parts = qkv if isinstance(qkv, (tuple, list)) else _wrong(layout, qkv)
    paged = "PAGED" in layout
    if paged and len(parts) == 3:
        parts = (parts[0], tuple(parts[1:]))
    if len(parts) != (3 if layout == "SEPARATE_Q_K_V" else 2):
        _wrong(layout, parts)
    q, *kv = parts
    validate.conforms("qkv[0]", q, "dense_q")
    known = {"kv_layout": layout[-3:]}
    if layout == "SEPARATE_Q_K_V":
        k, v = (validate.conforms(f"qkv[{i}]", x, "dense_kv") for i, x in enumerate(kv, 1))
        return q, (k, v)
    if layout == "CONTIGUOUS_Q_KV":
        return q, validate.conforms("qkv[1]", *kv, "packed_kv").unbind(1)
    if not isinstance(kv[0], (tuple, list)):
        return q, validate.conforms("qkv[1]", *kv, "packed_pages", known=known)
    k, v = kv[0] if len(kv[0]) == 2 else _wrong(layout, parts)
    for name, pool in (("k", k), ("v", v)):
        validate.conforms(f"qkv: {name}", validate.tensor(name, pool), "pool", known=known)
    return q, (k, v)


def _one_tensor(name: str, value: Any) -> Any:
    """Returns the value itself, or the only element of a list."""
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
