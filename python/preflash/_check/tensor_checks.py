"""Checks of one tensor: its memory, device, dtype, shape and aliasing. Also formats values for
error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .recording import eager

ALIGNMENT = 16
WHY_FLOAT32 = "the log-sum-exp is always float32"
_SIGNED = (torch.int32, torch.int64, torch.int16, torch.int8)
_INTEGERS = (*_SIGNED, torch.uint8, torch.uint16, torch.uint32)


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
        # NOTE: a nested tensor has an address and a storage, but neither shape nor strides.
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


def integers(name: str, value: Any, device: torch.device) -> torch.Tensor:
    """Checks a tensor of any integer dtype and shape, on the CPU or on `device`."""
    on_cpu_or(name, is_tensor(name, value), device)
    tensor(name, value)
    if value.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {value.dtype}; must be an integer dtype")
    return value


def index_array(
    name: str,
    value: Any,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (torch.int32,),
) -> torch.Tensor:
    """Checks lengths, an indptr or pages: one-dimensional, on the CPU or on `device`."""
    value = tensor(name, value)
    if value.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} is {value.dtype}; must be {allowed}{_int_hint(name, value)}")
    has_dims(name, value, 1, "one-dimensional")
    on_cpu_or(name, value, device)
    return value


def page_table(
    name: str, value: Any, shape: tuple[int, int], device: torch.device, why: str = ""
) -> torch.Tensor:
    """Checks a page table: int32, on the CPU or on `device`; shape: [batch_size, minimum pages]."""
    table = tensor(name, value)
    has_dtype(name, table, torch.int32, "page numbers")
    batch_size, pages = shape
    if table.dim() != 2 or table.shape[0] != batch_size or table.shape[1] < pages:
        raise ValueError(
            f"{name} has shape {tuple(table.shape)}; must be [batch_size, pages] = "
            f"[{batch_size}, at least {pages}]{why}"
        )
    on_cpu_or(name, table, device)
    return table


def output(
    value: torch.Tensor,
    shape: tuple[int, ...],
    meaning: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks `out`, which a kernel writes in place."""
    tensor("out", value)
    has_shape("out", value, shape, meaning)
    has_dtype("out", value, dtype, "o_data_type, which is q's dtype but for fp8")
    on_device("out", value, device)
    rows("out", value)
    not_overlapping("out", value)


def has_dims(name: str, value: torch.Tensor, dims: int, wanted: str) -> None:
    if value.dim() != dims:
        hint = _batch_hint(name, value) if dims == 3 else ""
        raise ValueError(f"{name} has shape {tuple(value.shape)}; must be {wanted}{hint}")


def _batch_hint(name: str, value: torch.Tensor) -> str:
    """Returns how to pass q, k or v [batch, tokens, heads, head_dim]; "" for other tensors."""
    if value.dim() != 4 or name not in ("q", "k", "v"):
        return ""
    return (
        f". Pass a batch [batch, tokens, heads, head_dim] as {name}.flatten(0, 1), with an indptr "
        "of its requests, to BatchPrefillWithRaggedKVCacheWrapper or another batch wrapper"
    )


def _int_hint(name: str, value: torch.Tensor) -> str:
    """Returns how to convert indices to int32; "" for a tensor that holds no integers."""
    return f": pass {name}.int()" if value.dtype in _INTEGERS else ""


def contiguous(name: str, value: torch.Tensor) -> None:
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {tuple(value.stride())}; must be contiguous")


def has_dtype(name: str, value: torch.Tensor, wanted: torch.dtype, why: str) -> None:
    if value.dtype != wanted:
        hint = _int_hint(name, value) if wanted == torch.int32 else ""
        raise TypeError(f"{name} is {value.dtype}; must be {wanted} ({why}){hint}")


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


def has_shape(name: str, value: torch.Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != wanted:
        hint = _batch_hint(name, value) if len(wanted) == 3 else ""
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; must be {wanted}: {meaning}{hint}"
        )
