"""Two batches in one launch on the CPU: each is compared with the oracle, and with itself alone."""

import dataclasses
import itertools

import pytest
import torch
from fuzz.guarded import bits
from fuzz.random_cases import random_cases
from preflash import _core
from preflash._check.arguments import PerHead
from preflash._check.outputs import Outputs
from preflash._check.request import Request
from preflash._plan import pipeline
from preflash._run.variant import SegmentRun, new_workspace, run_memory
from preflash.testing import runner
from preflash.testing.case import Case, KvForm, MaskKind, Position, Sinks
from preflash.testing.comparison import poison
from preflash.testing.inputs import Inputs, build

CPU = torch.device("cpu")

# A prefill beside what it might meet: decode with other lengths, heads, dtypes and options.
PREFILL = Case(
    "prefill", (37, 0, 150), (100, 9, 150), num_qo_heads=6, num_kv_heads=2, mask=MaskKind.CAUSAL
)
MASKED = dataclasses.replace(PREFILL, name="masked", mask=MaskKind.CUSTOM, window_left=60)
DECODE = Case(
    "decode",
    (1, 1, 0, 1, 1),
    (1, 700, 5, 0, 2049),
    num_qo_heads=8,
    num_kv_heads=2,
    page_size=16,
    head_dim=64,
)
WINDOW = dataclasses.replace(
    DECODE, name="window", window_left=300, page_size=1, form=KvForm.COMBINED, layout="HND"
)
SPLIT = dataclasses.replace(DECODE, name="split", fixed_split_size=128, sinks=Sinks.MIXED)
BIASED = dataclasses.replace(
    PREFILL, name="biased", position=Position.ALIBI, soft_cap=20.0, dtype=torch.float16
)
SPLIT_PREFILL = dataclasses.replace(PREFILL, name="split prefill", fixed_split_size=64)
EMPTY = dataclasses.replace(DECODE, name="empty", qo_lens=(), kv_lens=())
KEYLESS = dataclasses.replace(DECODE, name="keyless", qo_lens=(2, 1), kv_lens=(0, 0))

PAIRS = [
    (PREFILL, DECODE),
    (MASKED, DECODE),
    (MASKED, WINDOW),
    (BIASED, SPLIT),
    (SPLIT_PREFILL, SPLIT),
    (DECODE, MASKED),
    (WINDOW, WINDOW),
    (MASKED, MASKED),
    (EMPTY, PREFILL),
    (PREFILL, EMPTY),
    (EMPTY, EMPTY),
    (KEYLESS, SPLIT),
]


