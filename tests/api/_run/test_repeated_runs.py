"""Repeated runs: tensors' properties are checked once, and a run for others like them finds its
launch in C++. Whatever differs is checked, so that no result or refusal depends on what ran
before."""

import dataclasses
import gc
import math
import weakref

import preflash
import pytest
import torch
from planned_cases import planned
from preflash import _core
from preflash._check import tensors as _tensors
from preflash._check import torch_modes
from preflash._check.outputs import DEFAULT_OUTPUTS
from preflash.testing import Case, KvForm, MaskKind, build, runner
from torch.autograd import forward_ad

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = Case("paged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL,
             form=KvForm.COMBINED)  # fmt: skip
SPLIT = Case("split", (3, 5), (400, 90), 4, 2, 64, page_size=16, fixed_split_size=64)
NARROW_V = Case("narrow_v", (33, 5), (40, 90), 4, 2, 64, head_dim_vo=32)
MASKED = Case("masked", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.CUSTOM)
CASES = [RAGGED, PAGED, SPLIT, NARROW_V, MASKED]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


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
    counted = []
    original = _tensors.bind

    def bind(*arguments):
        counted.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(_tensors, "bind", bind)
    return counted


@pytest.fixture(params=[True, False], ids=["by table", "by methods"])
def reading(request, monkeypatch):
    """Both ways in which C++ reads tensors, of which an older torch has the second alone."""
    if not request.param:
        monkeypatch.setattr(torch_modes, "TORCH", older_torch())


def older_torch():
    return _core.Torch(object, torch.jit.is_tracing, torch.is_grad_enabled, torch.autograd)


def test_another_layer_is_not_checked_again(case, target, reading, checks):
    inputs, wrapper = planned(case, target)
    for _ in range(3):
        out = wrapper.run(*copied(tensors(inputs)))
        runner.compare(inputs, out, None).check()
    assert len(checks) == 1
    for _ in range(3):
        into = torch.full_like(out, float("nan"))
        assert wrapper.run(*copied(tensors(inputs)), out=into) is into
        runner.compare(inputs, into, None).check()
    assert len(checks) == 2


def test_runs_of_several_kinds_by_turns(case, target, reading, checks):
    """A launch for each, whatever ran between: with an LSE, in either order of its dimensions."""
    inputs, wrapper = planned(case, target)
    shape = (*inputs.q.shape[:2],)
    for _ in range(3):
        runner.compare(inputs, wrapper.run(*tensors(inputs)), None).check()
        out, lse = wrapper.run(*tensors(inputs), return_lse=True)
        runner.compare(inputs, out, lse).check()
        out, turned = wrapper.run(*tensors(inputs), return_lse=True, lse_layout="HN")
        assert torch.equal(turned, lse.T)
        into = torch.full(shape, float("nan"), device=target.device)
        out = wrapper.run(*tensors(inputs), lse=into)
        runner.compare(inputs, out, into).check()
        natural = wrapper.run(*tensors(inputs), return_lse=True, lse_base="ln")[1]
        torch.testing.assert_close(natural, lse * math.log(2.0))
    assert len(checks) == 4  # a base is a factor, not a launch


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


def by_methods(case, target):
    """A wrapper whose tensors are asked, as those of an older torch are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_modes, "TORCH", older_torch())
        return planned(case, target)[1]


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
    for one in (wrapper, by_methods(RAGGED, target)):
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
    for one in (wrapper, by_methods(RAGGED, target)):
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
    for one in (wrapper, by_methods(inputs.case, target)):
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
    """Repeated runs belong to one plan: the next plan has other lengths."""
    inputs, wrapper = planned(RAGGED, target)
    for _ in range(2):
        wrapper.run(*tensors(inputs))
    shorter = Case("shorter", (30, 5, 3, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
    other = build(shorter, device=target.device)
    runner.plan(wrapper, other)
    for _ in range(2):
        runner.compare(other, wrapper.run(*tensors(other)), None).check()


def test_the_next_plan_checks_no_tensor_again(case, target, reading, checks):
    inputs, wrapper = planned(case, target)
    wrapper.run(*tensors(inputs))
    for _ in range(2):
        runner.plan(wrapper, inputs)
        runner.compare(inputs, wrapper.run(*copied(tensors(inputs))), None).check()
    assert len(checks) == 1
    runner.plan(wrapper, inputs, sm_scale=0.5)  # a factor of runs
    wrapper.run(*tensors(inputs))
    assert len(checks) == 1
    runner.plan(wrapper, inputs, window_left=20)
    wrapper.run(*tensors(inputs))
    assert len(checks) == 2


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "message"),
    [
        ((33, 5, 0, 71), (40, 90, 7, 71), r"q has shape \(108, 4, 64\); must be \(109, 4, 64\)"),
        (
            (33, 5, 0, 70),
            (40, 90, 99, 70),
            r"k has shape .*; must be \(299, .* kv_indptr\[-1\]",
        ),
    ],
)
def test_longer_than_tensors_that_passed(target, qo_lens, kv_lens, message):
    """The lengths of each plan are compared with tensors that an earlier plan has checked."""
    inputs, wrapper = planned(RAGGED, target)
    wrapper.run(*tensors(inputs))
    longer = dataclasses.replace(RAGGED, qo_lens=qo_lens, kv_lens=kv_lens)
    runner.plan(wrapper, build(longer, device=target.device))
    with pytest.raises(ValueError, match=message):
        wrapper.run(*tensors(inputs))
    runner.plan(wrapper, inputs)
    runner.compare(inputs, wrapper.run(*tensors(inputs)), None).check()


def test_pages_beyond_a_cache_that_passed(target):
    """Page indices of each plan, too."""
    inputs, wrapper = planned(PAGED, target)
    q, cache = tensors(inputs)
    wrapper.run(q, cache)
    (qo_indptr, kv_indptr, pages, *others), options = runner.plan_arguments(inputs)
    beyond = pages.cpu().clone()
    beyond[3] = cache.shape[0]
    wrapper.plan(qo_indptr, kv_indptr, beyond, *others, **options)
    with pytest.raises(ValueError, match=f"paged_kv_indices holds {cache.shape[0]}; "):
        wrapper.run(q, cache)


def test_nothing_keeps_a_plan_alive(target):
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


def test_wrong_calls_of_what_runs():
    inputs = build(PAGED)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    runner.plan(wrapper, inputs)
    attend_to = wrapper._plan.default_variant
    usual = (*tensors(inputs), (1.0, 1.0), DEFAULT_OUTPUTS, None)
    attend_to(*usual)
    for wrong in (usual[:4], (*usual[:2], 1.0, *usual[3:]), (*usual[:3], None, None)):
        with pytest.raises(TypeError, match="a run takes q, kv, scales, outputs and memory"):
            attend_to(*wrong)
    with pytest.raises(ValueError, match="the plan has 1 segments; got tensors for 2"):
        attend_to(*usual, *usual)
    with pytest.raises((RuntimeError, TypeError)):
        attend_to(*usual[:4], inputs.q)
