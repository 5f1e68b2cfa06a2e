"""Repeated runs: tensors' properties are checked once, and a run for others like them finds its
launch in C++. Any difference is checked, so that no result or refusal depends on earlier runs."""

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from planned_cases import planned
from preflash import _core
from preflash._check import tensors as _tensors
from preflash._check import torch_modes
from preflash.testing import Case, KvForm, MaskKind, build, runner
from torch.autograd import forward_ad

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16, form=KvForm.COMBINED)
CASES = [
    RAGGED,
    PAGED,
    Case("split", (3, 5), (400, 90), 4, 2, 64, page_size=16, fixed_split_size=64),
    Case("narrow_v", (33, 5), (40, 90), 4, 2, 64, head_dim_vo=32),
    Case("masked", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.CUSTOM),
]


def tensors(inputs):
    return [inputs.q, inputs.cache] if inputs.case.paged else [inputs.q, inputs.k, inputs.v]


def copied(given):
    """Copies the tensors, as another layer's cache would be."""
    if isinstance(given, (list, tuple)):
        return type(given)(copied(one) for one in given)
    copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return copy.copy_(given)


@pytest.fixture
def checks(monkeypatch):
    """Counts the runs whose tensors are checked."""
    counted, original = [], _tensors.bind
    monkeypatch.setattr(_tensors, "bind", lambda *a: counted.append(a) or original(*a))
    return counted


def older_torch():
    """C++ reads tensors by their methods, as it does under an older torch."""
    return _core.Torch(object, torch.jit.is_tracing, torch.is_grad_enabled, torch.autograd)


@pytest.fixture(params=["by table", "by methods"])
def reading(request, monkeypatch):
    if request.param == "by methods":
        monkeypatch.setattr(torch_modes, "TORCH", older_torch())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_checks_are_not_repeated(case, target, reading, checks):
    """Each kind of run has its launch, for every layer and for later plans of the same options."""
    inputs, wrapper = planned(case, target)
    rows = inputs.q.shape[:2]
    for _ in range(3):
        out = wrapper.run(*copied(tensors(inputs)))
        runner.compare(inputs, out, None).check()
        into = torch.full_like(out, float("nan"))
        assert wrapper.run(*copied(tensors(inputs)), out=into) is into
        runner.compare(inputs, into, None).check()
        out, lse = wrapper.run(*tensors(inputs), return_lse=True)
        runner.compare(inputs, out, lse).check()
        into = torch.full(rows[::-1], float("nan"), device=target.device)
        for buffer in ({}, {"lse": into}):
            options = {"return_lse": True, "lse_layout": "HN", **buffer}
            assert torch.equal(wrapper.run(*tensors(inputs), **options)[1], lse.T)
        into = torch.full(rows, float("nan"), device=target.device)
        runner.compare(inputs, wrapper.run(*tensors(inputs), lse=into), into).check()
        natural = wrapper.run(*tensors(inputs), return_lse=True, lse_base="ln")[1]
        torch.testing.assert_close(natural, lse * math.log(2.0))
    assert len(checks) == 6  # a base is a factor, not a launch
    for options, count in (({}, 6), ({}, 6), ({"sm_scale": 0.5}, 6), ({"window_left": 20}, 7)):
        runner.plan(wrapper, inputs, **options)
        out = wrapper.run(*copied(tensors(inputs)))
        if not options:
            runner.compare(inputs, out, None).check()
        assert len(checks) == count


def test_the_cache_of_launches_is_bounded(target, checks):
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    longer = [torch.cat([q, q.new_zeros(n, *q.shape[1:])]) for n in range(70)]
    for n in (0, *range(70), 69, 68):
        found = wrapper.run(longer[n], k, v)
        runner.compare(inputs, found[: q.shape[0]], None).check()
    assert len(checks) == 70
    wrapper.run(q, k, v)
    assert len(checks) == 71


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


CHANGES = {
    "same": lambda t: t,
    "more rows": lambda t: torch.cat([t, t[:3]]),
    "fewer rows": lambda t: t[:-1],
    "strides": wider,
    "dtype": lambda t: t.float(),
    "heads": lambda t: t[:, :2],
    "dimensions": lambda t: t[None],
    "a subclass": lambda t: t.as_subclass(Plain),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a gradient": lambda t: t.clone().requires_grad_(),
    "on the device meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "freed": freed,
    "unaligned": unaligned,
    "negative": torch._neg_view,
    "a list": lambda t: t.tolist(),
    "none": lambda t: None,
    "an array": lambda t: t.float().cpu().numpy(),
}
PLACES = {"q": 0, "q_with_out": 0, "k": 1, "v": 2, "cache": 1, "first_of_pair": 1, "out": None}
CHANGED = [
    (place, change)
    for place in PLACES
    for change in CHANGES
    # A batch may own the last pages of a cache or not.
    if not (place in ("cache", "first_of_pair") and change == "fewer rows")
    if place == "out" or change != "an array"
]


def outcome(wrapper, arguments, **options):
    try:
        return wrapper.run(*arguments, **options)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(("place", "change"), CHANGED)
