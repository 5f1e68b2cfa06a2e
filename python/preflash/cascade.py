"""Merging attention over disjoint sets of keys: out = sum_i 2^(s_i) v_i / sum_i 2^(s_i).

s is the base-2 log-sum-exp that run(return_lse=True) returns. A state with s = -inf has no weight,
whatever its v holds; where every state has, the result is 0 and -inf. (Cascade inference and the
recursive form of attention: FlashInfer, arXiv:2501.01005.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _core
from . import _validate as check
from ._device_stream import DeviceStream

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


class _State(NamedTuple):
    v: torch.Tensor
    s: torch.Tensor


@check.eager
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two states of every token and head.

    Args:
        v_a, v_b: [seq_len, num_heads, head_dim] float16, bfloat16 or float32.
        s_a, s_b: [seq_len, num_heads] float32, base 2.

    Returns:
        v [seq_len, num_heads, head_dim] and s [seq_len, num_heads].

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: a gradient is wanted, or a tracer is recording.
    """
    check.forward_only(v_a, s_a, v_b, s_b)
    a = _checked(("v_a", v_a), ("s_a", s_a), dims=3)
    b = _checked(("v_b", v_b), ("s_b", s_b), dims=3)
    _check_same("v_b", v_b, "v_a", v_a)
    merged = _State(
        torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device), torch.empty_like(a.s)
    )
    _merge(a, b, merged, None)
    return merged.v, merged.s


@check.eager
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merges another state into v and s.

    Args:
        v, s: [seq_len, num_heads, head_dim] and [seq_len, num_heads] float32, contiguous;
            overwritten.
        v_other, s_other: of the same shapes. They and the mask must not share memory with v or s,
            except that v_other may be v and s_other may be s.
        mask: [seq_len] bool or uint8; tokens where it is 0 stay as they are.

    Raises:
        TypeError, ValueError: an argument is wrong; nothing was written.
        NotImplementedError: a gradient is wanted, or a tracer is recording.
    """
    check.forward_only(v, s, v_other, s_other)
    own = _checked(("v", v), ("s", s), dims=3)
    other = _checked(("v_other", v_other), ("s_other", s_other), dims=3)
    _check_same("v_other", v_other, "v", v)
    for name, value in (("v", v), ("s", s)):
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {tuple(value.stride())}; must be contiguous")
    if mask is not None:
        check.tensor("mask", mask)
        if mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"mask is {mask.dtype}; must be torch.bool or torch.uint8")
        check.has_shape("mask", mask, (v.shape[0],), "[seq_len]")
        check.on_device("mask", mask, v.device)
        mask = mask.contiguous()
    # As the kernel sees them: what was not contiguous is a copy by now. A state may be merged with
    # itself: rows are read before they are written.
    read = [("v_other", other.v), ("s_other", other.s)]
    check.apart([("v", own.v), ("s", own.s)], read if mask is None else [*read, ("mask", mask)])
    _merge(own, other, own, mask)


@check.eager
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges any number of states of every token and head.

    Args:
        v: [seq_len, num_states, num_heads, head_dim] float16, bfloat16 or float32.
        s: [seq_len, num_states, num_heads] float32, base 2.

    Returns:
        v [seq_len, num_heads, head_dim] and s [seq_len, num_heads].

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: a gradient is wanted, or a tracer is recording.
    """
    check.forward_only(v, s)
    states = _checked(("v", v), ("s", s), dims=4)
    tokens, count, heads, head_dim = v.shape
    if count == 0:
        raise ValueError(f"v has shape {tuple(v.shape)}; must hold at least one state")
    merged = _State(
        torch.empty((tokens, heads, head_dim), dtype=v.dtype, device=v.device),
        torch.empty((tokens, heads), dtype=torch.float32, device=v.device),
    )
    _merge(states, None, merged, None)
    return merged.v, merged.s


def _checked(v: tuple[str, torch.Tensor], s: tuple[str, torch.Tensor], *, dims: int) -> _State:
    """A state as contiguous tensors."""
    v_name, value = v
    s_name, logsumexp = s
    check.tensor(v_name, value)
    check.tensor(s_name, logsumexp)
    if value.dtype not in check.CORE_DTYPES:
        raise TypeError(f"{v_name} is {value.dtype}; must be float16, bfloat16 or float32")
    if value.dim() != dims:
        shape = "[seq_len, num_heads, head_dim]"
        if dims == 4:
            shape = "[seq_len, num_states, num_heads, head_dim]"
        raise ValueError(f"{v_name} has shape {tuple(value.shape)}; must be {shape}")
    check.has_shape(
        s_name, logsumexp, tuple(value.shape[:-1]), f"that of {v_name} without head_dim"
    )
    check.has_dtype(s_name, logsumexp, torch.float32, "the log-sum-exp is always float32")
    check.on_device(s_name, logsumexp, value.device)
    return _State(value.contiguous(), logsumexp.contiguous())


def _check_same(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    check.has_shape(name, value, tuple(other.shape), f"that of {other_name}")
    check.has_dtype(name, value, other.dtype, f"that of {other_name}")
    check.on_device(name, value, other.device)


def _merge(a: _State, b: _State | None, into: _State, mask: torch.Tensor | None) -> None:
    if into.v.numel() == 0:
        return
    device_stream = DeviceStream(a.v.device)
    params = _core.MergeStatesParams(
        dtype=check.CORE_DTYPES[a.v.dtype],
        num_tokens=a.v.shape[0],
        num_states=2 if b is not None else a.v.shape[1],
        num_heads=a.v.shape[-2],
        head_dim=a.v.shape[-1],
    )
    params.set_inputs(
        check.address(a.v),
        check.address(a.s),
        0 if b is None else check.address(b.v),
        0 if b is None else check.address(b.s),
    )
    params.set_outputs(
        check.address(into.v), check.address(into.s), 0 if mask is None else check.address(mask)
    )
    params.launch(
        device=device_stream.ordinal,
        stream=device_stream.stream(),
        num_threads=device_stream.num_threads(),
    )
