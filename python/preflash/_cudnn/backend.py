"""cuDNN as a backend of the batch wrappers. On the host it plans nothing but the arrays that cuDNN
reads; a graph is built at the first run() with new strides."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _core
from .._check import tensors as _tensors
from .._check import values as check
from .._check.arguments import KvCache, PerHead, Result
from .._check.lengths import Lengths
from .._check.outputs import DEFAULT_OUTPUTS, Outputs
from .._check.request import Request
from .._check.scales import Scales
from .._device import backends
from .._device.buffers import Buffer
from .._device.stream import sent
from .._device.workspace import Workspace
from . import execution
from .call import Batch, Call, Starts
from .graph import RefusedError

_WAY_OUT = "use backend='auto', 'fa3' or 'fa2'"


class CudnnPlan(NamedTuple):
    """In the place of a _core.Plan: cuDNN has no work list."""

    id: str

    int_bytes = 0
    has_prepass = False

    @property
    def float_bytes(self) -> int:
        raise NotImplementedError(
            "workspace_size() with backend='cudnn': cuDNN tells its needs when it has seen the "
            "tensors of run(); 128 MB of float_workspace_buffer is plenty"
        )


class CudnnBackend:
    """A backends.Backend."""

    name = backends.CUDNN

    def plan(
        self,
        device: torch.device,
        options: _core.AttentionOptions,
        batch: _core.Batch,
        *room: int,
    ) -> CudnnPlan:
        _check_options(device, options, batch.page_size)
        # The planner checks the batch.
        host = torch.device("cpu")
        backends.choose("cpu", host, options).plan(host, options, batch, 1 << 40)
        dims = f"d{options.head_dim_qk}"
        if options.head_dim_vo != options.head_dim_qk:
            dims += f"_{options.head_dim_vo}"
        return CudnnPlan(f"cudnn_{options.q_dtype.name}_{dims}")

    def place(
        self, workspace: Workspace, plan: CudnnPlan, request: Request, where: None = None
    ) -> CudnnRun:
        return CudnnRun(self, workspace, plan, request)

    def __repr__(self) -> str:
        return f"<preflash backend {self.name!r}>"


def _refused(why: str) -> NotImplementedError:
    return NotImplementedError(f"backend='cudnn': {why}; {_WAY_OUT}")


def _check_options(device: torch.device, o: _core.AttentionOptions, page_size: int) -> None:
    dtypes = [check.TORCH_DTYPES[dtype] for dtype in (o.q_dtype, o.kv_dtype)]
    try:
        execution.refuse_unserved(device, *dtypes, (o.head_dim_qk, o.head_dim_vo))
    except RefusedError as refusal:
        raise _refused(str(refusal)) from None
    for name, given in (
        ("custom_mask", o.mask == _core.Mask.custom),
        ("logits_soft_cap", o.soft_cap > 0.0),
        ("pos_encoding_mode", o.position != _core.Position.none),
        ("window_left", o.window_left >= 0),
        ("fixed_split_size", o.fixed_split_size > 0),
        ("disable_split_kv", o.disable_split),
        ("skip_softmax_threshold_scale_factor", o.skip_factor > 0.0),
    ):
        if given:
            raise _refused(f"it does not serve {name}")
    if page_size & (page_size - 1):
        raise _refused(f"page_size={page_size} must be a power of two")


class CudnnRun:
    """A backends.Run."""

    place = None  # nothing to upload

    def __init__(
        self, backend: CudnnBackend, workspace: Workspace, plan: CudnnPlan, request: Request
    ) -> None:
        self.plan, self.backend, self.request = plan, backend, request
        self.shared = False  # whether a CUDA graph or a copied wrapper reads the arrays
        self._device_stream = device_stream = workspace.device_stream
        self._workspace = workspace.float_buffer.tensor
        self._batch = _batch(request.lengths, device_stream.device)
        self.buffers = [Buffer(array) for array in self._batch.arrays().values()]
        self.int_buffer = self.buffers[0]
        self._stream = device_stream.stream()
        self._ready: torch.cuda.Event | None = None
        if device_stream.ordinal >= 0:
            self._ready = torch.cuda.Event()
            self._ready.record(device_stream.owner_stream())
        self._attention = execution.Attention(self._workspace, "float_workspace_buffer")

    def memory_with(self, per_head: PerHead, skip_factor: float) -> None:
        _tensors.check_per_head(per_head, self.request.options, self.request.device)
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
        check.forward_only(q=q)
        _tensors.bind(q, kv, outputs, self.request)
        keys = kv if isinstance(kv, (tuple, list)) else (kv,)
        check.forward_only(*keys, out=outputs.out, lse=outputs.lse)
        if scales.output != 1.0:
            raise NotImplementedError(f"backend='cudnn' does not serve v_scale; {_WAY_OUT}")
        self._follow_stream()
        self.shared = self.shared or self._device_stream.is_capturing()
        options, heads_first = self.request.options, outputs.lse_layout == "HN"
        lse, (k, v) = outputs.lse, _keys(kv, self.request)
        call = Call(
            q=q,
            k=k,
            v=v,
            out=outputs.out,
            lse=lse.T if lse is not None and heads_first else lse,
            batch=self._batch,
            workspace=self._workspace,
            sm_scale=scales.logits,
            causal=options.causal,
            o_dtype=check.TORCH_DTYPES[options.o_dtype],
            lse_base=outputs.lse_base,
            lse_shape=(q.shape[0], options.num_qo_heads),
            return_lse=outputs.return_lse,
        )
        try:
            out, made = self._attention.of(call)
        except RefusedError as refusal:
            raise _refused(str(refusal)) from None
        if not outputs.return_lse:
            return out
        if lse is None:
            lse = made.T.contiguous() if heads_first else made
        return out, lse

    def _follow_stream(self) -> None:
        # A capture begins with a wait for the device: what other streams prepared is there.
        stream = self._device_stream.stream()
        if stream == self._stream or self._device_stream.is_capturing():
            return
        if self._ready is not None:
            self._ready.wait(self._device_stream.owner_stream())
        for buffer in self.buffers:
            buffer.used_on_current_stream(self._device_stream)
        self._attention.forget()  # what is on the other stream
        self._stream = stream


def _batch(lengths: Lengths, device: torch.device) -> Batch:
    """What cuDNN reads of a batch, on the device."""
    batch = lengths.batch
    requests = range(batch.num_requests)
    kv_lens = [batch.kv_len(i) for i in requests]

    def array(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return sent(torch.tensor(values, dtype=dtype, device="cpu"), device)

    def starts(name: str) -> Starts:
        return Starts(name, array(getattr(batch, name), torch.int64), in_tokens=True)

    queries = starts("qo_indptr")
    keys = starts("kv_indptr") if lengths.pages is None else None
    return Batch(
        size=batch.num_requests,
        max_qo_len=batch.max_qo_len,
        max_kv_len=batch.max_kv_len,
        qo_lens=array([batch.qo_len(i) for i in requests], torch.int32),
        kv_lens=array(kv_lens, torch.int32),
        maybe_keyless=0 in kv_lens,
        block_tables=_page_table(lengths, device),
        starts={"q": queries, "out": queries, "k": keys, "v": keys, "stats": queries},
        rows=slice(batch.qo_begin, batch.qo_end),
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


def _keys(kv: KvCache, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, heads, head_dim], or [pages, heads, page_size, head_dim]."""
    k, v = _tensors.kv_of(kv)
    nhd = request.kv_layout == "NHD"
    if request.page_size == 0:
        return (k, v) if nhd else (k.transpose(0, 1), v.transpose(0, 1))
    if request.page_size == 1 and k.dim() == 3:
        k, v = (pool.unsqueeze(1 if nhd else 2) for pool in (k, v))
    return (k.transpose(1, 2), v.transpose(1, 2)) if nhd else (k, v)
