"""Prebuilt flash attention for prefill and append, on NVIDIA GPUs and on the CPU.

`import preflash as flashinfer` runs code written for flashinfer's prefill, decode, attention,
cascade, page and quantization modules: the kernels are compiled ahead of time and are part of this
package. `patch_flashinfer()` puts them into an installed flashinfer, for engines that import it.
"""

from __future__ import annotations

from pathlib import Path

from . import _core

_core.set_library_dir(str(Path(__file__).parent / "lib"))

from . import attention, cascade, cudnn, decode, page, pod, prefill, quantization  # noqa: E402
from ._compat.patch import patch_flashinfer  # noqa: E402
from ._torch import operators  # noqa: E402, F401
from .attention import BatchAttentionWithAttentionSinkWrapper  # noqa: E402
from .cascade import (  # noqa: E402
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (  # noqa: E402
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens  # noqa: E402
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper  # noqa: E402
from .prefill import (  # noqa: E402
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    cudnn_batch_prefill_with_kv_cache,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_fmha_v2_prefill,
)
from .quantization import packbits, segment_packbits  # noqa: E402

__version__: str = _core.__version__

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "__version__",
    "append_paged_kv_cache",
    "attention",
    "cascade",
    "cudnn",
    "cudnn_batch_prefill_with_kv_cache",
    "decode",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "page",
    "patch_flashinfer",
    "pod",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_fmha_v2_prefill",
]
