"""GPU tests run on every GPU backend."""

from collections.abc import Iterable

import pytest
from preflash.testing import Case

GPU_BACKENDS = ("fa2", "fa3")

on_every_backend = pytest.mark.parametrize("backend", GPU_BACKENDS)


def backends_and_cases(cases: Iterable[Case]) -> list:
    """Values of ("backend", "case"): each case on each backend."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case.id}")
        for case in cases
        for backend in GPU_BACKENDS
    ]
