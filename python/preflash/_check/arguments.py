"""What callers gave, before any check: one field per parameter of the public functions.

Defaults are those of the public signatures, so that each is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

Scale = float | torch.Tensor | None
KvCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class PlanArguments:
    """Those of plan() that both wrappers have.

    NOTE: nobody writes to it, but of so many fields a frozen one costs plan() 3 us more, and names
    in its call another one. A test sees to it that every argument gets into its field.
    """

    qo_indptr: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int | None
    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    pos_encoding_mode: str
    allow_fp16_qk_reduction: bool
    sm_scale: Scale
    window_left: int
    logits_soft_cap: float | None
    rope_scale: float | None
    rope_theta: float | None
    q_data_type: str | torch.dtype
    kv_data_type: str | torch.dtype | None
    non_blocking: bool
    head_dim_qk: int | None
    head_dim_vo: int | None
    use_fp16_qk_reduction: bool | None
    o_data_type: str | torch.dtype | None
    o_dtype: str | torch.dtype | None
    prefix_len_ptr: torch.Tensor | None
    token_pos_in_items_ptr: torch.Tensor | None
    token_pos_in_items_len: int
    max_item_len_ptr: torch.Tensor | None
    seq_lens: torch.Tensor | None
    seq_lens_q: torch.Tensor | None
    max_token_per_sequence: int | None
    max_sequence_kv: int | None
    fixed_split_size: int | None
    disable_split_kv: bool
    uniform_q_len: int | None


@dataclass(slots=True)
class RaggedPlanArguments(PlanArguments):
    kv_indptr: torch.Tensor
    v_indptr: torch.Tensor | None
    o_indptr: torch.Tensor | None


@dataclass(slots=True)
class PagedPlanArguments(PlanArguments):
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    page_size: int
    block_tables: torch.Tensor | None


@dataclass(slots=True)
class DecodePlanArguments:
    """Those of the decode wrapper's plan()."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    q_data_type: str | torch.dtype | None
    kv_data_type: str | torch.dtype | None
    data_type: str | torch.dtype | None
    sm_scale: Scale
    rope_scale: float | None
    rope_theta: float | None
    non_blocking: bool
    block_tables: torch.Tensor | None
    seq_lens: torch.Tensor | None
    fixed_split_size: int | None
    disable_split_kv: bool
    o_data_type: str | torch.dtype | None
    q_len_per_req: int | None


BatchArguments = RaggedPlanArguments | PagedPlanArguments


class GivenScales(NamedTuple):
    """The calibration scales of a run."""

    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def given(self) -> bool:
        q_scale, k_scale, v_scale = self
        return not (q_scale is None and k_scale is None and v_scale is None)


class ForwardArguments(NamedTuple):
    """The options that the deprecated forward() has of its own."""

    causal: bool
    pos_encoding_mode: str
    allow_fp16_qk_reduction: bool | None
    use_fp16_qk_reduction: bool
    window_left: int
    logits_soft_cap: float | None
    sm_scale: Scale
    rope_scale: float | None
    rope_theta: float | None
    scales: GivenScales


class PerHead(NamedTuple):
    """The tensors of a run that hold one float32 for each head; None: absent."""

    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None

    @property
    def given(self) -> bool:
        sinks, scale_q, scale_k, scale_v = self
        return not (sinks is None and scale_q is None and scale_k is None and scale_v is None)

    @property
    def scaled(self) -> bool:
        """Whether heads have factors."""
        return not (self.scale_q is None and self.scale_k is None and self.scale_v is None)


class HeadTensor(NamedTuple):
    """What a tensor of PerHead is: by this its checks go, and the table of features."""

    heads: str  # the option that tells how many elements it has
    element: str
    why_float32: str
    of: str | None  # the fp8 operand that it is for; None: it goes with every run


_OF_QUERY_HEADS = HeadTensor("num_qo_heads", "one factor per head", "factors of the heads", "q")
_OF_KV_HEADS = _OF_QUERY_HEADS._replace(heads="num_kv_heads")
_LOGITS = HeadTensor(
    "num_qo_heads", "one logit per query head", "natural logarithms, like logits", of=None
)

# NOTE: what C++ has to know of them is kHeadTensors in params.h.
PER_HEAD = PerHead(
    sinks=_LOGITS,
    scale_q=_OF_QUERY_HEADS,
    scale_k=_OF_KV_HEADS._replace(of="k"),
    scale_v=_OF_KV_HEADS._replace(of="v"),
)


class RunArguments(NamedTuple):
    """What a run() has beside tensors where it is not the usual one."""

    scales: GivenScales
    window_left: int | None = None
    per_head: PerHead = PerHead()
    sm_scale: Scale = None  # None: that of the plan


class UnservedRunOptions(NamedTuple):
    """Options of run() of which this build serves the neutral values alone."""

    enable_pdl: bool | None
    kv_cache_sf: torch.Tensor | None
    o_scale: float | None
    skip_softmax_threshold_scale_factor: float | None
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None


class RunCall(NamedTuple):
    """A run() of the batch wrappers as it was called, tensors of the batch apart."""

    extra: tuple[None, ...]  # positional arguments for kernels that are compiled at run time
    return_lse: bool | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    lse_base: str
    lse_layout: str
    window_left: int | None
    scales: GivenScales
    per_head: PerHead
    unserved: UnservedRunOptions


class Qkv(NamedTuple):
    """The tensors of one request."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class SingleArguments(NamedTuple):
    """What decides the plan of a single request; hence, with the shapes, its key."""

    causal: bool
    kv_layout: str
    pos_encoding_mode: str
    allow_fp16_qk_reduction: bool
    use_fp16_qk_reduction: bool | None
    window_left: int
    logits_soft_cap: float | None
    rope_scale: float | None
    rope_theta: float | None
    backend: str
    o_dtype: str | torch.dtype | None
    masked: bool


class SingleCall(NamedTuple):
    """What may differ between single requests that share a plan."""

    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    sm_scale: Scale
    scales: GivenScales
    per_head: PerHead
