"""Checks of one tensor: its memory, device, dtype, shape and aliasing. Also formats values for
error messages.

conforms() checks a tensor against its rule, a row of [tensor] in cpp/variants/options.toml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rules import TENSORS, TensorRule
from .torch_modes import eager

ALIGNMENT = 16
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8)
_INTEGERS += (torch.uint8, torch.uint16, torch.uint32)
_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FLOATING += (torch.float8_e4m3fn, torch.float8_e5m2)
# Kinds of dtypes in rules, and what errors call them.
_KINDS = {
    "integer": (_INTEGERS, "an integer dtype"),
    "floating": (_FLOATING, "float32 or another float dtype"),
}


def kind_of(value: Any) -> str:
    return f"{type(value).__name__} {start_of(value)}".rstrip()


def start_of(value: Any) -> str:
    """repr; for a tensor shape and dtype: its numbers may be in freed memory, or need a wait."""
    try:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return f"of {len(value)}"
        return f"{value!r:.60}"
    except Exception:
        return ""


def digits_of(value: Any) -> str:
    """repr, but not the hundreds of digits that a number may have."""
    try:
        text = repr(value)
    except ValueError:  # Python's own limit
        return f"(a very long {type(value).__name__})"
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def is_tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {kind_of(value)}")
    return value


@eager
def tensor(name: str, value: Any) -> torch.Tensor:
    """Checks that all elements of a tensor have memory that may be read as it is."""
    if not isinstance(value, Tensor):
        is_tensor(name, value)
    negative = False
    try:
        # A nested tensor has an address and a storage, but neither shape nor strides.
        if not value.is_nested:
            if value.data_ptr() and bytes_reached(value) <= len(value.untyped_storage()):
                negative = value.is_neg()
                if not negative:
                    return value
            elif value.numel() == 0:
                return value
    except (RuntimeError, ValueError):
        pass  # tensors without address or strides raise one of these
    if negative:
        raise ValueError(
            f"{name} is a negative view, whose memory holds the numbers with the other sign; pass "
            "resolve_neg()"
        )
    raise _no_memory(name, value)


@eager
def bytes_reached(value: torch.Tensor) -> int:
    """Bytes from the start of a tensor's storage to the end of its last element."""
    last = value.storage_offset()
    if value.is_contiguous():  # the usual case, and the fastest
        return last * value.itemsize + value.nbytes if last else value.nbytes
    for size, stride in zip(value.shape, value.stride()):  # noqa: B905, which takes time
        last += (size - 1) * stride
    return (last + 1) * value.itemsize


@eager
def _no_memory(name: str, value: torch.Tensor) -> Exception:
    """Returns the error for a tensor that `tensor` refuses."""
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
        if torch._C._functorch.is_batchedtensor(value):
            return (
                "it stands for a batch inside of torch.vmap, and transforms of torch.func are not "
                "supported; loop over the batch, or give all of it to one call of a batch wrapper"
            )
        return (
            "it stands for another tensor inside of a transform of torch.func, and these are not "
            "supported; call preflash outside of it"
        )
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {kind.__name__}; pass the plain tensor that it stands for"
    if torch._is_zerotensor(value):
        return "it is a ZeroTensor, as autograd makes them; pass torch.zeros_like(...)"
    room = len(value.untyped_storage())
    return f"its storage has {room} bytes and it needs {bytes_reached(value)}; was it freed?"


