"""wrapper._cached_module.plan(), which SGLang calls instead of wrapper.plan()."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from .._check import dtypes, validate
from .._check.calls import PagedPlanArguments


class PlanModule:
    """wrapper._cached_module, where a module compiled at run time would be. SGLang calls its plan()
    in plan()'s place between graph replays."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(self, *arguments: Any) -> _core.Plan:
        """begin_forward() for lengths on the host, where the caller has filled the wrapper's
        buffers. What these arguments do not say is as in the plan before.

        Raises:
            NotImplementedError: without use_cuda_graph=True, or before the first plan().
            ValueError: another wrapper's workspace, other heads, another size of head or page.
        """
        wrapper = self._wrapper
        graph = wrapper._graph
        if graph is None or graph.buffers.indices is None or wrapper._plan.request is None:
            raise NotImplementedError(
                "_cached_module.plan() is served after a first plan() of a paged wrapper with "
                "use_cuda_graph=True alone; call the wrapper's plan()"
            )
        return self._plan(*arguments)

    def _plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: Any,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        *more: int,
    ) -> _core.Plan:
        wrapper = self._wrapper
        request, buffers = wrapper._plan.request, wrapper._graph.buffers
        if request.items.prefix_len_ptr is not None:
            raise NotImplementedError(
                "_cached_module.plan() does not write the mask of multi-item scoring; call plan()"
            )
        options = request.options
        same = (options.num_qo_heads, options.num_kv_heads, wrapper._batch.page_size)
        if (num_qo_heads, num_kv_heads, page_size) != same:
            raise ValueError(
                f"num_qo_heads, num_kv_heads, page_size = {num_qo_heads}, {num_kv_heads}, "
                f"{page_size}: this wrapper was planned with {same}; call its plan()"
            )
        if (head_dim_qk, head_dim_vo) != (options.head_dim_qk, options.head_dim_vo):
            raise ValueError(
                f"head_dim_qk, head_dim_vo = {head_dim_qk}, {head_dim_vo}: this wrapper was "
                f"planned with {options.head_dim_qk}, {options.head_dim_vo}; call its plan()"
            )
        if float_workspace_buffer is not wrapper._float_workspace_buffer:
            raise ValueError("float_workspace_buffer is not this wrapper's")
        for value in more:
            validate.neutral("num_colocated_ctas", value, 0)
        masked = options.mask == _core.Mask.custom
        arguments = PagedPlanArguments(
            qo_indptr, kv_indptr, buffers.indices, _last_page_len(kv_indptr, kv_lens, page_size),
            num_qo_heads, num_kv_heads, head_dim_qk, page_size,
            packed_custom_mask=buffers.mask if masked else None,
            causal=causal,
            pos_encoding_mode=validate.MODE_OF[options.position],
            sm_scale=request.scales.logits,
            window_left=window_left,
            logits_soft_cap=request.logits_soft_cap,
            rope_scale=options.rope_scale,
            rope_theta=options.rope_theta,
            q_data_type=wrapper._cached_q_data_type,
            kv_data_type=dtypes.TORCH_DTYPES[options.kv_dtype],
            o_data_type=dtypes.TORCH_DTYPES[options.o_dtype],
            head_dim_vo=head_dim_vo,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )  # fmt: skip
        wrapper._begin_forward(arguments)
        return wrapper._plan_info


def _last_page_len(kv_indptr: torch.Tensor, kv_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 on the host."""
    for name, value in (("kv_indptr", kv_indptr), ("kv_lens", kv_lens)):
        validate.is_tensor(name, value)
        if not value.is_cpu:
            raise ValueError(f"{name} is on {value.device}; must be on the CPU")
    pages = kv_indptr[1:] - kv_indptr[:-1]
    last = kv_lens - (pages - 1) * page_size
    return last.where(pages > 0, torch.zeros_like(last)).to(torch.int32)
