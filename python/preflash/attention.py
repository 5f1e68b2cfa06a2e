"""Attention with sinks, as serving engines ask for it."""

# NOTE: the API fixes long signatures; see prefill.py.

from __future__ import annotations

from typing import Any

import torch

from ._check import values as check
from ._check.arguments import (
    GivenScales,
    KvCache,
    PagedPlanArguments,
    PerHead,
    Result,
    RunArguments,
    Scale,
    UnservedRunOptions,
)
from ._check.options import check_unserved
from ._check.outputs import run_outputs
from .prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttentionWithAttentionSinkWrapper"]


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

    _serves_cudnn = False

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
        check.permission("use_fp16_qk_reduction", use_fp16_qk_reduction)
        q_dtype = check.query_dtype("q_data_type", q_data_type)
        self._announced = {
            "pos_encoding_mode": check.one_of(
                "pos_encoding_mode", pos_encoding_mode, check.ENCODING_MODES
            ),
            "q_data_type": q_dtype,
            "kv_data_type": check.kv_dtype("kv_data_type", kv_data_type, q_dtype),
            "head_dim_qk": check.integer("head_dim_qk", head_dim_qk, at_least=1),
            "head_dim_vo": check.integer("head_dim_vo", head_dim_vo, at_least=1),
        }
        window_left = check.window_left(window_left)
        if window_left >= 0:
            self._announced["window_left"] = window_left
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )

    def _asked(self, a: PagedPlanArguments) -> Any:
        asked = super()._asked(a)
        options = asked.request.options
        planned = {
            "pos_encoding_mode": a.pos_encoding_mode,
            "q_data_type": check.TORCH_DTYPES[options.q_dtype],
            "kv_data_type": check.TORCH_DTYPES[options.kv_dtype],
            "head_dim_qk": options.head_dim_qk,
            "head_dim_vo": options.head_dim_vo,
            "window_left": options.window_left,
        }
        for name, announced in self._announced.items():
            if planned[name] != announced:
                raise ValueError(
                    f"{name}={planned[name]} in plan() contradicts the constructor's {announced}: "
                    "give both the same, or construct another wrapper"
                )
        return asked

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KvCache,
        sinks: torch.Tensor | None = None,
        sm_scale: Scale = None,
        *args: None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        kv_cache_sf: None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Computes one layer of the planned batch on the current stream.

        Args:
            sinks: [num_qo_heads] float32, as in single_prefill_with_kv_cache.
            sm_scale: factor of the logits instead of plan()'s; None is plan()'s.
            The others are those of BatchPrefillWithPagedKVCacheWrapper.run().

        Returns:
            out [rows of q, num_qo_heads, head_dim_vo], or (out, lse) with return_lse.

        Raises:
            TypeError, ValueError: not planned, or a tensor is not what was planned. Nothing is
            launched. NotImplementedError: an option of a later release.
        """
        check.nothing_more("run", args)
        check_unserved(
            UnservedRunOptions(
                enable_pdl=enable_pdl,
                kv_cache_sf=kv_cache_sf,
                o_scale=None,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                use_fp16_softmax=use_fp16_softmax,
                uses_spcompress=uses_spcompress,
            )
        )
        given = GivenScales(q_scale, k_scale, v_scale)
        per_head = PerHead(sinks, scale_q, scale_k, scale_v)
        return super()._run_with(
            q,
            paged_kv_cache,
            RunArguments(given, window_left, per_head, sm_scale),
            run_outputs(out, lse, return_lse, lse_base, lse_layout),
        )

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: KvCache, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """run() with return_lse=True."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **options)
