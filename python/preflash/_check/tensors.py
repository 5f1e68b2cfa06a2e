"""The tensors of run(): checked once per combination of shapes, strides, dtypes and devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _core
from . import values as check
from .arguments import PER_HEAD, KvCache, PerHead
from .outputs import Outputs


class KvView(NamedTuple):
    """K or V as the kernels see it: strides of [page, token, head] in elements."""

    strides: tuple[int, int, int]
    extents: tuple[int, int]  # pages, tokens in one of them; ragged: one page that holds all
    offset: int  # bytes from the data pointer of the tensor that the caller passed


class Expected(NamedTuple):
    """What plan() said about the tensors of run()."""

    options: _core.AttentionOptions
    device: torch.device
    kv_layout: str
    batch: _core.Batch
    largest_page: int | None

    @property
    def qo_tokens(self) -> int:
        """At least; q may have more."""
        return 0 if self.batch.are_bounds else self.batch.qo_end

    @property
    def kv_tokens(self) -> int:
        """Ragged: the tokens in use."""
        return 0 if self.batch.are_bounds else self.batch.kv_end

    @property
    def page_size(self) -> int:
        """0: ragged."""
        return self.batch.page_size


def signature(value: torch.Tensor | None) -> tuple | None:
    """Everything of a tensor that its checks look at, except its address."""
    if value is None:
        return None
    return (value.shape, value.stride(), value.dtype, value.device, value.is_neg())


def effective_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 where a dimension has one element."""
    return tuple(value.stride(dim) if value.shape[dim] > 1 else 0 for dim in range(value.dim() - 1))


class Bound(NamedTuple):
    """What a launch is bound to."""

    strides: tuple[tuple[int, ...], ...]  # q, k, v, o, lse, as _core.Launch takes them
    v_offset: int  # bytes, where K and V are halves of one tensor


def bind(q: Any, kv: KvCache, outputs: Outputs, expected: Expected) -> Bound:
    """Every check of one run's tensors."""
    q_strides = check_q(q, expected)
    if expected.page_size > 0:
        k, v = check_paged(kv, expected)
    else:
        k = check_ragged("k", kv[0], expected.options.head_dim_qk, expected)
        v = check_ragged("v", kv[1], expected.options.head_dim_vo, expected)
    tokens, heads = q.shape[0], expected.options.num_qo_heads
    if outputs.out is None:
        out_strides = contiguous_strides((tokens, heads, expected.options.head_dim_vo))
    else:
        out_strides = check_out(outputs.out, tokens, expected)
    of_lse = (0, 0, 1)
    if outputs.lse is not None:
        of_lse = check_lse(outputs.lse, outputs.lse_layout, tokens, expected)
    elif outputs.return_lse:
        of_lse = (heads, 1, 1) if outputs.lse_layout == "NH" else (1, tokens, 1)
    k_numbers, v_numbers = (*k.strides, *k.extents), (*v.strides, *v.extents)
    return Bound(((*q_strides, tokens), k_numbers, v_numbers, out_strides, of_lse), v.offset)


def check_q(q: Any, expected: Expected) -> tuple[int, int]:
    """The strides of q [tokens, num_qo_heads, head_dim_qk]."""
    options = expected.options
    check.tensor("q", q)
    # Rows behind the last request are padding, which is neither read nor written.
    rows = max(q.shape[0], expected.qo_tokens) if q.dim() > 0 else expected.qo_tokens
    check.has_shape(
        "q",
        q,
        (rows, options.num_qo_heads, options.head_dim_qk),
        "[at least qo_indptr[-1], num_qo_heads, head_dim] as planned",
    )
    q_dtype = check.TORCH_DTYPES[options.q_dtype]
    check.has_dtype("q", q, q_dtype, "q_data_type of plan, float16 unless given")
    check.on_device("q", q, expected.device)
    check.rows("q", q)
    return effective_strides(q)