def planned(inputs: list[Inputs], float_bytes: int = 32 << 20) -> tuple[_core.PlannedVariant, list]:
    """The plan of both, and the request of each."""
    requests = []
    for one in inputs:
        wrapper = runner.make_wrapper(one.case, backend="cpu")
        runner.plan(wrapper, one)
        requests.append(wrapper._plan.request)
    partials = torch.full((float_bytes // 4,), torch.nan).view(torch.uint8)
    return pipeline.made(new_workspace(CPU, partials), "cpu", *requests), requests


def poisoned_run(inputs: Inputs, request: Request, plan: _core.PlannedVariant) -> SegmentRun:
    case, shape = inputs.case, (inputs.q.shape[0], inputs.case.num_qo_heads)
    kv = inputs.cache if case.paged else (inputs.k, inputs.v)
    outputs = Outputs(
        out=poison((*shape, case.dim_vo), case.dtype_o),
        lse=poison(shape, torch.float32),
        return_lse=True,
    )
    of_heads = PerHead(inputs.sinks, inputs.scales.q, inputs.scales.k, inputs.scales.v)
    memory = run_memory(plan.workspace.float_tensor, request.mask, of_heads)
    return SegmentRun(inputs.q, kv, request.scales, outputs, memory)


def attend(plan: _core.PlannedVariant, *runs: SegmentRun) -> tuple:
    return plan(*itertools.chain(*runs))


def check(cases: tuple[Case, Case]) -> tuple[_core.PlannedVariant, list]:
    inputs = [build(case, seed=index) for index, case in enumerate(cases)]
    plan, requests = planned(inputs)
    results = attend(
        plan, *(poisoned_run(*one, plan) for one in zip(inputs, requests, strict=True))
    )
    for one, (out, lse) in zip(inputs, results, strict=True):
        if one.case.batch_size > 0:
            runner.compare(one, out, lse).check()
    return plan, list(zip(inputs, results, strict=True))


@pytest.mark.parametrize("cases", PAIRS, ids=lambda pair: f"{pair[0].name}+{pair[1].name}")
def test_pairs(cases):
    plan, _ = check(cases)
    assert plan.plan.num_segments == 2
    assert plan.plan.id.count("+") == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs(seed):
    """Any two cases, however little they have in common."""
    first, second = random_cases(2, seed=1000 + seed, longest=200, work=2e8)
    check((first, second))


def test_a_fixed_split_keeps_its_bits():
    """A segment's result is the same alone and with another segment."""
    _, results = check((SPLIT_PREFILL, SPLIT))
    for inputs, (out, lse) in results:
        wrapper = runner.make_wrapper(inputs.case, backend="cpu")
        runner.plan(wrapper, inputs)
        alone, lse_alone = runner.run(wrapper, inputs)
        assert torch.equal(bits(out), bits(alone))
        assert torch.equal(bits(lse), bits(lse_alone))


def test_both_segments_are_split():
    plan, _ = check((SPLIT_PREFILL, SPLIT))
    assert plan.plan.num_merges > 0
    alone = [planned_alone(case) for case in (SPLIT_PREFILL, SPLIT)]
    assert plan.plan.num_merges == sum(one.num_merges for one in alone)
    assert plan.plan.float_bytes == sum(one.float_bytes for one in alone)
    assert plan.plan.num_items == sum(one.num_items for one in alone)


def planned_alone(case: Case) -> _core.Plan:
    wrapper = runner.make_wrapper(case, backend="cpu")
    runner.plan(wrapper, build(case, seed=0))
    return wrapper._plan.primary.plan


def pair_of_runs() -> tuple[_core.PlannedVariant, list[SegmentRun]]:
    inputs = [build(case, seed=index) for index, case in enumerate((PREFILL, DECODE))]
    plan, requests = planned(inputs)
    return plan, [poisoned_run(*one, plan) for one in zip(inputs, requests, strict=True)]


def test_outputs_may_not_lie_on_the_other_segment():
    plan, (first, second) = pair_of_runs()
    rows = first.q.shape[0]
    memory = second.q.new_empty(rows * 6 * 128 + second.q.numel())
    q = memory[: second.q.numel()].view(second.q.shape).copy_(second.q)
    lying = first.outputs._replace(out=memory[: rows * 6 * 128].view(rows, 6, 128))
    with pytest.raises(ValueError, match="prefill side's out shares memory with decode side's q"):
        attend(plan, first._replace(outputs=lying), second._replace(q=q))
    both = second.outputs._replace(lse=first.outputs.lse.view(-1)[: second.outputs.lse.numel()])
    both = both._replace(lse=both.lse.view(second.outputs.lse.shape))
    with pytest.raises(ValueError, match="prefill side's lse shares memory with decode side's lse"):
        attend(plan, first, second._replace(outputs=both))


def test_in_place_is_allowed_within_a_segment():
    plan, (first, second) = pair_of_runs()
    expected, _ = attend(plan, first, second)[0]
    expected = expected.clone()
    q = first.q.clone()
    in_place = first._replace(q=q, outputs=first.outputs._replace(out=q))
    (out, _), _ = attend(plan, in_place, second)
    assert torch.equal(bits(out), bits(expected))


def test_a_run_brings_every_segment():
    plan, (first, _) = pair_of_runs()
    with pytest.raises(ValueError, match="the plan has 2 segments; got tensors for 1"):
        attend(plan, first)


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_segments(count):
    request = planned([build(DECODE, seed=0)])[1][0]
    segments = [(request.options, request.batch, 0, 0)] * count
    with pytest.raises(ValueError, match=f"a launch has one or two segments, not {count}"):
        _core.plan(_core.Family.cpu, -1, segments, 1 << 20)


def test_errors_name_the_segment():
    good = planned([build(DECODE, seed=0)])[1][0]
    bad = good._replace(options=good.options.replace(num_qo_heads=9))
    with pytest.raises(ValueError, match="segment 1: num_qo_heads = 9 is not a multiple of"):
        pipeline.made(new_workspace(CPU), "cpu", good, bad)


def test_other_backends_refuse_two_segments():
    """Options without two-segment kernels are refused; the error says what would work."""
    capped = dataclasses.replace(DECODE, name="capped", soft_cap=20.0)
    request = planned([build(capped, seed=0)])[1][0]
    segments = [(request.options, request.batch, 0, 0)] * 2
    for family in _core.families():
        if _core.traits_of(family).on_cpu:
            continue
        with pytest.raises(NotImplementedError) as refused:
            _core.plan(family, -1, segments, 1 << 20)
        assert "logits softcap" in str(refused.value)
        assert "segments two" in str(refused.value)
        assert 'backend "cpu"' in str(refused.value)
        if _core.find_error(family, request.options) is None:
            ways = str(refused.value).partition("What would work: the same with ")[2]
            assert "segments one" in ways


def test_wrappers_go_on_with_their_batches():
    """A batch may be planned alone and beside another one."""
    inputs = [build(case, seed=3) for case in (PREFILL, DECODE)]
    wrappers = [runner.make_wrapper(one.case, backend="cpu") for one in inputs]
    for wrapper, one in zip(wrappers, inputs, strict=True):
        runner.plan(wrapper, one)
    requests = [wrapper._plan.request for wrapper in wrappers]
    pipeline.made(new_workspace(CPU, runner.workspace()), "cpu", *requests)
    for wrapper, one in zip(wrappers, inputs, strict=True):
        runner.compare(one, *runner.run(wrapper, one)).check()
