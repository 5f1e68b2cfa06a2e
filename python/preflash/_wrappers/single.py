"""Attention of one request: planned like a batch of one, and the plan remembered.

Plans are kept per thread and per stream: their work lists are on the device, ordered by the stream
they were copied on. One that was used while a CUDA graph was captured is kept for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from .. import _core
from .._check import torch_modes, validate
from .._check.arguments import PerHead, Result, per_head_of, scales_of
from .._check.calls import SingleArguments
from .._check.lengths import single_batch
from .._check.options import converted_from, has_mask, single_key, single_options
from .._check.outputs import Outputs, outputs_of
from .._check.request import Request
from .._check.scales import Scales, folded_scales, softmax_scale
from .._check.tensors import check_per_head
from .._device import backends
from .._device.stream import DeviceStream, device_stream_of
from .._plan import masks, pipeline, prepass
from .._run.variant import mask_tiles, new_workspace, run_memory
from . import compile_ops

_PLANS_KEPT = 64
# Enough to split the keys of one request over any machine, and for its copies (pre-pass); allocated
# only as far as a plan asks.
_FLOAT_BYTES = 1024 * 1024 * 1024


class _Cache(threading.local):
    """The most recently used plans of this thread, and its workspace of each device."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple, _core.ExecutionPlan] = OrderedDict()
        self.last: tuple[tuple | None, _core.ExecutionPlan | None] = (None, None)  # of plans
        self.workspaces: dict[torch.device, _core.Workspace] = {}


_cache = _Cache()
_captured: list[_core.ExecutionPlan] = []  # replayed by CUDA graphs, whose end is not observable


def attention_of_one(a: SingleArguments) -> Result:
    """single_prefill_with_kv_cache()."""
    return compile_ops.single(a) if torch_modes.traced() else prefill(a)


@torch_modes.eager
def prefill(a: SingleArguments) -> Result:
    outputs, per_head = outputs_of(a), per_head_of(a)
    q, k, v = a.q, a.k, a.v
    try:
        device_stream = device_stream_of(q.device)
        key = _key(a, per_head, device_stream)
        last_key, planned = _cache.last
        if key != last_key:  # comparing takes half of what hashing does
            planned = _cache.plans.get(key)
            if planned is not None:
                _cache.plans.move_to_end(key)
                _cache.last = (key, planned)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # Unusual tensors, or an option without a hash: the checks name it.
        planned = None
    if planned is None:
        torch_modes.forward_only(q=q, k=k, v=v)
        for name, value in (("q", q), ("k", k), ("v", v)):
            validate.tensor(name, value)
        device_stream = device_stream_of(q.device)
        planned = _plan(a, per_head, device_stream)
        _cache.plans[_key(a, per_head, device_stream)] = planned
        if len(_cache.plans) > _PLANS_KEPT:
            _cache.plans.popitem(last=False)
    return _run_planned(planned, a, per_head, outputs)


def _key(a: SingleArguments, per_head: PerHead, device_stream: DeviceStream) -> tuple:
    q, k, v = a.q, a.k, a.v
    return (q.shape, k.shape, v.shape, q.dtype, k.dtype, single_key(a), q.device,
            device_stream.stream(), per_head.scaled, prepass.policy())  # fmt: skip


def _plan(
    a: SingleArguments, per_head: PerHead, device_stream: DeviceStream
) -> _core.ExecutionPlan:
    options = single_options(a)
    pipeline.refuse_capture(device_stream)
    masked, q_given = has_mask(a), converted_from(a.q.dtype, options)
    batch = single_batch(a.q.shape[0], a.k.shape[0 if a.kv_layout == "NHD" else 1])
    if masked:
        batch.use_mask()
    scales = Scales(softmax_scale(None, options), 1.0)
    options = prepass.applied_to(options)
    if per_head.scaled:
        check_per_head(per_head, options, device_stream.device, q_given)
        options = prepass.without(options)
    device = device_stream.device
    request = Request(
        options, device, batch, None, a.kv_layout, q_given=q_given, scales=scales
    )  # fmt: skip
    # One pair of pinned buffers per thread and device.
    workspace = _cache.workspaces.get(device)
    if workspace is None:
        workspace = _cache.workspaces[device] = new_workspace(device)
        workspace.float_bytes = _FLOAT_BYTES
    return pipeline.made(workspace, backends.requested(a.backend).name, request)


def _run_planned(
    variant: _core.ExecutionPlan, a: SingleArguments, per_head: PerHead, outputs: Outputs
) -> Result:
    request, scales, given = variant.request, variant.request.scales, scales_of(a)
    if a.sm_scale is not None or given.given:
        options = request.options
        scales = folded_scales(softmax_scale(a.sm_scale, options), given, options)
    per_head_given = per_head.given
    if per_head_given:
        check_per_head(per_head, request.options, a.q.device, request.q_given)
    mask = _mask(variant, a, outputs) if has_mask(a) else None
    num_bytes = variant.plan.float_bytes
    memory = None
    if mask is not None or num_bytes > 0 or per_head_given:
        # Freed in stream order: what was launched may still use them.
        device = request.device
        partials = torch.empty(num_bytes, dtype=torch.uint8, device=device) if num_bytes else None
        tiles = None if mask is None else mask_tiles(variant)
        memory = run_memory(partials, mask, per_head, tiles)
    was_shared = variant.shared
    result = variant(a.q, (a.k, a.v), scales, outputs, memory)
    if variant.shared and not was_shared:  # with a CUDA graph
        _captured.append(variant)
    return result


def _mask(variant: _core.ExecutionPlan, a: SingleArguments, outputs: Outputs) -> torch.Tensor:
    """The call's mask, checked and packed; after the other checks, because packing is a launch."""
    request, packed = variant.request, a.packed_custom_mask is not None
    if not packed:
        masks.check_rows(a.custom_mask, (request.qo_tokens, request.kv_tokens))
    mask = masks.check_mask(a.custom_mask, a.packed_custom_mask, request.batch)
    masks.check_mask_device(mask, request.device)
    variant.check_run(a.q, (a.k, a.v), request.scales, outputs, None)
    return masks.mask_of_run(mask, packed, request.batch, variant.device_stream)
