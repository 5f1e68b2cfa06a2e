"""Calls whose gradient or trace would silently miss our kernels are refused; traces that can hold
the calls do, and modes that watch change nothing."""

import gc

import pytest
import torch
from compiled_calls import NAMES, PAGED, RAGGED, as_list, assert_same, calls_of
from fuzz.guarded import bits
from planned_cases import planned, tensors
from pods import Pod
from preflash.testing import runner
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

# Calls, and what their refusals call their differentiable tensors, which come first.
DIFFERENTIABLE = {
    "ragged": ("q", "k", "v"),
    "single": ("q", "k", "v"),
    "merge_state": ("an input",) * 4,
    "in_place": ("an input",) * 4,
    "merge_states": ("an input",) * 2,
    "append_whole": ("an input", "an input", "k_cache"),
}
EVERY = ["ragged", "single", "merge_state", "in_place", "merge_states"]
EVERY += ["packbits", "segment_packbits"]


class Entry:
    def __init__(self, name, target):
        self.name, call = name, calls_of(target)[name]
        self.fresh, self.call = call.fresh, call.function
        self.expected = self.call(*self.fresh())

    def right(self, got):
        assert_same(got, self.expected)

    def with_one(self, change):
        """Yields what each differentiable tensor is called, and the tensors with it changed."""
        for i, name in enumerate(DIFFERENTIABLE[self.name]):
            given = [t.detach() for t in self.fresh()]
            given[i] = change(given[i])
            yield name, given


@pytest.fixture(params=DIFFERENTIABLE)
def differentiable(request, target):
    return Entry(request.param, target)


@pytest.fixture(params=EVERY)
def entry(request, target):
    return Entry(request.param, target)


def leaf(t):
    return t.clone().requires_grad_()


def dual(t):
    return forward_ad.make_dual(t.detach(), torch.ones_like(t))


def test_requires_grad(differentiable):
    """Refused before and after runs that passed every check."""
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        for name, given in differentiable.with_one(leaf):
            before = [bits(t.detach()).clone() for t in given]
            says = rf"^{name} requires grad.*forward only.*no_grad.*detach"
            refused(says, differentiable.call, *given, error=NotImplementedError)
            assert all(map(torch.equal, (bits(t.detach()) for t in given), before))
            with mode():
                differentiable.right(differentiable.call(*given))
        differentiable.right(differentiable.call(*differentiable.fresh()))


def test_forward_mode(differentiable):
    with forward_ad.dual_level():
        differentiable.right(differentiable.call(*differentiable.fresh()))
        for _, given in differentiable.with_one(dual):
            for mode in (torch.enable_grad, torch.no_grad):
                with mode(), pytest.raises(NotImplementedError, match=r"tangent.*forward only"):
                    differentiable.call(*given)


OPTIONS = {
    **{name: lambda q: torch.tensor(1.0) for name in ("q_scale", "k_scale", "v_scale")},
    "out": torch.empty_like,
    "lse": lambda q: q.new_empty(q.shape[:2], dtype=torch.float32),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_requires_grad(target, name):
    """Autograd would go on with the values of an output that are overwritten."""
    inputs, wrapper = planned(RAGGED, target)
    expected, plain = wrapper.run(*tensors(inputs)), OPTIONS[name](inputs.q)
    value = leaf(torch.ones_like(plain))
    for wrong in (value, value * 1.0) * 2:
        with pytest.raises(NotImplementedError, match=rf"^{name} requires grad.*forward only"):
            wrapper.run(*tensors(inputs), **{name: wrong})
        assert bool((value == 1.0).all())
        wrapper.run(*tensors(inputs), **{name: plain})
    with torch.no_grad():
        result = wrapper.run(*tensors(inputs), **{name: value})
    assert torch.equal(result.detach(), expected)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name} has a tang"):
        wrapper.run(*tensors(inputs), **{name: dual(plain)})


def writes(name, target):
    if name == "pod":
        pod = Pod(target)
        pod.plan()
        outputs = pod.outputs()
        return lambda: pod.run(**outputs), list(outputs.values())
    call = calls_of(target)[name]
    given = call.fresh()
    return lambda: call.function(*given), [given[i] for i in call.written]


