"""Prebuilt flash attention for prefill and append, on NVIDIA GPUs and on the CPU.

`import preflash as flashinfer` runs code written for flashinfer.prefill and
flashinfer.quantization: the kernels are compiled ahead of time and are part of this package.
"""

from __future__ import annotations

from pathlib import Path

from . import _core

_core.set_library_dir(str(Path(__file__).parent / "lib"))

from . import cascade, prefill, quantization  # noqa: E402
from .cascade import merge_state, merge_state_in_place, merge_states  # noqa: E402
from .prefill import (  # noqa: E402
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits  # noqa: E402

__version__: str = _core.__version__

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "__version__",
    "cascade",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
