"""A run like the one before it takes a shorter way through C++. Whatever is different takes the
long one, so that nothing that is computed or refused depends on what ran before."""

import dataclasses
import gc
import weakref

import preflash
import pytest
import torch
from preflash import _core
from preflash._run import variant as _variant
from preflash.testing import Case, KvForm, MaskKind, build, runner
from torch.autograd import forward_ad

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = Case("paged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL,
             form=KvForm.COMBINED)  # fmt: skip
SPLIT = Case("split", (3, 5), (400, 90), 4, 2, 64, page_size=16, fixed_split_size=64)
NARROW_V = Case("narrow_v", (33, 5), (40, 90), 4, 2, 64, head_dim_vo=32)
MASKED = Case("masked", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.CUSTOM)
CASES = [RAGGED, PAGED, SPLIT, NARROW_V, MASKED]

reads_tensors = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="a torch that has no table"
)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


def planned(case, target):
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    return inputs, wrapper


def tensors(inputs):
    return [inputs.q, inputs.cache] if inputs.case.paged else [inputs.q, inputs.k, inputs.v]


def copied(given):
    """The same numbers elsewhere: another layer's."""
    if isinstance(given, (list, tuple)):
        return type(given)(copied(one) for one in given)
    copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return copy.copy_(given)


@pytest.fixture
def long_ways(monkeypatch):
    """Counts the runs that are checked from scratch."""
    counted = []
    original = _variant.PlannedVariant.attend_to

    def attend_to(*arguments):
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(_variant.PlannedVariant, "attend_to", attend_to)
    return counted


@reads_tensors
def test_another_layer_takes_the_short_way(case, target, long_ways):
    inputs, wrapper = planned(case, target)
    for _ in range(3):
        out = wrapper.run(*copied(tensors(inputs)))
        runner.compare(inputs, out, None).check()
    assert len(long_ways) == 1
    for _ in range(3):
        into = torch.full_like(out, float("nan"))
        assert wrapper.run(*copied(tensors(inputs)), out=into) is into
        runner.compare(inputs, into, None).check()
    assert len(long_ways) == 2


@reads_tensors
def test_an_lse_takes_the_long_way(case, target, long_ways):
    inputs, wrapper = planned(case, target)
    for _ in range(2):
        wrapper.run(*tensors(inputs))
        out, lse = wrapper.run(*tensors(inputs), return_lse=True)
        runner.compare(inputs, out, lse).check()
    assert len(long_ways) == 4


def wider(t):
    """The same tensor with other strides."""
    memory = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)
    return memory[..., : t.shape[-1]].copy_(t)


class Plain(torch.Tensor):
    pass


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def unaligned(t):
    memory = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


# Of q, whose first run was as usual.
CHANGES = {
    "same": lambda q: q,
    "more rows": lambda q: torch.cat([q, q[:3]]),
    "fewer rows": lambda q: q[:-1],
    "strides": wider,
    "dtype": lambda q: q.float(),
    "heads": lambda q: q[:, :2],
    "dimensions": lambda q: q[None],
    "a subclass": lambda q: q.as_subclass(Plain),
    "a parameter": lambda q: torch.nn.Parameter(q, requires_grad=False),
    "a gradient": lambda q: q.clone().requires_grad_(),
    "on the device meta": lambda q: q.to("meta"),
    "sparse": lambda q: q.to_sparse(),
    "freed": freed,
    "unaligned": unaligned,
    "negative": torch._neg_view,
    "a list": lambda q: q.tolist(),
    "none": lambda q: None,
}


def always_long(case, target):
    """A wrapper that looks at every run in Python, as it does with an older torch."""
    wrapper = planned(case, target)[1]
    wrapper._state.planned.usual._repeater = lambda *arguments: None
    return wrapper


def outcome(wrapper, arguments, **options):
    try:
        return wrapper.run(*arguments, **options)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error)


def check_same(inputs, found, expected):
    if isinstance(expected, tuple):
        assert found == expected
        return
    rows = inputs.q.shape[0]
    assert found.shape == expected.shape
    runner.compare(inputs, found[:rows].detach().as_subclass(torch.Tensor), None).check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("into", [False, True], ids=["fresh", "out"])
def test_another_q(target, change, into):
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    options = {"out": torch.empty_like(q)} if into else {}
    changed = change(q)
    found = []
    for one in (wrapper, always_long(RAGGED, target)):
        for _ in range(2):
            one.run(q, k, v, **options)
        found.append(outcome(one, (changed, k, v), **options))
    check_same(inputs, *found)
    wrapper.run(q, k, v, **options)  # as before


@pytest.mark.parametrize(
    "change", [*CHANGES.values(), lambda t: t.float().cpu().numpy()], ids=[*CHANGES, "an array"]
)
def test_another_out(target, change):
    inputs, wrapper = planned(RAGGED, target)
    found = []
    for one in (wrapper, always_long(RAGGED, target)):
        out = torch.full_like(inputs.q, float("nan"))
        for _ in range(2):
            one.run(*tensors(inputs), out=out)
        found.append(outcome(one, tensors(inputs), out=change(out)))
    check_same(inputs, *found)
    wrapper.run(*tensors(inputs), out=out)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("runs_before", [0, 2])