def test_another_tensor_after_two_runs(target, place, change):
    """Both ways in which C++ reads tensors find the same result or the same error."""
    case, change, found = (
        PAGED if place in ("cache", "first_of_pair") else RAGGED,
        CHANGES[change],
        [],
    )
    for older in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if older:
                patch.setattr(torch_modes, "TORCH", older_torch())
            inputs, wrapper = planned(case, target)
        usual, options = tensors(inputs), {}
        if place == "first_of_pair":
            usual[1] = (inputs.cache[:, 0], inputs.cache[:, 1])
        if place in ("out", "q_with_out"):
            options["out"] = torch.full_like(inputs.q, float("nan"))
        for _ in range(2):
            wrapper.run(*usual, **options)
        given, into = list(usual), dict(options)
        if place == "out":
            into["out"] = change(into["out"])
        elif place == "first_of_pair":
            given[1] = (change(usual[1][0]), usual[1][1])
        else:
            given[PLACES[place]] = change(usual[PLACES[place]])
        found.append(outcome(wrapper, given, **into))
        wrapper.run(*usual, **options)
    if isinstance(found[1], tuple):
        assert found[0] == found[1]
        return
    assert found[0].shape == found[1].shape
    for out in found:
        out = out[: inputs.q.shape[0]].detach().as_subclass(torch.Tensor)
        runner.compare(inputs, out, None).check()


def test_a_pair_after_a_cache(target):
    inputs, wrapper = planned(PAGED, target)
    q, cache = tensors(inputs)
    pair = (cache[:, 0], cache[:, 1])
    for kv in (cache, cache, pair, pair, list(pair), cache, pair[::1], cache):
        runner.compare(inputs, wrapper.run(q, kv), None).check()


def out_on_q(wrapper, q, *kv):
    memory = torch.cat([q, q[:1]])
    wrapper.run(memory[:-1], *kv, out=memory[1:])


def tangent(wrapper, q, *kv):
    with forward_ad.dual_level():
        wrapper.run(forward_ad.make_dual(q, torch.ones_like(q)), *kv)


def trace(wrapper, q, *kv):
    torch.jit.trace(lambda one: wrapper.run(one, *kv), (q,), check_trace=False)


def vmap(place):
    """Inside of torch.vmap a tensor looks like the one before it and has no address."""

    def call(wrapper, *usual):
        def run(one):
            return wrapper.run(*usual[:place], one, *usual[place + 1 :])

        torch.vmap(run)(torch.stack([usual[place]] * 2))

    return call


def masked(wrapper, q, *kv):
    wrapper.run(torch.masked.masked_tensor(q, torch.ones_like(q, dtype=torch.bool)), *kv)


def planned_longer(**lengths):
    def call(wrapper, *usual):
        longer = dataclasses.replace(RAGGED, dtype=torch.float16, **lengths)
        runner.plan(wrapper, build(longer, device=wrapper.device))
        wrapper.run(*usual)

    return call


MORE_ROWS = {"qo_lens": (33, 5, 0, 71), "kv_lens": (40, 90, 7, 71)}
REFUSED = {
    "out on q": (out_on_q, ValueError, "out shares memory with q"),
    "out": (
        lambda wrapper, q, *kv: wrapper.run(q, *kv, out=torch.cat([q, q])),
        ValueError,
        "out has shape",
    ),
    "tangent": (tangent, NotImplementedError, "tangent"),
    "trace": (trace, NotImplementedError, r"torch\.jit\.trace"),
    **{f"vmap {n}": (vmap(i), ValueError, f"^{n} has no memory.*torch.func")
       for i, n in enumerate("qkv")},
    "masked": (masked, ValueError, r"^q has no memory .* MaskedTensor"),
    "rows": (
        planned_longer(**MORE_ROWS),
        ValueError,
        r"q has shape \(108, 4, 64\); must be \(109, 4, 64\)",
    ),
    "keys": (
        planned_longer(kv_lens=(40, 90, 99, 70)),
        ValueError,
        r"k has shape .*; must be \(299, .* kv_indptr\[-1\]",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("runs_before", [0, 2])
@pytest.mark.parametrize(("call", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_refusals_after_runs(target, call, error, match, runs_before):
    """Tensors that passed are refused in another call, and with a longer plan."""
    inputs, wrapper = planned(dataclasses.replace(RAGGED, dtype=torch.float16), target)
    for _ in range(runs_before):
        wrapper.run(*tensors(inputs))
        wrapper.run(*tensors(inputs), out=torch.empty_like(inputs.q))
    with pytest.raises(error, match=match):
        call(wrapper, *tensors(inputs))
    runner.plan(wrapper, inputs)
    runner.compare(inputs, wrapper.run(*tensors(inputs)), None).check()


def test_pages_beyond_a_cache_that_passed(target):
    inputs, wrapper = planned(PAGED, target)
    q, cache = tensors(inputs)
    wrapper.run(q, cache)
    beyond = inputs.indices.cpu().clone()
    beyond[3] = cache.shape[0]
    runner.plan(wrapper, dataclasses.replace(inputs, indices=beyond))
    with pytest.raises(ValueError, match=f"paged_kv_indices holds {cache.shape[0]}; "):
        wrapper.run(q, cache)


def test_another_plan_forgets_the_run(target):
    """Repeated runs belong to one plan: the next plan has other lengths."""
    inputs, wrapper = planned(RAGGED, target)
    shorter = dataclasses.replace(RAGGED, qo_lens=(30, 5, 3, 70))
    for one in (inputs, build(shorter, device=target.device), inputs):
        runner.plan(wrapper, one)
        for _ in range(2):
            runner.compare(one, wrapper.run(*tensors(one)), None).check()


def test_a_replaced_plan_is_freed_at_once(target):
    inputs, wrapper = planned(PAGED, target)
    for _ in range(3):
        wrapper.run(*tensors(inputs))
    variant = weakref.ref(wrapper._plan.default_variant)
    gc.disable()
    try:
        runner.plan(wrapper, inputs)
        assert variant() is None
    finally:
        gc.enable()