@eager
def address(value: torch.Tensor) -> int:
    """The address of a tensor that this package made, which torch's modes may have changed."""
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
def apart(
    written: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Raises ValueError if contiguous tensors that are written share memory with other tensors.

    The same elements at the same addresses are one tensor with two names; whether that is right
    is for the caller to know.
    """
    spans = [(name, x, x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in (*written, *others)]
    for i, (name, value, begin, end) in enumerate(spans[: len(written)]):
        for other_name, other, other_begin, other_end in spans[i + 1 :]:
            # Empty tensors share nothing.
            shared = begin < end > other_begin < other_end > begin
            if shared and not _same_place(value, other):
                raise ValueError(
                    f"{name} shares memory with {other_name}, and {name} is written; must be "
                    "apart: pass a copy"
                )


@eager
def _same_place(value: torch.Tensor, other: torch.Tensor) -> bool:
    place, other_place = ((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (value, other))
    return place == other_place


def on_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; the workspace and q, k, v are on {device}")


def on_cpu_or(name: str, value: torch.Tensor, device: torch.device) -> None:
    if not value.is_cpu and value.device != device:
        raise ValueError(f"{name} is on {value.device}; must be on the CPU or on {device}")


def _batch_hint(name: str, value: torch.Tensor) -> str:
    """Returns how to pass q, k or v [batch, tokens, heads, head_dim]; "" for other tensors."""
    if value.dim() != 4 or name not in ("q", "k", "v"):
        return ""
    return (
        f". Pass a batch [batch, tokens, heads, head_dim] as {name}.flatten(0, 1), with an indptr "
        "of its requests, to BatchPrefillWithRaggedKVCacheWrapper or another batch wrapper"
    )


def contiguous(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(value.stride())}; must be contiguous")


def contiguous_rows(name: str, value: torch.Tensor) -> None:
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {value.stride(-1)} in its last dimension; must be contiguous there "
            "(strides of the other dimensions are free)"
        )


def rows(name: str, value: torch.Tensor) -> None:
    """Checks for a contiguous last dimension and 16-byte strides, as kernels load 16 bytes."""
    contiguous_rows(name, value)
    item = value.element_size()
    for dim in range(value.dim() - 1):
        stride = value.stride(dim)
        if value.shape[dim] > 1 and stride * item % ALIGNMENT != 0:
            raise ValueError(
                f"{name} has a stride of {stride * item} bytes in dimension {dim}; must be a "
                f"multiple of {ALIGNMENT}: {_aligned_rows(value)}"
            )
    if value.numel() > 0 and value.data_ptr() % ALIGNMENT != 0:
        raise ValueError(
            f"{name} starts {value.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; "
            "make a contiguous copy"
        )


def _aligned_rows(value: torch.Tensor) -> str:
    """Returns how to store the tensor in rows that start on multiples of 16 bytes."""
    columns = value.shape[-1]
    step = ALIGNMENT // value.element_size()
    if columns % step == 0:
        return "make a contiguous copy"
    padded = -(-columns // step) * step
    return f"allocate rows of {padded} columns and pass a view of the first {columns}"


def aligned(name: str, value: torch.Tensor) -> None:
    """Checks memory that a plan divides: contiguous, from a multiple of 16 bytes on."""
    contiguous(name, value)
    if value.data_ptr() % ALIGNMENT != 0:
        raise ValueError(
            f"{name} must be {ALIGNMENT}-byte aligned; it starts {value.data_ptr() % ALIGNMENT} "
            f"bytes past a multiple of {ALIGNMENT}: pass a buffer that was not sliced"
        )


def not_overlapping(name: str, value: torch.Tensor) -> None:
    """Raises ValueError if elements of a tensor that is written may overlap."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{name} has strides {tuple(value.stride())} for shape {tuple(value.shape)}: its "
                "elements overlap, so it cannot be written"
            )
        if size > 1:
            reach = stride * (size - 1) + reach


_MEMORY = {
    "rows": rows,
    "contiguous_rows": contiguous_rows,
    "contiguous": contiguous,
    "aligned": aligned,
}


class _Dim(NamedTuple):
    """A dimension of a rule."""

    name: str
    is_minimum: bool
    size: int | None  # a literal size of the rule, such as 2

    @classmethod
    def of(cls, text: str) -> _Dim:
        size = int(text) if text.isdigit() else None
        return cls(text.removesuffix("+"), text.endswith("+"), size)


# Parsed forms of the columns shape and dtype; keys are the columns.
_DIMS = {row.shape: tuple(map(_Dim.of, row.shape)) for row in TENSORS.values()}
_FIXED_DTYPES = {
    row.dtype: frozenset(
        dtype
        for name in row.dtype
        for dtype in _KINDS.get(name, [[getattr(torch, name, None)]])[0]
        if dtype is not None
    )
    for row in TENSORS.values()
}


