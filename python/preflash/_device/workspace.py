"""Checks of workspaces, the memory that plans of a wrapper go into (_core.Workspace)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .._check import validate
from .._check.tensors import reaches_into


def check_buffer(name: str, value: Any, device: torch.device | None = None) -> torch.Tensor:
    """A workspace: contiguous, 16-byte aligned, of any dtype."""
    return validate.conforms(name, value, "workspace", device)


def check_apart(**buffers: torch.Tensor) -> None:
    """Raises ValueError if buffers that are in use at once share memory, or are one tensor; their
    names are those of the arguments."""
    for (name, value), (other_name, other) in itertools.combinations(buffers.items(), 2):
        if reaches_into(value, other):
            raise ValueError(
                f"{other_name} shares memory with {name}, which is in use with it; must be apart"
            )


def check_levels_apart(name: str, buffers: Sequence[torch.Tensor]) -> None:
    """check_apart() for one argument's buffers, one for each level of a cascade."""
    check_apart(**{f"{name}[{i}]": buffer for i, buffer in enumerate(buffers)})
