"""Runs of planned variants (_core.ExecutionPlan): their memory, and the checks C++ asks for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .. import _core
from .._check import dtypes, torch_modes, validate
from .._check import tensors as _tensors
from .._check.arguments import KvCache, PerHead
from .._check.lengths import on_host
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request
from .._check.scales import Scales
from .._device.stream import DeviceStream, sent

_NO_HEADS = PerHead()
SIDES = ("prefill side", "decode side")  # the segments of a plan that has two


class SegmentRun(NamedTuple):
    """Inputs of one run for a segment: the arguments of attend_to(), in their order."""

    q: torch.Tensor
    kv: KvCache  # (k, v), or one paged cache that holds both
    scales: Scales
    outputs: Outputs = DEFAULT_OUTPUTS
    # Per-head tensors of this run alone, or memory that replaces the plan's.
    memory: PerHead | tuple | _core.RunMemory | None = None


def converted_query(q: torch.Tensor, request: Request) -> torch.Tensor:
    """q in the dtype that kernels read. Exact: float8_e5m2 has fewer bits of either kind."""
    validate.conforms("q", q, "converted_q", known={"q_given": request.q_given})
    torch_modes.forward_only(q=q)
    return q.to(dtypes.TORCH_DTYPES[request.options.q_dtype])


def memory_with(
    variant: _core.ExecutionPlan, per_head: PerHead, skip_factor: float
) -> _core.RunMemory:
    """Run memory of the plan, with the per-head tensors and skip factor of one run."""
    request = variant.request
    _tensors.check_per_head(per_head, request.options, request.device, request.q_given)
    return run_memory(
        variant.workspace.float_tensor, request.mask, per_head, skip_factor=skip_factor,
        kv_lens=request.kv_lens,
    )  # fmt: skip


def memory_with_mask(variant: _core.ExecutionPlan, mask: torch.Tensor) -> _core.RunMemory:
    """Run memory of the plan, with the mask of one run."""
    return run_memory(variant.workspace.float_tensor, mask, mask_tiles=mask_tiles(variant))


def mask_tiles(variant: _core.ExecutionPlan) -> torch.Tensor | None:
    """Memory for the tile states of a run's mask; None if the kernel uses none."""
    words = variant.plan.mask_tile_words
    if words == 0:
        return None
    return torch.empty(words, dtype=torch.int32, device=variant.request.device)


def run_memory(
    partials: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    per_head: PerHead = _NO_HEADS,
    mask_tiles: torch.Tensor | None = None,
    skip_factor: float = 0.0,
    kv_lens: torch.Tensor | None = None,
) -> _core.RunMemory:
    """Memory that a launch uses besides the work list and the tensors of a segment.

    partials: split-KV partial results; a wrapper's outputs keep out of it under every plan.
    mask: packed. mask_tiles: tile states of one run's mask, which that run fills. skip_factor:
    replaces that of a plan which skips tiles; 0: the plan's. kv_lens: Request.kv_lens.
    """
    return _core.RunMemory(
        torch_modes.TORCH, partials, skip_factor, mask_bits=mask, mask_tiles=mask_tiles,
        kv_lens=kv_lens, **per_head._asdict(),
    )  # fmt: skip


@contextlib.contextmanager
def error_context(name: str) -> Iterator[None]:
    """Prefixes errors with the name of the segment that they are about."""
    try:
        yield
    except (NotImplementedError, TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"{name}: {error}") from error


# Functions that C++ calls during a run.


def _segments(
    requests: Sequence[Request], given: tuple
) -> Iterator[tuple[str, Request, SegmentRun]]:
    size = len(SegmentRun._fields)
    names = SIDES if len(requests) > 1 else ("",)
    for s, (name, request) in enumerate(zip(names, requests, strict=True)):
        run = SegmentRun(*given[s * size : (s + 1) * size])
        yield name, request, run._replace(outputs=Outputs(*run.outputs))


@torch_modes.eager
def _bound_to(requests: Sequence[Request], *given: Any) -> list[tuple]:
    """Checks a run's tensors. Returns, for each segment, what launches for like tensors are bound
    to: strides and extents, the offset of V, and functions that make out and lse from q."""
    found = []
    for name, request, run in _segments(requests, given):
        q, outputs, options = run.q, run.outputs, request.options
        with error_context(name):
            torch_modes.forward_only(q=q)  # before anything is remembered of a traced tensor
            if isinstance(run.memory, tuple):
                heads = PerHead(*run.memory)
                _tensors.check_per_head(heads, options, request.device, request.q_given)
            strides, v_offset = _tensors.bind(q, run.kv, outputs, request)
        out_shape = (q.shape[0], options.num_qo_heads, options.head_dim_vo)
        out_dtype = dtypes.TORCH_DTYPES[options.o_dtype]
        make_out = torch.empty_like
        if not (q.is_contiguous() and tuple(q.shape) == out_shape and q.dtype == out_dtype):
            make_out = _maker(out_shape, out_dtype)
        lse_shape = _tensors.lse_shape(outputs.lse_layout, q.shape[0], request)
        make_lse = _maker(lse_shape, torch.float32)
        found.append((strides, v_offset, make_out, make_lse))
    return found


def _maker(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.Tensor.new_empty, size=shape, dtype=dtype)


@torch_modes.eager
def _refuse_gradients(requests: Sequence[Request], *given: Any) -> None:
    """Refuses a run whose gradient or trace would miss it, before it is launched."""
    for name, _, (q, kv, _, outputs, memory) in _segments(requests, given):
        heads = PerHead(*memory)._asdict() if isinstance(memory, tuple) else {}
        keys = {"k": kv[0], "v": kv[1]} if isinstance(kv, (tuple, list)) else {"paged_kv_cache": kv}
        with error_context(name):
            torch_modes.forward_only(q=q, **keys, out=outputs.out, lse=outputs.lse, **heads)


def _copy(buffer: torch.Tensor, array: torch.Tensor, most: int) -> None:
    """Copies an array of plan(), or a block table, to where CUDA graphs read it."""
    if _is_start_of(buffer, array):
        return
    if array.dim() == 1:
        array = array[:most]
    rows = sent(array.contiguous(), buffer.device) if array.is_cpu else array
    if rows.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        rows = rows.clone()
    into = buffer[:, : rows.shape[1]] if rows.dim() == 2 else buffer[: rows.numel()]
    into.copy_(rows)


def _is_start_of(buffer: torch.Tensor, array: torch.Tensor) -> bool:
    """True if the caller passed the buffer itself, or its beginning."""
    return (
        array.data_ptr() == buffer.data_ptr()
        and array.device == buffer.device
        and array.dtype == buffer.dtype
        and (array.is_contiguous() if array.dim() == 1 else array.stride() == buffer.stride())
    )


_FUNCTIONS = _core.RunFunctions(
    torch_modes.TORCH,
    check=_bound_to,
    refuse=_refuse_gradients,
    convert=converted_query,
    copy=_copy,
    to_host=on_host,
)


def new_workspace(
    device: torch.device,
    float_buffer: torch.Tensor | None = None,
    int_buffer: torch.Tensor | None = None,
) -> _core.Workspace:
    """Memory for the plans of one wrapper. Without a float buffer plans may use `float_bytes` of
    one that every run brings, if any."""
    return _core.Workspace(_FUNCTIONS, DeviceStream(device), float_buffer, int_buffer)
