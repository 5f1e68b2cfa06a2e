"""The API tests run on every device that is there: a CPU always, a GPU where torch sees one."""

import dataclasses

import pytest
import torch
from require_variant import skip_unless_compiled


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and the backend that the tests ask for on it."""

    device: str
    backend: str

    def to(self, value):
        return value.to(self.device)


def _target(device: str) -> Target:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return Target(device, "cpu" if device == "cpu" else "fa2")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request) -> Target:
    return _target(request.param)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except NotImplementedError as error:
        skip_unless_compiled(pyfuncitem, error)
