"""Calls whose gradient or trace would silently miss our kernels are refused; traces that can hold
them do, and modes that only watch keep working."""

import preflash
import pytest
import torch
from preflash.testing import Case, KvForm, build, runner
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

CASE = Case("forward", (33, 5), (40, 90), 4, 2, 64)
ONE = Case("one", (33,), (40,), 4, 2, 64)
BESIDE = Case("beside", (1, 1), (40, 9), 4, 2, 64, page_size=16, form=KvForm.COMBINED)


class Entry:
    """A call of ours on tensors that are differentiable or traceable, and its right result."""

    def __init__(self, name, target):
        self.name = name
        self.tensors, self.call = getattr(self, name)(target)
        self.expected = self.call(*self.tensors)

    def run(self, target):
        inputs = build(CASE, device=target.device)
        wrapper = runner.make_wrapper(CASE, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        self.wrapper = wrapper
        return [inputs.q, inputs.k, inputs.v], lambda q, k, v: wrapper.run(q, k, v)

    def single(self, target):
        inputs = build(ONE, device=target.device)

        def call(q, k, v):
            return preflash.single_prefill_with_kv_cache(q, k, v, backend=target.backend)

        return [inputs.q, inputs.k[:40], inputs.v[:40]], call

    def _states(self, target):
        generator = torch.Generator().manual_seed(0)
        v = target.to(torch.randn(9, 2, 3, 16, generator=generator))
        return v, target.to(torch.randn(9, 2, 3, generator=generator))

    def merge_state(self, target):
        v, s = self._states(target)

        def call(v_a, s_a, v_b, s_b):
            return preflash.merge_state(v_a, s_a, v_b, s_b)[0]

        return [v[:, 0], s[:, 0], v[:, 1], s[:, 1]], call

    def merge_state_in_place(self, target):
        v, s = self._states(target)
        own_v, own_s = v[:, 0].contiguous(), s[:, 0].contiguous()

        def call(own_v, own_s, v_other, s_other):
            out, lse = own_v.clone(), own_s.clone()
            preflash.merge_state_in_place(out, lse, v_other, s_other)
            return out

        return [own_v, own_s, v[:, 1].contiguous(), s[:, 1].contiguous()], call

    def merge_states(self, target):
        v, s = self._states(target)
        return [v, s], lambda v, s: preflash.merge_states(v, s)[0]

    def packbits(self, target):
        bits = target.to(torch.rand(37, generator=torch.Generator().manual_seed(0)) < 0.5)
        return [bits], lambda x: preflash.packbits(x)

    def segment_packbits(self, target):
        bits = target.to(torch.rand(37, generator=torch.Generator().manual_seed(0)) < 0.5)
        indptr = torch.tensor([0, 9, 37])
        return [bits], lambda x: preflash.segment_packbits(x, indptr)[0]

    def right(self, got):
        assert torch.equal(got, self.expected)


ATTENTION = ["run", "single"]
DIFFERENTIABLE = [*ATTENTION, "merge_state", "merge_state_in_place", "merge_states"]
EVERY = [*DIFFERENTIABLE, "packbits", "segment_packbits"]


@pytest.fixture(params=DIFFERENTIABLE)
def differentiable(request, target):
    return Entry(request.param, target)


@pytest.fixture(params=EVERY)
def entry(request, target):
    return Entry(request.param, target)


def test_requires_grad(differentiable):
    for i in range(len(differentiable.tensors)):
        tensors = [t.detach() for t in differentiable.tensors]
        tensors[i] = tensors[i].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=r"forward only.*no_grad.*detach"):
            differentiable.call(*tensors)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(differentiable, mode):
    tensors = [t.clone().requires_grad_() for t in differentiable.tensors]
    with mode():
        differentiable.right(differentiable.call(*tensors))
    differentiable.right(differentiable.call(*(t.detach() for t in tensors)))


