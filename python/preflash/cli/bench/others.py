"""Baselines that join where their package imports: flashinfer and FlashAttention-3."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch

from ...testing import Inputs, MaskKind, runner
from ...testing.inputs import indptr
from .rows import Row

Call = Callable[[], torch.Tensor]

_WORKSPACE_BYTES = 256 * 1024 * 1024
_FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


@functools.cache
def _imported(*names: str) -> ModuleType | None:
    """The first module that imports. A package that is broken is as good as none."""
    for name in names:
        try:
            return importlib.import_module(name)
        except Exception:  # whatever a broken package raises
            continue
    return None


def others_of(row: Row) -> dict[str, Callable[[Inputs], Call]]:
    """How each of them makes the call for one set of inputs, by name."""
    if row.case.fixed_split_size is not None or row.case.disable_split_kv:
        return {}
    found: dict[str, Callable[[Inputs], Call]] = {}
    flashinfer = _imported("flashinfer")
    if flashinfer is not None:
        found["flashinfer"] = _FlashInfer(flashinfer).prepare
    fa3 = _imported(*_FA3_MODULES)
    if fa3 is not None and not row.case.paged:
        found["flash_attn_3"] = functools.partial(_varlen, fa3.flash_attn_varlen_func)
    return found


class _FlashInfer:
    """Its wrapper, of which preflash has the API: one for all sets of a row, planned once."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._wrapper = module, None

    def prepare(self, inputs: Inputs) -> Call:
        if self._wrapper is None:
            try:
                self._wrapper = self._planned(inputs)
            except Exception as error:  # a compiler that is missing, a package that does not fit
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return runner.launcher(self._wrapper, inputs)

    def _planned(self, inputs: Inputs):
        case, positional = inputs.case, runner.plan_arguments(inputs)[0]
        kind = self._module.BatchPrefillWithRaggedKVCacheWrapper
        if case.paged:
            kind = self._module.BatchPrefillWithPagedKVCacheWrapper
        wrapper = kind(runner.workspace(inputs.q.device, _WORKSPACE_BYTES), case.layout)
        dtypes = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
        wrapper.plan(*positional, causal=case.mask is MaskKind.CAUSAL, **dtypes)
        return wrapper


def _varlen(forward: Callable, inputs: Inputs) -> Call:
    case, device = inputs.case, inputs.q.device
    lengths = (indptr(case.qo_lens, device), indptr(case.kv_lens, device))
    longest = (max(case.qo_lens), max(case.kv_lens))
    options = {"softmax_scale": case.scale, "causal": case.mask is MaskKind.CAUSAL}

    def call() -> torch.Tensor:
        out = forward(inputs.q, inputs.k, inputs.v, *lengths, *longest, **options)
        return out[0] if isinstance(out, tuple) else out

    return call
