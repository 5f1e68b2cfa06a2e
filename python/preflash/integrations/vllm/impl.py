"""One attention layer of vLLM: writes its keys and values into the cache and launches."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from .layers import FP8_CACHES, LayerForm, position_encoding

ENCODER_TYPES = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class PreflashImpl(AttentionImpl):
    """Attention of one layer. The builder plans for `form`; forward() only launches.

    num_loads: how often weights of any layer were loaded in this process.

    Raises:
        NotImplementedError: an option that preflash does not serve, named in the message.
    """

    num_loads: ClassVar[int] = 0

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if max(self.dcp_world_size, self.pcp_world_size) > 1:
            raise NotImplementedError(
                "preflash serves no context parallelism in vLLM; unset "
                "--decode-context-parallel-size and --prefill-context-parallel-size"
            )
        if attn_type in ENCODER_TYPES and sliding_window is not None:
            raise NotImplementedError(
                "an encoder's sliding window has two sides; preflash has windows to the left only"
            )
        if attn_type in ENCODER_TYPES and kv_cache_dtype in FP8_CACHES:
            kv_cache_dtype = "auto"  # an encoder has no cache
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.fp8_dtype = FP8_CACHES.get(kv_cache_dtype)
        soft_cap, position = float(logits_soft_cap or 0.0), position_encoding(alibi_slopes)
        # vLLM then quantises q to float8_e4m3fn before it calls forward(). Kernels that multiply
        # 8 bits as they are exist on SM90, up to head_dim 128 and without these options.
        self.supports_quant_query_input = (
            self.fp8_dtype == torch.float8_e4m3fn
            and current_platform.is_device_capability_family(90)
            and head_size <= 128
            and soft_cap == 0.0
            and position == "NONE"
        )
        self.form = LayerForm(
            num_heads,
            self.scale,
            -1 if sliding_window is None else sliding_window - 1,
            soft_cap,
            position,
            self.supports_quant_query_input,
        )
        self._given_sinks = sinks
        self.forget_cache()

    def forget_cache(self) -> None:
        """Drops the views of the last cache, which vLLM may be about to free."""
        self._cache: torch.Tensor | None = None
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Converts the sinks to the dtype that run() takes.

        NOTE: vLLM calls it again when it reloads weights. CUDA graphs hold the address of the first
        copy, so later calls write into it.
        """
        PreflashImpl.num_loads += 1
        if self._given_sinks is None or self._given_sinks.dtype == torch.float32:
            return
        if self.sinks is self._given_sinks:
            self.sinks = self._given_sinks.float()
        else:
            self.sinks.copy_(self._given_sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layer for the step that the builder planned.

        Args:
            layer: the attention layer, with its scales of q, k and v.
            query: [num_tokens, num_heads, head_size]; rows of padding are not read.
            key, value: [num_tokens, num_kv_heads, head_size]; read by encoders only.
            kv_cache: the layer's cache, in either shape of PreflashBackend.
            attn_metadata: PreflashMetadata; None in a profiling run, which fills output with 0.
            output: [num_tokens, num_heads, head_size]; rows of padding are not written.

        Raises:
            NotImplementedError: the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("preflash writes no quantised output")
        if attn_metadata is None:
            return output.fill_(0)
        wrapper = attn_metadata.wrappers[self.form]
        if self.attn_type in ENCODER_TYPES:
            wrapper.run(query, key, value, out=output, sinks=self.sinks)
        elif self.fp8_dtype is None:
            wrapper.run(query, self._key_and_value(kv_cache), out=output, sinks=self.sinks)
        else:
            wrapper.run(
                query,
                self._key_and_value(kv_cache),
                q_scale=layer._q_scale_float if self.supports_quant_query_input else None,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                out=output,
                sinks=self.sinks,
            )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes the new tokens' keys and values into the cache; slot -1 is padding."""
        if self.attn_type in ENCODER_TYPES:
            return
        # NOTE: key and value may have rows of padding; the operator writes as many rows as
        # slot_mapping has.
        torch.ops._C_cache_ops.reshape_and_cache_flash(
            key,
            value,
            *_halves(kv_cache, self.head_size),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def _key_and_value(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v [blocks, block_size, num_kv_heads, head_size], made once for a cache."""
        if kv_cache is not self._cache:
            views = _halves(kv_cache, self.head_size)
            if self.fp8_dtype is not None:
                views = tuple(view.view(self.fp8_dtype) for view in views)
            self._cache, self._views = kv_cache, views
        return self._views


def _halves(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns k and v [blocks, block_size, num_kv_heads, head_size] of a cache in either shape."""
    if kv_cache.dim() == 5:
        return kv_cache.unbind(1)
    return kv_cache.transpose(1, 2).split(head_size, dim=-1)
