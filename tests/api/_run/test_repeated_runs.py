"""Properties of tensors are checked once, and runs for equal ones find their launch in C++
(test_call_times.py); no result or refusal depends on earlier runs."""

import dataclasses
import math

import pytest
import torch
from planned_cases import planned, tensors
from preflash import _core
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


def copied(given):
    """Copies the tensors, as another layer's cache would be."""
    if isinstance(given, (list, tuple)):
        return type(given)(copied(one) for one in given)
    copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return copy.copy_(given)


def older_torch():
    """Returns the seam by which C++ reads tensors under an older torch: by their methods."""
    return _core.Torch(object, torch.jit.is_tracing, torch.is_grad_enabled, torch.autograd)


@pytest.fixture(params=["by table", "by methods"])
def _reading(request, monkeypatch):
    if request.param == "by methods":
        monkeypatch.setattr(torch_modes, "TORCH", older_torch())


@pytest.mark.usefixtures("_reading")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runs_of_every_form_for_other_tensors(case, target):
    """Each form of run() has its launch, for every layer and for later plans."""
    inputs, wrapper = planned(case, target)
    rows = inputs.q.shape[:2]
    for options in ({}, {}, {"sm_scale": 0.5}, {"window_left": 20}, {}):
        runner.plan(wrapper, inputs, **options)
        for _ in range(3):
            results = [(wrapper.run(*copied(tensors(inputs))), None)]
            into = torch.full_like(inputs.q[..., : case.dim_vo], float("nan"))
            assert wrapper.run(*copied(tensors(inputs)), out=into) is into
            results.append((into, None))
            out, lse = wrapper.run(*tensors(inputs), return_lse=True)
            results.append((out, lse))
            into = torch.full(rows[::-1], float("nan"), device=target.device)
            for buffer in ({}, {"lse": into}):
                form = {"return_lse": True, "lse_layout": "HN", **buffer}
                assert torch.equal(wrapper.run(*tensors(inputs), **form)[1], lse.T)
            into = torch.full(rows, float("nan"), device=target.device)
            results.append((wrapper.run(*tensors(inputs), lse=into), into))
            for out, into in results:
                assert torch.equal(out, results[0][0])
                assert into is None or torch.equal(into, lse)
            natural = wrapper.run(*tensors(inputs), return_lse=True, lse_base="ln")[1]
            torch.testing.assert_close(natural, lse * math.log(2.0))
        if not options:
            runner.compare(inputs, results[0][0], lse).check()


def test_few_launches_are_kept(target):
    """Launches for many shapes of q replace each other."""
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    longer = [torch.cat([q, q.new_zeros(n, *q.shape[1:])]) for n in range(70)]
    for n in (0, *range(70), 69, 68):
        found = wrapper.run(longer[n], k, v)
        runner.compare(inputs, found[: q.shape[0]], None).check()


def wider(t):
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
    found = []
    for older in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if older:
                patch.setattr(torch_modes, "TORCH", older_torch())
            case = PAGED if place in ("cache", "first_of_pair") else RAGGED
            inputs, wrapper = planned(case, target)
        usual, options = list(tensors(inputs)), {}
        if place == "first_of_pair":
            usual[1] = (inputs.cache[:, 0], inputs.cache[:, 1])
        if place in ("out", "q_with_out"):
            options["out"] = torch.full_like(inputs.q, float("nan"))
        for _ in range(2):
            wrapper.run(*usual, **options)
        given, into = list(usual), dict(options)
        if place == "out":
            into["out"] = CHANGES[change](into["out"])
        elif place == "first_of_pair":
            given[1] = (CHANGES[change](usual[1][0]), usual[1][1])
        else:
            given[PLACES[place]] = CHANGES[change](usual[PLACES[place]])
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
