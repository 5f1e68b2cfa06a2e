"""GPU tests run on every GPU backend that serves what they ask for."""

from collections.abc import Iterable

import pytest
from preflash.testing import Case

GPU_BACKENDS = ("fa2", "fa3")

on_every_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)


def serves(backend: str, case: Case) -> bool:
    """fa3 has no kernels for custom masks."""
    return backend != "fa3" or not case.has_custom_mask


def backends_and_cases(cases: Iterable[Case]) -> list:
    """Values of ("backend", "case"): each case on each backend that serves it."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case.id}")
        for case in cases
        for backend in GPU_BACKENDS
        if serves(backend, case)
    ]