def check_ragged(name: str, value: Any, head_dim: int, expected: Expected) -> KvView:
    """k or v: [tokens, num_kv_heads, head_dim], or [num_kv_heads, tokens, head_dim] with HND."""
    check.tensor(name, value)
    _check_dtype_and_device(name, value, expected)
    heads = expected.options.num_kv_heads
    nhd = expected.kv_layout == "NHD"
    order = "[tokens, num_kv_heads, head_dim]" if nhd else "[num_kv_heads, tokens, head_dim]"
    if value.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be {order}")
    tokens = value.shape[0 if nhd else 1]
    wanted = (tokens, heads, head_dim) if nhd else (heads, tokens, head_dim)
    check.has_shape(name, value, wanted, f"{order} as planned, kv_layout={expected.kv_layout}")
    if tokens < expected.kv_tokens:
        raise ValueError(
            f"{name} has {tokens} tokens; the plan uses kv_indptr[-1] = {expected.kv_tokens}"
        )
    check.rows(name, value)
    token, head = effective_strides(value) if nhd else reversed(effective_strides(value))
    return KvView(strides=(0, token, head), extents=(1, tokens), offset=0)


def check_paged(cache: Any, expected: Expected) -> tuple[KvView, KvView]:
    """A 5-D cache that holds both, or a pair of 4-D caches; one dimension fewer at page_size 1."""
    options = expected.options
    if isinstance(cache, torch.Tensor):
        _check_dtype_and_device("paged_kv_cache", cache, expected)
        short = expected.page_size == 1 and cache.dim() == 4
        if (not short and cache.dim() != 5) or cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {tuple(cache.shape)}; must be "
                f"{_cache_shape(expected, 2)}, "
                f"or a tuple (k_cache, v_cache) of {_cache_shape(expected, 1)}"
            )
        k, v = cache[:, 0], cache[:, 1]
        names = ("paged_kv_cache[:, 0]", "paged_kv_cache[:, 1]")
        apart = cache.stride(1) * cache.element_size()
    elif isinstance(cache, (tuple, list)) and len(cache) == 2:
        k, v = cache
        names = ("k_cache", "v_cache")
        apart = 0
    else:
        raise TypeError(
            "paged_kv_cache must be a tensor or a tuple (k_cache, v_cache); got "
            f"{type(cache).__name__}"
        )
    views = (
        _check_pages(names[0], k, options.head_dim_qk, expected, 0),
        _check_pages(names[1], v, options.head_dim_vo, expected, apart),
    )
    # An index that is in range for the one must be for the other, also where it lies on the GPU.
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"{names[0]} has {k.shape[0]} pages and {names[1]} {v.shape[0]}; the page table "
            "indexes both, so they must have as many"
        )
    return views


def _check_pages(name: str, value: Any, head_dim: int, expected: Expected, offset: int) -> KvView:
    check.tensor(name, value)
    _check_dtype_and_device(name, value, expected)
    nhd = expected.kv_layout == "NHD"
    if expected.page_size == 1 and value.dim() == 3:
        value = value.unsqueeze(1 if nhd else 2)
    heads, page_size = expected.options.num_kv_heads, expected.page_size
    pages = value.shape[0] if value.dim() > 0 else 0
    wanted = (page_size, heads, head_dim) if nhd else (heads, page_size, head_dim)
    check.has_shape(
        name,
        value,
        (pages, *wanted),
        f"{_cache_shape(expected, 1)} as planned, {expected.kv_layout}",
    )
    if expected.largest_page is not None and expected.largest_page >= pages:
        raise ValueError(
            f"paged_kv_indices holds {expected.largest_page}; {name} has {pages} pages, so an "
            f"index must be less than {pages}"
        )
    check.rows(name, value)
    page, first, second = effective_strides(value)
    token, head = (first, second) if nhd else (second, first)
    return KvView(strides=(page, token, head), extents=(pages, page_size), offset=offset)


def _cache_shape(expected: Expected, planes: int) -> str:
    inner = "page_size, num_kv_heads" if expected.kv_layout == "NHD" else "num_kv_heads, page_size"
    return f"[max_num_pages, {'2, ' if planes == 2 else ''}{inner}, head_dim]"


def _check_dtype_and_device(name: str, value: torch.Tensor, expected: Expected) -> None:
    kv_dtype = check.TORCH_DTYPES[expected.options.kv_dtype]
    check.has_dtype(name, value, kv_dtype, "kv_data_type, which is q's dtype unless given")
    check.on_device(name, value, expected.device)


