"""PREFLASH's answers to vLLM's selection of backends: cache shapes, and reasons for a refusal."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from .._paging import head_size_refusal, is_served_head_size
from .builder import PreflashMetadataBuilder
from .impl import PreflashImpl
from .layers import FP8_CACHES
from .registration import NAME

_ATTENTION_TYPES = (
    AttentionType.DECODER,
    AttentionType.ENCODER,
    AttentionType.ENCODER_ONLY,
    AttentionType.ENCODER_DECODER,
)
_DTYPE_OF_CACHE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class PreflashBackend(AttentionBackend):
    """vLLM's attention on preflash's kernels: paged and ragged, prefill and decode in one launch.

    The KV cache of a layer is [blocks, 2, block_size, num_kv_heads, head_size] where vLLM asks the
    backend for a shape (0.24), and [blocks, num_kv_heads, block_size, 2 * head_size] where it does
    not (0.33); preflash reads either in any strides.
    """

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_DTYPE_OF_CACHE, *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PreflashImpl]:
        return PreflashImpl

    @staticmethod
    def get_builder_cls() -> type[PreflashMetadataBuilder]:
        return PreflashMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(16)]

    # The shape of the cache; releases that have no such methods decide it themselves.

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":
            return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    # What is served.

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return is_served_head_size(head_size)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in _ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # plans are for the query lengths on the host

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Returns a sentence that refuses the configuration, or None."""
        if _DTYPE_OF_CACHE.get(kv_cache_dtype, dtype) != dtype:
            return (
                f"preflash reads a 16-bit cache in the model's dtype {dtype}, not in "
                f"{kv_cache_dtype}: use --kv-cache-dtype auto"
            )
        return head_size_refusal(head_size, kv_cache_dtype in FP8_CACHES)