@pytest.mark.parametrize(
    "name", ["into", "into_lse", "single_into", "in_place", "append_whole", "pod"]
)
def test_saved_tensors_are_not_overwritten_unseen(target, name):
    """Backward raises for an overwritten saved tensor, as after torch's own in-place operations."""
    call, outputs = writes(name, target)
    for _ in range(3):
        call()
        for output in outputs:
            weight = torch.ones_like(output, requires_grad=True)
            loss = (weight * output).sum()
            with torch.no_grad():
                call()
            refused("modified by an inplace operation", loss.backward, error=RuntimeError)
    with torch.inference_mode():  # whose tensors have no version
        writes(name, target)[0]()


def test_jit_trace(entry):
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace.*trace would hold none"):
        torch.jit.trace(entry.call, tuple(entry.fresh()), check_trace=False)
    entry.right(entry.call(*entry.fresh()))


@pytest.mark.parametrize(
    ("tracing_mode", "pre_dispatch"),
    [("real", False), ("real", True), ("fake", False), ("symbolic", True)],
)
def test_make_fx(entry, tracing_mode, pre_dispatch):
    """A trace holds the call as an operator, and computes other values."""
    if entry.name == "segment_packbits" and tracing_mode != "real":
        pytest.skip("the size of its result is in the values")
    trace = make_fx(entry.call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)
    graph = trace(*entry.fresh())
    entry.right(graph(*entry.fresh()))

    def others():
        first, *rest = entry.fresh()
        return [first.flip(0), *rest]

    assert_same(graph(*others()), entry.call(*others()))
    assert not torch.equal(as_list(graph(*others()))[0], as_list(entry.expected)[0])
    entry.right(entry.call(*entry.fresh()))


def test_modes_that_watch(entry):
    for mode in (FlopCounterMode(display=False), LoggingTensorMode(), BaseTorchFunctionMode()):
        with mode:
            entry.right(entry.call(*entry.fresh()))
    for use_reentrant in (False, True):
        entry.right(checkpoint(entry.call, *entry.fresh(), use_reentrant=use_reentrant))


def test_a_graph_that_breaks(target):
    """torch breaks a graph at segment_packbits, whose result has a size that depends on values."""
    torch._dynamo.reset()
    entry = Entry("segment_packbits", target)

    def model(bits, indptr):
        packed, ends = entry.call(bits | False, indptr)
        return packed.clone(), ends

    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            entry.right(compiled(*entry.fresh()))


def test_a_wrapper_that_is_gone_or_of_another_process(target):
    inputs, wrapper = planned(RAGGED, target)
    given = tensors(inputs)
    graph, other = (make_fx(wrapper.run)(*given) for _ in range(2))
    assert_same(graph(*given), wrapper.run(*given))
    (node,) = (node for node in other.graph.nodes if str(node.target).startswith("preflash.run"))
    node.update_arg(0, f"{node.args[0]}@0123456789abcdef")
    other.recompile()
    refused("another process", other, *given)
    del wrapper
    gc.collect()
    refused(r"wrapper='\d+@\w+'.*is gone", graph, *given)


@pytest.mark.parametrize("strict", [False, True])
def test_export(target, strict, tmp_path):
    """A saved program runs as before, with the plan of the time."""
    inputs, wrapper = planned(PAGED, target)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return wrapper.run(q * 1, (k, v), return_lse=True)

    given = (inputs.q, *inputs.cache)
    program = torch.export.export(Layer(), given, strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for causal in (False, True):
        runner.plan(wrapper, inputs, causal=causal)
        expected = wrapper.run(inputs.q, inputs.cache, return_lse=True)
        assert_same(program.module()(*given), expected)
        assert_same(loaded(*given), expected)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(target, name):
    """FakeTensorMode gets shapes, strides and dtypes, without a launch, of plain tensors too."""
    call = calls_of(target)[name]
    if name == "segment_packbits":
        pytest.skip("its size is in the values")
    expected = as_list(call.function(*call.fresh()))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call.function(*map(mode.from_tensor, call.fresh()))
        plain = fake if call.written else call.function(*call.fresh())
    for got in (fake, plain):
        for a, b in zip(as_list(got), expected, strict=True):
            assert isinstance(a, FakeTensor)
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert a.device == b.device
