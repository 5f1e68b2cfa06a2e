"""A checked call of cudnn_batch_prefill_with_kv_cache on the kernels of this package: a plan and a
run of the batch wrappers, with rows moved where offsets put them as no wrapper has them."""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .._check import values as check
from .._check.tensors import refuse_shared
from .._cudnn.call import Call
from .._device.stream import DeviceStream, sent
from .._plan.pages import listed, spans
from .batch import BatchPrefillWrapper
from .paged import BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper

_WRAPPERS_KEPT = 2  # of a thread, with their workspaces
_wrappers = threading.local()


class _Placed(NamedTuple):
    """The tokens of all requests in one tensor."""

    indptr: list[int]
    rows: torch.Tensor | None  # int64, of each token; None: one after the other from indptr[0]

    def every_row(self) -> torch.Tensor:
        if self.rows is not None:
            return self.rows
        return torch.arange(self.indptr[0], self.indptr[-1], device="cpu")


@check.eager
def attend(
    call: Call, backend: str, why_not_cudnn: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and lse or None."""
    _refuse_capture(call, why_not_cudnn)
    qo_lens, kv_lens = call.batch.qo_lens.tolist(), call.batch.kv_lens.cpu()
    q_at = _placed(call, "q", qo_lens)
    wrapper = _wrapper(call, backend)
    if call.batch.block_tables is None:
        k, v, kv_indptr = _side_by_side(call, kv_lens.tolist())
        keys, planned = (k, v), {"kv_indptr": _int32(kv_indptr)}
    else:
        page_size = call.k.shape[2]
        pages = listed(call.batch.block_tables, kv_lens, page_size)
        keys, planned = ((call.k, call.v),), {"page_size": page_size}
        planned |= {f"paged_kv_{name}": array for name, array in pages._asdict().items()}
    wrapper.plan(
        qo_indptr=_int32(q_at.indptr),
        num_qo_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[2],
        head_dim_vo=call.v.shape[-1],
        causal=call.causal,
        sm_scale=call.sm_scale,
        q_data_type=call.q.dtype,
        kv_data_type=call.k.dtype,
        o_data_type=call.o_dtype,
        **planned,
    )
    out_at = _placed(call, "out", qo_lens)
    lse_rows = _lse_rows(call, qo_lens) if call.with_lse else None
    out = call.out
    in_place = q_at.rows is None and out_at.rows is None and out_at.indptr == q_at.indptr
    _check_apart(call, in_place)
    computed = wrapper.run(
        call.q if q_at.rows is None else _taken(call.q, q_at.rows),
        *keys,
        **call.scales._asdict(),
        out=out if in_place else None,
        return_lse=call.with_lse,
        lse_base=call.lse_base,
    )
    computed, lse = computed if call.with_lse else (computed, None)
    owned = slice(q_at.indptr[0], q_at.indptr[-1])  # of what was computed
    if in_place:
        out = computed
    else:
        if out is None:
            out = call.q.new_zeros(call.out_shape, dtype=call.o_dtype)
        rows = sent(out_at.every_row(), out.device)
        _indexable(out).index_copy_(0, rows, _indexable(computed[owned]))
    if lse is not None:
        lse = _placed_lse(call, lse_rows, lse[owned])
    return out, lse if call.return_lse else None


def _refuse_capture(call: Call, why_not_cudnn: str) -> None:
    if not call.q.is_cuda:
        return
    way_out = (
        "use BatchPrefillWithPagedKVCacheWrapper or BatchPrefillWithRaggedKVCacheWrapper with "
        "use_cuda_graph=True"
    )
    if call.capturable:
        raise NotImplementedError(
            "is_cuda_graph_compatible=True reads lengths on the GPU, which cuDNN alone does, and "
            f"{why_not_cudnn}; {way_out}"
        )
    if DeviceStream(call.q.device).is_capturing():
        raise RuntimeError(
            "this call makes a plan on the host, which cannot be while its stream is being "
            f"captured into a CUDA graph ({why_not_cudnn}); {way_out}"
        )


def _check_apart(call: Call, in_place: bool) -> None:
    """Of outputs that are copied from what a run returned, as that run would refuse them; of the
    whole workspace, by the name that it has here."""
    read = [("k_cache", call.k), ("v_cache", call.v)]
    apart = [("workspace_buffer", call.workspace)]
    for name, value, inputs in (
        ("out", call.out, [] if in_place else read),
        ("lse", call.lse, [("q", call.q), *read]),
    ):
        for other_name, other in [*apart, *inputs] if value is not None else []:
            refuse_shared(name, value, other_name, other)


def _wrapper(call: Call, backend: str) -> BatchPrefillWrapper:
    workspace, kind, layout = call.workspace, BatchPrefillWithPagedKVCacheWrapper, "HND"
    if call.batch.block_tables is None:
        kind, layout = BatchPrefillWithRaggedKVCacheWrapper, "NHD"
    key = (workspace.device, workspace.data_ptr(), workspace.nbytes, backend, kind)
    kept = vars(_wrappers).setdefault("kept", {})  # this thread's; the last used is the last
    kept[key] = found = kept.pop(key, None) or kind(workspace, layout, backend=backend)
    if len(kept) > _WRAPPERS_KEPT:
        del kept[next(iter(kept))]
    return found


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _side_by_side(call: Call, kv_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """k and v with every request at the same tokens of both, and the tokens."""
    k_at, v_at = _placed(call, "k", kv_lens), _placed(call, "v", kv_lens)
    if k_at.rows is None and v_at.rows is None and k_at.indptr == v_at.indptr:
        used = k_at.indptr[-1]
        return call.k[:used], call.v[:used], k_at.indptr
    k, v = _taken(call.k, k_at.every_row()), _taken(call.v, v_at.every_row())
    return k, v, list(accumulate(kv_lens, initial=0))


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype whose rows torch takes and writes: of 8-bit floats not all do."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows]"""
    return _indexable(tensor)[sent(rows, tensor.device)].view(tensor.dtype)


def _spans(starts: list[int], lengths: list[int]) -> torch.Tensor:
    return spans(*(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (starts, lengths)))


def _placed(call: Call, name: str, lengths: list[int]) -> _Placed:
    starts = call.first_tokens(name, lengths)
    used = [(start, length) for start, length in zip(starts, lengths, strict=True) if length]
    side_by_side = all(a + length == b for (a, length), (b, _) in pairwise(used))
    begin = used[0][0] if used and side_by_side else 0
    indptr = list(accumulate(lengths, initial=begin))
    return _Placed(indptr, None if side_by_side else _spans(starts, lengths))


def _lse_rows(call: Call, qo_lens: list[int]) -> torch.Tensor:
    """Rows of lse, seen as [rows, num_qo_heads]."""
    if call.batch.starts["stats"] is not None:
        return _placed(call, "stats", qo_lens).every_row()
    return _spans([request * call.batch.max_qo_len for request in range(len(qo_lens))], qo_lens)


def _placed_lse(call: Call, rows: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Padded to the longest request with -inf, or where batch_offsets_stats has it."""
    result = lse.new_empty(call.lse_shape) if call.lse is None else call.lse
    if call.lse is None or call.batch.starts["stats"] is None:
        result.fill_(-torch.inf)
    result.view(-1, call.q.shape[1]).index_copy_(0, sent(rows, lse.device), lse)
    return result
