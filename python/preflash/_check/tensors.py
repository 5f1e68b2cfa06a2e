"""The tensors of run(): checked once per combination of shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from . import values as check
from .arguments import PER_HEAD, KvCache, PerHead
from .outputs import Outputs
from .request import Request

# K or V as the kernels see it: strides of page, token and head in elements, then how many pages
# there are and tokens in one of them. Ragged: one page that holds all.
KvNumbers = tuple[int, int, int, int, int]


def effective_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 where a dimension has one element."""
    return tuple(value.stride(dim) if value.shape[dim] > 1 else 0 for dim in range(value.dim() - 1))


def bind(
    q: Any, kv: KvCache, outputs: Outputs, request: Request
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Checks one run's tensors. Returns what a launch is bound to: the strides and extents of
    q, k, v, out and lse, as _core.RunFunctions.check does, and the byte offset of V."""
    options = request.options
    q_strides = check_q(q, request)
    v_offset = 0
    if request.page_size > 0:
        k, v, v_offset = _check_paged(kv, request)
    else:
        k = _check_ragged("k", kv[0], options.head_dim_qk, request)
        v = _check_ragged("v", kv[1], options.head_dim_vo, request)
    tokens, heads, head_dim_vo = q.shape[0], options.num_qo_heads, options.head_dim_vo
    out_strides = (heads * head_dim_vo, head_dim_vo)
    if outputs.out is not None:
        shape, meaning = (tokens, heads, head_dim_vo), "[rows of q, num_qo_heads, head_dim_vo]"
        dtype = check.TORCH_DTYPES[options.o_dtype]
        check.output(outputs.out, shape, f"{meaning} as planned", dtype, request.device)
        out_strides = effective_strides(outputs.out)
    of_lse = (0, 0, 1)
    if outputs.lse is not None:
        of_lse = _check_lse(outputs.lse, outputs.lse_layout, tokens, request)
    elif outputs.return_lse:
        of_lse = (heads, 1, 1) if outputs.lse_layout == "NH" else (1, tokens, 1)
    return ((*q_strides, tokens), k, v, out_strides, of_lse), v_offset


def check_q(q: Any, request: Request) -> tuple[int, int]:
    """The strides of q [tokens, num_qo_heads, head_dim_qk]."""
    options = request.options
    check.tensor("q", q)
    batch = request.batch
    if batch.exact_rows:
        check_decode_rows(q, batch.num_requests, max(batch.max_qo_len, 1))
    # Rows of a prefill after its last request are padding, which kernels neither read nor write.
    rows = max(q.shape[0], request.qo_tokens) if q.dim() > 0 else request.qo_tokens
    wanted = (rows, options.num_qo_heads, options.head_dim_qk)
    meaning = "[at least qo_indptr[-1], num_qo_heads, head_dim] as planned"
    check.has_shape("q", q, wanted, meaning)
    q_dtype = check.TORCH_DTYPES[options.q_dtype]
    check.has_dtype("q", q, q_dtype, "q_data_type of plan, float16 unless given")
    check.on_device("q", q, request.device)
    check.rows("q", q)
    return effective_strides(q)


def check_decode_rows(q: torch.Tensor, batch_size: int, q_len_per_req: int) -> None:
    """Raises ValueError unless q has batch_size * q_len_per_req rows, as a decode batch wants."""
    rows = batch_size * q_len_per_req
    if q.dim() == 4:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; must be [{rows}, num_qo_heads, head_dim], as a decode "
            "batch is planned: pass q.flatten(0, 1)"
        )
    if q.dim() > 0 and q.shape[0] != rows:
        raise ValueError(
            f"q has {q.shape[0]} rows; a decode batch of {batch_size} requests with q_len_per_req="
            f"{q_len_per_req} has exactly {rows}: pass q[:{rows}], or plan() the requests of all "
            "rows"
        )


def _check_ragged(name: str, value: Any, head_dim: int, request: Request) -> KvNumbers:
    """k or v: [tokens, num_kv_heads, head_dim], or [num_kv_heads, tokens, head_dim] with HND."""
    check.tensor(name, value)
    _check_dtype_and_device(name, value, request)
    heads = request.options.num_kv_heads
    nhd = request.kv_layout == "NHD"
    order = "[tokens, num_kv_heads, head_dim]" if nhd else "[num_kv_heads, tokens, head_dim]"
    check.has_dims(name, value, 3, order)
    tokens = value.shape[0 if nhd else 1]
    wanted = (tokens, heads, head_dim) if nhd else (heads, tokens, head_dim)
    meaning = f"{order} as planned, kv_layout={request.kv_layout}"
    swapped = (value.shape[1], heads, head_dim) if nhd else (heads, value.shape[0], head_dim)
    meaning += _layout_hint(value, swapped, request)
    check.has_shape(name, value, wanted, meaning)
    if tokens < request.kv_tokens:
        raise ValueError(
            f"{name} has {tokens} tokens; the plan uses kv_indptr[-1] = {request.kv_tokens}"
        )
    check.rows(name, value)
    return (0, *_token_first(effective_strides(value), request), 1, tokens)


def _check_paged(cache: Any, request: Request) -> tuple[KvNumbers, KvNumbers, int]:
    """A 5-D cache that holds both, or a pair of 4-D caches; one dimension fewer at page_size 1.
    Tells of K, of V, and where V begins in bytes."""
    options = request.options
    names, apart = ("k_cache", "v_cache"), 0
    if isinstance(cache, torch.Tensor):
        _check_dtype_and_device("paged_kv_cache", cache, request)
        short = request.page_size == 1 and cache.dim() == 4
        if (not short and cache.dim() != 5) or cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {tuple(cache.shape)}; must be "
                f"{_cache_shape(request, 2)}, or a tuple (k_cache, v_cache) of "
                f"{_cache_shape(request, 1)}"
            )
        names = ("paged_kv_cache[:, 0]", "paged_kv_cache[:, 1]")
        apart = cache.stride(1) * cache.element_size()
    elif not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise TypeError(
            "paged_kv_cache must be a tensor or a tuple (k_cache, v_cache); got "
            f"{type(cache).__name__}"
        )
    k, v = kv_of(cache)
    of_k = _check_pages(names[0], k, options.head_dim_qk, request)
    of_v = _check_pages(names[1], v, options.head_dim_vo, request)
    # A page index in range for k must be in range for v, also if the indices are on the GPU.
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{names[0]} has {k.shape[0]} pages and {names[1]} {v.shape[0]}; the page table "
            "indexes both, so they must have as many"
        )
    return of_k, of_v, apart


def _check_pages(name: str, value: Any, head_dim: int, request: Request) -> KvNumbers:
    check.tensor(name, value)
    _check_dtype_and_device(name, value, request)
    nhd = request.kv_layout == "NHD"
    if request.page_size == 1 and value.dim() == 3:
        value = value.unsqueeze(1 if nhd else 2)
    heads, page_size = request.options.num_kv_heads, request.page_size
    pages = value.shape[0] if value.dim() > 0 else 0
    wanted = (page_size, heads, head_dim) if nhd else (heads, page_size, head_dim)
    meaning = f"{_cache_shape(request, 1)} as planned, {request.kv_layout}"
    meaning += _layout_hint(value, (pages, *wanted), request)
    check.has_shape(name, value, (pages, *wanted), meaning)
    if request.largest_page >= pages:
        raise ValueError(
            f"paged_kv_indices holds {request.largest_page}; {name} has {pages} pages, so an "
            f"index must be less than {pages}"
        )
    check.rows(name, value)
    page, *inner = effective_strides(value)
    return (page, *_token_first(inner, request), pages, page_size)


def _layout_hint(value: torch.Tensor, wanted: tuple[int, ...], request: Request) -> str:
    """Returns the kv_layout to pass if k or v has the wanted shape with tokens and heads
    exchanged; else ""."""
    other = "HND" if request.kv_layout == "NHD" else "NHD"
    *first, tokens, heads, head_dim = wanted
    if tokens == heads or tuple(value.shape) != (*first, heads, tokens, head_dim):
        return ""
    return f"; the shape fits {other}: construct the wrapper with kv_layout={other!r}"


def _token_first(strides: Sequence[int], request: Request) -> Sequence[int]:
    """[token, head] strides from those of two dimensions in the order of the layout."""
    return strides if request.kv_layout == "NHD" else strides[::-1]


def _cache_shape(request: Request, planes: int) -> str:
    inner = "page_size, num_kv_heads" if request.kv_layout == "NHD" else "num_kv_heads, page_size"
    return f"[max_num_pages, {'2, ' if planes == 2 else ''}{inner}, head_dim]"


def _check_dtype_and_device(name: str, value: torch.Tensor, request: Request) -> None:
    kv_dtype = check.TORCH_DTYPES[request.options.kv_dtype]
    check.has_dtype(name, value, kv_dtype, "kv_data_type, which is q's dtype unless given")
    check.on_device(name, value, request.device)


def _check_lse(
    lse: torch.Tensor, layout: str, tokens: int, request: Request
) -> tuple[int, int, int]:
    """The strides of [token, head] in lse, which is float32, and the values of each."""
    check.tensor("lse", lse)
    shape, order = lse_shape(layout, tokens, request), _LSE_ORDERS[layout]
    check.has_shape("lse", lse, shape, f"{order} for lse_layout={layout!r}")
    check.has_dtype("lse", lse, torch.float32, check.WHY_FLOAT32)
    check.on_device("lse", lse, request.device)
    check.not_overlapping("lse", lse)
    first, second = lse.stride()[:2]
    if layout == "HN":
        return (second, first, 1)
    return (first, second, 2 if layout == "STATS" else 1)


def check_per_head(
    given: PerHead,
    options: _core.AttentionOptions,
    device: torch.device,
    q_given: torch.dtype | None = None,
) -> None:
    """Asked for every run: the addresses of these tensors are all that a launch gets. q_given: of
    queries that the run converts."""
    for name, value, tensor in zip(given._fields, given, PER_HEAD, strict=True):
        if value is None:
            continue
        if tensor.of is not None:
            dtype = check.TORCH_DTYPES[options.kv_dtype]
            if tensor.of == "q":
                dtype = q_given or check.TORCH_DTYPES[options.q_dtype]
            if dtype not in check.FP8_DTYPES:
                raise ValueError(
                    f"{name}: only an fp8 tensor has a factor for each head, and {tensor.of} is "
                    f"{dtype}; leave it None, and pass one factor as {tensor.of}_scale"
                )
        check.forward_only(**{name: value})
        check.tensor(name, value)
        check.has_dtype(name, value, torch.float32, tensor.why_float32)
        shape = (getattr(options, tensor.heads),)
        check.has_shape(name, value, shape, f"[{tensor.heads}], {tensor.element}")
        check.on_device(name, value, device)
        check.contiguous(name, value)


_LSE_ORDERS = {
    "NH": "[tokens, num_qo_heads]",
    "HN": "[num_qo_heads, tokens]",
    "STATS": "[tokens, num_qo_heads, 2]",
}


def lse_shape(layout: str, tokens: int, request: Request) -> tuple[int, ...]:
    shape = (tokens, request.options.num_qo_heads)
    if layout == "STATS":
        return (*shape, 2)
    return shape if layout == "NH" else shape[::-1]


def reaches_into(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the address ranges of two tensors overlap."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(value: torch.Tensor) -> int:
    return value.data_ptr() + check.bytes_reached(value) - value.storage_offset() * value.itemsize


def kv_of(kv: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns k and v, also from one tensor that holds both."""
    return tuple(kv) if isinstance(kv, (tuple, list)) else (kv[:, 0], kv[:, 1])


def refuse_shared(name: str, written: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raises ValueError if two tensors share elements. Repeats the check of a launch
    for calls of several launches. Parts of one packed tensor share none."""
    if reaches_into(written, other) and _core.may_overlap(_strided(written), _strided(other)):
        raise ValueError(
            f"{name} shares memory with {other_name}, which would be overwritten while it is in "
            f"use: give {name} memory of its own"
        )


def _strided(value: torch.Tensor) -> tuple[int, list[tuple[int, int]], int]:
    size = value.element_size()
    dims = [(stride * size, n) for stride, n in zip(value.stride(), value.shape, strict=True)]
    if dims and value.stride(-1) == 1:
        size *= dims.pop()[1]
    return value.data_ptr(), dims, size
