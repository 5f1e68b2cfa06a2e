"""Page tables: lengths, positions, and appending to a paged KV cache.

Everything here runs on the tensors' own device, without a wait for it: the append is a kernel, the
lengths of arrays on the CPU one call, the rest a handful of torch operations.
"""

from __future__ import annotations

import torch

from . import _core
from ._check import pages as checks
from ._check import torch_modes, validate
from ._check.arguments import KvCache
from ._check.tensors import effective_strides, reaches_into
from ._device.stream import DeviceStream
from ._wrappers.compile_ops import pools_of

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

# A serving engine asks in every step.
_lengths_of_usual = _core.page_lengths_of(torch_modes.TORCH)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """KV lengths of the requests of a page table; 0 for a request without pages.

    Args:
        kv_indptr: [batch_size + 1] int32, first page of each request.
        kv_last_page_len: [batch_size] int32, tokens in the last page of each.
        page_size: tokens per page.

    Returns:
        [batch_size] int32 on kv_indptr's device.

    Raises:
        TypeError, ValueError: an argument is wrong. Values on the GPU are checked only with
            PREFLASH_DEBUG=1 in the environment, because it takes a wait.
    """
    if torch_modes.traced():
        return torch.ops.preflash.get_seq_lens(kv_indptr, kv_last_page_len, page_size)
    page_size = validate.size("page_size", page_size)
    jit_traces = torch.jit.is_tracing()
    on_host = None if jit_traces else _lengths_of_usual(kv_indptr, kv_last_page_len, page_size)
    if on_host is not None:
        return torch.tensor(on_host, dtype=torch.int32, device="cpu")
    checks.index_arrays(kv_indptr, kv_last_page_len)
    if checks.may_be_read(kv_indptr):
        checks.page_table(kv_indptr, kv_last_page_len, page_size)
    pages = kv_indptr.diff()
    lengths = (pages - 1) * page_size + kv_last_page_len
    return torch.where(pages > 0, lengths, 0).to(torch.int32)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose each appended token is, and where in its request it goes: to the end.

    Args:
        append_indptr: [batch_size + 1] int32 or int64, first appended token of each request.
        seq_lens: [batch_size], integers: KV lengths after the append.
        nnz: how many tokens to tell about; more than append_indptr[-1] where they are padded.
        batch_indices, positions: [nnz] int32 to write into.

    Returns:
        batch_indices [nnz] int32, -1 for tokens that no request has, and positions [nnz] int32, 0
        for those.

    Raises as get_seq_lens().
    """
    if torch_modes.traced():
        outputs = [
            append_indptr.new_empty(nnz, dtype=torch.int32) if given is None else given
            for given in (batch_indices, positions)
        ]
        torch.ops.preflash.get_batch_indices_positions(append_indptr, seq_lens, nnz, *outputs)
        return outputs[0], outputs[1]
    validate.conforms("append_indptr", append_indptr)
    device, known = append_indptr.device, {"batch_size": append_indptr.numel() - 1}
    validate.conforms("seq_lens", seq_lens, "append_lengths", device, known)
    nnz = validate.size("nnz", nnz)
    if checks.may_be_read(append_indptr):
        checks.appended(append_indptr, seq_lens)
    outputs = []
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is None:
            outputs.append(torch.empty(nnz, dtype=torch.int32, device=device))
        else:
            outputs.append(validate.conforms(name, given, "made_places", device, {"nnz": nnz}))
    if reaches_into(*outputs):
        raise ValueError(
            "batch_indices shares memory with positions, and both are written; must be apart"
        )
    batch_size = seq_lens.numel()
    if batch_size == 0:
        return outputs[0].fill_(-1), outputs[1].zero_()
    tokens = torch.arange(nnz, dtype=append_indptr.dtype, device=device)
    # The first request that ends behind the token: requests without tokens end where they begin.
    ends = append_indptr[1:].contiguous()
    request = torch.searchsorted(ends, tokens, right=True)
    owned = (request < batch_size) & (tokens >= append_indptr[0])
    request = request.clamp(max=batch_size - 1)
    position = seq_lens[request] - (ends[request] - tokens)
    owners, places = torch.where(owned, request, -1), torch.where(owned, position, 0)
    return outputs[0].copy_(owners), outputs[1].copy_(places)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: KvCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values into the pages that a page table already has for them.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim], the cache's dtype.
        batch_indices, positions: [nnz] integers: whose each token is and where in its request
            (get_batch_indices_positions). Tokens with batch_indices below 0 are padding.
        paged_kv_cache: as in BatchPrefillWithPagedKVCacheWrapper.run().
        kv_indices, kv_indptr, kv_last_page_len: int32, the page table after the append. kv_indices
            may be a block table [batch_size, max_pages] with contiguous rows at any distance; of
            kv_indptr the differences then count: the pages of each request.
        kv_layout: "NHD" or "HND".

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was written. Positions and pages on the
            GPU are checked only with PREFLASH_DEBUG=1 in the environment, because it takes a wait;
            without, tokens that the page table has no place for are not written.
        NotImplementedError: a gradient is wanted, or torch.jit.trace is recording.
    """
    if torch_modes.traced():
        torch.ops.preflash.append_paged_kv_cache(
            append_key, append_value, batch_indices, positions, *pools_of(paged_kv_cache),
            kv_indices, kv_indptr, kv_last_page_len, kv_layout,
        )  # fmt: skip
        return
    validate.one_of("kv_layout", kv_layout, validate.KV_LAYOUTS)
    k_cache, v_cache = _pools(paged_kv_cache, kv_layout)
    torch_modes.forward_only(append_key, append_value, k_cache=k_cache, v_cache=v_cache)
    device = k_cache.device
    tokens = checks.rows("append_key", append_key, k_cache)
    if checks.rows("append_value", append_value, v_cache) != tokens:
        raise ValueError(
            f"append_value has {append_value.shape[0]} tokens and append_key {tokens}; "
            "must be equal"
        )
    is_table = isinstance(kv_indices, torch.Tensor) and kv_indices.dim() == 2
    checks.index_arrays(kv_indptr, kv_last_page_len, device)
    known = {"nnz": tokens, "batch_size": kv_last_page_len.numel()}
    for name, value in (("batch_indices", batch_indices), ("positions", positions)):
        validate.conforms(name, value, "append_places", device, known)
    rule = "append_table" if is_table else "append_pages"
    validate.conforms("kv_indices", kv_indices, rule, device, known)
    if checks.may_be_read(kv_indptr):
        lengths = get_seq_lens(kv_indptr, kv_last_page_len, k_cache.shape[1])
        checks.in_use(kv_indices, kv_indptr)
        checks.places(batch_indices, positions, lengths)
    if tokens == 0 or 0 in (kv_indices.numel(), kv_last_page_len.numel(), k_cache.numel()):
        return
    if checks.may_be_read(kv_indptr):
        owned = batch_indices >= 0
        request, position = batch_indices[owned].long(), positions[owned].long()
        nth = position // k_cache.shape[1]
        used = (request, nth) if is_table else kv_indptr[request].long() + nth
        checks.pages(kv_indices[used], k_cache.shape[0])
    one_pool = k_cache.data_ptr() == v_cache.data_ptr()
    if one_pool and append_key.data_ptr() != append_value.data_ptr():
        raise ValueError("v_cache lies where k_cache does, and their rows differ; must be apart")
    # Tokens may be moved within a cache: their rows are read before any is written.
    key, value = (
        rows.clone() if reaches_into(rows, k_cache) or reaches_into(rows, v_cache) else rows
        for rows in (append_key, append_value)
    )
    params = _core.AppendParams(tokens, *k_cache.shape[:2])
    params.set_k(*_row_numbers(key, k_cache))
    params.set_v(*_row_numbers(value, v_cache))
    params.set_places(_index_numbers(batch_indices), _index_numbers(positions))
    row = (kv_indices.shape[1], kv_indices.stride(0)) if is_table else (0, 0)
    if is_table:
        extent = (kv_indices.shape[0] - 1) * row[1] + row[0]
        kv_indices = kv_indices.as_strided((extent,), (1,))
    params.set_page_table(_index_numbers(kv_indices), _index_numbers(kv_indptr), row)
    params.launch(DeviceStream(device).target())
    torch_modes.written(k_cache, v_cache)


