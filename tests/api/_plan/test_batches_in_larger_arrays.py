"""Batches may be a part of larger arrays: indptr start anywhere, q is padded."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from fuzz import fmha_problems
from fuzz.fmha_problems import SPARE, FmhaCase
from fuzz.guarded import GivenOutputs
from fuzz.problems import Brought
from planned_cases import check_run, planned, tensors, unplanned
from preflash.testing import Case, MaskKind, poison, runner
from refusals import refused

PADDING = 3
RAGGED = Case("ragged", (9, 0, 33, 1), (40, 7, 90, 0), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
CASES = [
    RAGGED,
    dataclasses.replace(RAGGED, page_size=1),
    dataclasses.replace(RAGGED, fixed_split_size=32),
    dataclasses.replace(PAGED, mask=MaskKind.CUSTOM),
    dataclasses.replace(PAGED, dtype=torch.float8_e4m3fn),
]


def padded(rows: torch.Tensor, before: int = PADDING) -> torch.Tensor:
    """Returns the rows between others that hold NaN."""
    ends = [poison((n, *rows.shape[1:]), rows.dtype, rows.device) for n in (before, PADDING)]
    return torch.cat([ends[0], rows, ends[1]])


@contextlib.contextmanager
def poisoned_memory():
    """Makes torch fill each new tensor with NaN, so that values that nothing wrote are visible."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_indptr_may_start_anywhere(target, case, monkeypatch):
    """An engine plans the prefills of a batch and hands over the arrays of the whole batch: rows of
    no request are untouched in its outputs, 0 and -inf in new ones. The fuzzer draws other batches,
    and longer masks."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # foreign pages are not checked even then
    inputs, wrapper = unplanned(case, target)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    for where in sorted({"cpu", target.device}):
        arrays = ("qo_indptr", "kv_indptr")
        later = {name: (getattr(inputs, name) + PADDING).to(where) for name in arrays}
        if case.paged:
            # Entries before the first request may be anything: pages outside of the pool.
            foreign = torch.tensor([10**6, -1, 2**31 - 1], dtype=torch.int32)
            later["indices"] = torch.cat([foreign, inputs.indices.cpu(), foreign]).to(where)
            later["last_page_len"] = inputs.last_page_len.to(where)
        runner.plan(wrapper, dataclasses.replace(inputs, **later))
        inputs.variant = wrapper.variant  # whose products may be of 8 bits
        for brought, layout in itertools.product(
            (Brought.ABSENT, Brought.CONTIGUOUS), ("NH", "HN")
        ):
            given = GivenOutputs(inputs, layout, PADDING, out=brought, lse=brought)
            options = {"out": given.out, "lse": given.lse, "lse_layout": layout}
            with poisoned_memory():
                returned = wrapper.run(padded(inputs.q), *kv, return_lse=True, **options)
            result = given.settle(returned, with_lse=True)
            assert result.failures == []
            runner.compare(inputs, result.out, result.lse).check()


@pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)
def test_padded_q(target, case):
    """CUDA-graph buckets: q has more rows than the plan, which serves q without padding too."""
    inputs, wrapper = planned(case, target)
    (rows, heads, _), (_, *kv) = inputs.q.shape, tensors(inputs)
    q = padded(inputs.q, before=0)
    lse = torch.zeros(len(q), heads, device=target.device)
    runner.compare(inputs, wrapper.run(q, *kv)[:rows], None).check()
    check_run(inputs, wrapper)
    refused(r"q has shape .*at least qo_indptr\[-1\]", wrapper.run, q[: rows - 1], *kv)
    refused("^out has shape", wrapper.run, q, *kv, out=q[:rows].clone(), lse=lse)
    refused("^lse has shape", wrapper.run, q, *kv, out=q.clone(), lse=lse[:rows])


def test_rows_of_no_request_in_one_call(target):
    case = FmhaCase(RAGGED.qo_lens, (40, 7, 90, 1), stats=True)
    for where in sorted({"cpu", target.device}):
        inputs = fmha_problems.build(case, target.device, where)
        with poisoned_memory():
            result = fmha_problems.run(inputs, target.backend)
        assert fmha_problems.judge(inputs, result).failures == []
        out = result[0]
        assert not bool(out[:SPARE].any() or out[-SPARE:].any())
