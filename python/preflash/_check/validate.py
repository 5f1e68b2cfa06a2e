"""Checks shared by every public function. Each names the argument, its value and what is allowed.

A wrong type or dtype raises TypeError, a wrong value ValueError, and an option that this build
does not serve NotImplementedError.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _core
from . import torch_modes
from .dtypes import CONVERTED_QUERY, FP8_DTYPES, FP8_OUTPUTS, FP8_QUERY, SHORT_DTYPES, WIDE_DTYPES
from .rules import RANGES

# Checks of tensors, too, are called as validate.NAME.
from .tensor_checks import (  # noqa: F401
    ALIGNMENT,
    address,
    apart,
    bytes_reached,
    conforms,
    contiguous_rows,
    digits_of,
    has_form,
    is_tensor,
    kind_of,
    not_overlapping,
    on_cpu_or,
    on_device,
    start_of,
    tensor,
)

# PREFLASH_BATCH_INVARIANT of the environment, read once at import.
ALWAYS_INVARIANT = os.environ.get("PREFLASH_BATCH_INVARIANT", "") not in ("", "0")
# PREFLASH_Q_QUANTIZATION, too.
ALWAYS_QUANTIZED = os.environ.get("PREFLASH_Q_QUANTIZATION") or "none"
Q_QUANTIZATIONS = ("none", "row")
POSITIONS = {
    "NONE": _core.Position.none,
    "ROPE_LLAMA": _core.Position.rope,
    "ALIBI": _core.Position.alibi,
}
# Angles are computed in float64. At 1024 radians a position an angle is off by 2^-25 at position
# 2^17, as much as the rounding of its sine to float32.
MOST_RADIANS = 1024.0
ENCODING_MODES = tuple(POSITIONS)  # in FlashInfer's numbering
MODE_OF = {position: mode for mode, position in POSITIONS.items()}
KV_LAYOUTS = ("NHD", "HND")
FLOAT32_MAX = torch.finfo(torch.float32).max
# The kernels multiply by log2(e), in float32, what they exponentiate: FLOAT32_MAX / log2(e) is
# 2.3586e38, and beyond it infinity times a zero is NaN.
LARGEST_LOGITS_SCALE = 2.358e38
# The kernels compute c * tanh(x * (sm_scale / c)). Up to here sm_scale / c keeps all its bits for
# every |sm_scale| from 1.2e-8 on. Measured with sm_scale=1e-8 on logits of ordinary size, the LSE
# is off by 1e-6 with c=1e30, as without a cap, by 8e-4 with 1e34 and by 0.8 with 1e37. A larger
# cap would change no logit below 1e25 anyway.
LARGEST_SOFT_CAP = 1e30
# The kernels add a bias of ALiBi to the product of q and k before the scale, divided by it: up to
# 2^24 keys times a slope of 1, times 1e30, is 2e37.
SMALLEST_BIASED_SCALE = 1e-30
SMALLEST_SOFT_CAP = 1e-6
# Per-head counterparts of the scales of a run, which are one number per tensor.
_OF_HEADS = {"q_scale": "scale_q", "k_scale": "scale_k", "v_scale": "scale_v"}
LARGEST_WINDOW = 2**30  # kMaxRequestLength of the planner
LSE_SCALES = {"log2": 1.0, "ln": math.log(2.0)}
LSE_LAYOUTS = ("NH", "HN")


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {', '.join(allowed)}; got {kind_of(value)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def flag(name: str, value: Any) -> bool:
    """A bool, or numpy's. An integer is refused: in its place it means another argument."""
    if isinstance(value, bool):
        return value
    found = plain(value)
    if not isinstance(found, bool):
        raise TypeError(f"{name} must be True or False; got {kind_of(value)}")
    return found


def invariance(name: str, value: Any) -> bool:
    """batch_invariant of a call, which PREFLASH_BATCH_INVARIANT sets for all."""
    return flag(name, value) or ALWAYS_INVARIANT


