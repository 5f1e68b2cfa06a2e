"""Everything here needs an NVIDIA GPU; a build that holds part of the matrix runs what it holds."""

import pytest
from require_variant import skip_unless_compiled, why_no_fa3


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


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except NotImplementedError as error:
        skip_unless_compiled(pyfuncitem, error)