def test_what_only_looks_like_q_is_named(target, runs_before):
    inputs, wrapper = planned(dataclasses.replace(RAGGED, dtype=torch.float16), target)
    q, k, v = tensors(inputs)
    for _ in range(runs_before):
        wrapper.run(q, k, v)
    masked = torch.masked.masked_tensor(q, torch.ones_like(q, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^q has no memory .* MaskedTensor"):
        wrapper.run(masked, k, v)
    runner.compare(inputs, wrapper.run(q, k, v), None).check()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("which", ["k", "v", "cache", "pair"])
def test_another_cache(target, change, which):
    if which in ("cache", "pair") and change is CHANGES["fewer rows"]:
        pytest.skip("pages that the batch may have")
    inputs, wrapper = planned(PAGED if which in ("cache", "pair") else RAGGED, target)
    usual = tensors(inputs)
    if which == "pair":
        usual[1] = (inputs.cache[:, 0], inputs.cache[:, 1])
    changed = list(usual)
    if which == "pair":
        changed[1] = (change(usual[1][0]), usual[1][1])
    else:
        where = 2 if which == "v" else 1
        changed[where] = change(usual[where])
    found = []
    for one in (wrapper, always_long(inputs.case, target)):
        for _ in range(2):
            one.run(*usual)
        found.append(outcome(one, changed))
    check_same(inputs, *found)
    wrapper.run(*usual)


def test_a_pair_after_a_cache(target):
    inputs, wrapper = planned(PAGED, target)
    q, cache = tensors(inputs)
    pair = (cache[:, 0], cache[:, 1])
    for kv in (cache, cache, pair, pair, list(pair), cache, pair[::1], cache):
        runner.compare(inputs, wrapper.run(q, kv), None).check()


def test_overlaps_are_refused_again(target):
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    for _ in range(2):
        wrapper.run(q, k, v, out=torch.empty_like(q))
    memory = torch.empty(q.shape[0] + 1, *q.shape[1:], dtype=q.dtype, device=q.device)
    with pytest.raises(ValueError, match="out shares memory with q"):
        wrapper.run(memory[:-1], k, v, out=memory[1:])
    with pytest.raises(ValueError, match="out has shape"):
        wrapper.run(q, k, v, out=memory)


def test_tangents_and_traces_are_refused_again(target):
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    for _ in range(2):
        wrapper.run(q, k, v)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        wrapper.run(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda one: wrapper.run(one, k, v), (q,), check_trace=False)
    runner.compare(inputs, wrapper.run(q, k, v), None).check()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_a_transform_is_refused_again(target, which):
    """Inside of torch.vmap a tensor looks like the one before it and has no address."""
    inputs, wrapper = planned(RAGGED, target)
    usual = tensors(inputs)
    for _ in range(2):
        wrapper.run(*usual)

    def run(one):
        return wrapper.run(*usual[:which], one, *usual[which + 1 :])

    with pytest.raises(ValueError, match=f"^{'qkv'[which]} has no memory.*torch.func"):
        torch.vmap(run)(torch.stack([usual[which]] * 2))
    runner.compare(inputs, wrapper.run(*usual), None).check()


def test_another_plan_forgets_the_run(target):
    """What is repeated belongs to a plan: the next one has other lengths."""
    inputs, wrapper = planned(RAGGED, target)
    for _ in range(2):
        wrapper.run(*tensors(inputs))
    shorter = Case("shorter", (30, 5, 3, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
    other = build(shorter, device=target.device)
    runner.plan(wrapper, other)
    for _ in range(2):
        runner.compare(other, wrapper.run(*tensors(other)), None).check()


def test_an_older_torch(case, target, monkeypatch, long_ways):
    nothing = _core.Torch(object, *(lambda: False,) * 2, forward_ad, lambda _: None)
    monkeypatch.setattr(_variant.check, "TORCH", nothing)
    inputs, wrapper = planned(case, target)
    for _ in range(3):
        runner.compare(inputs, wrapper.run(*copied(tensors(inputs))), None).check()
    assert len(long_ways) == 3


def test_nothing_keeps_a_plan_alive(target):
    inputs, wrapper = planned(PAGED, target)
    for _ in range(3):
        wrapper.run(*tensors(inputs))
    variant = weakref.ref(wrapper._state.planned.usual)
    gc.disable()
    try:
        runner.plan(wrapper, inputs)
        assert variant() is None
    finally:
        gc.enable()


def test_wrong_calls_of_what_repeats():
    inputs = build(PAGED)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    runner.plan(wrapper, inputs)
    wrapper.run(*tensors(inputs))
    again = wrapper._state.planned.usual.again
    if again is None:
        pytest.skip("a torch that has no table")
    with pytest.raises(TypeError, match="a repeated run takes"):
        again(*tensors(inputs))
    with pytest.raises(TypeError, match="a repeated run takes"):
        again(*tensors(inputs), None, 1.0, None)
