"""Everything here needs an NVIDIA GPU; a build that holds part of the matrix runs what it holds."""

import pytest
from require_variant import why_no_fa3


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitizer: small enough to run under compute-sanitizer")


@pytest.fixture
def fa3() -> str:
    """Backend "fa3", where it can run."""
    if why_no_fa3():
        pytest.skip(why_no_fa3())
    return "fa3"


@pytest.fixture(params=["fa2", "fa3"])
def backend(request) -> str:
    """Each backend that can run: a test that asks for it runs on all of them."""
    return request.getfixturevalue("fa3") if request.param == "fa3" else request.param
