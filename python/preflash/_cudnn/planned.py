"""Plans of the batch wrappers for cuDNN: they plan nothing on the host but the arrays that cuDNN
reads, and build a graph at the first run() with new strides."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .. import _core
from .._check import tensors as _tensors
from .._check import values as check
from .._check.arguments import GivenScales, KvCache, PerHead, Result
from .._check.lengths import Lengths
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.scales import Scales
from .._device import backends
from .._device.buffers import Buffer
from .._device.stream import DeviceStream, sent
from . import execution
from .call import Call, Offsets
from .execution import Prepared, RefusedError, SmallWorkspaceError

_KEPT = 64  # prepared graphs of a plan
_WAY_OUT = "use backend='auto', 'fa3' or 'fa2'"


class CudnnBackend:
    """In the place of a backends.Backend of kernels."""

    name = backends.CUDNN

    def __repr__(self) -> str:
        return f"<preflash backend {self.name!r}>"


class CudnnPlan(NamedTuple):
    """In the place of a _core.Plan."""

    id: str
    # Of the work list, which cuDNN has none of. The workspace is checked when a graph is built.
    int_bytes: int = 0
    float_bytes: int = 0
    staged: bool = False


def plan(device: torch.device, options: _core.AttentionOptions, batch: _core.Batch) -> CudnnPlan:
    """Raises ValueError for a batch that is not well formed, NotImplementedError for what cuDNN
    does not serve."""
    _check_options(device, options, batch.page_size)
    # The planner checks the batch.
    host = torch.device("cpu")
    backends.choose("cpu", host, options).plan(host, options, batch, backends.PlanRoom(1 << 40))
    dims = f"d{options.head_dim_qk}"
    if options.head_dim_vo != options.head_dim_qk:
        dims += f"_{options.head_dim_vo}"
    return CudnnPlan(f"cudnn_{options.q_dtype.name}_{dims}")


def _check_options(device: torch.device, o: _core.AttentionOptions, page_size: int) -> None:
    dtypes = [check.TORCH_DTYPES[dtype] for dtype in (o.q_dtype, o.kv_dtype)]
    refusal = execution.why_not(device, *dtypes, (o.head_dim_qk, o.head_dim_vo))
    for name, given in (
        ("custom_mask", o.mask == _core.Mask.custom),
        ("logits_soft_cap", o.soft_cap > 0.0),
        ("pos_encoding_mode", o.position != _core.Position.none),
        ("window_left", o.window_left >= 0),
        ("fixed_split_size", o.fixed_split_size > 0),
        ("disable_split_kv", o.disable_split),
    ):
        if refusal is None and given:
            refusal = f"it does not serve {name}"
    if refusal is None and page_size & (page_size - 1):
        refusal = f"page_size={page_size} must be a power of two"
    if refusal is not None:
        raise NotImplementedError(f"backend='cudnn': {refusal}; {_WAY_OUT}")


class _Place:
    """No graph captures a work list there."""

    captured = None


class CudnnVariant:
    """In the place of a PlannedVariant."""

    device_plan = None  # nothing to upload
    again = None  # cuDNN's graphs are looked up for every run
    place = _Place()

    def __init__(
        self,
        cudnn_plan: CudnnPlan,
        expected: _tensors.Expected,
        lengths: Lengths,
        device_stream: DeviceStream,
        workspace: torch.Tensor,
    ) -> None:
        self.plan = cudnn_plan
        self.backend = CudnnBackend()
        self.expected = expected
        self.shared = False  # whether a CUDA graph or a copied wrapper reads the arrays
        self._device_stream = device_stream
        self._workspace = workspace
        self._workspace_bytes = workspace.nbytes
        self._arrays = _Arrays.of(lengths, device_stream.device)
        self._buffers = [Buffer(value) for value in self._arrays.tensors()]
        self._stream = device_stream.stream()
        self._ready: torch.cuda.Event | None = None
        if device_stream.ordinal >= 0:
            self._ready = torch.cuda.Event()
            self._ready.record(device_stream.owner_stream())
        self._prepared: dict[tuple, Prepared] = {}
        self._captured: list[Prepared] = []  # what CUDA graphs replay

    @property
    def int_buffer(self) -> Buffer:
        return self._buffers[0]

    @property
    def buffers(self) -> list[Buffer]:
        return self._buffers

    def memory_with(self, per_head: PerHead) -> None:
        _tensors.check_per_head(per_head, self.expected.options, self.expected.device)
        names = [name for name, value in per_head._asdict().items() if value is not None]
        raise NotImplementedError(f"backend='cudnn' does not serve {names[0]}; {_WAY_OUT}")

    @check.eager
    def attend_to(
        self,
        q: torch.Tensor,
        kv: KvCache,
        scales: Scales,
        outputs: Outputs = DEFAULT_OUTPUTS,
        memory: None = None,
    ) -> Result:
        """One run, as PlannedVariant has it."""
        check.forward_only(q=q)
        _tensors.bind(q, kv, outputs, self.expected)
        keys = kv if isinstance(kv, (tuple, list)) else (kv,)
        check.forward_only(*keys, out=outputs.out, lse=outputs.lse)
        if scales.output != 1.0:
            raise NotImplementedError(f"backend='cudnn' does not serve v_scale; {_WAY_OUT}")
        self._follow_stream()
        call = self._call(q, kv, scales, outputs)
        out, lse = self._computed(call)
        if outputs.lse is not None and outputs.lse is not lse:
            lse = outputs.lse.copy_(lse if outputs.lse_layout == "NH" else lse.T)
        elif lse is not None and outputs.lse_layout == "HN":
            lse = lse.T.contiguous()
        return (out, lse) if outputs.return_lse else out

    def _follow_stream(self) -> None:
        # A capture begins with a wait for the device: what other streams prepared is there.
        stream = self._device_stream.stream()
        if stream == self._stream or self._device_stream.is_capturing():
            return
        if self._ready is not None:
            self._ready.wait(self._device_stream.owner_stream())
        for buffer in self._buffers:
            buffer.used_on_current_stream(self._device_stream)
        self._prepared.clear()  # on the other stream
        self._stream = stream

    def _call(self, q: torch.Tensor, kv: KvCache, scales: Scales, outputs: Outputs) -> Call:
        expected, arrays = self.expected, self._arrays
        k, v = _keys(kv, expected)
        paged = expected.page_size > 0
        tokens, heads = q.shape[0], expected.options.num_qo_heads
        lse = None
        if outputs.return_lse or outputs.lse is not None:
            lse = q.new_empty((tokens, heads), dtype=torch.float32)
            if outputs.lse is not None:  # rows that no request has stay as they are
                given = outputs.lse if outputs.lse_layout == "NH" else outputs.lse.T
                lse = given if given.is_contiguous() else lse.copy_(given)
        out_token = heads * expected.options.head_dim_vo
        out_token = out_token if outputs.out is None else outputs.out.stride(0)
        return Call(
            q=q,
            k=k,
            v=v,
            sm_scale=scales.logits,
            scales=GivenScales(),
            workspace=self._workspace,
            batch_size=arrays.qo_lens.numel(),
            max_qo_len=arrays.max_qo_len,
            max_kv_len=arrays.max_kv_len,
            qo_lens=arrays.qo_lens,
            kv_lens=arrays.kv_lens,
            maybe_keyless=arrays.maybe_keyless,
            block_tables=arrays.page_table,
            causal=expected.options.causal,
            q_at=Offsets("qo_indptr", arrays.qo_indptr, q.stride(0), True),
            out_at=Offsets("qo_indptr", arrays.qo_indptr, out_token, True),
            k_at=Offsets("kv_indptr", None if paged else arrays.kv_indptr, k.stride(0), True),
            v_at=Offsets("kv_indptr", None if paged else arrays.kv_indptr, v.stride(0), True),
            stats_at=None if lse is None else Offsets("qo_indptr", arrays.qo_indptr, heads, True),
            out=outputs.out,
            lse=lse,
            return_lse=lse is not None,
            lse_base=outputs.lse_base,
            o_dtype=check.TORCH_DTYPES[expected.options.o_dtype],
            capturable=False,
            backend=backends.Requested(backends.CUDNN),
        )

    def _computed(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        if call.max_qo_len == 0 or call.max_kv_len == 0 or call.k.numel() == 0:
            return self._without_keys(call)
        given = [call.q, call.k, call.v, call.out]
        layout = tuple(None if t is None else (t.shape, t.stride()) for t in given)
        key = (layout, call.lse is None, call.sm_scale)
        prepared = self._prepared.get(key)
        try:
            if prepared is None:
                prepared = execution.prepare(call)
            else:
                execution.check_workspace(call, prepared.graph)
                execution.check_apart(call)
        except RefusedError as refusal:
            message = str(refusal).replace("workspace_buffer", "float_workspace_buffer")
            if isinstance(refusal, SmallWorkspaceError) and refusal.there < self._workspace_bytes:
                raise ValueError(
                    f"backend='cudnn': {message}: it was given other memory after plan()"
                ) from None
            raise NotImplementedError(f"backend='cudnn': {message}; {_WAY_OUT}") from None
        if self._device_stream.is_capturing():
            self.shared = True
            self._captured.append(prepared)  # a replay reads its arrays, or makes them
        elif key not in self._prepared:
            if len(self._prepared) >= _KEPT:
                self._prepared.clear()
            self._prepared[key] = prepared
        return execution.compute(call, prepared)

    def _without_keys(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """No request keeps a key: 0 and -inf."""
        begin, end = self._arrays.rows
        out = call.out
        if out is None:
            out = torch.empty(call.out_shape, dtype=call.o_dtype, device=call.q.device)
        out[begin:end] = 0.0
        if call.lse is not None:
            call.lse[begin:end] = -math.inf
        return out, call.lse


class _Arrays(NamedTuple):
    """What cuDNN reads of a batch, on the device."""

    qo_lens: torch.Tensor  # [batch_size] int32
    kv_lens: torch.Tensor  # [batch_size] int32
    qo_indptr: torch.Tensor  # [batch_size + 1] int64
    kv_indptr: torch.Tensor  # [batch_size + 1] int64
    page_table: torch.Tensor | None  # [batch_size, pages of max_kv_len] int32
    max_qo_len: int
    max_kv_len: int
    maybe_keyless: bool
    rows: tuple[int, int]  # of q, from the first request's first to the last one's last

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self if isinstance(value, torch.Tensor)]

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device) -> _Arrays:
        batch = lengths.batch
        requests = range(batch.num_requests)
        kv_lens = [batch.kv_len(i) for i in requests]

        def array(values: list[int], dtype: torch.dtype) -> torch.Tensor:
            return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)

        return cls(
            qo_lens=array([batch.qo_len(i) for i in requests], torch.int32),
            kv_lens=array(kv_lens, torch.int32),
            qo_indptr=array(batch.qo_indptr, torch.int64),
            kv_indptr=array(batch.kv_indptr, torch.int64),
            page_table=_page_table(lengths, device),
            max_qo_len=batch.max_qo_len,
            max_kv_len=batch.max_kv_len,
            maybe_keyless=0 in kv_lens,
            rows=(batch.qo_begin, batch.qo_end),
        )


def _page_table(lengths: Lengths, device: torch.device) -> torch.Tensor | None:
    batch, pages = lengths
    if pages is None:
        return None
    indptr = torch.tensor(batch.kv_indptr, device="cpu")
    width = -(-batch.max_kv_len // batch.page_size)
    at = indptr[:-1, None] + torch.arange(width, device="cpu")
    at = torch.minimum(at, (indptr[1:, None] - 1).clamp(min=0))  # behind the last page, that again
    given = pages.given
    if given.numel() == 0:
        return torch.zeros(at.shape, dtype=torch.int32, device=device)
    if given.is_cpu:
        return sent(given[at].to(torch.int32), device)
    return given[sent(at, device)]


def _keys(kv: KvCache, expected: _tensors.Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, heads, head_dim], or [pages, heads, page_size, head_dim]."""
    k, v = (kv[:, 0], kv[:, 1]) if isinstance(kv, torch.Tensor) else kv
    nhd = expected.kv_layout == "NHD"
    if expected.page_size == 0:
        return (k, v) if nhd else (k.transpose(0, 1), v.transpose(0, 1))
    if expected.page_size == 1 and k.dim() == 3:
        k, v = (pool.unsqueeze(1 if nhd else 2) for pool in (k, v))
    return (k.transpose(1, 2), v.transpose(1, 2)) if nhd else (k, v)
