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
from .others import others_of
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
    if gpu:
        found += [BaselineCall(name, prepare) for name, prepare in others_of(row).items()]
    if Baseline.READ in row.baselines and gpu:
        found.append(BaselineCall("read", lambda inputs: _plain_read(row, inputs), checked=False))
    return found


def _sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    case = inputs.case
    q, k, v = (
        x.unflatten(0, (case.batch_size, -1)).transpose(1, 2)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    causal = case.mask is MaskKind.CAUSAL

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _varlen(inputs: Inputs) -> Call:
    case, device = inputs.case, inputs.q.device
    lengths = (
        indptr(case.qo_lens, device),
        indptr(case.kv_lens, device),
        max(case.qo_lens),
        max(case.kv_lens),
    )
    tensors = (inputs.q, inputs.k, inputs.v)
    options = (0.0, case.mask is MaskKind.CAUSAL, False)  # dropout, causal, debug mask
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(*tensors, *lengths, *options, scale=case.scale)[0]


class _Frontend:
    """The wrappers with backend="cudnn": one for all sets of a row, planned once, so that a call is
    nothing but the launch after the first one."""

    def __init__(self) -> None:
        self._wrapper = None

    def prepare(self, inputs: Inputs) -> Call:
        if self._wrapper is None:
            self._wrapper = runner.planned(inputs, backend="cudnn", size=_FRONTEND_WORKSPACE)
        return runner.launcher(self._wrapper, inputs)


def _plain_read(row: Row, inputs: Inputs) -> Call:
    data = torch.ones(row.bytes() // 4, dtype=torch.float32, device=inputs.q.device)
    return lambda: data.sum()