def test_forward_mode(differentiable):
    with forward_ad.dual_level():
        differentiable.right(differentiable.call(*differentiable.tensors))
        for i, t in enumerate(differentiable.tensors):
            tensors = list(differentiable.tensors)
            tensors[i] = forward_ad.make_dual(t, torch.ones_like(t))
            for mode in (torch.enable_grad, torch.no_grad):
                with mode(), pytest.raises(NotImplementedError, match=r"tangent.*forward only"):
                    differentiable.call(*tensors)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("runs_before", [0, 2])
def test_who_requires_grad_is_named(target, name, runs_before):
    entry = Entry(name, target)
    for _ in range(runs_before):
        entry.call(*entry.tensors)
    for i, what in enumerate("qkv"):
        tensors = list(entry.tensors)
        tensors[i] = tensors[i].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"^{what} requires grad"):
            entry.call(*tensors)


def test_a_scale_that_requires_grad(target):
    entry = Entry("run", target)
    for name in ("q_scale", "k_scale", "v_scale"):
        scale = torch.tensor(1.0, requires_grad=True)
        with pytest.raises(NotImplementedError, match=rf"^{name} requires grad.*forward only"):
            entry.wrapper.run(*entry.tensors, **{name: scale})
        with torch.no_grad():
            entry.right(entry.wrapper.run(*entry.tensors, **{name: scale}))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(scale.detach(), torch.tensor(1.0))
            with pytest.raises(NotImplementedError, match=rf"^{name} has a tangent"):
                entry.wrapper.run(*entry.tensors, **{name: dual})


@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.parametrize("runs_before", [0, 2])
def test_an_output_that_requires_grad(target, name, runs_before):
    """Autograd would go on with the values that are overwritten."""
    entry = Entry("run", target)
    outputs = {
        "out": torch.empty_like(entry.expected),
        "lse": entry.expected.new_empty(entry.expected.shape[:2], dtype=torch.float32),
    }
    for _ in range(runs_before):
        entry.wrapper.run(*entry.tensors, **{name: outputs[name]})
    leaf = torch.full_like(outputs[name], 7.0).requires_grad_()
    for value in (leaf, leaf * 1.0):
        with pytest.raises(NotImplementedError, match=rf"^{name} requires grad.*forward only"):
            entry.wrapper.run(*entry.tensors, **{name: value})
    assert bool((leaf == 7.0).all())
    with torch.no_grad():
        result = entry.wrapper.run(*entry.tensors, **{name: leaf})
    entry.right(result.detach())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(outputs[name], torch.ones_like(outputs[name]))
        with pytest.raises(NotImplementedError, match=f"^{name} has a tangent"):
            entry.wrapper.run(*entry.tensors, **{name: dual})


def test_a_cache_that_requires_grad(target):
    """Refuses a cache that requires grad, since the call writes it."""
    row, cache = target.to(torch.ones(1, 2, 8)), target.to(torch.zeros(4, 2, 4, 2, 8))
    zero, one = (target.to(torch.tensor(n, dtype=torch.int32)) for n in ([0], [1]))
    indptr = torch.cat([zero, one])
    leaf = cache.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^k_cache requires grad"):
        preflash.append_paged_kv_cache(row, row, zero, zero, leaf, zero, indptr, one)
    assert bool((leaf == 0).all())
    with torch.no_grad():
        preflash.append_paged_kv_cache(row, row, zero, zero, leaf, zero, indptr, one)
    assert leaf.sum().item() == row.numel() * 2


