"""The API tests run on every device that is there: a CPU always, a GPU where torch sees one.

Folders have the names of the packages in python/preflash that their tests are about; this folder
has the tests of public modules and of the package as a whole.
"""

import dataclasses

import pytest
import torch
from graph_stage import recorder  # noqa: F401
from require_variant import why_no_fa3


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and the backend that the tests ask for on it."""

    device: str
    backend: str

    def to(self, value):
        """Returns the tensor on the device. One with gaps keeps its strides."""
        if self.device == "cpu" or value.is_contiguous() or 0 in value.stride():
            return value.to(self.device)
        moved = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=self.device
        )
        return moved.copy_(value)


def _target(backend: str) -> Target:
    if backend == "cpu":
        return Target("cpu", backend)
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if backend == "fa3" and why_no_fa3():
        pytest.skip(why_no_fa3())
    return Target("cuda", backend)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("fa2", id="cuda", marks=pytest.mark.gpu),
        pytest.param("fa3", id="fa3", marks=pytest.mark.gpu),
    ]
)
def target(request) -> Target:
    return _target(request.param)
