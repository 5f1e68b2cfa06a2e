"""Values as errors spell them."""

from __future__ import annotations

from typing import Any


def kind_of(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


def digits_of(value: Any) -> str:
    """repr, but not the hundreds of digits that a number may have."""
    try:
        text = repr(value)
    except ValueError:  # Python's own limit
        return f"(a very long {type(value).__name__})"
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"