def check_out(out: torch.Tensor, tokens: int, expected: Expected) -> tuple[int, int]:
    """The strides of out [tokens, num_qo_heads, head_dim_vo], where q has so many tokens."""
    options = expected.options
    check.tensor("out", out)
    check.has_shape(
        "out",
        out,
        (tokens, options.num_qo_heads, options.head_dim_vo),
        "[rows of q, num_qo_heads, head_dim_vo] as planned",
    )
    o_dtype = check.TORCH_DTYPES[options.o_dtype]
    check.has_dtype("out", out, o_dtype, "o_data_type, which is q's dtype but for fp8")
    check.on_device("out", out, expected.device)
    check.rows("out", out)
    check.not_overlapping("out", out)
    return effective_strides(out)


def check_lse(
    lse: torch.Tensor, layout: str, tokens: int, expected: Expected
) -> tuple[int, int, int]:
    """The strides of [token, head] in lse, which is float32, and the values of each."""
    shape = lse_shape(layout, tokens, expected)
    check.tensor("lse", lse)
    order = _LSE_ORDERS[layout]
    check.has_shape("lse", lse, shape, f"{order} for lse_layout={layout!r}")
    check.has_dtype("lse", lse, torch.float32, "the log-sum-exp is always float32")
    check.on_device("lse", lse, expected.device)
    check.not_overlapping("lse", lse)
    return lse_strides(lse, layout)


def check_per_head(given: PerHead, options: _core.AttentionOptions, device: torch.device) -> None:
    """Asked for every run: the addresses of these tensors are all that a launch gets."""
    for name, value, tensor in zip(given._fields, given, PER_HEAD, strict=True):
        if value is None:
            continue
        if tensor.of is not None:
            dtype = options.q_dtype if tensor.of == "q" else options.kv_dtype
            _check_scaled(name, tensor.of, check.TORCH_DTYPES[dtype])
        check.forward_only(**{name: value})
        check.tensor(name, value)
        check.has_dtype(name, value, torch.float32, tensor.why_float32)
        shape = (getattr(options, tensor.heads),)
        check.has_shape(name, value, shape, f"[{tensor.heads}], {tensor.element}")
        check.on_device(name, value, device)
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {tuple(value.stride())}; must be contiguous")


def _check_scaled(name: str, operand: str, dtype: torch.dtype) -> None:
    if dtype not in check.FP8_DTYPES:
        raise ValueError(
            f"{name}: only an fp8 tensor has a factor for each head, and {operand} is "
            f"{dtype}; leave it None, and pass one factor as {operand}_scale"
        )


_LSE_ORDERS = {
    "NH": "[tokens, num_qo_heads]",
    "HN": "[num_qo_heads, tokens]",
    "STATS": "[tokens, num_qo_heads, 2]",
}


def lse_shape(layout: str, tokens: int, expected: Expected) -> tuple[int, ...]:
    shape = (tokens, expected.options.num_qo_heads)
    if layout == "STATS":
        return (*shape, 2)
    return shape if layout == "NH" else shape[::-1]


def lse_strides(lse: torch.Tensor, layout: str) -> tuple[int, int, int]:
    first, second = lse.stride()[:2]
    if layout == "STATS":
        return (first, second, 2)
    return (first, second, 1) if layout == "NH" else (second, first, 1)


def contiguous_strides(shape: tuple[int, int, int]) -> tuple[int, int]:
    """The strides of [token, head] in a fresh [token, head, head_dim] tensor."""
    return (shape[1] * shape[2], shape[2])


def reaches_into(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the stretches of memory that two tensors lie in meet."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    (a_begin, a_end), (b_begin, b_end) = _reach(a), _reach(b)
    return a_begin < b_end and b_begin < a_end


def _reach(value: torch.Tensor) -> tuple[int, int]:
    begin = value.data_ptr()
    return begin, begin + check.bytes_reached(value) - value.storage_offset() * value.element_size()


def kv_of(kv: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, of one tensor that holds both, too."""
    return tuple(kv) if isinstance(kv, (tuple, list)) else (kv[:, 0], kv[:, 1])


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may have an element in common; parts of one packed tensor have none."""
    return reaches_into(a, b) and _core.may_overlap(_strided(a), _strided(b))


def refuse_shared(name: str, written: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """As the launch itself refuses it, where there are several."""
    if share_memory(written, other):
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