def q_quantization(name: str, value: Any) -> bool:
    """Returns True if queries may be rounded to 8 bits, by the call or the environment."""
    given = ((name, value), ("PREFLASH_Q_QUANTIZATION", ALWAYS_QUANTIZED))
    return "row" in [one_of(*one, Q_QUANTIZATIONS) for one in given]


def window_left(name: str, value: Any) -> int:
    """-1: no window. A window wider than the longest possible request is cut to that."""
    return min(size(name, value, "window_left"), LARGEST_WINDOW)


def plain(value: Any) -> Any:
    """Python's own number for a scalar of numpy's, or an array that holds one."""
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy_scalar else value


def size(name: str, value: Any, row: str = "") -> int:
    """Returns an integer; refuses one outside of its row of [range] in options.toml. row: by
    default the argument's name."""
    least, most = RANGES[row or name]
    if type(value) is int and least <= value <= most:
        return value
    return integer(name, value, least, most)


def integer(name: str, value: Any, at_least: int, at_most: int) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError(f"{name} must be an integer; got bool")
        if isinstance(value, Tensor):
            tensor(name, value)
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an integer; got {kind_of(value)}") from None
    if not at_least <= value <= at_most:
        raise ValueError(f"{name}={digits_of(value)}: must be in [{at_least}, {at_most}]")
    return value


def split_size(name: str, value: Any) -> int:
    """-1, 0 and None all mean that the planner chooses."""
    return 0 if value is None else max(size(name, value, "fixed_split_size"), 0)


def real(name: str, value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, (bool, str, torch.Tensor)):
            raise TypeError(f"{name} must be a float; got {kind_of(value)}")
        try:
            value = float(value)
        except TypeError:
            raise TypeError(f"{name} must be a float; got {kind_of(value)}") from None
        except OverflowError:
            raise ValueError(f"{name}={digits_of(value)}: must be finite in float32") from None
        except ValueError as error:
            raise TypeError(f"{name} must be a float; got {type(value).__name__}") from error
    # The kernels compute in float32: what is finite here must be finite there.
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name}={value}: must be finite in float32")
    return value


def scale(name: str, value: Any) -> float:
    """A scale of a run. A one-element tensor is read, which waits for a GPU that holds it."""
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return value
    if isinstance(value, torch.Tensor):
        value = tensor(name, value)
        if value.numel() != 1:
            per_head = _OF_HEADS.get(name)
            hint = f": one factor for each head of an fp8 tensor is {per_head}" if per_head else ""
            raise ValueError(
                f"{name} has {value.numel()} elements; must be a float or a one-element tensor"
                + hint
            )
        torch_modes.not_differentiated(value, what=name)
        value = value.item()
    return real(name, value)


def logits_scale(name: str, value: float, options: _core.AttentionOptions | None = None) -> float:
    """A factor of the logits as the kernels get it, with everything folded in; options: whose soft
    cap and position encoding it meets, None for neither."""
    size = abs(value)
    if SMALLEST_BIASED_SCALE <= size <= 1.0:
        return value
    if not size <= LARGEST_LOGITS_SCALE:
        raise ValueError(
            f"{name}={value}: must be in [{-LARGEST_LOGITS_SCALE}, {LARGEST_LOGITS_SCALE}], so "
            "that it stays finite in float32 when it is multiplied by log2(e)"
        )
    cap = 0.0 if options is None else options.soft_cap
    if cap > 0.0 and size > FLOAT32_MAX * cap:
        raise ValueError(
            f"{name}={value} with logits_soft_cap={cap:.7g}: "
            "their quotient must be finite in float32"
        )
    biased = options is not None and cap == 0.0 and options.position == _core.Position.alibi
    if biased and 0.0 < size < SMALLEST_BIASED_SCALE:
        raise ValueError(
            f"{name}={value} with ALiBi: must be 0 or at least {SMALLEST_BIASED_SCALE} in size, so "
            "that a bias divided by it stays finite in float32; 0 leaves the biases alone"
        )
    return value


