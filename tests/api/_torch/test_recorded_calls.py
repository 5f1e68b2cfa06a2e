"""Graphs of make_fx and torch.export may outlive a wrapper or its process."""

import gc

import pytest
import torch
from compiled_calls import NAMES, PAGED, RAGGED, as_list, assert_same, calls_of
from planned_cases import planned
from preflash.testing import runner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def test_a_wrapper_that_is_gone_or_of_another_process(target):
    inputs, wrapper = planned(RAGGED, target)
    tensors = (inputs.q, inputs.k, inputs.v)
    graph, other = make_fx(wrapper.run)(*tensors), make_fx(wrapper.run)(*tensors)
    assert_same(graph(*tensors), wrapper.run(*tensors))
    (node,) = (node for node in other.graph.nodes if str(node.target).startswith("preflash.run"))
    node.update_arg(0, f"{node.args[0]}@0123456789abcdef")
    other.recompile()
    with pytest.raises(ValueError, match="another process"):
        other(*tensors)
    del wrapper
    gc.collect()
    with pytest.raises(ValueError, match=r"wrapper='\d+@\w+'.*is gone"):
        graph(*tensors)


@pytest.mark.parametrize("strict", [False, True])
def test_export(target, strict, tmp_path):
    """A saved program runs as before, with the plan of the time."""
    inputs, wrapper = planned(PAGED, target)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return wrapper.run(q * 1, (k, v), return_lse=True)

    tensors = (inputs.q, *inputs.cache)
    program = torch.export.export(Layer(), tensors, strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for causal in (False, True):
        runner.plan(wrapper, inputs, causal=causal)
        expected = wrapper.run(inputs.q, inputs.cache, return_lse=True)
        assert_same(program.module()(*tensors), expected)
        assert_same(loaded(*tensors), expected)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(target, name):
    """FakeTensorMode gets shapes, strides and dtypes, without a launch."""
    call = calls_of(target)[name]
    if name == "segment_packbits":
        pytest.skip("its size is in the values")
    expected = as_list(call.function(*call.fresh()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = as_list(call.function(*map(mode.from_tensor, call.fresh())))
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
