"""Properties of SGLang's attention layers that decide how preflash plans for them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from .._paging import head_size_refusal

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class Source(enum.Enum):
    """Origin of a layer's keys."""

    CACHE = enum.auto()  # all tokens of a request
    WINDOW_POOL = enum.auto()  # all tokens, in the pool that SGLang has for sliding windows
    ENCODER = enum.auto()  # the encoder tokens of a request, which its cache begins with
    NEW_TOKENS = enum.auto()  # those of the step, which are in no cache


class LayerForm(NamedTuple):
    """Options of plan() that layers of one model may differ in; equal forms share a plan."""

    source: Source
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0

    @property
    def causal(self) -> bool:
        return self.source in (Source.CACHE, Source.WINDOW_POOL)


def layer_form(layer: Any, has_window_pool: bool) -> LayerForm:
    """Returns the form of a RadixAttention layer.

    Args:
        has_window_pool: layers with a sliding window have a cache pool of their own.
    """
    window_left = layer.sliding_window_size
    source = Source.CACHE
    if layer.is_cross_attention:
        source = Source.ENCODER
    elif layer.attn_type == AttentionType.ENCODER_ONLY:
        source = Source.NEW_TOKENS
    elif has_window_pool and window_left >= 0:
        source = Source.WINDOW_POOL
    return LayerForm(
        source,
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.head_dim,
        layer.v_head_dim,
        float(layer.scaling),
        window_left,
        float(layer.logit_cap or 0.0),
    )


def attention_layers(model: torch.nn.Module) -> Iterator[RadixAttention]:
    return (module for module in model.modules() if isinstance(module, RadixAttention))


def layer_refusal(layer: Any, kv_dtype: torch.dtype, with_trees: bool) -> str | None:
    """Returns a sentence that refuses the layer, or None.

    Args:
        with_trees: the layer verifies draft trees.
    """
    windowed = layer.sliding_window_size >= 0
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        return (
            "preflash serves causal decoders, not a decoder that sees later tokens "
            "(AttentionType.DECODER_BIDIRECTIONAL)"
        )
    if windowed and (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY):
        return (
            "a sliding window without causal masking has two sides; preflash has windows to the "
            "left only"
        )
    if windowed and with_trees:
        return (
            "a sliding window over a draft tree goes by the depth of its tokens, and preflash's "
            "by their order: use --speculative-eagle-topk 1"
        )
    if layer.pos_encoding_mode != "NONE" or layer.logit_capping_method != "tanh":
        return (
            "preflash's backend of SGLang serves pos_encoding_mode='NONE' and "
            f"logit_capping_method='tanh', not {layer.pos_encoding_mode!r} and "
            f"{layer.logit_capping_method!r}"
        )
    if layer.xai_temperature_len > 0:
        return "preflash does not scale the logits by position, as xai_temperature_len asks"
    for head_size in (layer.head_dim, layer.v_head_dim):
        refusal = head_size_refusal(head_size, kv_dtype in FP8_DTYPES)
        if refusal is not None:
            return refusal
    return None
