"""Wrappers keep their contract of forms, buffers, options, workspaces and repeated plans."""

import dataclasses
import operator

import pytest
import torch
from fuzz import guarded
from planned_cases import check_run, planned, tensors, unplanned
from preflash.testing import Case, MaskKind, build, poison, runner
from refusals import refused

RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SPLIT_KV = dataclasses.replace(PAGED, name="split_kv", fixed_split_size=64)


def each(*cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


every_case, both = each(RAGGED, PAGED, SPLIT_KV), each(RAGGED, PAGED)


@every_case
def test_forms_of_the_result(target, case):
    """Base 2 and [tokens, heads] by default; the caller may overwrite lengths after plan().
    test_repeated_runs.py has the other forms, the fuzzer strided outputs."""
    inputs, wrapper = planned(case, target)
    given = tensors(inputs)
    for array in (inputs.qo_indptr, inputs.kv_indptr, *[inputs.last_page_len] * case.paged):
        array.fill_(-1)
    out, lse = wrapper.run(*given, return_lse=True)
    assert (out.dtype, out.device) == (inputs.q.dtype, inputs.q.device)
    assert (lse.dtype, lse.shape) == (torch.float32, inputs.q.shape[:2])
    runner.compare(inputs, out, lse).check()
    for same in (
        wrapper.run_return_lse(*given),
        wrapper.run(*given, return_lse=True, lse_base="log2", lse_layout="NH"),
    ):
        assert all(map(torch.equal, same, (out, lse)))


@both
def test_padded_q(target, case):
    """CUDA-graph buckets: q has more rows than the plan, which serves q without padding too."""
    inputs, wrapper = planned(case, target)
    (rows, heads, dim), (_, *kv) = inputs.q.shape, tensors(inputs)
    q = torch.cat([inputs.q, poison((3, heads, dim), case.dtype, target.device)])
    lse = torch.zeros(len(q), heads, device=target.device)
    runner.compare(inputs, wrapper.run(q, *kv)[:rows], None).check()
    check_run(inputs, wrapper)
    refused(r"q has shape .*at least qo_indptr\[-1\]", wrapper.run, q[: rows - 1], *kv)
    refused("^out has shape", wrapper.run, q, *kv, out=q[:rows].clone(), lse=lse)
    refused("^lse has shape", wrapper.run, q, *kv, out=q.clone(), lse=lse[:rows])


@both
def test_windows_of_run(case, target):
    """Later runs with a window find its variant at once: that of the current plan, though more
    windows have come since than variants are cached."""
    (_, wrapper), (_, twin) = (unplanned(case, target) for _ in range(2))
    windows = [*range(12), -1, 3, 1_000_000]
    other = dataclasses.replace(case, qo_lens=case.qo_lens[::-1], kv_lens=case.kv_lens[::-1])
    # C++ makes the second plan by itself, the third one has other options.
    for lengths, options in ((case, {}), (other, {}), (case, {"sm_scale": 0.3})):
        inputs = build(lengths, device=target.device)
        runner.plan(wrapper, inputs, **options)
        first = {window: wrapper.run(*tensors(inputs), window_left=window) for window in windows}
        for window, out in first.items():
            runner.plan(twin, inputs, window_left=window, **options)
            assert torch.equal(twin.run(*tensors(inputs)), out)
            assert torch.equal(wrapper.run(*tensors(inputs), window_left=window), out)
        windows.reverse()  # the next plan begins with the last window of this one
    for wrong in (-2, True, 1.5, "3"):
        given, error = tensors(inputs), (TypeError, ValueError)
        refused("window_left", wrapper.run, *given, error=error, window_left=wrong)


def test_attributes(target):
    """The soft cap is the caller's double, which engines compare; kernels have it in float32.
    Which of fa2 and fa3 "auto" chooses depends on what is compiled (tests/gpu)."""
    case = Case("attributes", (9,), (30,), 4, 2, 64, window_left=12, soft_cap=0.3, sm_scale=0.25)
    inputs, wrapper = planned(case, target, causal=True)
    shown = operator.attrgetter("_window_left", "_logits_soft_cap", "_causal")
    assert shown(wrapper) == (12, 0.3, True)
    assert (wrapper._sm_scale, wrapper._backend) == (0.25, target.backend)
    assert wrapper.is_cuda_graph_enabled is False
    runner.plan(wrapper, inputs, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None)
    assert shown(wrapper) == (-1, 0.0, False)
    assert isinstance(wrapper._logits_soft_cap, float)
    wrapper = runner.planned(inputs, backend="auto")
    families = {"cpu": "cpu_", "fa2": "sm80_", "fa3": "sm90_"}
    assert wrapper.variant.startswith(families[wrapper._backend])
    assert (wrapper._backend == "cpu") is (target.device == "cpu")


def test_workspace_size_is_enough_and_needed(target):
    """One launch needs it: a smaller workspace takes two. No other byte is written."""
    case = Case("split", (2, 70), (700, 300), 4, 2, 64, page_size=16, fixed_split_size=64)
    inputs, wrapper = unplanned(case, target)
    positional, options = runner.plan_arguments(inputs)
    float_bytes, int_bytes = wrapper.workspace_size(*positional, **options)
    assert float_bytes > 2 * 4 * 64 * 4  # at least two partial rows per query head
    for less, rounds in ((0, 1), (16, 2)):
        memory = guarded.workspace(float_bytes - less, target.device)
        wrapper.reset_workspace_buffer(memory.given, runner.workspace(target.device, 2 * int_bytes))
        runner.plan(wrapper, inputs)
        check_run(inputs, wrapper)
        assert wrapper._plan_info.num_rounds == rounds
        assert memory.failures("workspace") == []
    for split in ({"fixed_split_size": None}, {"disable_split_kv": True}):
        runner.plan(wrapper, inputs, **split)
        check_run(inputs, wrapper)
