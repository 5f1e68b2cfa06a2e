"""Drives vLLM's attention backends: its own for FlashInfer (FlashInferMetadataBuilder.build() and
FlashInferImpl.forward()), and preflash's PREFLASH, on vLLM's unmodified base classes."""

from __future__ import annotations

import importlib
import inspect
import itertools
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import torch

from .serving import PAGE, Batch, Load, Shape, empty_cache, write
from .stand_ins import Anything, Finder

# What computes here is vLLM's own code.
REAL = (
    "vllm.utils.math_utils",
    "vllm.utils.torch_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
)
ABSENT = ("uvloop", "zmq", "msgspec", "pydantic", "cachetools", "regex", "cloudpickle", "numba")
BACKENDS = {
    "FLASHINFER": ("vllm.v1.attention.backends.flashinfer", "FlashInferBackend"),
    "PREFLASH": ("preflash.integrations.vllm.backend", "PreflashBackend"),
}
MAX_REQUESTS = 16


class _Buffer:
    """CpuGpuBuffer of vllm.v1.utils, which imports its whole engine."""

    def __init__(self, *size, dtype, device, pin_memory=False, with_numpy=True) -> None:
        self.cpu = torch.zeros(*size, dtype=dtype, pin_memory=pin_memory)
        self.gpu = torch.zeros(*size, dtype=dtype, device=device)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)


def _platform(device: torch.device) -> Anything:
    """Makes a GPU of the device's compute capability; of 9.0 for the CPU."""
    on_gpu = device.type == "cuda"
    major, minor = version = torch.cuda.get_device_capability(device) if on_gpu else (9, 0)
    capability = SimpleNamespace(major=major, minor=minor, to_int=lambda: 10 * major + minor)

    def pair(value):
        return divmod(value, 10) if isinstance(value, int) else value

    return Anything(
        "current_platform", device_type="cuda", is_cuda=lambda: True, is_cuda_alike=lambda: True,
        fp8_dtype=lambda: torch.float8_e4m3fn, get_device_capability=lambda *_: capability,
        is_device_capability=lambda value, *_: version == pair(value),
        has_device_capability=lambda value, *_: version >= pair(value),
        is_device_capability_family=lambda value, *_: value // 10 == major,
    )  # fmt: skip


class _Kernel:
    """Stands in for _copy_page_indices_kernel on the CPU."""

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(indices, table, _stride, indptr, BLOCK_SIZE=0, **_) -> None:  # noqa: N803
            for request in range(grid[0]):
                begin, end = indptr[request : request + 2].tolist()
                indices[begin:end] = table[request, : end - begin]

        return launch


def _reshape_and_cache_flash(key, value, k_cache, v_cache, slots, _dtype, _k_scale, _v_scale):
    """Stands in for vLLM's operator, with scales of 1; caches are [pages, tokens, heads, dim]."""
    page, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
    for cache, new in ((k_cache, key), (v_cache, value)):
        cache = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
        write(cache, (page, offset), new[: len(slots)])


