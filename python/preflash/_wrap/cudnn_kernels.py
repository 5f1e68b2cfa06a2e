"""A checked call of cudnn_batch_prefill_with_kv_cache on the kernels of this package: a plan and a
run of the batch wrappers, with rows moved where offsets put them as no wrapper has them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

import torch

from .._check import values as check
from .._check.tensors import refuse_shared
from .._cudnn.call import Call, Offsets
from .._device.stream import DeviceStream, sent
from .paged import BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper

_WRAPPERS_KEPT = 2  # of a thread, with their workspaces

Wrapper = BatchPrefillWithPagedKVCacheWrapper | BatchPrefillWithRaggedKVCacheWrapper
CudnnResult = tuple[torch.Tensor, torch.Tensor | None]


class _Wrappers(threading.local):
    """Those of this thread, by what their constructors were given."""

    def __init__(self) -> None:
        self.of: OrderedDict[tuple, Wrapper] = OrderedDict()


_wrappers = _Wrappers()


class _Placed(NamedTuple):
    """The tokens of all requests in one tensor."""

    indptr: list[int]
    rows: torch.Tensor | None  # int64, of each token; None: one after the other from indptr[0]

    def every_row(self) -> torch.Tensor:
        if self.rows is not None:
            return self.rows
        return torch.arange(self.indptr[0], self.indptr[-1], device="cpu")


@check.eager
def attend(call: Call, why_not_cudnn: str) -> CudnnResult:
    """The result, and lse or None."""
    _check_not_captured(call, why_not_cudnn)
    qo_lens, kv_lens = call.qo_lens.tolist(), call.kv_lens.tolist()
    q_at = _placed(call.q_at, qo_lens, call.q.shape[0])
    wrapper = _wrapper(call)
    if call.block_tables is None:
        k, v, kv_indptr = _side_by_side(call, kv_lens)
        wrapper.plan(**_plan_options(call, q_at), kv_indptr=_int32(kv_indptr))
        keys = (k, v)
    else:
        wrapper.plan(**_plan_options(call, q_at), **_page_list(call, kv_lens))
        keys = ((call.k, call.v),)
    q = call.q if q_at.rows is None else _taken(call.q, q_at.rows)
    out_at = _placed(call.out_at, qo_lens, call.q.shape[0], written="out")
    lse_rows = _lse_rows(call, qo_lens) if call.with_lse else None
    out = call.out
    if out is None:
        out = call.q.new_empty(call.out_shape, dtype=call.o_dtype)
    in_place = q_at.rows is None and out_at.rows is None and out_at.indptr == q_at.indptr
    _check_apart(call, in_place)
    computed = wrapper.run(
        q,
        *keys,
        **call.scales._asdict(),
        out=out if in_place else None,
        return_lse=call.with_lse,
        lse_base=call.lse_base,
    )
    computed, lse = computed if call.with_lse else (computed, None)
    owned = slice(q_at.indptr[0], q_at.indptr[-1])  # of what was computed
    if not in_place:
        rows = sent(out_at.every_row(), out.device)
        _indexable(out).index_copy_(0, rows, _indexable(computed[owned]))
    if lse is not None:
        lse = _placed_lse(call, lse_rows, lse[owned])
    return out, lse if call.return_lse else None


def _check_not_captured(call: Call, why_not_cudnn: str) -> None:
    if call.q.device.type != "cuda":
        return
    if call.capturable:
        raise NotImplementedError(
            "is_cuda_graph_compatible=True reads lengths on the GPU, which cuDNN alone does, and "
            f"{why_not_cudnn}; use BatchPrefillWithPagedKVCacheWrapper or "
            "BatchPrefillWithRaggedKVCacheWrapper with use_cuda_graph=True"
        )
    if DeviceStream(call.q.device).is_capturing():
        raise RuntimeError(
            "this call makes a plan on the host, which cannot be while its stream is being "
            f"captured into a CUDA graph ({why_not_cudnn}); use "
            "BatchPrefillWithPagedKVCacheWrapper or BatchPrefillWithRaggedKVCacheWrapper with "
            "use_cuda_graph=True"
        )


def _check_apart(call: Call, in_place: bool) -> None:
    """Of outputs that are copied from what a run returned, as that run would refuse them; of the
    whole workspace, by the name that it has here."""
    for name, value in (("out", call.out), ("lse", call.lse)):
        if value is not None:
            refuse_shared(name, value, "workspace_buffer", call.workspace)
    if call.out is not None and not in_place:
        refuse_shared("out", call.out, "k_cache", call.k)
        refuse_shared("out", call.out, "v_cache", call.v)
    if call.lse is not None:
        for name, value in (("q", call.q), ("k_cache", call.k), ("v_cache", call.v)):
            refuse_shared("lse", call.lse, name, value)


def _wrapper(call: Call) -> Wrapper:
    workspace, paged = call.workspace, call.block_tables is not None
    key = (workspace.device, workspace.data_ptr(), workspace.nbytes, call.backend.name, paged)
    found = _wrappers.of.get(key)
    if found is None:
        if paged:
            found = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=key[3])
        else:
            found = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=key[3])
        _wrappers.of[key] = found
        if len(_wrappers.of) > _WRAPPERS_KEPT:
            _wrappers.of.popitem(last=False)
    _wrappers.of.move_to_end(key)
    return found


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _plan_options(call: Call, q_at: _Placed) -> dict:
    return {
        "qo_indptr": _int32(q_at.indptr),
        "num_qo_heads": call.q.shape[1],
        "num_kv_heads": call.k.shape[1],
        "head_dim": call.q.shape[2],
        "head_dim_vo": call.v.shape[-1],
        "causal": call.causal,
        "sm_scale": call.sm_scale,
        "q_data_type": call.q.dtype,
        "kv_data_type": call.k.dtype,
        "o_data_type": call.o_dtype,
    }


def _page_list(call: Call, kv_lens: list[int]) -> dict:
    """block_tables as the wrapper has them: rows cut to their pages, one after the other."""
    page_size, table = call.k.shape[2], call.block_tables
    pages = [-(-length // page_size) for length in kv_lens]
    rows = _rows([request * table.shape[1] for request in range(call.batch_size)], pages)
    last = [length - (n - 1) * page_size for n, length in zip(pages, kv_lens, strict=True)]
    return {
        "paged_kv_indptr": _int32(_cumulated(pages)),
        "paged_kv_indices": table.reshape(-1)[sent(rows, table.device)],
        "paged_kv_last_page_len": _int32(last),
        "page_size": page_size,
    }


def _side_by_side(call: Call, kv_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """k and v with every request at the same tokens of both, and the tokens."""
    k_at = _placed(call.k_at, kv_lens, call.k.shape[0])
    v_at = _placed(call.v_at, kv_lens, call.v.shape[0])
    if k_at.rows is None and v_at.rows is None and k_at.indptr == v_at.indptr:
        used = k_at.indptr[-1]
        return call.k[:used], call.v[:used], k_at.indptr
    k, v = _taken(call.k, k_at.every_row()), _taken(call.v, v_at.every_row())
    return k, v, _cumulated(kv_lens)


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype whose rows torch takes and writes: of 8-bit floats not all do."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows]"""
    return _indexable(tensor)[sent(rows, tensor.device)].view(tensor.dtype)


