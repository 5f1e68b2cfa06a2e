"""Plans and runs trtllm_fmha_v2_prefill. Plans for lengths on the GPU are kept, per thread and per
stream: their work lists are on the device, and each call changes the lengths in them."""

from __future__ import annotations

import functools
import threading

import torch

from .. import _core
from .._check import dtypes
from .._check.arguments import Result
from .._check.outputs import Outputs
from .._check.request import PageList, Request
from .._check.tensors import kv_of, refuse_shared
from .._device import backends
from .._device.stream import DeviceStream, device_stream_of
from .._plan import masks, pipeline, prepass
from .._run.variant import new_workspace, run_memory
from . import lengths as fmha_lengths
from .arguments import FmhaCall
from .lengths import FmhaLengths

_PLANS_KEPT = 64
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


class _Cache(threading.local):
    def __init__(self) -> None:
        # For any lengths up to some; the one used last is the last.
        self.plans: dict[tuple, _core.ExecutionPlan] = {}
        self.workspace = functools.cache(new_workspace)


_cache = _Cache()
_captured: list[_core.ExecutionPlan] = []  # replayed by CUDA graphs, whose end is not observable


def run(call: FmhaCall) -> Result:
    lengths = fmha_lengths.checked(call)
    device_stream = device_stream_of(call.operands.q.device)
    if call.options.skip_factor > 0.0 and call.operands.q.dtype == dtypes.FP8_QUERY:
        backend = backends.choose(call.backend, device_stream.device, call.options)
        if backend.why_unsupported(device_stream.device, call.options) is not None:
            call, lengths = _in_16_bits(call, lengths)
    if call.given.draft_mask is not None:  # whose plan needs the lengths on the host
        lengths = fmha_lengths.brought_to_host(lengths)
    if lengths.on_host:
        return _run_exact(call, lengths, device_stream)
    return _run_within_bounds(call, lengths, device_stream)


def _in_16_bits(call: FmhaCall, lengths: FmhaLengths) -> tuple[FmhaCall, FmhaLengths]:
    """The same of converted tensors, which is exact: kernels of 16 bits skip tiles. Pages are
    converted one request after the other; with lengths on the GPU, all that max_kv_len takes."""
    operands = call.operands
    # An output of 8 bits comes from float16: weights lose an eighth of what bfloat16 takes.
    dtype = call.out_dtype if call.out_dtype.itemsize == 2 else torch.float16
    k, v = kv_of(operands.kv)
    if lengths.pages is not None:
        pages = lengths.pages
        used = pages.flatten().clamp(0, max(operands.kv_extent - 1, 0)).to(k.device)
        k, v = (pool.view(torch.uint8)[used].view(pool.dtype) for pool in (k, v))
        numbers = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device)
        lengths = lengths._replace(pages=numbers.view(pages.shape))
        operands = operands._replace(kv_extent=pages.numel())
    operands = operands._replace(
        q=operands.q.to(dtype), kv=(k.to(dtype), v.to(dtype)), kv_dtype=dtype
    )
    core = dtypes.CORE_DTYPES[dtype]
    options = call.options.replace(q_dtype=core, kv_dtype=core, o_dtype=core)
    return call._replace(operands=operands, options=options), lengths


def _run_exact(call: FmhaCall, lengths: FmhaLengths, device_stream: DeviceStream) -> Result:
    """Lengths on the host: every call has a plan of its own."""
    if device_stream.is_capturing():
        raise RuntimeError(
            "seq_lens is on the CPU, so that this call makes a plan, which cannot be done while "
            "its stream is being captured into a CUDA graph: pass seq_lens, cum_seq_lens_q and "
            "cum_seq_lens_kv on the GPU"
        )
    workspace = _cache.workspace(device_stream.device)
    workspace.float_bytes = call.given.workspace_buffer.nbytes
    variant = _planned(call, *fmha_lengths.exact(lengths), workspace)
    result = _attend(call, lengths, variant)
    workspace.give_back(variant)
    return result


def _planned(
    call: FmhaCall, batch: _core.Batch, pages: PageList | None, workspace: _core.Workspace
) -> _core.ExecutionPlan:
    device_stream, draft_mask, mask = workspace.device_stream, call.given.draft_mask, None
    device = device_stream.device
    if draft_mask is not None:
        batch.use_mask()
        dense = masks.of_drafts(draft_mask, batch, device)
        mask = masks.owned_mask(dense, False, batch, device_stream)
    options = prepass.applied_to(call.options)
    request = Request(options, device, batch, pages, call.operands.kv_layout, mask)
    return pipeline.made(workspace, call.backend, request)


