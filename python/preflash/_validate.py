"""Checks shared by every public function. Each names the argument, its value and what is allowed.

A wrong type or dtype raises TypeError, a wrong value ValueError, and an option that this build
does not serve NotImplementedError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_torch_function_mode_enabled as function_mode_is_active
from torch._C import _is_tracing as jit_is_tracing
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import _core

CORE_DTYPES = {
    torch.float16: _core.DType.float16,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float32: _core.DType.float32,
    torch.float8_e4m3fn: _core.DType.float8_e4m3fn,
    torch.float8_e5m2: _core.DType.float8_e5m2,
}
TORCH_DTYPES = {core: dtype for dtype, core in CORE_DTYPES.items()}
WIDE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_QUERY = torch.float8_e4m3fn
# What is written for such queries, the default first.
FP8_OUTPUTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
POSITIONS = {
    "NONE": _core.Position.none,
    "ROPE_LLAMA": _core.Position.rope,
    "ALIBI": _core.Position.alibi,
}
# An angle is computed in float64. With so many radians to a position it is off by 2^-25 at position
# 2^17, as much as the rounding of its sine to float32.
MOST_RADIANS = 1024.0
ENCODING_MODES = tuple(POSITIONS)
KV_LAYOUTS = ("NHD", "HND")
# What rope_scale=None and rope_theta=None stand for; callers pass them without RoPE, too.
ROPE_SCALE = 1.0
ROPE_THETA = 1e4
FLOAT32_MAX = torch.finfo(torch.float32).max
# The kernels multiply by log2(e), in float32, what they exponentiate: FLOAT32_MAX / log2(e) is
# 2.3586e38, and beyond it infinity times a zero is NaN.
LARGEST_LOGITS_SCALE = 2.358e38
# The kernels compute c * tanh(x * (sm_scale / c)). Up to here sm_scale / c keeps all its bits for
# every |sm_scale| from 1.2e-8 on. Measured with sm_scale=1e-8 on logits of ordinary size, the LSE
# is off by 1e-6 with c=1e30, as without a cap, by 8e-4 with 1e34 and by 0.8 with 1e37. A larger
# cap would change no logit below 1e25 anyway.
LARGEST_SOFT_CAP = 1e30
SMALLEST_SOFT_CAP = 1e-6
LSE_SCALES = {"log2": 1.0, "ln": math.log(2.0)}
LSE_LAYOUTS = ("NH", "HN")
ALIGNMENT = 16


Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Keeps torch.compile out of a function and of what it calls: they run as they are written,
    inside of an operator (_torch_ops) or at a graph break.

    What is asked here (addresses, modes, storage) dynamo would answer for its own fake tensors.
    Unlike torch.compiler.disable this costs an ordinary call nothing.
    """
    function._torchdynamo_disable = True  # not inlined
    dynamo = torch._C._dynamo.eval_frame
    actions = getattr(dynamo, "_FrameAction", None)
    strategy = getattr(dynamo, "_FrameExecStrategy", None)
    if actions is not None and strategy is not None:
        dynamo.set_code_exec_strategy(function.__code__, strategy(actions.SKIP, actions.SKIP))
    elif hasattr(dynamo, "skip_code"):  # torch 2.5 and before
        dynamo.skip_code(function.__code__)
    return function


