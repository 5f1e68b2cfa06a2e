"""The tensors of run(): checked once per combination of shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from . import dtypes, torch_modes, validate
from .arguments import PER_HEAD_OPERANDS, KvCache, PerHead
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
    options, device = request.options, request.device
    known = _sizes_of(request)
    q_strides = check_q(q, request, known)
    v_offset = 0
    if request.page_size > 0:
        k, v, v_offset = _check_paged(kv, request, known)
    else:
        k, v = (_check_ragged(name, x, request, known) for name, x in zip("kv", kv, strict=True))
    tokens, heads = q.shape[0], options.num_qo_heads
    known["rows of q"] = tokens
    out_strides = (heads * options.head_dim_vo, options.head_dim_vo)
    if outputs.out is not None:
        out_strides = effective_strides(validate.conforms("out", outputs.out, "", device, known))
    of_lse = (0, 0, 1)
    if outputs.lse is not None:
        lse = validate.conforms("lse", outputs.lse, f"lse_{outputs.lse_layout}", device, known)
        of_lse = (*lse.stride()[:2], 2 if outputs.lse_layout == "STATS" else 1)
        if outputs.lse_layout == "HN":
            of_lse = (of_lse[1], of_lse[0], 1)
    elif outputs.return_lse:
        of_lse = (heads, 1, 1) if outputs.lse_layout == "NH" else (1, tokens, 1)
    return ((*q_strides, tokens), k, v, out_strides, of_lse), v_offset


def _sizes_of(request: Request) -> dict[str, Any]:
    """The sizes and dtypes of a plan, by their names in the rules of tensors."""
    options = request.options
    return {
        **sizes_of(options),
        "qo_indptr[-1]": request.qo_tokens,
        "kv_indptr[-1]": request.kv_tokens,
        "page_size": request.page_size,
        "kv_layout": request.kv_layout,
    }


def sizes_of(options: _core.AttentionOptions) -> dict[str, Any]:
    """The sizes and dtypes of options, by their names in the rules of tensors."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    sizes = {name: getattr(options, name) for name in names}
    names = ("q_dtype", "kv_dtype", "o_dtype")
    return sizes | {name: dtypes.TORCH_DTYPES[getattr(options, name)] for name in names}


def check_q(q: Any, request: Request, known: dict[str, Any]) -> tuple[int, int]:
    """Checks q [tokens, num_qo_heads, head_dim_qk], and returns its strides. Rows of a prefill
    after its last request are padding, which kernels neither read nor write."""
    batch = request.batch
    if batch.exact_rows:
        check_decode_rows(validate.tensor("q", q), batch.num_requests, max(batch.max_qo_len, 1))
    return effective_strides(validate.conforms("q", q, "", request.device, known))


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


def _check_ragged(name: str, value: Any, request: Request, known: dict[str, Any]) -> KvNumbers:
    """k or v: [tokens, num_kv_heads, head_dim], or [num_kv_heads, tokens, head_dim] with HND."""
    value = validate.conforms(name, value, "", request.device, known)
    tokens = value.shape[0 if request.kv_layout == "NHD" else 1]
    return (0, *_token_first(effective_strides(value), request), 1, tokens)


def _check_paged(
    cache: Any, request: Request, known: dict[str, Any]
) -> tuple[KvNumbers, KvNumbers, int]:
    """A 5-D cache that holds both, or a pair of 4-D caches; one dimension fewer at page_size 1.
    Tells of K, of V, and where V begins in bytes."""
    names, apart = ("k_cache", "v_cache"), 0
    if isinstance(cache, torch.Tensor):
        validate.tensor("paged_kv_cache", cache)  # torch raises another error for freed memory
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
    of_k = _check_pages(names[0], k, "k_cache", request, known)
    of_v = _check_pages(names[1], v, "v_cache", request, known)
    # A page index in range for k must be in range for v, also if the indices are on the GPU.
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{names[0]} has {k.shape[0]} pages and {names[1]} {v.shape[0]}; the page table "
            "indexes both, so they must have as many"
        )
    return of_k, of_v, apart


def _check_pages(
    name: str, value: Any, rule: str, request: Request, known: dict[str, Any]
) -> KvNumbers:
    validate.tensor(name, value)
    if request.page_size == 1 and value.dim() == 3:
        value = value.unsqueeze(1 if request.kv_layout == "NHD" else 2)
    pages = validate.conforms(name, value, rule, request.device, known).shape[0]
    if request.largest_page >= pages:
        raise ValueError(
            f"paged_kv_indices holds {request.largest_page}; {name} has {pages} pages, so an "
            f"index must be less than {pages}"
        )
    page, *inner = effective_strides(value)
    return (page, *_token_first(inner, request), pages, request.page_size)


def _token_first(strides: Sequence[int], request: Request) -> Sequence[int]:
    """[token, head] strides from those of two dimensions in the order of the layout."""
    return strides if request.kv_layout == "NHD" else strides[::-1]


def _cache_shape(request: Request, planes: int) -> str:
    inner = "page_size, num_kv_heads" if request.kv_layout == "NHD" else "num_kv_heads, page_size"
    return f"[max_num_pages, {'2, ' if planes == 2 else ''}{inner}, head_dim]"


def check_per_head(
    given: PerHead,
    options: _core.AttentionOptions,
    device: torch.device,
    q_given: torch.dtype | None = None,
) -> None:
    """Asked for every run: the addresses of these tensors are all that a launch gets. q_given: of
    queries that the run converts."""
    for name, value in zip(given._fields, given, strict=True):
        if value is None:
            continue
        of = PER_HEAD_OPERANDS.get(name)
        if of is not None:
            dtype = dtypes.TORCH_DTYPES[options.kv_dtype]
            if of == "q":
                dtype = q_given or dtypes.TORCH_DTYPES[options.q_dtype]
            if dtype not in dtypes.FP8_DTYPES:
                raise ValueError(
                    f"{name}: only an fp8 tensor has a factor for each head, and {of} is {dtype}; "
                    f"leave it None, and pass one factor as {of}_scale"
                )
        torch_modes.forward_only(**{name: value})
        validate.conforms(name, value, "", device, sizes_of(options))


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
    return (
        value.data_ptr() + validate.bytes_reached(value) - value.storage_offset() * value.itemsize
    )


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
