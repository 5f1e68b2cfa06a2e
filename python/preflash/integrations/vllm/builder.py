"""Plans of a step of vLLM, made once for all layers of an attention group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import vllm.envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from .cascade import COSTS
from .impl import ENCODER_TYPES, PreflashImpl
from .layers import CacheForm
from .plans import PagedPlans, RaggedPlans, Step, Wrappers


@dataclass
class PreflashMetadata(AttentionMetadata):
    """A planned step. vLLM's cross-attention replaces slot_mapping."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    causal: bool  # drafters of vLLM read it
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
        for impl in impls:
            impl.forget_cache()
        one, dtype = impls[0], vllm_config.model_config.dtype
        cache = CacheForm(one.num_kv_heads, one.head_size, one.fp8_dtype or dtype, dtype)
        forms = dict.fromkeys(impl.form for impl in impls)
        self._cache, self._num_qo_heads = cache, max(form.num_qo_heads for form in forms)
        self._is_decoder = one.attn_type == AttentionType.DECODER
        self._layers, self._captured_scales, self._num_loads = layers, None, 0
        # Drafters raise the lengths on the device by their tokens, but not the bounds on the host.
        self._draft_tokens = 0
        if vllm_config.speculative_config is not None:
            self._draft_tokens = vllm_config.num_speculative_tokens + 1
        # vLLM may change the mode of CUDA graphs after it has made its builders.
        self._compilation = getattr(vllm_config, "compilation_config", None)
        self._capturing = False
        self._ragged = self._paged = None
        batch_invariant = vllm.envs.VLLM_BATCH_INVARIANT
        if one.attn_type in ENCODER_TYPES:
            self._ragged = RaggedPlans(cache, forms, device, batch_invariant)
        else:
            self._paged = PagedPlans(
                cache,
                forms,
                kv_cache_spec.block_size,
                device,
                own_workspace=getattr(vllm_config.parallel_config, "use_ubatching", False),
                batch_invariant=batch_invariant,
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        # With LoRA a drafter may replay a graph of a step that the target has planned as eager.
        if vllm_config.speculative_config is not None and vllm_config.lora_config is not None:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.ALWAYS

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PreflashMetadata:
        """Plans a step. Its metadata holds until the next build().

        common_prefix_len: keys that all requests share, where use_cascade_attention() agreed to
        attend to them once for all requests; else 0.

        Raises:
            NotImplementedError: masking that differs from request to request, or a window
                without causal masking.
            RuntimeError: the scales of an fp8 cache are not those of the captured graphs.
        """
        m = common_attn_metadata
        if self._captured_scales is not None and self._num_loads != PreflashImpl.num_loads:
            self._check_captured_scales()
        if self._ragged is not None:
            wrappers = self._ragged.plan(m.query_start_loc_cpu)
        else:
            step = _step_of(m, self._draft_tokens)
            if common_prefix_len > 0:
                wrappers = self._paged.plan_cascade(step, int(common_prefix_len))
            else:
                wrappers = self._paged.plan(step, for_capture=self._capturing)
        return PreflashMetadata(m.num_actual_tokens, m.slot_mapping, m.causal, wrappers)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PreflashMetadata:
        """build() whose runs a CUDA graph records."""
        self._captured_scales, self._num_loads = self._scales(), PreflashImpl.num_loads
        self._capturing = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._capturing = False

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Returns True if build() should have common_prefix_len: the layers have no option that a
        cascade cannot serve, and its time saved exceeds its costs (cascade.CascadeCosts).

        vLLM 0.24 calls it in each step whose requests share blocks, with
        --no-disable-cascade-attn; 0.33 has no such call.

        Args:
            common_prefix_len: keys before the first query of every request, full blocks.
            query_lens: [num_reqs], tokens of each request in the step.
            num_query_heads, num_kv_heads: the model's; the group's own decide.
        """
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
            return False
        if common_prefix_len <= 0 or not self._is_decoder or not self._paged.can_cascade:
            return False
        saved = COSTS.saved_us(
            int(common_prefix_len), query_lens, self._num_qo_heads, self._cache, num_sms
        )
        return saved > COSTS.launches_us + self._graph_us(query_lens)

    def _graph_us(self, query_lens: np.ndarray) -> float:
        """Returns the host's time per layer that a full CUDA graph of the step would save."""
        mode = getattr(self._compilation, "cudagraph_mode", None)
        if mode is None or not mode.has_full_cudagraphs():
            return 0.0
        largest = getattr(self._compilation, "max_cudagraph_capture_size", None)
        if largest is not None and int(np.sum(query_lens)) > largest:
            return 0.0
        uniform = bool((np.asarray(query_lens) == max(1, self._draft_tokens)).all())
        if (mode.decode_mode() if uniform else mode.mixed_mode()).name != "FULL":
            return 0.0
        return COSTS.piecewise_us if mode.has_piecewise_cudagraphs() else COSTS.eager_us

    def _scales(self) -> dict[str, tuple[float, ...]]:
        """The scales that a launch over an fp8 cache has as numbers, by layer."""
        return {
            name: (layer._q_scale_float, layer._k_scale_float, layer._v_scale_float)
            for name, layer in self._layers.items()
            if layer.impl.fp8_dtype is not None
        }

    def _check_captured_scales(self) -> None:
        self._num_loads, scales = PreflashImpl.num_loads, self._scales()
        for name, captured in self._captured_scales.items():
            if scales[name] != captured:
                raise RuntimeError(
                    f"weights were reloaded, and the scales of q, k and v of {name} are "
                    f"{scales[name]}; CUDA graphs were captured with {captured} and keep them: "
                    "start again, or use --enforce-eager"
                )


def _step_of(m: CommonAttentionMetadata, draft_tokens: int) -> Step:
    if not isinstance(m.causal, bool):
        raise NotImplementedError("preflash takes one value of causal for all requests of a step")
    return Step(
        m.query_start_loc_cpu,
        _kv_bounds(m, draft_tokens),
        m.seq_lens,
        m.block_table_tensor,
        m.num_actual_tokens,
        m.causal,
    )


def _kv_bounds(m: CommonAttentionMetadata, draft_tokens: int) -> np.ndarray:
    """Returns upper bounds of seq_lens that are on the host, int32 [num_reqs].

    draft_tokens: what drafters may have added to seq_lens alone.

    NOTE: vLLM replaces seq_lens for cross-attention, and 0.24 for chunked local attention, but not
    seq_lens_cpu_upper_bound; _seq_lens_cpu, which 0.33 does not have, always belongs to seq_lens.
    """
    bounds = getattr(m, "_seq_lens_cpu", None)
    if bounds is None and m.encoder_seq_lens is None:
        bounds = m.seq_lens_cpu_upper_bound
    if bounds is None or len(bounds) < m.num_reqs:
        bounds = torch.full((m.num_reqs,), m.max_seq_len, dtype=torch.int32, device="cpu")
    bounds = bounds.numpy()[: m.num_reqs]
    return bounds + draft_tokens if draft_tokens else bounds
