"""The baselines: torch's own calls for the same problem, and cuDNN through the wrappers, [tokens,
num_qo_heads, head_dim] each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..._cudnn import graph
from ...testing import Inputs, MaskKind, runner
from ...testing.inputs import indptr
from .rows import Baseline, Row

Call = Callable[[], torch.Tensor]

_FRONTEND_WORKSPACE = 128 * 1024 * 1024

_GPU_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# On the CPU there is one fused implementation.
_CPU_BACKENDS = {"sdpa": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class BaselineCall:
    """A column of the table. `prepare` makes the call for one set of inputs; `checked` says whether
    the call returns attention, which is compared with the oracle."""

    name: str
    prepare: Callable[[Inputs], Call]
    checked: bool = True


def baselines_of(row: Row, device: torch.device) -> list[BaselineCall]:
    """The baselines of a row on this kind of device; trying one shows whether it takes the row."""
    gpu = device.type == "cuda"
    found = []
    if Baseline.SDPA in row.baselines:
        backends = _GPU_BACKENDS if gpu else _CPU_BACKENDS
        found += [
            BaselineCall(name, lambda inputs, backend=backend: _sdpa(inputs, backend))
            for name, backend in backends.items()
        ]
    if Baseline.VARLEN in row.baselines and gpu:
        found.append(BaselineCall("varlen", _varlen))
    if Baseline.FRONTEND in row.baselines and gpu and graph.why_missing() is None:
        found.append(BaselineCall("cudnn frontend", _Frontend().prepare))
    if Baseline.READ in row.baselines and gpu:
        found.append(BaselineCall("read", lambda inputs: _plain_read(row, inputs), checked=False))
    return found


def _sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    case = inputs.case

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (case.batch_size, -1)).transpose(1, 2)

    q, k, v = batched(inputs.q), batched(inputs.k), batched(inputs.v)
    causal = case.mask is MaskKind.CAUSAL

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _varlen(inputs: Inputs) -> Call:
    case = inputs.case
    device = inputs.q.device
    qo_indptr = indptr(case.qo_lens, device)
    kv_indptr = indptr(case.kv_lens, device)
    causal = case.mask is MaskKind.CAUSAL

    def call() -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(
            inputs.q,
            inputs.k,
            inputs.v,
            qo_indptr,
            kv_indptr,
            max(case.qo_lens),
            max(case.kv_lens),
            0.0,
            causal,
            False,
            scale=case.scale,
        )[0]

    return call


class _Frontend:
    """The wrappers with backend="cudnn": one for all sets of a row, planned once, so that a call is
    nothing but the launch after the first one."""

    def __init__(self) -> None:
        self._wrapper = None

    def prepare(self, inputs: Inputs) -> Call:
        case, device = inputs.case, inputs.q.device
        if self._wrapper is None:
            buffer = runner.workspace(device, _FRONTEND_WORKSPACE)
            self._wrapper = runner.make_wrapper(case, backend="cudnn", device=device, buffer=buffer)
            runner.plan(self._wrapper, inputs)
        run = self._wrapper.run
        out = inputs.q.new_empty(inputs.q.shape[0], case.num_qo_heads, case.dim_vo)
        keys = (inputs.cache,) if case.paged else (inputs.k, inputs.v)
        return lambda: run(inputs.q, *keys, out=out)


def _plain_read(row: Row, inputs: Inputs) -> Call:
    data = torch.ones(row.bytes() // 4, dtype=torch.float32, device=inputs.q.device)
    return lambda: data.sum()
