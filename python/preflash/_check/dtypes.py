"""The dtypes of calls: torch's, the core's and their short names."""

from __future__ import annotations

import torch

from .. import _core

CORE_DTYPES = {getattr(torch, name): core for name, core in _core.DType.__members__.items()}
TORCH_DTYPES = {core: dtype for dtype, core in CORE_DTYPES.items()}
WIDE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Short names of dtypes, those in the ids of kernels first; torch has the long ones.
SHORT_DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
FP8_QUERY = torch.float8_e4m3fn
# Queries of this dtype are converted, which is exact, to that of the output.
CONVERTED_QUERY = torch.float8_e5m2
# Output dtypes for fp8 queries, the default first.
FP8_OUTPUTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
