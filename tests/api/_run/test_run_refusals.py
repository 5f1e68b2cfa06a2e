"""run() and single calls refuse wrong sinks and factors of heads, and go on with the plan."""

import dataclasses

import pytest
import torch
from planned_cases import check_run, mistakes, planned, spoil
from preflash.testing import Case, MaskKind, build, runner
from torch._subclasses.fake_tensor import FakeTensorMode

SINKS = Case("sinks", (33, 5), (40, 90), 4, 2, 64)
FP8 = Case("fp8", (9, 3), (30, 5), 4, 2, 64, dtype=torch.float8_e4m3fn, mask=MaskKind.CAUSAL,
           page_size=16, head_scales=True)  # fmt: skip
SINGLE = Case("single", (9,), (30,), 4, 2, 64)


def freed(t):
    t.untyped_storage().resize_(0)
    return t


def freed_view(t):
    """Returns a view of freed storage, whose address is not null."""
    t = torch.cat([t.new_zeros(1000), t])[1000:]
    return freed(t)


def meta(t):
    return t.to("meta")


def fake(t):
    return FakeTensorMode().from_tensor(t)


def strided(t):
    return t.repeat(2)[::2]


NO_MEMORY = "^sinks .*no memory behind it"
SINKS_REFUSED = [
    ("sinks", ValueError, *([change, NO_MEMORY] for change in (freed, freed_view, meta, fake)),
     [lambda t: t[:-1], r"^sinks .*\(3,\); must be \(4,\): \[num_qo_heads\]"],
     [lambda t: t[None], r"^sinks .*shape \(1, 4\); must be \(4,\)"],
     [strided, r"^sinks .*\(2,\); must be contiguous"]),
    ("sinks", TypeError, [lambda t: [t], "^sinks .*must be a torch.Tensor; got list"],
     [torch.Tensor.double, "^sinks .*torch.float64; must be torch.float32"]),
    ("sinks", NotImplementedError, [torch.Tensor.requires_grad_, "requires grad"]),
]  # fmt: skip
FACTORS_REFUSED = [
    ("scale_k", TypeError, [torch.Tensor.tolist, "scale_k must be a torch.Tensor"]),
    ("scale_v", TypeError, [torch.Tensor.half, "scale_v is torch.float16; must be"]),
    ("scale_q", ValueError, [lambda t: t[:-1], r"scale_q has shape \(3,\).*num_qo_heads"],
     [strided, "scale_q has strides"]),
    ("scale_v", ValueError, [lambda t: t.repeat(2), r"scale_v has shape \(4,\).*num_kv_he"]),
    ("scale_k", ValueError, [meta, "scale_k has no memory"]),
    ("k_scale", ValueError, [torch.ones(2), r"k_scale has 2 elements.*scale_k"]),
]  # fmt: skip
ROW = ("argument", "value", "error", "says")
ROWS = [
    pytest.param(case, *row.values, id=f"{case.name}-{row.id}")
    for case, rows in ((SINKS, SINKS_REFUSED), (FP8, FACTORS_REFUSED))
    for row in mistakes(*rows)
]


def sinks(target) -> torch.Tensor:
    return target.to(torch.tensor([0.5, -1.0, -torch.inf, 30.0]))


@pytest.mark.parametrize(("case", *ROW), ROWS)
def test_run(target, case, argument, value, error, says):
    """run() refuses the value in a first call, and after a call with right values."""
    inputs, wrapper = planned(case, target)
    for runs_before in (0, 1):
        given = {f"scale_{name}": factors for name, factors in vars(inputs.scales).items()}
        if case is SINKS:
            given = {"sinks": sinks(target)}
        for _ in range(runs_before):
            runner.run(wrapper, inputs, **given)
        spoil(given, argument, value, target)
        with pytest.raises(error, match=says):
            runner.run(wrapper, inputs, **given)
    check_run(inputs, wrapper)


@pytest.mark.parametrize(ROW, mistakes(*SINKS_REFUSED))
def test_single(target, argument, value, error, says):
    inputs = build(SINGLE, device=target.device)
    for mask in (None, target.to(torch.ones(9, 30, dtype=torch.bool))):
        given = {"sinks": sinks(target)}
        spoil(given, argument, value, target)
        with pytest.raises(error, match=says):
            runner.single(inputs, backend=target.backend, custom_mask=mask, **given)
    runner.compare(inputs, *runner.single(inputs, backend=target.backend)).check()


@pytest.mark.parametrize("kv", [None, torch.float8_e4m3fn], ids=["f16", "e4m3"])
def test_factors_of_heads_are_for_fp8(target, kv):
    case = dataclasses.replace(FP8, dtype=torch.float16, kv_dtype=kv, head_scales=False)
    inputs, wrapper = planned(case, target)
    for name, heads in (("scale_q", 4), ("scale_k", 2), ("scale_v", 2)):
        factors = {name: torch.ones(heads, device=target.device)}
        if kv is None or name == "scale_q":
            with pytest.raises(ValueError, match=f"{name}: only an fp8 tensor.*{name[-1]}_scale"):
                runner.run(wrapper, inputs, **factors)
        else:
            check_run(inputs, wrapper, **factors)
