"""Decode attention: prefill with one query per request, over the same kernels.

The planner cuts a batch of short queries into short tiles and splits long keys over the machine, so
there are no kernels for decode alone, and `use_tensor_cores` chooses nothing.
"""

# NOTE: the API fixes long signatures; see prefill.py.

from __future__ import annotations

import torch

from ._check import values as check
from ._check.arguments import Result, Scale
from ._wrap.decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import single_prefill_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: Scale = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of one query.

    Args:
        q: [num_qo_heads, head_dim].
        use_tensor_cores: a permission; one kernel serves both.
        The others are those of single_prefill_with_kv_cache.

    Returns:
        out [num_qo_heads, head_dim of v], or (out, lse) with lse [num_qo_heads].

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was launched.
        NotImplementedError: no compiled kernel serves it, or an option of a later release.
    """
    check.permission("use_tensor_cores", use_tensor_cores)
    if not check.traced():
        check.tensor("q", q)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; must be [num_qo_heads, head_dim]")
    result = single_prefill_with_kv_cache(
        q.unsqueeze(0),
        k,
        v,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=return_lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if isinstance(result, tuple):
        out, lse = result
        return out.squeeze(0), lse.squeeze(0)
    return result.squeeze(0)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True.

    Args:
        workspace_buffer: the float workspace.
        indptr_buffer, indices_buffer, last_page_len_buffer: where plan() keeps its arrays.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            True,
            use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: Scale = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int | torch.Tensor | None = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """begin_forward() as a function, which engines put in its place:
    `wrapper.begin_forward = functools.partial(fast_decode_plan, wrapper)`.

    Args:
        global_override_indptr_cpu: indptr's values on the CPU, used in its stead: plan() then does
            not wait for a copy of it. By position it may stand before q_len_per_req, as it did in
            older releases.
        The others are those of BatchDecodeWithPagedKVCacheWrapper.plan().

    Raises:
        TypeError: self is a wrapper of another library. The others are those of plan().
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise TypeError(
            f"self is a {type(self).__module__}.{type(self).__qualname__}; must be preflash's "
            "BatchDecodeWithPagedKVCacheWrapper: under patch_flashinfer(), patch before wrappers "
            "are constructed"
        )
    if isinstance(q_len_per_req, torch.Tensor) and global_override_indptr_cpu is None:
        q_len_per_req, global_override_indptr_cpu = 1, q_len_per_req
    # Of the class: the instance's begin_forward may be this function.
    BatchDecodeWithPagedKVCacheWrapper.begin_forward(
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type,
        sm_scale,
        rope_scale,
        rope_theta,
        non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
