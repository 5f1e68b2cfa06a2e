"""Checks shared by every public function. Each names the argument, its value and what is allowed.

A wrong type or dtype raises TypeError, a wrong value ValueError, and an option that this build
does not serve NotImplementedError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from . import _core

CORE_DTYPES = {
    torch.float16: _core.DType.float16,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float32: _core.DType.float32,
}
FP8_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
KV_LAYOUTS = ("NHD", "HND")
FLOAT32_MAX = torch.finfo(torch.float32).max
SMALLEST_SOFT_CAP = 1e-6
LSE_SCALES = {"log2": 1.0, "ln": math.log(2.0)}
LSE_LAYOUTS = ("NH", "HN")
ALIGNMENT = 16


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {', '.join(allowed)}; got {_kind(value)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {_kind(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {_kind(value)}")
    return value


def integer(name: str, value: Any, *, at_least: int, at_most: int = 2**31 - 1) -> int:
    if type(value) is not int:
        if isinstance(value, bool):
            raise TypeError(f"{name} must be an integer; got bool")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an integer; got {_kind(value)}") from None
    if not at_least <= value <= at_most:
        raise ValueError(f"{name}={value}: must be in [{at_least}, {at_most}]")
    return value


def real(name: str, value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, (bool, str, torch.Tensor)):
            raise TypeError(f"{name} must be a float; got {_kind(value)}")
        try:
            value = float(value)
        except TypeError:
            raise TypeError(f"{name} must be a float; got {_kind(value)}") from None
    # The kernels compute in float32: what is finite here must be finite there.
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name}={value}: must be finite in float32")
    return value


def scale(name: str, value: Any) -> float:
    """A calibration scale. A one-element tensor is read, which waits for a GPU that holds it."""
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise NotImplementedError(
                f"{name} has {value.numel()} elements: per-head scales come with fp8 inputs, which "
                "this build does not serve; pass a float or a one-element tensor"
            )
        value = value.item()
    return real(name, value)


def soft_cap(value: Any) -> float:
    """logits_soft_cap as a float; 0.0 is off."""
    if value is None:
        return 0.0
    value = real("logits_soft_cap", value)
    if value < 0.0:
        raise ValueError(f"logits_soft_cap={value}: must be positive, or 0 or None for none")
    if 0.0 < value < SMALLEST_SOFT_CAP:
        raise ValueError(
            f"logits_soft_cap={value}: must be at least {SMALLEST_SOFT_CAP}, or 0 or None for "
            "none; smaller ones vanish in float32"
        )
    return value


def dtype(name: str, value: Any) -> torch.dtype:
    """A torch.dtype, or its name, such as "float16"."""
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"{name}={value!r}: not the name of a torch dtype, such as 'float16'")
    raise TypeError(f"{name} must be a torch.dtype or its name; got {_kind(value)}")


def attention_dtype(name: str, value: Any) -> torch.dtype:
    """A dtype that q, k and v may have."""
    found = dtype(name, value)
    if found in CORE_DTYPES:
        return found
    if found in FP8_DTYPES:
        raise NotImplementedError(
            f"{name}={found}: fp8 is not served by this build; use float16 or bfloat16"
        )
    raise TypeError(f"{name}={found}: must be float16 or bfloat16, or float32 with the cpu backend")


def position_encoding(mode: Any, rope_scale: Any, rope_theta: Any) -> None:
    one_of("pos_encoding_mode", mode, ("NONE", "ROPE_LLAMA", "ALIBI"))
    if mode != "NONE":
        raise NotImplementedError(
            f"pos_encoding_mode={mode!r} is not served by this build; use 'NONE' and encode "
            "positions before the call"
        )
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None:
            raise NotImplementedError(
                f"{name}={value!r}: in-kernel RoPE is not served by this build; leave it None"
            )


def permission(name: str, value: Any) -> None:
    """enable_pdl and allow_fp16_qk_reduction permit something that the kernels may leave undone."""
    if value is not None:
        flag(name, value)


def absent(**options: Any) -> None:
    """Options of later releases: only their neutral values are accepted."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not served by this build; leave it None")


def alias(name: str, value: Any, other_name: str, other_value: Any) -> Any:
    """One argument with two spellings."""
    if other_value is None:
        return value
    if value is not None and value != other_value:
        raise TypeError(
            f"{name}={value!r} and {other_name}={other_value!r} are two spellings of one argument; "
            "give one of them"
        )
    return other_value


def required(name: str, value: Any) -> Any:
    if value is None:
        raise TypeError(f"missing required argument: {name}")
    return value


def on_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; the workspace and q, k, v are on {device}")


def has_dtype(name: str, value: torch.Tensor, wanted: torch.dtype, why: str) -> None:
    if value.dtype != wanted:
        raise TypeError(f"{name} is {value.dtype}; must be {wanted} ({why})")


def rows(name: str, value: torch.Tensor) -> None:
    """Contiguous last dimension and 16-byte strides: what a kernel that loads 16 bytes needs."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {value.stride(-1)} in its last dimension; must be contiguous there "
            "(strides of the other dimensions are free)"
        )
    item = value.element_size()
    for dim in range(value.dim() - 1):
        stride = value.stride(dim)
        if value.shape[dim] > 1 and stride * item % ALIGNMENT != 0:
            raise ValueError(
                f"{name} has a stride of {stride * item} bytes in dimension {dim}; must be a "
                f"multiple of {ALIGNMENT}: pad the last dimension or make a contiguous copy"
            )
    if value.numel() > 0 and value.data_ptr() % ALIGNMENT != 0:
        raise ValueError(
            f"{name} starts {value.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; "
            "make a contiguous copy"
        )


def not_overlapping(name: str, value: torch.Tensor) -> None:
    """A tensor that is written must have one address per element."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{name} has strides {tuple(value.stride())} for shape {tuple(value.shape)}: its "
                "elements overlap, so it cannot be written"
            )
        if size > 1:
            reach = stride * (size - 1) + reach
    return None


def has_shape(name: str, value: torch.Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be {wanted}: {meaning}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
