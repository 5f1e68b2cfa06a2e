"""Properties of tensors are checked once, and runs for equal ones find their launch in C++
(test_call_times.py); no result or refusal depends on earlier runs."""

import dataclasses
import itertools
import math

import pytest
import torch
from changed_tensors import freed, meta, misaligned, negative, wide_rows
from planned_cases import planned, tensors
from preflash import _core
from preflash._check import torch_modes
from preflash.testing import Case, KvForm, MaskKind, build, runner
from refusals import refused

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16, form=KvForm.COMBINED)
CASES = [
    RAGGED,
    PAGED,
    Case("split", (3, 5), (400, 90), 4, 2, 64, page_size=16, fixed_split_size=64),
    Case("narrow_v", (33, 5), (40, 90), 4, 2, 64, head_dim_vo=32),
    Case("masked", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.CUSTOM),
]


def read_by_methods(monkeypatch) -> None:
    """Makes C++ read tensors by their methods, as under an older torch."""
    older = _core.Torch(object, torch.jit.is_tracing, torch.is_grad_enabled, torch.autograd)
    monkeypatch.setattr(torch_modes, "TORCH", older)


def copied(given):
    """Copies the tensors, as another layer's cache would be."""
    if isinstance(given, (list, tuple)):
        return type(given)(copied(one) for one in given)
    copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
    return copy.copy_(given)