def soft_cap(name: str, value: Any) -> float:
    """Returns the soft cap as a float; None and values of 0 or less give 0.0, which is off."""
    if value is None:
        return 0.0
    value = max(real(name, value), 0.0) + 0.0  # -0.0 is 0.0
    if 0.0 < value < SMALLEST_SOFT_CAP:
        raise ValueError(
            f"{name}={value}: must be at least {SMALLEST_SOFT_CAP}, or None, 0 or less for "
            "none; smaller ones vanish in float32"
        )
    if value > LARGEST_SOFT_CAP:
        raise ValueError(
            f"{name}={value}: must be at most {LARGEST_SOFT_CAP}, or None, 0 or less for none; "
            f"with larger ones sm_scale / {name} loses its bits in float32"
        )
    return value


def dtype(name: str, value: Any) -> torch.dtype:
    """Returns the torch.dtype that `value` is or names: "float16", "torch.float16" or "f16"."""
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str):
        found = SHORT_DTYPES.get(value) or getattr(torch, value.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
        short = ", ".join(SHORT_DTYPES)
        raise ValueError(
            f"{name}={value!r}: not the name of a torch dtype, such as 'float16', or one of {short}"
        )
    raise TypeError(f"{name} must be a torch.dtype or its name; got {kind_of(value)}")


def query_dtype(name: str, value: Any) -> torch.dtype:
    found = dtype(name, value)
    if found in WIDE_DTYPES or found == FP8_QUERY:
        return found
    eight = "float8_e4m3fn" if found == CONVERTED_QUERY else "float8_e4m3fn or float8_e5m2"
    raise TypeError(
        f"{name}={found}: must be float16, bfloat16, {eight}, or float32 with the cpu backend"
    )


def converted_query_dtype(name: str, value: Any, kv: torch.dtype) -> torch.dtype:
    """Returns the dtype that float8_e5m2 queries are converted to: the output's."""
    found = FP8_OUTPUTS[0] if value is None else dtype(name, value)
    if found not in (torch.bfloat16, torch.float16):
        raise NotImplementedError(
            f"{name}={value}: for float8_e5m2 queries this build writes bfloat16 or float16; "
            "leave it None and convert"
        )
    if kv not in FP8_DTYPES:
        raise TypeError(f"kv_data_type={kv}: must be 8-bit, as q_data_type=float8_e5m2 is")
    return found


def kv_dtype(name: str, value: Any, q: torch.dtype) -> torch.dtype:
    """Returns the dtype of k and v: q's, or fp8 for queries of a wider dtype."""
    found = dtype(name, value)
    if found == q or (found in FP8_DTYPES and q in WIDE_DTYPES):
        return found
    others = ", float8_e4m3fn or float8_e5m2" if q in WIDE_DTYPES else ""
    raise TypeError(f"{name}={found}: must be q's dtype, {q}{others}")


def output_dtype(name: str, value: Any, q: torch.dtype) -> torch.dtype:
    """q's, or one of FP8_OUTPUTS for queries of 8 bits; None asks for the default."""
    if value is None:
        return q if q in WIDE_DTYPES else FP8_OUTPUTS[0]
    found = dtype(name, value)
    if q == FP8_QUERY and found not in FP8_OUTPUTS:
        raise NotImplementedError(
            f"{name}={value}: for float8_e4m3fn queries this build writes bfloat16, float16 or "
            "float8_e4m3fn; leave it None and convert"
        )
    if q in WIDE_DTYPES and found != q:
        raise NotImplementedError(
            f"{name}={value}: this build writes q's dtype, {q}; leave it None and convert"
        )
    return found


class PositionEncoding(NamedTuple):
    """Position encoding of AttentionOptions. None stands for the defaults, which callers may pass
    without RoPE, too."""

    position: _core.Position
    rope_scale: float = 1.0
    rope_theta: float = 1e4


def position_encoding(mode: Any, rope_scale: Any, rope_theta: Any) -> PositionEncoding:
    encoding = PositionEncoding(
        POSITIONS[one_of("pos_encoding_mode", mode, ENCODING_MODES)],
        _rope_option("rope_scale", rope_scale),
        _rope_option("rope_theta", rope_theta),
    )
    if encoding.position != _core.Position.rope:
        if encoding != PositionEncoding(encoding.position):
            raise ValueError(
                f"rope_scale={rope_scale!r}, rope_theta={rope_theta!r}: only "
                f"pos_encoding_mode='ROPE_LLAMA' has them, and it is {mode!r}; leave them None"
            )
        return encoding
    radians = max(1.0, 1.0 / encoding.rope_theta) / encoding.rope_scale
    if radians > MOST_RADIANS:
        raise ValueError(
            f"rope_scale={encoding.rope_scale} with rope_theta={encoding.rope_theta}: a position "
            f"would turn a row by up to {radians:.7g} radians; must be at most {MOST_RADIANS:g}, "
            "or the angles of far positions lose their bits"
        )
    return encoding


def _rope_option(name: str, value: Any) -> float:
    if value is None:
        return PositionEncoding._field_defaults[name]
    value = real(name, value)
    if value <= 0.0:
        raise ValueError(f"{name}={value}: must be positive, or None for the default")
    return value


def skip_factor(value: Any) -> float:
    """Returns the skip factor as a float; 0.0 is off."""
    name = "skip_softmax_threshold_scale_factor"
    factor = 0.0 if value is None else real(name, value)
    if factor < 0.0:
        raise ValueError(f"{name}={factor}: must be positive, or 0 for off")
    return factor


def permission(name: str, value: Any) -> None:
    """Checks a flag that has no effect: it permits what kernels may leave undone, as enable_pdl."""
    if value is not None:
        flag(name, value)


def absent(**options: Any) -> None:
    """Refuses options of later releases; only None is accepted."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not served by this build; leave it None")


def neutral(name: str, value: Any, *values: Any) -> None:
    """Refuses an option of other kernels, unless it is None or one of the neutral `values`."""
    if value is None:
        return
    if isinstance(value, Tensor) or not any(_is_neutral(value, v) for v in values):
        allowed = " or ".join(repr(v) for v in (None, *values))
        raise NotImplementedError(
            f"{name}={start_of(value)} is not served by this build; leave it {allowed}"
        )


def custom_mask(name: str, value: Any) -> None:
    """Refuses a bool in the place of a mask, where causal is not: single_prefill(q, k, v, True)."""
    if isinstance(value, bool):
        raise TypeError(
            f"{name}={value}: must be a torch.Tensor; causal is another argument, pass causal="
            f"{value} by name"
        )


def one_cache(after: tuple[Any, ...], dims: int = 3) -> None:
    """Refuses run(q, k, v) of a wrapper that takes k and v as one argument.

    after: the arguments after the cache; dims: the fewest dimensions by which the first of them is
    v and no argument of its own.
    """
    if after and isinstance(after[0], Tensor) and after[0].dim() >= dims:
        raise TypeError(
            f"run(q, k, v): the third argument has shape {tuple(after[0].shape)}, and this wrapper "
            "takes k and v as one argument; pass run(q, (k, v))"
        )


def nothing_more(function: str, extra: tuple[Any, ...]) -> None:
    """Positional arguments that kernels compiled at run time would take; None says nothing."""
    if any(value is not None for value in extra):
        raise TypeError(
            f"{function}() got {len(extra)} positional arguments too many: they belong to kernels "
            "that are compiled at run time (jit_args); pass options by keyword"
        )


def alias(name: str, value: Any, other_name: str, other_value: Any) -> Any:
    """Returns the value of an argument with two names. Raises TypeError if they contradict."""
    if other_value is None:
        return value
    if value is not None and not _equal(value, other_value):
        raise TypeError(
            f"{name}={start_of(value)} and {other_name}={start_of(other_value)} are two spellings "
            "of one argument; give one of them"
        )
    return other_value


def _is_neutral(value: Any, other: Any) -> bool:
    """True if equal; a bool is never equal to a number."""
    return isinstance(plain(value), bool) == isinstance(other, bool) and _equal(value, other)


def _equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):  # arrays, of which neither has one truth
        return value is other