def one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {', '.join(allowed)}; got {_kind(value)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    return value


def is_tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {_kind(value)}")
    return value


@eager
def tensor(name: str, value: Any) -> torch.Tensor:
    """A tensor with memory behind all of its elements: an address that may be read."""
    if not isinstance(value, Tensor):
        is_tensor(name, value)
    try:
        # NOTE: a nested tensor has an address and a storage, but neither shape nor strides.
        if not value.is_nested:
            if value.data_ptr() and bytes_reached(value) <= len(value.untyped_storage()):
                return value
            if value.numel() == 0:
                return value
    except (RuntimeError, ValueError):
        pass  # what has no address or no strides says so with one of these
    raise _no_memory(name, value)


@eager
def bytes_reached(value: torch.Tensor) -> int:
    """How much of its storage a tensor needs: up to the end of its last element."""
    last = value.storage_offset()
    if value.is_contiguous():  # the usual case, and the fastest
        return last * value.itemsize + value.nbytes if last else value.nbytes
    for size, stride in zip(value.shape, value.stride()):  # noqa: B905, which takes time
        last += (size - 1) * stride
    return (last + 1) * value.itemsize


@eager
def _no_memory(name: str, value: torch.Tensor) -> Exception:
    """Why `tensor` refuses, in words."""
    if value.is_nested:
        return TypeError(
            f"{name} is a nested tensor ({value.layout}); must be a dense one, with strides: pass "
            "its values, and the lengths as indptr"
        )
    if value.layout != torch.strided:
        return TypeError(
            f"{name} has the layout {value.layout}; must be dense, with strides (to_dense())"
        )
    return ValueError(f"{name} has no memory behind it that could be read: {_unbacked(value)}")


@eager
def _unbacked(value: torch.Tensor) -> str:
    if value.is_meta:
        return "it is on the device meta"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "it stands for another tensor inside a transform of torch.func; call outside of it"
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {kind.__name__}; pass the plain tensor that it stands for"
    if torch._is_zerotensor(value):
        return "it is a ZeroTensor, as autograd makes them; pass torch.zeros_like(...)"
    room = len(value.untyped_storage())
    return f"its storage has {room} bytes and it needs {bytes_reached(value)}; was it freed?"


@eager
def address(value: torch.Tensor) -> int:
    """Where a tensor lies that this package made: modes of torch may have had a say in it."""
    try:
        found = value.data_ptr()
        if found or value.numel() == 0:
            return found
    except RuntimeError:
        pass
    raise NotImplementedError(
        "torch makes tensors without memory here, as transforms of torch.func do (grad, jvp, "
        "functionalize); call preflash outside of them"
    )


@eager
def forward_only(*tensors: torch.Tensor) -> None:
    """Refuses a call whose gradient or trace would miss it. Ordinary calls pay 0.1 us for it.

    What is not a tensor is left to the checks that name it.
    """
    if jit_is_tracing() or function_mode_is_active() or num_dispatch_modes():
        not_traced()
    not_differentiated(*tensors)


def not_differentiated(*tensors: torch.Tensor) -> None:
    """Refuses a call whose gradient would miss it."""
    try:
        if is_grad_enabled():
            for value in tensors:
                if value.requires_grad:
                    raise _no_gradient("an input requires grad")
        # NOTE: torch.no_grad() does not switch forward-mode differentiation off.
        if forward_ad._current_level >= 0:
            for value in tensors:
                if forward_ad.unpack_dual(value).tangent is not None:
                    raise _no_gradient("an input has a tangent")
    except (AttributeError, TypeError):
        pass


def _no_gradient(why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{why}, and preflash computes no gradients: it is forward only. Call it under "
        "torch.inference_mode() or torch.no_grad(), or detach() its inputs"
    )


def traced() -> bool:
    """Whether torch records this call instead of making it (_traced): torch.compile, make_fx,
    torch.export, FakeTensorMode. The first of them takes the first term for True."""
    return is_dynamo_compiling() or (
        (function_mode_is_active() or num_dispatch_modes() > 0) and _is_recorded()
    )


@eager
def _is_recorded() -> bool:
    return _proxy_mode() is not None or _dispatch_mode("FAKE") is not None


@eager
def not_traced() -> None:
    """Refuses to run where torch records operations: it would record nothing of ours.

    Modes that only watch (counting, logging, checkpointing) are welcome.
    """
    if jit_is_tracing():
        raise _not_traceable("torch.jit.trace")
    if not function_mode_is_active() and not num_dispatch_modes():
        return
    # Before dispatch, as torch.export traces, no dispatch mode shows; a function mode always does.
    if _proxy_mode() is not None:
        raise _not_traceable("make_fx or torch.export")
    if _dispatch_mode("FAKE") is not None:
        raise ValueError(
            "a FakeTensorMode is active: a tensor that is made has no memory behind it; call "
            "preflash outside of it"
        )


def _not_traceable(tracer: str) -> NotImplementedError:
    return NotImplementedError(
        f"{tracer} is tracing, and the trace would hold none of this call; make it outside of what "
        "is traced. torch.compile, torch.export and make_fx record run(), the single functions "
        "and the merges"
    )


@eager
def _proxy_mode() -> Any:
    from torch.fx.experimental import proxy_tensor

    find = getattr(proxy_tensor, "get_proxy_mode", None)
    return _dispatch_mode("PROXY") if find is None else find()


@eager
def _dispatch_mode(key: str) -> Any:
    """The active mode of one of torch's own kinds."""
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    return None if keys is None else torch._C._get_dispatch_mode(getattr(keys, key))


@eager
def apart(
    written: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Contiguous tensors that are written must share no memory, with each other or with others.

    The same elements at the same addresses are one tensor with two names; whether that is right
    is for the caller to know.
    """
    spans = [(name, value, *_span(value)) for name, value in (*written, *others)]
    for i, (name, value, begin, end) in enumerate(spans[: len(written)]):
        for other_name, other, other_begin, other_end in spans[i + 1 :]:
            # Empty ones lie nowhere.
            shared = begin < end > other_begin < other_end > begin
            if shared and not _same_place(value, other):
                raise ValueError(
                    f"{name} shares memory with {other_name}, and {name} is written; must be "
                    "apart: pass a copy"
                )


@eager
def _span(value: torch.Tensor) -> tuple[int, int]:
    begin = value.data_ptr()
    return begin, begin + value.nbytes


@eager
def _same_place(value: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        value.data_ptr() == other.data_ptr()
        and value.dtype == other.dtype
        and value.shape == other.shape
        and value.stride() == other.stride()
    )


def flag(name: str, value: Any) -> bool:
    """A bool, or what stands for one: 0, 1, and numpy's."""
    if isinstance(value, bool):
        return value
    plain = value.item() if _is_numpy_scalar(value) else value
    if not isinstance(plain, int) or plain not in (0, 1):
        raise TypeError(f"{name} must be True or False; got {_kind(value)}")
    return bool(plain)


def _is_numpy_scalar(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()


def integer(name: str, value: Any, *, at_least: int, at_most: int = 2**31 - 1) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError(f"{name} must be an integer; got bool")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an integer; got {_kind(value)}") from None
    if not at_least <= value <= at_most:
        raise ValueError(f"{name}={_digits(value)}: must be in [{at_least}, {at_most}]")
    return value


def real(name: str, value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, (bool, str, torch.Tensor)):
            raise TypeError(f"{name} must be a float; got {_kind(value)}")
        try:
            value = float(value)
        except TypeError:
            raise TypeError(f"{name} must be a float; got {_kind(value)}") from None
        except OverflowError:
            raise ValueError(f"{name}={_digits(value)}: must be finite in float32") from None
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
            raise ValueError(
                f"{name} has {value.numel()} elements; must be a float or a one-element tensor: "
                f"one factor for each head of an fp8 tensor is scale_{name[0]}"
            )
        if value.requires_grad:
            forward_only(value)
        value = value.item()
    return real(name, value)


def logits_scale(name: str, value: float, cap: float = 0.0) -> float:
    """A factor of the logits as the kernels get it, with everything folded in; cap 0.0 is off."""
    if not abs(value) <= LARGEST_LOGITS_SCALE:
        raise ValueError(
            f"{name}={value}: must be in [{-LARGEST_LOGITS_SCALE}, {LARGEST_LOGITS_SCALE}], so "
            "that it stays finite in float32 when it is multiplied by log2(e)"
        )
    if cap > 0.0 and abs(value) > FLOAT32_MAX * cap:
        raise ValueError(
            f"{name}={value} with logits_soft_cap={cap:.7g}: "
            "their quotient must be finite in float32"
        )
    return value


def soft_cap(value: Any) -> float:
    """logits_soft_cap as a float; 0.0 is off."""
    if value is None:
        return 0.0
    value = real("logits_soft_cap", value) + 0.0  # -0.0 is 0.0
    if value < 0.0:
        raise ValueError(f"logits_soft_cap={value}: must be positive, or 0 or None for none")
    if 0.0 < value < SMALLEST_SOFT_CAP:
        raise ValueError(
            f"logits_soft_cap={value}: must be at least {SMALLEST_SOFT_CAP}, or 0 or None for "
            "none; smaller ones vanish in float32"
        )
    if value > LARGEST_SOFT_CAP:
        raise ValueError(
            f"logits_soft_cap={value}: must be at most {LARGEST_SOFT_CAP}, or 0 or None for none; "
            "with larger ones sm_scale / logits_soft_cap loses its bits in float32"
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


def query_dtype(name: str, value: Any) -> torch.dtype:
    found = dtype(name, value)
    if found in WIDE_DTYPES or found == FP8_QUERY:
        return found
    raise TypeError(
        f"{name}={found}: must be float16, bfloat16 or float8_e4m3fn, or float32 with the cpu "
        "backend"
    )


def kv_dtype(name: str, value: Any, q: torch.dtype) -> torch.dtype:
    """Of k and v: q's, or 8 bits under wider queries."""
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
    position: _core.Position
    rope_scale: float = ROPE_SCALE
    rope_theta: float = ROPE_THETA


def position_encoding(mode: Any, rope_scale: Any, rope_theta: Any) -> PositionEncoding:
    """pos_encoding_mode, rope_scale and rope_theta; None is the default of the last two."""
    encoding = PositionEncoding(POSITIONS[one_of("pos_encoding_mode", mode, tuple(POSITIONS))])
    if rope_scale is not None:
        encoding = encoding._replace(rope_scale=_rope_option("rope_scale", rope_scale))
    if rope_theta is not None:
        encoding = encoding._replace(rope_theta=_rope_option("rope_theta", rope_theta))
    if encoding.position != _core.Position.rope:
        neutral = PositionEncoding(encoding.position)
        if encoding != neutral:
            raise ValueError(
                f"rope_scale={rope_scale!r}, rope_theta={rope_theta!r}: only "
                f"pos_encoding_mode='ROPE_LLAMA' has them, and it is {mode!r}; leave them None"
            )
        return neutral
    radians = max(1.0, 1.0 / encoding.rope_theta) / encoding.rope_scale
    if radians > MOST_RADIANS:
        raise ValueError(
            f"rope_scale={encoding.rope_scale} with rope_theta={encoding.rope_theta}: a position "
            f"would turn a row by up to {radians:.7g} radians; must be at most {MOST_RADIANS:g}, "
            "or the angles of far positions lose their bits"
        )
    return encoding


def _rope_option(name: str, value: Any) -> float:
    value = real(name, value)
    if value <= 0.0:
        raise ValueError(f"{name}={value}: must be positive, or None for the default")
    return value


def permission(name: str, value: Any) -> None:
    """enable_pdl and allow_fp16_qk_reduction permit something that the kernels may leave undone."""
    if value is not None:
        flag(name, value)


def absent(**options: Any) -> None:
    """Options of later releases: only their neutral values are accepted."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not served by this build; leave it None")


def neutral(name: str, value: Any, *values: Any) -> None:
    """An option of other kernels that changes nothing if it is None or one of `values`."""
    if value is None:
        return
    if isinstance(value, Tensor) or value not in values:
        allowed = " or ".join(repr(v) for v in (None, *values))
        raise NotImplementedError(
            f"{name}={value!r:.60} is not served by this build; leave it {allowed}"
        )


def nothing_more(function: str, extra: tuple[Any, ...]) -> None:
    """Positional arguments that kernels compiled at run time would take; None says nothing."""
    if any(value is not None for value in extra):
        raise TypeError(
            f"{function}() got {len(extra)} positional arguments too many: they belong to kernels "
            "that are compiled at run time (jit_args); pass what is meant by its name"
        )


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


def _digits(value: Any) -> str:
    """repr, but not the hundreds of digits that a number may have."""
    try:
        text = repr(value)
    except ValueError:  # Python's own limit
        return f"(a very long {type(value).__name__})"
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"