def _index_numbers(array: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, count, stride and bytes of an element."""
    return validate.address(array), array.numel(), array.stride(0), array.element_size()


def _row_numbers(
    rows: torch.Tensor, pool: torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """New rows and the pool that they go into, as addresses and strides in bytes; heads, and the
    bytes of a row."""
    item = rows.element_size()
    of_rows, of_pool = (
        (validate.address(x), *(item * stride for stride in effective_strides(x)))
        for x in (rows, pool)
    )
    return of_rows, of_pool, rows.shape[1], rows.shape[2] * item


def _pools(cache: KvCache, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [pages, page_size, num_kv_heads, head_dim], whatever the layout."""
    if isinstance(cache, torch.Tensor):
        validate.tensor("paged_kv_cache", cache)
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {tuple(cache.shape)}; must be [max_num_pages, 2, ...] "
                "of 5 dimensions (4 at page_size 1), or a tuple (k_cache, v_cache)"
            )
        validate.not_overlapping("paged_kv_cache", cache)
        pair = (cache[:, 0], cache[:, 1])
    elif isinstance(cache, (tuple, list)) and len(cache) == 2:
        pair = tuple(cache)
    else:
        raise TypeError(
            "paged_kv_cache must be a tensor or a tuple (k_cache, v_cache); got "
            f"{type(cache).__name__}"
        )
    pools = []
    for name, pool in zip(("k_cache", "v_cache"), pair, strict=True):
        validate.tensor(name, pool)
        if pool.dim() not in (3, 4):
            raise ValueError(
                f"{name} has shape {tuple(pool.shape)}; must be four-dimensional, {layout} (three "
                "at page_size 1)"
            )
        if pool.dim() == 3:
            pool = pool.unsqueeze(1)
        elif layout == "HND":
            pool = pool.transpose(1, 2)
        validate.not_overlapping(name, pool)
        pools.append(pool)
    k, v = pools
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k_cache is {tuple(k.shape)} {k.dtype} on {k.device} and v_cache {tuple(v.shape)} "
            f"{v.dtype} on {v.device}; must agree but for head_dim"
        )
    return k, v
