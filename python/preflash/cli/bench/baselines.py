"""The baselines, [tokens, num_qo_heads, head_dim] each: torch's own calls for the same problem
(cuDNN is one of them), and flashinfer and FlashAttention-3 where they import."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...testing import Inputs, MaskKind, runner
from ...testing.inputs import indptr
from .rows import Baseline, Row

Call = Callable[[], torch.Tensor]
Prepare = Callable[[Inputs], Call]

WORKSPACE_BYTES = 256 * 1024 * 1024
READ = "read"  # the one that is no attention: its output is not compared
_GPU_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# On the CPU there is one fused implementation.
_CPU_BACKENDS = {"sdpa": SDPBackend.FLASH_ATTENTION}


def baselines_of(row: Row, device: torch.device) -> dict[str, Prepare]:
    """The baselines of a row on this kind of device, by column: what makes the call for one set of
    inputs. Trying one shows whether it takes the row."""
    gpu, wanted = device.type == "cuda", row.baselines
    found: dict[str, Prepare] = {}
    if Baseline.SDPA in wanted:
        backends = _GPU_BACKENDS if gpu else _CPU_BACKENDS
        found |= {name: functools.partial(_sdpa, one) for name, one in backends.items()}
    if gpu and Baseline.VARLEN in wanted:
        found["varlen"] = _torch_varlen
    found |= others_of(row) if gpu else {}
    if gpu and Baseline.READ in wanted:
        found[READ] = functools.partial(_plain_read, row)
    return found


def others_of(row: Row) -> dict[str, Prepare]:
    """Baselines of other packages, where they import."""
    found: dict[str, Prepare] = {}
    if row.case.fixed_split_size is not None or row.case.disable_split_kv:
        return found
    if (flashinfer := _imported("flashinfer")) is not None:
        found["flashinfer"] = _planned_once(functools.partial(_flashinfer, flashinfer))
    fa3 = _imported("flash_attn_interface", "flash_attn_3.flash_attn_interface")
    if fa3 is not None and not row.case.paged:
        found["flash_attn_3"] = functools.partial(_fa3_varlen, fa3.flash_attn_varlen_func)
    return found


@functools.cache
def _imported(*names: str) -> ModuleType | None:
    """The first module that imports. A package that is broken is as good as none."""
    for name in names:
        with contextlib.suppress(Exception):  # whatever a broken package raises
            return importlib.import_module(name)
    return None


def _sdpa(backend: SDPBackend, inputs: Inputs) -> Call:
    case = inputs.case
    tensors = (inputs.q, inputs.k, inputs.v)
    q, k, v = (x.unflatten(0, (case.batch_size, -1)).transpose(1, 2) for x in tensors)
    causal = case.mask is MaskKind.CAUSAL

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=case.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _varlen(inputs: Inputs) -> tuple[tuple, bool]:
    """Arguments of variable-length calls, and True if they are causal."""
    case, device = inputs.case, inputs.q.device
    offsets = (indptr(case.qo_lens, device), indptr(case.kv_lens, device))
    longest = (max(case.qo_lens), max(case.kv_lens))
    return (inputs.q, inputs.k, inputs.v, *offsets, *longest), case.mask is MaskKind.CAUSAL


def _torch_varlen(inputs: Inputs) -> Call:
    arguments, causal = _varlen(inputs)
    options = (0.0, causal, False)  # dropout, causal, debug mask
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(*arguments, *options, scale=inputs.case.scale)[0]


def _fa3_varlen(forward: Callable, inputs: Inputs) -> Call:
    arguments, causal = _varlen(inputs)

    def call() -> torch.Tensor:
        out = forward(*arguments, softmax_scale=inputs.case.scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def _planned_once(planned: Callable[[Inputs], Any]) -> Prepare:
    """One wrapper for all sets of a row, so that a call is nothing but the launch."""
    wrappers: list[Any] = []

    def prepare(inputs: Inputs) -> Call:
        if not wrappers:
            wrappers.append(planned(inputs))
        return runner.launcher(wrappers[0], inputs)

    return prepare


def _flashinfer(module: ModuleType, inputs: Inputs) -> Any:
    """FlashInfer's wrapper, planned; its API is preflash's."""
    case, positional = inputs.case, runner.plan_arguments(inputs)[0]
    # For decode, flashinfer's fa3 computes a full tile of queries: three times its fa2's time.
    backend = "fa2" if max(case.qo_lens) == 1 and inputs.q.is_cuda else "auto"
    dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
    try:
        buffer = runner.workspace(inputs.q.device, WORKSPACE_BYTES)
        wrapper = runner.make_wrapper(case, backend=backend, buffer=buffer, package=module)
        wrapper.plan(*positional, causal=case.mask is MaskKind.CAUSAL, **dtypes)
    except Exception as error:  # a compiler that is missing, a package that does not fit
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return wrapper


def _plain_read(row: Row, inputs: Inputs) -> Call:
    data = torch.ones(row.bytes() // 4, dtype=torch.float32, device=inputs.q.device)
    return lambda: data.sum()
