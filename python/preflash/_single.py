"""Attention of one request: planned like a batch of one, and the plan remembered.

Plans are kept per thread and per stream: their work lists are on the device, ordered by the stream
they were copied on. One that was used while a CUDA graph was captured is kept for good.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from . import _core, _masks, _tensors
from . import _validate as check
from ._backends import check_name
from ._device_stream import DeviceStream
from ._options import Options, data_types, softmax_scale
from ._planned import Memory, Outputs, PlannedVariant
from ._workspace import Upload, Workspace, draft, upload
from ._wrapper import run_scales

_PLANS_KEPT = 64
# Enough to split the keys of one request over any machine; allocated only as far as a plan asks.
_FLOAT_BYTES = 256 * 1024 * 1024


class Problem(NamedTuple):
    """The options of a call, as the caller gave them: with the shapes, the key of a plan."""

    causal: Any
    kv_layout: Any
    pos_encoding_mode: Any
    allow_fp16_qk_reduction: Any
    use_fp16_qk_reduction: Any
    window_left: Any
    logits_soft_cap: Any
    rope_scale: Any
    rope_theta: Any
    backend: Any
    o_dtype: Any
    masked: bool


class Call(NamedTuple):
    """What may differ between calls that share a plan."""

    custom_mask: Any
    packed_custom_mask: Any
    sm_scale: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any


class _Planned(NamedTuple):
    variant: PlannedVariant
    batch: _core.Batch


class _Cache(threading.local):
    """The most recently used plans of this thread, and its workspace of each device."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple, _Planned] = OrderedDict()
        self.workspaces: dict[torch.device, Workspace] = {}


_cache = _Cache()
_captured: list[_Planned] = []  # what CUDA graphs replay; nobody tells when they are gone


@check.eager
def run(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    problem: Problem,
    call: Call,
    outputs: Outputs,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, k, v."""
    q, k, v = tensors
    try:
        device_stream = DeviceStream(q.device)
        key = _key(q, k, v, problem, device_stream)
        planned = _cache.plans.get(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # No ordinary tensors, or an option that has no hash: the checks say which one it is.
        planned = None
    if planned is None:
        check.forward_only(q, k, v)
        for name, value in (("q", q), ("k", k), ("v", v)):
            check.tensor(name, value)
        device_stream = DeviceStream(q.device)
        options = _options(q, k, v, problem)
        kv_len = k.shape[0 if problem.kv_layout == "NHD" else 1]
        planned = _plan(device_stream, (q.shape[0], kv_len), options, problem)
        _cache.plans[_key(q, k, v, problem, device_stream)] = planned
        if len(_cache.plans) > _PLANS_KEPT:
            _cache.plans.popitem(last=False)
    else:
        _cache.plans.move_to_end(key)
    return _run(planned, tensors, call, outputs)


def _key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, device_stream: DeviceStream
) -> tuple:
    key = (q.shape, k.shape, v.shape, q.dtype, problem, q.device, device_stream.stream())
    usual = (
        type(problem.causal) is bool
        and type(problem.allow_fp16_qk_reduction) is bool
        and type(problem.window_left) is int
        and problem.use_fp16_qk_reduction is None
        and (problem.logits_soft_cap is None or type(problem.logits_soft_cap) is float)
    )
    # 1, 1.0 and True are equal, but not all of them are accepted.
    return key if usual else (key, *map(type, problem))


def _options(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> Options:
    """Checks what decides the variant. PlannedVariant checks the tensors themselves."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; must be three-dimensional: "
                "tokens, heads and head_dim"
            )
    check.one_of("kv_layout", problem.kv_layout, check.KV_LAYOUTS)
    check_name(problem.backend)
    check.position_encoding(problem.pos_encoding_mode, problem.rope_scale, problem.rope_theta)
    check.permission("allow_fp16_qk_reduction", problem.allow_fp16_qk_reduction)
    check.permission("use_fp16_qk_reduction", problem.use_fp16_qk_reduction)
    check.attention_dtype("q", q.dtype)
    q_dtype, kv_dtype = data_types(q.dtype, None, problem.o_dtype, None)
    tokens, heads = (0, 1) if problem.kv_layout == "NHD" else (1, 0)
    if v.shape[tokens] != k.shape[tokens]:
        raise ValueError(f"v has {v.shape[tokens]} tokens and k {k.shape[tokens]}; must be equal")
    return Options(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[heads],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[2],
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        causal=check.flag("causal", problem.causal) and not problem.masked,
        window_left=check.integer("window_left", problem.window_left, at_least=-1),
        logits_soft_cap=check.soft_cap(problem.logits_soft_cap),
        custom_mask=problem.masked,
        fixed_split_size=0,
        disable_split_kv=False,
    )


