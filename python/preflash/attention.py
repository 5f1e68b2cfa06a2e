"""Attention with sinks, of mixed batches and with two-way spans, as serving engines ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._check import validate
from ._check.arguments import KvCache, Result, RunKwargs, Scale
from ._check.names import tells_nearest
from ._check.outputs import Outputs
from ._wrappers.batch_attention import BatchAttention
from ._wrappers.bidirectional_ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from ._wrappers.options import lists_options, run_options
from .prefill import BatchPrefillWithPagedKVCacheWrapper

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose run() takes sinks and sm_scale by position.

    Args:
        float_workspace_buffer to backend: as in BatchPrefillWithPagedKVCacheWrapper.
        pos_encoding_mode, use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk,
        head_dim_vo, window_left:
            what plan() will be given. Kernels are not compiled here, so plan() alone decides; it
            refuses to contradict these, but for a window where the constructor has none and for
            use_fp16_qk_reduction, which is a permission.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: backend="cudnn", or a dtype of a later release.
    """

    _takes_cudnn = False

    @tells_nearest
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        validate.one_of("pos_encoding_mode", pos_encoding_mode, validate.ENCODING_MODES)
        validate.permission("use_fp16_qk_reduction", use_fp16_qk_reduction)
        q_dtype = validate.query_dtype("q_data_type", q_data_type)
        fixed = {
            "pos_encoding_mode": pos_encoding_mode,
            "q_data_type": q_dtype,
            "kv_data_type": validate.kv_dtype("kv_data_type", kv_data_type, q_dtype),
            "head_dim_qk": validate.size("head_dim_qk", head_dim_qk),
            "head_dim_vo": validate.size("head_dim_vo", head_dim_vo),
        }
        window_left = validate.window_left("window_left", window_left)
        if window_left >= 0:
            fixed["window_left"] = window_left
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf,
            backend,
        )  # fmt: skip
        self._constructor_options = fixed

    @lists_options
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        sinks: torch.Tensor | None = None,
        sm_scale: Scale = None,
        *args: None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        q_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        **options: Unpack[RunKwargs],
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            sinks: [num_qo_heads] float32, as in single_prefill_with_kv_cache.
            sm_scale: factor of the logits instead of plan()'s; None is plan()'s.
            The others, the result and the errors are those of
            BatchPrefillWithPagedKVCacheWrapper.run().
        """
        validate.one_cache((sinks,))
        given = run_options(self, (args, q_scale, k_scale, v_scale, sinks), options)
        outputs = Outputs(out, lse, return_lse, lse_base, lse_layout)
        return super()._run_given(q, paged_kv_cache, given, outputs, sm_scale)
