"""Values as errors spell them."""

from __future__ import annotations

from typing import Any

import torch


def kind_of(value: Any) -> str:
    return f"{type(value).__name__} {start_of(value)}".rstrip()


def start_of(value: Any) -> str:
    """repr, but of a tensor what it is: its numbers may lie in freed memory, or be waited for."""
    try:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {value.dtype}"
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
