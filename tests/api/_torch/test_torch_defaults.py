"""A caller's defaults of torch (device, dtype, inference mode) change no result."""

import contextlib

import cudnn_calls
import pytest
import torch
from compiled_calls import NAMES, assert_same, calls_of
from preflash.cli import main
from preflash.testing import build


@contextlib.contextmanager
def default(device=None, dtype=None):
    before = torch.get_default_device(), torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype or before[1])
    try:
        yield
    finally:
        torch.set_default_device(None if before[0].type == "cpu" else before[0])
        torch.set_default_dtype(before[1])


SURROUNDINGS = [
    pytest.param(lambda: default("meta"), id="set_default_device_meta"),
    pytest.param(lambda: torch.device("meta"), id="with_device_meta"),
    pytest.param(lambda: default("cuda"), id="set_default_device_cuda", marks=pytest.mark.gpu),
    pytest.param(lambda: default(dtype=torch.float64), id="float64"),
    pytest.param(lambda: default(dtype=torch.bfloat16), id="bfloat16"),
    pytest.param(torch.inference_mode, id="inference_mode"),
]


@pytest.fixture(params=SURROUNDINGS)
def surroundings(request):
    with request.param():
        yield


@pytest.fixture(params=NAMES)
def call(request, target):
    """A call, with the result that it has under no defaults."""
    found = calls_of(target)[request.param]
    found.expected = found.function(*found.fresh())
    return found


def test_calls(call, surroundings):
    assert_same(call.function(*call.fresh()), call.expected)


@pytest.mark.parametrize("page_size", [0, 16])
def test_cudnn(surroundings, page_size):
    inputs = build(cudnn_calls.make_case("empty", page_size=page_size), device="cpu")
    out, lse = cudnn_calls.call(**cudnn_calls.arguments(inputs))
    assert lse.dtype == torch.float32
    cudnn_calls.check(inputs, out, cudnn_calls.rows_of(inputs.case, lse))


def test_self_test(surroundings):
    assert main(["check", "--quick", "--backend", "cpu"]) == 0
