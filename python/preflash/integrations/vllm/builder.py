"""Plans of a step of vLLM, made once for all layers of an attention group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from .impl import ENCODER_TYPES
from .layers import CacheForm
from .plans import PagedPlans, RaggedPlans, Step, Wrappers


@dataclass
class PreflashMetadata(AttentionMetadata):
    """A planned step. vLLM's cross-attention replaces slot_mapping."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    wrappers: Wrappers  # by PreflashImpl.form


class PreflashMetadataBuilder(AttentionMetadataBuilder[PreflashMetadata]):
    """Plans each step from the lengths that vLLM has on the host.

    The work list is for upper bounds of the numbers of keys; kernels read the numbers themselves
    from seq_lens and the pages from the block table, both on the device. The host never waits, and
    prefills and decodes are one launch in any order. With full CUDA graphs a step whose numbers of
    requests and tokens were captured plans for the replay of that graph, whatever its lengths.
    """

    reorder_batch_threshold = None

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
            raise NotImplementedError(
                "preflash plans from query lengths on the host, which --kv-sharing-fast-prefill "
                "has on the GPU first"
            )
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        impls = [layer.impl for layer in layers.values()]
        one, dtype = impls[0], vllm_config.model_config.dtype
        cache = CacheForm(one.num_kv_heads, one.head_size, one.fp8_dtype or dtype, dtype)
        forms = dict.fromkeys(impl.form for impl in impls)
        self._capturing = False
        self._ragged = self._paged = None
        if one.attn_type in ENCODER_TYPES:
            self._ragged = RaggedPlans(cache, forms, device)
        else:
            self._paged = PagedPlans(
                cache,
                forms,
                kv_cache_spec.block_size,
                device,
                exact_windows=vllm_config.speculative_config is None,
                own_workspace=getattr(vllm_config.parallel_config, "use_ubatching", False),
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PreflashMetadata:
        """Plans a step. Its metadata holds until the next build().

        Raises:
            NotImplementedError: masking that differs from request to request, or a window
                without causal masking.
        """
        m = common_attn_metadata
        if self._ragged is not None:
            wrappers = self._ragged.plan(m.query_start_loc_cpu)
        else:
            wrappers = self._paged.plan(_step_of(m), for_capture=self._capturing)
        return PreflashMetadata(m.num_actual_tokens, m.slot_mapping, wrappers)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PreflashMetadata:
        """build() whose runs a CUDA graph records."""
        self._capturing = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._capturing = False


def _step_of(m: CommonAttentionMetadata) -> Step:
    if not isinstance(m.causal, bool):
        raise NotImplementedError("preflash takes one value of causal for all requests of a step")
    return Step(
        m.query_start_loc_cpu,
        _kv_bounds(m),
        m.seq_lens,
        m.block_table_tensor,
        m.num_actual_tokens,
        m.causal,
    )


def _kv_bounds(m: CommonAttentionMetadata) -> np.ndarray:
    """Returns upper bounds of seq_lens that are on the host, int32 [num_reqs].

    NOTE: vLLM replaces seq_lens for cross-attention, and 0.24 for chunked local attention, but not
    seq_lens_cpu_upper_bound; _seq_lens_cpu, which 0.33 does not have, always belongs to seq_lens.
    """
    bounds = getattr(m, "_seq_lens_cpu", None)
    if bounds is None and m.encoder_seq_lens is None:
        bounds = m.seq_lens_cpu_upper_bound
    if bounds is None or len(bounds) < m.num_reqs:
        bounds = torch.full((m.num_reqs,), m.max_seq_len, dtype=torch.int32, device="cpu")
    return bounds[: m.num_reqs].numpy()