@pytest.mark.parametrize("by_methods", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runs_of_every_form_for_other_tensors(case, target, by_methods, monkeypatch):
    """Each form of run() has its launch, for every layer and for later plans."""
    if by_methods:
        read_by_methods(monkeypatch)
    inputs, wrapper = planned(case, target)
    rows = inputs.q.shape[:2]
    for options in ({}, {}, {"sm_scale": 0.5}, {"window_left": 20}, {}):
        runner.plan(wrapper, inputs, **options)
        for _ in range(3):
            out, lse = wrapper.run(*tensors(inputs), return_lse=True)
            assert torch.equal(wrapper.run(*copied(tensors(inputs))), out)
            into = torch.full_like(out, float("nan"))
            assert wrapper.run(*copied(tensors(inputs)), out=into) is into
            assert torch.equal(into, out)
            sums = torch.full(rows, float("nan"), device=target.device)
            assert torch.equal(wrapper.run(*tensors(inputs), lse=sums), out)
            assert torch.equal(sums, lse)
            by_head = torch.full(rows[::-1], float("nan"), device=target.device)
            for buffer in ({}, {"lse": by_head}):
                form = {"return_lse": True, "lse_layout": "HN", **buffer}
                assert torch.equal(wrapper.run(*tensors(inputs), **form)[1], lse.T)
            assert torch.equal(by_head, lse.T)
            natural = wrapper.run(*tensors(inputs), return_lse=True, lse_base="ln")[1]
            torch.testing.assert_close(natural, lse * math.log(2.0))
        if not options:
            runner.compare(inputs, out, lse).check()


def test_few_launches_are_kept(target):
    """Launches for many shapes of q replace each other."""
    inputs, wrapper = planned(RAGGED, target)
    q, k, v = tensors(inputs)
    expected = wrapper.run(q, k, v)
    runner.compare(inputs, expected, None).check()
    for n in (*range(70), 69, 68):
        longer = torch.cat([q, q.new_zeros(n, *q.shape[1:])])
        assert torch.equal(wrapper.run(longer, k, v)[: q.shape[0]], expected)


class Plain(torch.Tensor):
    pass


CHANGES = {
    "same": lambda t: t,
    "more rows": lambda t: torch.cat([t, t[:3]]),
    "fewer rows": lambda t: t[:-1],
    "strides": lambda t: wide_rows(t, 2 * t.shape[-1]),
    "dtype": lambda t: t.float(),
    "heads": lambda t: t[:, :2],
    "dimensions": lambda t: t[None],
    "a subclass": lambda t: t.as_subclass(Plain),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a gradient": lambda t: t.clone().requires_grad_(),
    "on the device meta": meta,
    "sparse": torch.Tensor.to_sparse,
    "freed": freed,
    "unaligned": misaligned,
    "negative": negative,
    "a list": torch.Tensor.tolist,
    "none": lambda t: None,
    "an array": lambda t: t.float().cpu().numpy(),
}
# A tensor's place among the arguments; -1: out.
PLACES = {"q": 0, "q_with_out": 0, "k": 1, "v": 2, "cache": 1, "first_of_pair": 1, "out": -1}
CHANGED = [
    (place, change)
    for place, change in itertools.product(PLACES, CHANGES)
    # A batch may own the last pages of a cache or not.
    if not (place in ("cache", "first_of_pair") and change == "fewer rows")
    if place == "out" or change != "an array"
]


def outcome(inputs, wrapper, place: str, change=lambda t: t):
    given, options = list(tensors(inputs)), {}
    if place in ("out", "q_with_out"):
        options["out"] = torch.full_like(inputs.q, float("nan"))
    if place == "out":
        options["out"] = change(options["out"])
    elif place == "first_of_pair":
        given[1] = (change(inputs.cache[:, 0]), inputs.cache[:, 1])
    else:
        given[PLACES[place]] = change(given[PLACES[place]])
    try:
        return wrapper.run(*given, **options)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize(("place", "change"), CHANGED)
def test_another_tensor(target, place, change, monkeypatch):
    """Both ways in which C++ reads tensors find the same result or the same error, in a first run
    and after others."""
    found, case = [], PAGED if place in ("cache", "first_of_pair") else RAGGED
    for by_methods in (False, True):
        if by_methods:
            read_by_methods(monkeypatch)
        for runs_before in (0, 2):
            inputs, wrapper = planned(case, target)
            for _ in range(runs_before):
                assert torch.is_tensor(outcome(inputs, wrapper, place))
            found.append(outcome(inputs, wrapper, place, CHANGES[change]))
            assert torch.is_tensor(outcome(inputs, wrapper, place))
    if isinstance(found[0], tuple):
        assert found[:2] == found[2:]
        if (place, change) != ("cache", "freed"):  # a first run's slices raise torch's own error
            assert found[0][0] is found[1][0]
        return
    for out in found:
        assert out.shape == found[0].shape
        out = out[: inputs.q.shape[0]].detach().as_subclass(torch.Tensor)
        runner.compare(inputs, out, None).check()


def test_a_pair_after_a_cache(target):
    inputs, wrapper = planned(PAGED, target)
    q, cache = tensors(inputs)
    pair = (cache[:, 0], cache[:, 1])
    for kv in (cache, cache, pair, pair, list(pair), cache, pair[::1], cache):
        runner.compare(inputs, wrapper.run(q, kv), None).check()


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


REFUSED = {
    **{f"vmap {n}": (vmap(i), ValueError, f"^{n} has no memory.*torch.func")
       for i, n in enumerate("qkv")},
    "masked": (masked, ValueError, r"^q has no memory .* MaskedTensor"),
    "rows": (planned_longer(qo_lens=(33, 5, 0, 71), kv_lens=(40, 90, 7, 71)), ValueError,
             r"q has shape \(108, 4, 64\); must be \(109, 4, 64\)"),
    "keys": (planned_longer(kv_lens=(40, 90, 99, 70)), ValueError,
             r"k has shape .*; must be \(299, .* kv_indptr\[-1\]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(("call", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_after_runs(target, call, error, says):
    """Tensors that passed are refused in another call, and with a longer plan."""
    inputs, wrapper = planned(dataclasses.replace(RAGGED, dtype=torch.float16), target)
    for runs_before in (0, 2):
        for _ in range(runs_before):
            wrapper.run(*tensors(inputs))
            wrapper.run(*tensors(inputs), out=torch.empty_like(inputs.q))
        refused(says, call, wrapper, *tensors(inputs), error=error)
        runner.plan(wrapper, inputs)
        runner.compare(inputs, wrapper.run(*tensors(inputs)), None).check()
