"""Everything here needs an NVIDIA GPU; a build that holds part of the matrix runs what it holds."""

import pytest
from require_variant import skip_unless_compiled, why_no_fa3


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitizer: small enough to run under compute-sanitizer")


def pytest_runtest_setup(item):
    """Skips tests of backend fa3 where it cannot run."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == "fa3" and why_no_fa3():
        pytest.skip(why_no_fa3())


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except NotImplementedError as error:
        skip_unless_compiled(pyfuncitem, error)