def _cumulated(lengths: list[int], begin: int = 0) -> list[int]:
    indptr = [begin]
    for length in lengths:
        indptr.append(indptr[-1] + length)
    return indptr


def _rows(starts: list[int], lengths: list[int]) -> torch.Tensor:
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ..."""
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    first = torch.tensor(starts, dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)
    every = torch.arange(int(counts.sum()), device="cpu")
    return torch.repeat_interleave(first, counts) + every


def _placed(at: Offsets, lengths: list[int], tokens: int, *, written: str | None = None) -> _Placed:
    starts = at.check(lengths, tokens, written=written)
    used = [(start, length) for start, length in zip(starts, lengths, strict=True) if length]
    indptr = _cumulated(lengths, used[0][0] if used else 0)
    if all(a + length == b for (a, length), (b, _) in pairwise(used)):
        return _Placed(indptr, None)
    return _Placed(_cumulated(lengths), _rows(starts, lengths))


def _lse_rows(call: Call, qo_lens: list[int]) -> torch.Tensor:
    """Rows of lse, seen as [rows, num_qo_heads]."""
    at = call.stats_at
    if at is None:
        starts = [request * call.max_qo_len for request in range(call.batch_size)]
        return _rows(starts, qo_lens)
    return _placed(at, qo_lens, call.stats_rows, written="lse").every_row()


def _placed_lse(call: Call, rows: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Padded to the longest request with -inf, or where batch_offsets_stats has it."""
    result = call.lse
    if result is None:
        result = lse.new_full(call.lse_shape, -torch.inf)
    elif call.stats_at is None:
        result.fill_(-torch.inf)
    result.view(-1, call.q.shape[1]).index_copy_(0, sent(rows, lse.device), lse)
    return result
