"""Runs the cases of kernels that rotate and dequantise (converted_cases) on the cpu backend."""

import pytest
from converted_cases import CASES
from preflash.testing import build, runner


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.id)
def test_numbers(case):
    inputs = build(case)
    wrapper = runner.planned(inputs, backend="cpu")
    assert "prepass+" not in wrapper.variant
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
