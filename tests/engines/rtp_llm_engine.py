"""Drives RTP-LLM's wrapper classes: paged and ragged prefill, and decode."""

from __future__ import annotations

import importlib
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import torch

from .serving import PAGE, Batch, Load, Shape, empty_cache, write
from .stand_ins import Finder

# What computes here is RTP-LLM's own code.
_ATTENTION = "rtp_llm.models_py.modules.factory.attention"
BACKEND = f"{_ATTENTION}.cuda_impl.py_flashinfer_mha"
REAL = (BACKEND, f"{_ATTENTION}.common")
MAX_REQUESTS = 16


class _CacheType(Enum):
    BASE = 0
    FP8 = 2


class _Parameters:
    """Stands in for FlashInferMlaAttnParams, which C++ fills: arrays of fixed addresses."""

    device = torch.device("cpu")
    num_pages = 0

    def __init__(self) -> None:
        sizes = {
            "decode_page_indptr": MAX_REQUESTS + 1,
            "page_indice": self.num_pages * MAX_REQUESTS,
            "paged_kv_last_page_len": MAX_REQUESTS,
        }
        self._all = {
            name: torch.zeros(size, dtype=torch.int32, device=self.device)
            for name, size in sizes.items()
        }

    def fill_params(
        self, prefixes, sequences, inputs, blocks, page_size, forbid_realloc=False
    ) -> None:
        lengths = (prefixes + inputs if prefixes.numel() else sequences + 1).tolist()
        counts = [-(-length // page_size) for length in lengths]
        values = {
            "decode_page_indptr": torch.tensor([0, *counts]).cumsum(0),
            "page_indice": torch.cat([row[:n] for row, n in zip(blocks, counts, strict=True)]),
            "paged_kv_last_page_len": torch.tensor([(n - 1) % page_size + 1 for n in lengths]),
        }
        for name, value in values.items():
            setattr(self, f"{name}_h", value.int())
            setattr(self, f"{name}_d", self._all[name][: len(value)].copy_(value))


def _quantized(x, out, _scale, _static) -> None:
    out.copy_(x.to(out.dtype))


def load(root: Path, device: torch.device, _backend: str):
    """Loads the module of RTP-LLM's wrappers from the directory that holds `rtp_llm`."""
    finder = Finder(root, "rtp_llm", REAL, ())
    ops = SimpleNamespace(FlashInferMlaAttnParams=_Parameters, per_tensor_quant_fp8=_quantized)
    finder.values = {
        "rtp_llm.models_py.utils.arch": {"is_sm90": lambda: True, "is_sm10x": lambda: False},
        "rtp_llm.ops": {"KvCacheDataType": _CacheType},
        "rtp_llm.ops.compute_ops": {"rtp_llm_ops": ops},
    }
    _Parameters.device = device
    finder.install()
    module = importlib.import_module(BACKEND)
    module.get_py_flashinfer_workspace_buffer.__defaults__ = (str(device),)
    return SimpleNamespace(module=module, loaded=finder.loaded, engine=RtpLlmEngine)


class RtpLlmEngine:
    def __init__(self, loaded, shape: Shape, device: torch.device, path: str, load: Load) -> None:
        if shape.sliding_window is not None or shape.soft_cap is not None:
            raise NotImplementedError("RTP-LLM's wrappers pass neither a sliding-window nor a cap")
        self._module, self._shape, self._device, self._load = loaded.module, shape, device, load
        _Parameters.num_pages = load.num_pages
        self._configs = SimpleNamespace(
            head_num=shape.num_qo_heads, kv_head_num=shape.num_kv_heads,
            size_per_head=shape.head_dim, kernel_tokens_per_block=PAGE, dtype=shape.dtype,
            kv_cache_dtype=_CacheType.FP8 if shape.fp8_cache else _CacheType.BASE,
            max_seq_len=load.max_length, is_causal=True,
        )  # fmt: skip
        size = (load.num_pages, 2, shape.num_kv_heads, PAGE, shape.head_dim)
        self._caches = [empty_cache(size, shape, device) for _ in range(shape.num_layers)]
        self._ops: dict[tuple, object] = {}

    def begin(self, batch: Batch, slots: torch.Tensor) -> None:
        decode = all(n == 1 for n in batch.new)
        prefixes = [r.computed for r in batch.requests]
        self._kind = "Decode" if decode else "PrefillPaged" if any(prefixes) else "Prefill"
        table = batch.block_table(self._load.max_length // PAGE)
        before, none = torch.tensor(prefixes).int(), torch.zeros(0, dtype=torch.int32)
        inputs = SimpleNamespace(
            is_prefill=not decode, is_cuda_graph=batch.graph,
            prefix_lengths=none if decode else before,
            sequence_lengths=before if decode else none,
            input_lengths=torch.tensor(batch.new).int(),
            kv_cache_kernel_block_id=table,
            kv_cache_kernel_block_id_device=table.to(self._device),
            cu_seqlens=batch.starts, cu_seqlens_device=batch.starts.to(self._device),
            prefill_cuda_graph_copy_params=None, padding_offset=None,
        )  # fmt: skip
        self._slots = slots
        key = self._kind, batch.graph
        self._op = self._ops.get(key)
        if self._op is not None and batch.graph:
            self._op.prepare_for_cuda_graph_replay(inputs)
            return
        if self._op is None:
            make = getattr(self._module, f"PyFlashinfer{self._kind}AttnOp")
            arguments = () if self._kind == "Prefill" else (inputs,)
            self._op = self._ops[key] = make(self._configs, *arguments)
        self._parameters = self._op.prepare(inputs)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._caches[layer]
        page, offset = self._slots // PAGE, self._slots % PAGE
        for side, new in enumerate((k, v)):
            write(cache[:, side].transpose(1, 2), (page, offset), new)
        layer_cache = SimpleNamespace(kv_cache_base=cache)
        if self._kind == "Prefill":
            return self._op.forward(q, k, v)
        parameters = (self._parameters,) if self._kind == "Decode" else ()
        return self._op.forward(q, layer_cache, *parameters)

    def wrappers(self) -> list:
        found = [item for op in self._ops.values() for item in vars(op).items()]
        return [value for name, value in found if name.endswith("_wrapper")]
