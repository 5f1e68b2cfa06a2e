"""Drives SGLang's attention backends, its own for FlashInfer (FlashInferAttnBackend) and that of
preflash on SGLang's unmodified base classes: extend, decode and the CUDA graphs of decode."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import torch

from .serving import PAGE, Batch, Load, Shape, empty_cache, write
from .stand_ins import Anything, Finder

# What computes here is SGLang's own code.
REAL = (
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.flashinfer_backend",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.model_executor.forward_batch_info",
)
BACKENDS = {
    "FLASHINFER": "sglang.srt.layers.attention.flashinfer_backend",
    "PREFLASH": "preflash.integrations.sglang.backend",
}
MAX_REQUESTS = 16
# sglang.srt.environ.envs, where every other variable is off.
ENVIRONMENT = {"SGLANG_FLASHINFER_WORKSPACE_SIZE": 32 << 20, "SGLANG_FLASHINFER_USE_PAGED": False}


def _variable(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        get=lambda: ENVIRONMENT[name], set=lambda value: ENVIRONMENT.__setitem__(name, value)
    )


class _WriteLoc:
    def __new__(cls, loc: torch.Tensor, _swa_loc=None) -> torch.Tensor:
        return loc

    @staticmethod
    def for_layer(forward_batch, _layer, swa_loc=None) -> torch.Tensor:
        return forward_batch.out_cache_loc


class _TorchWithoutCuda:
    """torch for a backend that writes device="cuda" into its code."""

    def __getattr__(self, name: str):
        value = getattr(torch, name)
        if name not in ("empty", "zeros", "ones", "tensor", "arange", "full"):
            return value

        def make(*args, **kwargs):
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        return make


class _Translator:
    """kv_index_translator where slots of the table are those of the pool."""

    reads_are_translated = False

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def pack_read_stream(self, _plan, **options) -> None:
        self.fill_packed_read_stream(**options)

    def fill_packed_read_stream(
        self, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, **_
    ) -> None:
        """Writes the slots of each request's keys, one request after another."""
        requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        for i, (row, length) in enumerate(requests):
            start = 0 if kv_start_idx is None else int(kv_start_idx[i])
            begin = int(indptr[i])
            out[begin : begin + length] = self._table[row, start : start + length]


class _Pool:
    """token_to_kv_pool: [slots, heads, dim] of each layer."""

    def __init__(self, shape: Shape, device: torch.device, load: Load) -> None:
        size = (load.num_pages * PAGE, shape.num_kv_heads, shape.head_dim)
        self._buffers = [
            [empty_cache(size, shape, device) for _ in "kv"] for _ in range(shape.num_layers)
        ]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(self._buffers[layer_id])

    def set_kv_buffer(self, layer, loc, k, v, *_scales, **_kwargs) -> None:
        for buffer, values in zip(self._buffers[layer.layer_id], (k, v), strict=True):
            write(buffer, loc, values.view(-1, *buffer.shape[1:]))

    def get_kv_cache_quant_method(self) -> Anything:
        access = SimpleNamespace(kind=None, scale_recipe=None)
        return Anything("method", resolve_attention_access=lambda *_: access)


def load(root: Path, device: torch.device, backend: str = "FLASHINFER"):
    """Loads the backend of that name on the modules in the directory that holds `sglang`."""
    if device.type == "cuda":
        ENVIRONMENT["SGLANG_FLASHINFER_WORKSPACE_SIZE"] = 384 << 20
    utils = {
        "is_flashinfer_available": lambda: True,
        "get_int_env_var": lambda _name, default=0: default,
        "get_bool_env_var": lambda _name, default="false": default == "true",
        "get_cuda_graph_max_batch_size": lambda size: max(size, MAX_REQUESTS),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
        "support_triton": lambda _name: True,
    }
    finder = Finder(root, "sglang", REAL, ("msgspec", "pybase64", "orjson", "zmq"))
    modules = {
        "environ": {"envs": Anything("envs", **{name: _variable(name) for name in ENVIRONMENT})},
        "runtime_context": {
            "get_buffer": lambda _name, make: make(),
            "get_exec": lambda: Anything(
                "exec", deterministic=SimpleNamespace(enable_deterministic_inference=False)
            ),
            "get_parallel": lambda: SimpleNamespace(
                attn_tp_size=1, attn_dcp_size=1, attn_cp_size=1
            ),
            "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=None),
        },
        "dllm.config": {"DllmConfig": SimpleNamespace(from_server_args=lambda _: None)},
        "mem_cache.base_swa_memory_pool": {"BaseSWAKVPool": type("Swa", (), {})},
        "mem_cache.memory_pool": {"KVWriteLoc": _WriteLoc},
        "utils": utils,
        "utils.common": utils,
    }
    finder.values = {f"sglang.srt.{name}": values for name, values in modules.items()}
    finder.values["sglang.kernels.kernel_api_logging"] = {"debug_kernel_api": lambda f: f}
    finder.install()
    module = importlib.import_module(BACKENDS[backend])
    if backend == "FLASHINFER" and device.type != "cuda":
        module.torch = _TorchWithoutCuda()
    engine = SglangEngine if backend == "FLASHINFER" else PreflashEngine
    return SimpleNamespace(module=module, loaded=finder.loaded, engine=engine)