def _run_within_bounds(call: FmhaCall, lengths: FmhaLengths, device_stream: DeviceStream) -> Result:
    """Lengths on the GPU: a plan for the longest requests, with the lengths put into it there."""
    operands = call.operands
    # Chunks of the keys would be those of the longest requests, and empty in most others.
    options = call.options.replace(one_pass=True)
    key = (
        options, lengths.batch_size, lengths.max_q_len, lengths.max_kv_len, lengths.page_size,
        operands.q.shape[0], operands.kv_extent, operands.kv_layout, call.backend,
        device_stream.device, device_stream.stream(),
    )  # fmt: skip
    variant = _cache.plans.pop(key, None)
    if variant is None:
        pipeline.refuse_capture(device_stream)
        batch, pages = fmha_lengths.bounds(lengths, operands)
        workspace = _cache.workspace(device_stream.device)
        variant = _planned(call._replace(options=options), batch, pages, workspace)
    _cache.plans[key] = variant
    if len(_cache.plans) > _PLANS_KEPT:
        del _cache.plans[next(iter(_cache.plans))]
    pages_each = kv_begin = 0
    if lengths.pages is None:
        extent, kv_begin = operands.kv_extent, lengths.kv_indptr.data_ptr()
    else:
        variant.request.pages.given.copy_(lengths.pages, non_blocking=True)
        pages_each = lengths.pages_each
        extent = pages_each * operands.page_size
    on_device = _core.RequestLengths(
        lengths.qo_indptr.data_ptr(), kv_begin, lengths.kv_lens.data_ptr(), pages_each
    )
    rows, stream = operands.q.shape[0], device_stream.stream()
    variant.plan_buffer.set_lengths(on_device, rows, extent, stream)
    was_shared = variant.shared
    result = _attend(call, lengths, variant)
    if variant.shared and not was_shared:  # with a CUDA graph
        _captured.append(variant)
    return result


def _attend(call: FmhaCall, lengths: FmhaLengths, variant: _core.ExecutionPlan) -> Result:
    q, kv = call.operands.q, call.operands.kv
    out, lse, stats = call.given.out, call.given.lse, None
    converts = dtypes.CORE_DTYPES[call.out_dtype] != variant.request.options.o_dtype
    if converts and out is not None:
        for name, value in zip(("k", "v", "lse"), (*kv_of(kv), lse), strict=True):
            if value is not None:
                refuse_shared("out", out, name, value)
    outputs = Outputs(None if converts else out, lse, call.return_lse)
    if call.stats_scale is not None:
        stats = torch.empty((*q.shape[:2], 2), dtype=torch.float32, device=q.device)
        if variant.request.batch.may_leave_rows(q.shape[0]):
            stats[..., 0].fill_(-torch.inf)  # the maximum of no key
            stats[..., 1].zero_()
        outputs = outputs._replace(lse=stats, lse_layout="STATS", lse_base=call.stats_scale)
    partials = call.given.workspace_buffer if variant.plan.float_bytes > 0 else None
    memory = run_memory(partials, variant.request.mask, call.per_head)
    # bmm2_scale may take a result out of the range of q's dtype, and the conversion back.
    scales = call.scales._replace(output=1.0) if converts else call.scales
    result = variant(q, kv, scales, outputs, memory)
    if call.return_lse:
        result, stats = result
    if converts:
        result = _converted(call, lengths, result)
    return (result, stats) if call.wants_stats or call.return_lse else result


def _converted(call: FmhaCall, lengths: FmhaLengths, result: torch.Tensor) -> torch.Tensor:
    """Times bmm2_scale, in another dtype than that which the kernels write. What rounds beyond 448
    is 448."""
    if call.scales.output != 1.0:
        result = result.to(torch.float32).mul_(call.scales.output)
    if call.out_dtype == torch.float8_e4m3fn:
        result = result.clamp(-_E4M3_MAX, _E4M3_MAX)
    result = result.to(call.out_dtype)
    out = call.given.out
    if out is None:
        return result
    # Rows that no request has stay as they are: those before the first one's and behind the last's.
    begin, end = lengths.qo_indptr[0], lengths.qo_indptr[-1]
    if lengths.on_host:
        out[begin:end] = result[begin:end]
        return out
    rows = torch.arange(out.shape[0], device=out.device)
    owned = ((begin <= rows) & (rows < end))[:, None, None]
    bits = torch.uint8 if out.itemsize == 1 else torch.int16
    kept = torch.where(owned, result.view(bits), out.view(bits))
    out.view(bits).copy_(kept)
    return out
