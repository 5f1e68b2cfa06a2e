"""Runs the cases of kernels that rotate and dequantise (converted_cases) on the cpu backend."""

import pytest
from converted_cases import CASES
from preflash.testing import build, runner


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.id)
def test_numbers(case):
    inputs = build(case)
    buffer = runner.workspace("cpu", 256 << 20)  # a fixed split is kept whatever it takes
    wrapper = runner.make_wrapper(case, backend="cpu", buffer=buffer)
    runner.plan(wrapper, inputs)
    assert not wrapper._plan.primary.plan.has_prepass
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