def _plan(
    device_stream: DeviceStream, lengths: tuple[int, int], options: Options, problem: Problem
) -> _Planned:
    check.not_traced()
    if device_stream.is_capturing():
        raise RuntimeError(
            "this call needs a plan, which cannot be made while its stream is being captured into "
            "a CUDA graph: call it once before, with the same shapes and options on the stream "
            "of the capture (torch.cuda.graph(graph, stream=...))"
        )
    qo_len = check.integer("qo_len", lengths[0], at_least=0)
    kv_len = check.integer("kv_len", lengths[1], at_least=0)
    indptr = torch.tensor([0, qo_len, 0, kv_len], dtype=torch.int32, device="cpu")
    begin = check.address(indptr)
    batch = _core.Batch(begin, begin + 2 * indptr.element_size(), 0, 1, 0)
    if options.custom_mask:
        batch.use_mask()
    # One pair of pinned buffers per thread and device.
    workspace = _cache.workspaces.setdefault(
        device_stream.device, Workspace(device_stream.device, None, float_bytes=_FLOAT_BYTES)
    )
    drafted = draft(workspace, problem.backend, batch, options)
    expected = _tensors.Expected(
        options=options,
        device=device_stream.device,
        kv_layout=problem.kv_layout,
        qo_tokens=qo_len,
        kv_tokens=kv_len,
        page_size=0,
        largest_page=None,
    )
    return _Planned(upload(workspace, drafted, Upload(expected)), batch)


def _run(
    planned: _Planned,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: Call,
    outputs: Outputs,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    q, k, v = tensors
    variant = planned.variant
    expected = variant.expected
    sm_scale = softmax_scale(call.sm_scale, expected.options)
    scales = run_scales(expected.options, sm_scale, call.q_scale, call.k_scale, call.v_scale)
    mask = _mask(planned, tensors, call, outputs) if expected.options.custom_mask else None
    num_bytes = variant.plan.float_bytes
    partials = None
    if num_bytes > 0:
        # Freed in stream order: what was launched may still use them, and the mask.
        partials = torch.empty(num_bytes, dtype=torch.uint8, device=expected.device)
    was_shared = variant.shared
    result = variant.run(q, (k, v), scales, outputs, Memory(partials, mask))
    if variant.shared and not was_shared:  # with a CUDA graph
        _captured.append(planned)
    return result


def _mask(
    planned: _Planned,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: Call,
    outputs: Outputs,
) -> torch.Tensor:
    """The call's mask, checked and packed; after the other checks, because packing is a launch."""
    q, k, v = tensors
    variant, batch = planned
    expected = variant.expected
    packed = call.packed_custom_mask is not None
    dense_shape = (expected.qo_tokens, expected.kv_tokens)
    mask = _masks.check_mask(call.custom_mask, call.packed_custom_mask, batch, dense_shape)
    _masks.check_mask_device(mask, expected.device)
    variant.check_tensors(q, (k, v), outputs)
    if variant.device_stream.is_capturing() and not (packed and mask.is_cuda):
        raise RuntimeError(
            "a dense mask, or one on the CPU, cannot be packed while the stream is being captured "
            "into a CUDA graph: pass packed_custom_mask (packbits) on the GPU"
        )
    return _masks.owned_mask(mask, packed, batch, variant.device_stream)