class SglangEngine:
    def __init__(self, loaded, shape: Shape, device: torch.device, path: str, load: Load) -> None:
        # Its ragged prefill of requests without a prefix does not hand on the window.
        ENVIRONMENT["SGLANG_FLASHINFER_USE_PAGED"] = shape.sliding_window is not None
        self._module, self._device = loaded.module, device
        self._modes = importlib.import_module(REAL[3]).ForwardMode
        self._table = torch.zeros(MAX_REQUESTS, load.max_length, dtype=torch.int32, device=device)
        pool = _Pool(shape, device, load)
        window = None if shape.sliding_window is None else shape.sliding_window - 1
        attention = importlib.import_module(REAL[2]).RadixAttention
        layers = [
            attention(
                shape.num_qo_heads, shape.head_dim, shape.scale, shape.num_kv_heads, index,
                logit_cap=shape.soft_cap or 0.0,
                sliding_window_size=-1 if window is None else window,
            )
            for index in range(shape.num_layers)
        ]  # fmt: skip
        self._layers = torch.nn.ModuleList(layers)
        runner = Anything(
            "ModelRunner", model=self._layers, dtype=shape.dtype, device=str(device),
            page_size=self._page_size(path), sliding_window_size=window,
            token_to_kv_pool=pool, kv_cache_dtype=pool.get_kv_buffer(0)[0].dtype,
            kv_cache_dtype_str="fp8_e4m3" if shape.fp8_cache else "auto",
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            req_to_token_pool=SimpleNamespace(req_to_token=self._table, size=MAX_REQUESTS),
            kv_index_translator=_Translator(self._table),
            model_config=Anything(
                "ModelConfig", num_attention_heads=shape.num_qo_heads, head_dim=shape.head_dim,
                get_max_num_attention_heads=lambda: shape.num_qo_heads,
                get_num_kv_heads=lambda *_: shape.num_kv_heads, v_head_dim=shape.head_dim,
                context_len=load.max_length,
            ),
            attention_chunk_size=None,
            spec_algorithm=Anything("SpeculativeAlgorithm", is_none=lambda: True),
        )  # fmt: skip
        self._backend = self._make_backend(runner)
        if path == "graph":
            self._backend.init_cuda_graph_state(MAX_REQUESTS, MAX_REQUESTS)
        self._captured: set[int] = set()

    def _page_size(self, _path: str) -> int:
        return 1

    def _make_backend(self, runner: SimpleNamespace):
        return self._module.FlashInferAttnBackend(runner)

    def begin(self, batch: Batch, slots: torch.Tensor) -> None:
        for request in batch.requests:
            row = torch.tensor(request.slots, dtype=torch.int32)
            self._table[request.index, : len(row)] = row.to(self._device)
        self._decode = all(n == 1 for n in batch.new)
        # The scheduler's device tensors keep their addresses between replays.
        lengths = torch.tensor(batch.total, dtype=torch.int64)
        prefixes = [r.computed for r in batch.requests]
        self._forward = Anything(
            "ForwardBatch",
            forward_mode=self._modes.DECODE if self._decode else self._modes.EXTEND,
            batch_size=len(batch.new),
            req_pool_indices=torch.tensor([r.index for r in batch.requests], device=self._device),
            seq_lens=lengths.to(self._device), seq_lens_cpu=lengths, seq_lens_sum=sum(batch.total),
            out_cache_loc=slots, positions=slots, input_ids=slots,
            extend_prefix_lens=torch.tensor(prefixes, device=self._device),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens=torch.tensor(batch.new, device=self._device),
            extend_seq_lens_cpu=batch.new,
            encoder_lens=None, spec_info=None, cross_attention_custom_mask=None,
            multi_item_delimiter_indices=None, kv_loc_plan=None,
        )  # fmt: skip
        if not batch.graph:
            self._backend.init_forward_metadata(self._forward)
            return
        size = len(batch.new)
        in_capture = size not in self._captured
        self._backend.init_forward_metadata_out_graph(self._forward, in_capture=in_capture)
        self._captured.add(size)
        if self._device.type != "cuda":  # where nothing was captured, the calls are made again
            self._use_wrappers_of_graph(size)

    def _use_wrappers_of_graph(self, size: int) -> None:
        backend = self._backend
        wrappers = backend.decode_cuda_graph_metadata[size]
        backend.forward_metadata = self._module.DecodeMetadata(wrappers)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        forward = self._backend.forward_decode if self._decode else self._backend.forward_extend
        q, k, v = (t.reshape(len(t), -1) for t in (q, k, v))
        return forward(q, k, v, self._layers[layer], self._forward)

    def wrappers(self) -> list:
        backend = self._backend
        found = [backend.prefill_wrapper_ragged, *backend.prefill_wrappers_paged]
        graph = [w for wrappers in backend.decode_cuda_graph_metadata.values() for w in wrappers]
        return found + backend.decode_wrappers + graph


class PreflashEngine(SglangEngine):
    """preflash's backend, with block tables of SGLang's pages or of single tokens."""

    def _page_size(self, path: str) -> int:
        return PAGE if path in ("eager", "graph") else 1

    def _make_backend(self, runner: SimpleNamespace):
        return self._module.PreflashAttnBackend(runner)

    def _use_wrappers_of_graph(self, size: int) -> None:
        """Does nothing: the next calls of the layers use the last plan of preflash's backend."""

    def wrappers(self) -> list:
        return list(self._backend.plans.wrappers.values())