class Writes:
    """Calls that write into tensors of the caller's: (the call, what it writes)."""

    def run(self, target, runs_before=0):
        entry = Entry("run", target)
        out = torch.empty_like(entry.expected)
        for _ in range(runs_before):
            entry.wrapper.run(*entry.tensors, out=out)
        return lambda: entry.wrapper.run(*entry.tensors, out=out), [out]

    def later_run(self, target):
        return self.run(target, 2)

    def run_with_lse(self, target):
        entry = Entry("run", target)
        out = torch.empty_like(entry.expected)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        return lambda: entry.wrapper.run(*entry.tensors, out=out, lse=lse), [out, lse]

    def pod(self, target):
        one, beside = build(ONE, device=target.device), build(BESIDE, device=target.device)
        wrapper = preflash.PODWithPagedKVCacheWrapper(
            runner.workspace(target.device), backend=target.backend
        )
        table = (beside.kv_indptr, beside.indices, beside.last_page_len)
        wrapper.plan(*table, 4, 2, 64, 16, q_data_type=one.q.dtype)
        tensors = (one.q, one.k[:40], one.v[:40], beside.q, beside.cache)
        outputs = {"out_p": torch.empty_like(one.q), "out_d": torch.empty_like(beside.q)}
        return lambda: wrapper.run(*tensors, **outputs), list(outputs.values())

    def merge_state_in_place(self, target):
        v, s = target.to(torch.ones(3, 2, 8)), target.to(torch.ones(3, 2))
        others = v.clone(), s.clone()
        return lambda: preflash.merge_state_in_place(v, s, *others), [v, s]

    def append(self, target):
        row, cache = target.to(torch.ones(1, 2, 8)), target.to(torch.zeros(4, 2, 4, 2, 8))
        zero, one = (target.to(torch.tensor(n, dtype=torch.int32)) for n in ([0], [1]))
        table = (zero, torch.cat([zero, one]), one)
        return (
            lambda: preflash.append_paged_kv_cache(row, row, zero, zero, cache, *table),
            [cache],
        )


@pytest.mark.parametrize(
    "name", ["run", "later_run", "run_with_lse", "pod", "merge_state_in_place", "append"]
)
def test_what_was_saved_for_backward_is_not_overwritten_unheard(target, name):
    """Backward raises for an overwritten saved tensor, as after torch's own in-place operations."""
    call, outputs = getattr(Writes(), name)(target)
    call()
    for output in outputs:
        weight = torch.ones_like(output, requires_grad=True)
        loss = (weight * output).sum()
        with torch.no_grad():
            call()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():  # whose tensors have no version
        getattr(Writes(), name)(target)[0]()


def test_jit_trace(entry):
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace.*trace would hold none"):
        torch.jit.trace(entry.call, tuple(entry.tensors), check_trace=False)
    entry.right(entry.call(*entry.tensors))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True], ids=["post_dispatch", "pre_dispatch"])
def test_make_fx(entry, tracing_mode, pre_dispatch):
    """A trace holds the call as an operator: it computes again on other values."""
    if entry.name == "segment_packbits" and tracing_mode != "real":
        pytest.skip("the size of its result is in values that are not there")
    graph = make_fx(entry.call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(
        *entry.tensors
    )
    entry.right(graph(*entry.tensors))
    others = [entry.tensors[0].flip(0), *entry.tensors[1:]]
    assert torch.equal(graph(*others), entry.call(*others))
    assert not torch.equal(graph(*others), entry.expected)
    entry.right(entry.call(*entry.tensors))


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call(*tensors)


def test_export(entry):
    program = torch.export.export(Module(entry.call), tuple(entry.tensors), strict=False)
    entry.right(program.module()(*entry.tensors))


class LoggedOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class LoggedFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [lambda: FlopCounterMode(display=False), LoggedOperations, LoggedFunctions],
    ids=["flops", "dispatch", "function"],
)
def test_modes_that_watch(entry, mode):
    with mode():
        entry.right(entry.call(*entry.tensors))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["modes", "reentrant"])
def test_checkpoint(entry, use_reentrant):
    entry.right(checkpoint(entry.call, *entry.tensors, use_reentrant=use_reentrant))


def test_compile(entry):
    """Compiles also where torch breaks the graph, as at a size that depends on values."""
    torch._dynamo.reset()

    def model(*tensors):
        first, *others = tensors
        doubled = first | False if first.dtype is torch.bool else first * 2 * 0.5
        return entry.call(doubled, *others).clone()

    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            entry.right(compiled(*entry.tensors))
