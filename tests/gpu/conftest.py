"""Everything here needs an NVIDIA GPU; a build that holds part of the matrix runs what it holds."""

import pytest
from require_variant import skip_unless_compiled


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitizer: small enough to run under compute-sanitizer")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except NotImplementedError as error:
        skip_unless_compiled(pyfuncitem, error)