@eager
def conforms(
    name: str,
    value: Any,
    rule: str = "",
    device: torch.device | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Checks a tensor against a rule, and returns the tensor.

    rule: a row of [tensor] in options.toml; by default that of the tensor's name. device: that of
    the call's other tensors; None: any. known: the sizes and dtypes of the call by the names in the
    rule, and kv_layout. The rest of the rule's sizes and dtypes are not checked.

    Raises TypeError for a wrong type or dtype, ValueError for everything else.
    """
    row = TENSORS[rule or name]
    if not isinstance(value, Tensor):
        is_tensor(name, value)
    if row.device == "any" and not value.is_cpu and device is not None:
        on_cpu_or(name, value, device)
    tensor(name, value)
    _check_form(name, value, row, device, known)
    if row.memory:
        _MEMORY[row.memory](name, value)
    if row.written:
        not_overlapping(name, value)
    return value


def has_form(
    name: str,
    value: Any,
    rule: str = "",
    device: torch.device | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Checks dtype, device and shape alone, for tensors that torch traces: they have no memory."""
    _check_form(name, is_tensor(name, value), TENSORS[rule or name], device, known)


def _check_form(
    name: str,
    value: torch.Tensor,
    row: TensorRule,
    device: torch.device | None,
    known: Mapping[str, Any],
) -> None:
    # Each plan() checks several tensors, so a correct tensor costs few calls.
    if value.dtype not in _FIXED_DTYPES[row.dtype] and row.dtype:
        _check_call_dtype(name, value, row, known)
    if device is not None and value.device != device and not (value.is_cpu and row.device == "any"):
        on_device(name, value, device)
    if not row.shape:
        return
    layout = known.get("kv_layout", "NHD") if row.kv_layout else "NHD"
    shape, dims = value.shape, _DIMS[row.shape]
    if not _has_shape(shape, dims if layout == "NHD" else _exchanged(dims), known):
        _refuse_shape(name, value, row, layout, known)


def _has_shape(shape: Sequence[int], dims: tuple[_Dim, ...], known: Mapping[str, Any]) -> bool:
    if len(shape) != len(dims):
        return False
    for found, (name, is_minimum, size) in zip(shape, dims):  # noqa: B905, which takes time
        size = known.get(name, size)
        if size is not None and (found < size if is_minimum else found != size):
            return False
    return True


def _exchanged(dims: tuple[_Dim, ...]) -> tuple[_Dim, ...]:
    *first, tokens, heads, head_dim = dims
    return (*first, heads, tokens, head_dim)


def _check_call_dtype(
    name: str, value: torch.Tensor, row: TensorRule, known: Mapping[str, Any]
) -> None:
    """Raises TypeError for a dtype that the rule refuses. The rule's names that `known` lacks allow
    any dtype."""
    words = []
    for dtype in row.dtype:
        found = known.get(dtype) or getattr(torch, dtype, None)
        if found == value.dtype:
            return
        if found or dtype in _KINDS:
            words.append(_KINDS[dtype][1] if dtype in _KINDS else str(found))
    if not words:
        return
    wanted, note = " or ".join(words), f" ({row.note})" if row.note else ""
    converts = torch.int32 in _FIXED_DTYPES[row.dtype] and value.dtype in _INTEGERS
    hint = f": pass {name}.int()" if converts else ""
    raise TypeError(f"{name} is {value.dtype}; must be {wanted}{note}{hint}")


def _refuse_shape(
    name: str, value: torch.Tensor, row: TensorRule, layout: str, known: Mapping[str, Any]
) -> None:
    shape, nhd = tuple(value.shape), _DIMS[row.shape]
    dims, swapped = nhd, _exchanged(nhd) if row.kv_layout else nhd
    if layout != "NHD":
        dims, swapped = swapped, dims
    wanted = f"[{', '.join(f'at least {d.name}' if d.is_minimum else d.name for d in dims)}]"
    if len(shape) == len(dims) or all(d.size is not None or d.name in known for d in dims):
        found = shape if len(shape) == len(dims) else (0,) * len(dims)
        sizes = (_size_wanted(*pair, known) for pair in zip(found, dims, strict=True))
        wanted = f"{tuple(sizes)}: {wanted}"
    elif len(dims) == 1:
        wanted = f"one-dimensional, {wanted}"
    if row.note and not row.dtype:
        wanted += f" {row.note}"
    hint = _batch_hint(name, value)
    if row.kv_layout and _has_shape(shape, swapped, known):
        other = "HND" if layout == "NHD" else "NHD"
        hint = f"; the shape fits {other}: construct the wrapper with kv_layout={other!r}"
    raise ValueError(f"{name} has shape {shape}; must be {wanted}{hint}")


def _size_wanted(found: int, dim: _Dim, known: Mapping[str, Any]) -> int:
    """The size of a dimension that the rule allows: the size found, unless it is wrong."""
    size = known.get(dim.name, found if dim.size is None else dim.size)
    return max(found, size) if dim.is_minimum else size
