"""Decode attention: prefill with one query per request, over the same kernels.

The planner cuts a batch of short queries into short tiles and splits long keys over the machine, so
there are no kernels for decode alone, and `use_tensor_cores` chooses nothing.
"""

from __future__ import annotations

import torch

from ._check import torch_modes, validate
from ._check.arguments import Result, converted
from ._check.calls import (
    FastDecodePlanArguments,
    SingleArguments,
    SingleDecodeArguments,
)
from ._check.names import tells_nearest
from ._compat.signatures import function_takes, plans
from ._wrappers.decode import ARRAYS, BatchDecodeWithPagedKVCacheWrapper
from ._wrappers.single import attention_of_one
from .cudnn import cudnn_batch_decode_with_kv_cache
from .trtllm import trtllm_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]


@function_takes(SingleDecodeArguments)
def single_decode_with_kv_cache(a: SingleDecodeArguments) -> Result:
    """Attention of one query.

    Args:
        q: [num_qo_heads, head_dim].
        use_tensor_cores: a permission; one kernel serves both.
        The others, and the errors, are those of single_prefill_with_kv_cache.

    Returns:
        out [num_qo_heads, head_dim of v], or (out, lse) with lse [num_qo_heads].
    """
    validate.permission("use_tensor_cores", a.use_tensor_cores)
    q = a.q
    if not torch_modes.traced():
        validate.tensor("q", q)
    if q.dim() != 2:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; must be [num_qo_heads, head_dim]: a batch goes through "
            "BatchDecodeWithPagedKVCacheWrapper"
        )
    result = attention_of_one(converted(a, SingleArguments, q=q.unsqueeze(0)))
    if isinstance(result, tuple):
        out, lse = result
        return out.squeeze(0), lse.squeeze(0)
    return result.squeeze(0)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True.

    Args:
        workspace_buffer: the float workspace.
        indptr_buffer, indices_buffer, last_page_len_buffer: where plan() keeps its arrays.

    Raises: TypeError, ValueError: an argument is wrong.
    """

    @tells_nearest
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
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer,
        )  # fmt: skip


@plans(FastDecodePlanArguments, **ARRAYS, global_override_indptr_cpu="on_host")
def fast_decode_plan(self: BatchDecodeWithPagedKVCacheWrapper, a: FastDecodePlanArguments) -> None:
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
    self._begin_forward(*self._as_prefill(a))
