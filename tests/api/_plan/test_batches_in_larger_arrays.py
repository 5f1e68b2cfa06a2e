"""Batches may be a part of larger arrays: indptr start anywhere, q is padded, masks are longer."""

import contextlib
import dataclasses
import functools
import itertools
import math

import preflash
import pytest
import torch
from fuzz.guarded import GivenOutputs
from fuzz.problems import Brought
from planned_cases import check_run, plan_decode, planned, tensors, unplanned
from preflash.testing import Case, MaskKind, build, poison, runner
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
    """Rows of no request in the outputs and statistics of trtllm_fmha_v2_prefill."""
    case = dataclasses.replace(RAGGED, kv_lens=(40, 7, 90, 1))
    inputs = build(case, device=target.device)
    q, rows = padded(inputs.q, before=0), inputs.q.shape[0]
    for where in sorted({"cpu", target.device}):
        with poisoned_memory():
            out, stats = preflash.trtllm_fmha_v2_prefill(
                (q, inputs.k, inputs.v), "SEPARATE_Q_K_V", runner.workspace(target.device),
                seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32, device=where),
                max_q_len=max(case.qo_lens), max_kv_len=max(case.kv_lens),
                bmm1_scale=case.head_dim**-0.5, bmm2_scale=1.0, batch_size=len(case.qo_lens),
                cum_seq_lens_q=inputs.qo_indptr.to(where),
                cum_seq_lens_kv=inputs.kv_indptr.to(where),
                mask_mode="causal", save_softmax_stats=True, backend=target.backend,
            )  # fmt: skip
        maximum, total = stats.unbind(-1)
        lse = (maximum + total.log()) / math.log(2.0)
        runner.compare(inputs, out[:rows], lse[:rows]).check()
        for values, blank in ((out, 0.0), (maximum, -math.inf), (total, 0.0)):
            assert torch.all(values[rows:] == blank)


def test_decode_takes_the_planned_rows_alone(target):
    case = Case("decode", (1, 1), (5, 21), 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    make = preflash.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(runner.workspace(target.device), backend=target.backend)
    plan_decode(wrapper, inputs)
    q = torch.cat([inputs.q, inputs.q])
    says = r"q has 4 rows; a decode batch of 2 requests .* exactly 2: pass q\[:2\]"
    for call in (wrapper.run, wrapper.run_return_lse, wrapper.forward):
        refused(says, call, q, inputs.cache)
        refused("q has 1 rows", call, q[:1], inputs.cache)
    check_run(inputs, wrapper)
    # A later plan() with the tensors of this one counts its own rows.
    first = {"kv_indptr": inputs.kv_indptr[:2], "last_page_len": inputs.last_page_len[:1]}
    plan_decode(wrapper, dataclasses.replace(inputs, **first))
    refused("q has 2 rows", wrapper.run, inputs.q, inputs.cache)


def test_masks_of_a_single_request(target):
    """A flat mask may be longer; a matrix of another shape is refused, its rows would be wrong."""
    case = Case("single", (9,), (30,), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    flat = inputs.masks[0].flatten()
    for mask in (flat, torch.cat([flat, flat[:7]])):
        result = runner.single(inputs, backend=target.backend, custom_mask=mask)
        runner.compare(inputs, *result).check()
    for shape in ((30, 9), (10, 30), (9, 31)):
        mask = torch.ones(shape, dtype=torch.bool, device=target.device)
        call = functools.partial(runner.single, inputs, backend=target.backend)
        refused(r"custom_mask has shape .*flatten", call, custom_mask=mask)
