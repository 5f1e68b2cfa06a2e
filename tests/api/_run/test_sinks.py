"""Sinks come with a run: what is accepted, and what of it reaches the kernel."""

import dataclasses

import pytest
import torch
from planned_cases import planned
from preflash import _core
from preflash.testing import Case, MaskKind, build, reference, runner
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS = 4
RAGGED = Case("ragged", (33, 5), (40, 90), HEADS, 2, 64)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SINGLE = Case("single", (9,), (30,), HEADS, 2, 64)
SPLIT = dataclasses.replace(RAGGED, name="split", fixed_split_size=64)


def freed(t):
    t.untyped_storage().resize_(0)
    return t


def freed_view(t):
    """View of freed storage past its first elements: its address is not null."""
    t = torch.cat([t.new_zeros(1000), t])[1000:]
    t.untyped_storage().resize_(0)
    return t


REFUSED = {
    "freed view": (freed_view, ValueError, "no memory behind it"),
    "a_list": (lambda t: [t], TypeError, "must be a torch.Tensor; got list"),
    "a_number": (lambda t: 0.5, TypeError, "must be a torch.Tensor; got float"),
    "half": (torch.Tensor.half, TypeError, "torch.float16; must be torch.float32"),
    "double": (torch.Tensor.double, TypeError, "torch.float64; must be torch.float32"),
    "too_few": (lambda t: t[:-1], ValueError, r"shape \(3,\); must be \(4,\): \[num_qo_heads\]"),
    "two_dimensional": (lambda t: t[None], ValueError, r"shape \(1, 4\); must be \(4,\)"),
    "strided": (lambda t: t.repeat(2)[::2], ValueError, r"strides \(2,\); must be contiguous"),
    "meta": (lambda t: t.to("meta"), ValueError, "no memory behind it"),
    "fake": (lambda t: FakeTensorMode().from_tensor(t), ValueError, "no memory behind it"),
    "freed": (freed, ValueError, "no memory behind it"),
    "requires_grad": (torch.Tensor.requires_grad_, NotImplementedError, "requires grad"),
}
refused = pytest.mark.parametrize(("spoil", "error", "why"), REFUSED.values(), ids=REFUSED)


def sinks_on(device) -> torch.Tensor:
    return torch.tensor([0.5, -1.0, -float("inf"), 30.0], device=device)


def named(error, why):
    return why if error is NotImplementedError else f"^sinks .*{why}"


@refused
@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_run_refuses(target, case, spoil, error, why):
    inputs, wrapper = planned(case, target)
    for seen in range(2):
        if seen:
            runner.run(wrapper, inputs, sinks=sinks_on(target.device))
        with pytest.raises(error, match=named(error, why)):
            runner.run(wrapper, inputs, sinks=spoil(sinks_on(target.device)))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@refused
def test_single_refuses(target, spoil, error, why):
    inputs = build(SINGLE, device=target.device)
    for masked in (False, True):
        mask = torch.ones(9, 30, dtype=torch.bool, device=target.device) if masked else None
        with pytest.raises(error, match=named(error, why)):
            runner.single(
                inputs,
                backend=target.backend,
                custom_mask=mask,
                sinks=spoil(sinks_on(target.device)),
            )
    runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


@pytest.mark.gpu
def test_sinks_on_another_device():
    inputs = build(RAGGED, device="cuda")
    wrapper = runner.make_wrapper(RAGGED, backend="auto", device="cuda")
    runner.plan(wrapper, inputs)
    with pytest.raises(ValueError, match="sinks is on cpu"):
        runner.run(wrapper, inputs, sinks=sinks_on("cpu"))


@pytest.mark.parametrize("case", [RAGGED, SPLIT], ids=lambda case: case.name)
def test_outputs_lie_apart_from_sinks(target, case):
    inputs, wrapper = planned(case, target)
    out = torch.empty_like(inputs.q)
    within = out.view(-1)[64 : 64 + 2 * HEADS].view(torch.float32)
    with pytest.raises(ValueError, match="out shares memory with sinks"):
        wrapper.run(inputs.q, inputs.k, inputs.v, out=out, sinks=within)
    lse = torch.empty(inputs.q.shape[:2], device=target.device)
    with pytest.raises(ValueError, match="lse shares memory with sinks"):
        wrapper.run(inputs.q, inputs.k, inputs.v, lse=lse, sinks=lse[-1])
    beside = torch.empty(lse.numel() + HEADS, device=target.device)
    lse, sinks = beside[:-HEADS].view(lse.shape), beside[-HEADS:]
    wrapper.run(inputs.q, inputs.k, inputs.v, lse=lse, sinks=sinks.zero_())


@pytest.fixture
def extras(monkeypatch):
    """Records, for every launch, whether it has a mask, and the address of its sinks (0: none)."""
    seen = []
    original = _core.RunMemory

    def spy(*arguments, mask_bits, sinks, **others):
        address = 0 if sinks is None else sinks.data_ptr()
        seen.append({"masked": mask_bits is not None, "sinks": address})
        return original(*arguments, mask_bits=mask_bits, sinks=sinks, **others)

    monkeypatch.setattr(_core, "RunMemory", spy)
    return seen


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM], ids=lambda mask: mask.name)
@pytest.mark.parametrize("case", [RAGGED, PAGED, SPLIT], ids=lambda case: case.name)
def test_sinks_of_one_run(target, case, mask):
    """Other sinks, and other memory of a size, count from run to run; none count without sinks."""
    inputs, wrapper = planned(dataclasses.replace(case, mask=mask), target)
    for sinks in (sinks_on(target.device), sinks_on(target.device).flip(0) * 3):
        given = dataclasses.replace(inputs, sinks=sinks)
        windowed = dataclasses.replace(given, case=dataclasses.replace(given.case, window_left=3))
        half = dataclasses.replace(given.pipeline, sm_scale=given.pipeline.sm_scale * 0.5)
        for expected, options in (
            (reference(given), {}),
            (reference(windowed), {"window_left": 3}),
            (reference(given, pipeline=half), {"k_scale": 0.5}),
            (reference(given), {}),
        ):
            result = runner.run(wrapper, inputs, sinks=sinks, **options)
            runner.compare(given, *result, expected).check()
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.CUSTOM], ids=lambda mask: mask.name)
def test_a_single_request_hands_them_on(target, mask, extras):
    inputs = build(dataclasses.replace(SINGLE, mask=mask), device=target.device)
    sinks = sinks_on(target.device)
    for _ in range(2):
        extras.clear()
        runner.single(inputs, backend=target.backend, sinks=sinks)
        assert extras == [{"masked": mask is MaskKind.CUSTOM, "sinks": sinks.data_ptr()}]
    runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


def test_not_planned(target):
    wrapper = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    x = torch.zeros(1, HEADS, 64, device=target.device)
    with pytest.raises(ValueError, match="plan"):
        wrapper.run(x, x, x, sinks=sinks_on(target.device))