def _to_fp8(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for scaled_fp8_quant, with a scale of 1."""
    return x.to(torch.float8_e4m3fn), scale


class _CUDAGraphMode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2

    def decode_mode(self):
        return self

    def has_full_cudagraphs(self):
        return self is _CUDAGraphMode.FULL


def load(root: Path, device: torch.device, backend: str = "FLASHINFER"):
    """Loads the backend of that name on the modules in the directory that holds `vllm`."""
    on_gpu, layers = device.type == "cuda", {}
    environment = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False,
        VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=(394 if on_gpu else 8) << 20,
        VLLM_KV_CACHE_LAYOUT=None,
    )
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    finder = Finder(root, "vllm", REAL, ABSENT)
    finder.values = {
        "vllm": {"envs": environment, "_custom_ops": SimpleNamespace(scaled_fp8_quant=_to_fp8)},
        "vllm.envs": vars(environment),
        "vllm.config": {
            "CUDAGraphMode": _CUDAGraphMode,
            "get_current_vllm_config_or_none": lambda: None,
            "get_layers_from_vllm_config": lambda _config, _kind, names=None: {
                name: layers[name] for name in (names or layers)
            },
        },
        "vllm.platforms": {"current_platform": _platform(device)},
        "vllm.distributed.parallel_state": {
            "get_dcp_group": lambda: group,
            "get_pcp_group": lambda: group,
            "get_dcp_world_size_and_rank": lambda *_: (1, 0),
        },
        "vllm.distributed.kv_transfer.kv_connector.utils": {
            "get_kv_connector_cache_layout": lambda *_: "NHD"
        },
        "vllm.utils.flashinfer": {"force_use_trtllm_attention": lambda: False},
        "vllm.utils.platform_utils": {"is_pin_memory_available": lambda: on_gpu},
        "vllm.utils.torch_version": {"is_torch_equal_or_newer": lambda _: True},
        "vllm.v1.utils": {"CpuGpuBuffer": _Buffer},
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
    }
    if on_gpu:
        import triton
        import triton.language as tl

        finder.values["vllm.triton_utils"] = {"triton": triton, "tl": tl}
    finder.install()
    path, name = BACKENDS[backend]
    module = importlib.import_module(path)
    if backend == "FLASHINFER" and not on_gpu:
        module._copy_page_indices_kernel = _Kernel()
    library = module._kept_library = torch.library.Library("_C_cache_ops", "DEF")
    library.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) k_cache, "
        "Tensor(b!) v_cache, Tensor slots, str dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )
    library.impl("reshape_and_cache_flash", _reshape_and_cache_flash, "CompositeExplicitAutograd")
    return SimpleNamespace(
        backend=getattr(module, name), layers=layers, loaded=finder.loaded,
        engine=VllmEngine if backend == "FLASHINFER" else PreflashEngine,
    )  # fmt: skip


class VllmEngine:
    def __init__(self, loaded, shape: Shape, device: torch.device, path: str, load: Load) -> None:
        backend = loaded.backend
        self._device, self._load, self._shape = device, load, shape
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        self._common = importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        names = [f"layer.{index}" for index in range(shape.num_layers)]
        cache_dtype = "fp8_e4m3" if shape.fp8_cache else "auto"
        config = self._config(path, cache_dtype, self._layout(backend), loaded.layers)
        dtype = {"dtype": shape.dtype}
        if shape.fp8_cache:
            dtype = {"dtype": torch.uint8, "kv_quant_mode": interface.KVQuantMode.FP8_PER_TENSOR}
        spec = interface.FullAttentionSpec(
            block_size=PAGE, num_kv_heads=shape.num_kv_heads, head_size=shape.head_dim, **dtype
        )
        self._impls = []
        scales = {f"_{x}_scale_float": 1.0 for x in "qkv"}
        for name in names:
            impl = backend.get_impl_cls()(
                shape.num_qo_heads, shape.head_dim, shape.scale, shape.num_kv_heads, None,
                shape.sliding_window, cache_dtype, shape.soft_cap,
            )  # fmt: skip
            impl.dcp_world_size, impl.dcp_rank = 1, 0
            impl.cache_config = config.cache_config
            self._impls.append(impl)
            loaded.layers[name] = SimpleNamespace(impl=impl, **scales)
        one = torch.ones((), device=device)
        tensors = {f"_{x}_scale": one for x in "qkv"}
        self._layer = SimpleNamespace(_o_scale_float=None, **tensors, **scales)
        self._builder = backend.get_builder_cls()(spec, names, config, device)
        size = self._cache_shape(backend, load.num_pages, shape)
        self._caches = [empty_cache(size, shape, device).view(spec.dtype) for _ in names]

    def _config(self, path: str, cache_dtype: str, layout, layers: dict) -> Anything:
        """Makes the part of VllmConfig that backends and builders read."""
        shape, load = self._shape, self._load
        rows = sum(load.prompts) + len(load.prompts) * load.shared
        parts = {
            "cache": {
                "cache_dtype": cache_dtype, "block_size": PAGE,
                "get_resolved_kv_cache_layout": lambda: layout,
            },
            "model": {
                "dtype": shape.dtype, "max_model_len": load.max_length,
                "get_num_attention_heads": lambda _: shape.num_qo_heads,
                "get_num_kv_heads": lambda _: shape.num_kv_heads,
                "get_head_size": lambda: shape.head_dim,
            },
            "compilation": {
                "cudagraph_mode": _CUDAGraphMode.FULL if path == "graph" else _CUDAGraphMode.NONE,
                "max_cudagraph_capture_size": MAX_REQUESTS, "static_forward_context": layers,
            },
            "scheduler": {"max_num_batched_tokens": max(1024, rows), "max_num_seqs": MAX_REQUESTS},
            "parallel": {
                "cp_kv_cache_interleave_size": 1, "dcp_kv_cache_interleave_size": 1,
                "dcp_comm_backend": "ag_rs", "decode_context_parallel_size": 1,
            },
        }  # fmt: skip
        configs = {f"{name}_config": Anything(name, **part) for name, part in parts.items()}
        return Anything("VllmConfig", num_speculative_tokens=0, speculative_config=None, **configs)

    @staticmethod
    def _cache_shape(backend, num_pages: int, shape: Shape) -> tuple[int, ...]:
        base = importlib.import_module("vllm.v1.attention.backend").AttentionBackend
        if hasattr(base, "get_kv_cache_shape"):
            return backend.get_kv_cache_shape(num_pages, PAGE, shape.num_kv_heads, shape.head_dim)
        return num_pages, shape.num_kv_heads, PAGE, 2 * shape.head_dim

    @staticmethod
    def _layout(backend):
        if not hasattr(backend, "supported_kv_cache_layouts"):
            return None  # its backend asks get_kv_cache_layout() instead
        layouts = backend.supported_kv_cache_layouts()
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        return layouts[0] if layouts else next(iter(interface.KVCacheLayout))

    def begin(self, batch: Batch, slots: torch.Tensor) -> None:
        self._metadata = self._builder.build(
            common_prefix_len=0, common_attn_metadata=self._common_of(batch, slots)
        )
        self._slots = slots

    def _common_of(self, batch: Batch, slots: torch.Tensor):
        """Makes the CommonAttentionMetadata of a step."""
        starts, lengths = batch.starts, torch.tensor(batch.total, dtype=torch.int32)
        table = batch.block_table(self._load.max_length // PAGE)
        return self._common(
            query_start_loc=starts.to(self._device), query_start_loc_cpu=starts,
            seq_lens=lengths.to(self._device), seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(batch.new), num_actual_tokens=int(starts[-1]),
            max_query_len=max(batch.new), max_seq_len=max(batch.total),
            block_table_tensor=table.to(self._device), slot_mapping=slots,
        )  # fmt: skip

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        impl, cache = self._impls[layer], self._caches[layer]
        impl.do_kv_cache_update(self._layer, k, v, cache, self._slots)
        out = torch.empty_like(q)
        impl.forward(self._layer, self._query_of(impl, q), k, v, cache, self._metadata, out)
        return out

    def _query_of(self, _impl, q: torch.Tensor) -> torch.Tensor:
        return q

    def wrappers(self) -> list:
        found = [self._builder._prefill_wrapper, self._builder._decode_wrapper]
        found += getattr(self._builder, "_decode_wrappers_cudagraph", {}).values()
        return [wrapper for wrapper in found if wrapper is not None]


class PreflashEngine(VllmEngine):
    """PREFLASH, with what only a GPU knows: bounds on the host are larger than the lengths."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, batch: Batch, slots: torch.Tensor) -> None:
        common = self._common_of(batch, slots)
        if not self._shape.sliding_window:
            common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + (2 * PAGE + 1)
        if batch.graph:
            self._use_inputs_of_graph(common)
        self._metadata = self._builder.build(self._common_prefix_len(batch), common)
        self._slots = slots

    def _common_prefix_len(self, batch: Batch) -> int:
        """Returns the prefix of use_cascade_attention(), as if the builder always agreed, or 0."""
        base = importlib.import_module("vllm.v1.attention.backend").AttentionMetadataBuilder
        if batch.graph or not hasattr(base, "use_cascade_attention"):
            return 0
        asked, served = (
            inspect.signature(builder.use_cascade_attention).parameters
            for builder in (base, type(self._builder))
        )
        assert list(asked) == list(served)
        columns = zip(*(request.pages for request in batch.requests), strict=False)
        shared = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        return min(len(list(shared)), min(r.computed for r in batch.requests) // PAGE) * PAGE

    def _use_inputs_of_graph(self, common) -> None:
        """Gives a step the tensors of its size's graph, first for sequences of one token."""
        given = common.seq_lens, common.block_table_tensor
        kept = self._inputs.get(common.num_reqs)
        if kept is None:
            kept = self._inputs[common.num_reqs] = tuple(map(torch.clone, given))
            lengths, table = kept[0].fill_(1), kept[1].zero_()
            dummy = common.replace(
                seq_lens=lengths, seq_lens_cpu_upper_bound=lengths.cpu(), block_table_tensor=table,
                max_seq_len=self._load.max_length,
            )  # fmt: skip
            for _ in range(2):  # the warm-up and the capture
                self._builder.build_for_cudagraph_capture(dummy)
        common.seq_lens, common.block_table_tensor = map(torch.Tensor.copy_, kept, given)

    def _query_of(self, impl, q: torch.Tensor) -> torch.Tensor:
        """Returns q as vLLM's attention layer hands it on."""
        return q.to(torch.float8_e4m3fn) if impl.supports_quant_query_input else q

    def wrappers(self) -> list:
        return list(self._metadata.wrappers.values())
