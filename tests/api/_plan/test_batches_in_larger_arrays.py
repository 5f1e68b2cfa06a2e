"""Batches may be a part of larger arrays: indptr start anywhere, q is padded, masks are longer."""

import contextlib
import dataclasses
import functools
import math

import preflash
import pytest
import torch
from planned_cases import check_run, plan_decode, planned, tensors, unplanned
from preflash.testing import Case, MaskKind, build, poison, runner
from refusals import refused

BEFORE, AFTER = 3, 5
RAGGED = Case("ragged", (9, 0, 33, 1), (40, 7, 90, 0), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
TOKENS = dataclasses.replace(RAGGED, name="page1", page_size=1)
CASES = pytest.mark.parametrize("case", [RAGGED, PAGED, TOKENS], ids=lambda case: case.name)


def padded(rows: torch.Tensor, before: int = BEFORE, after: int = AFTER) -> torch.Tensor:
    """Returns the rows between others that hold NaN."""
    ends = [poison((n, *rows.shape[1:]), rows.dtype, rows.device) for n in (before, after)]
    return torch.cat([ends[0], rows, ends[1]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def given_outputs(q, case, layout: str) -> dict:
    """Makes poisoned outputs, as options of run()."""
    shape = (q.shape[0], case.num_qo_heads)
    shape_of_lse = shape if layout == "NH" else shape[::-1]
    return {
        "out": poison((*shape, case.dim_vo), case.dtype_o, q.device),
        "lse": poison(shape_of_lse, torch.float32, q.device),
    }


@contextlib.contextmanager
def poisoned_memory():
    """Makes torch fill each new tensor with NaN, so that values that nothing wrote are visible."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_rows(inputs, wrapper, q, kv, before: int) -> None:
    """Checks the rows of requests, and those of no request: they are untouched in the caller's
    outputs, 0 and -inf in new ones."""
    inputs.variant = wrapper.variant  # whose products may be of 8 bits
    own = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    own[before : before + inputs.q.shape[0]] = True
    for layout in ("NH", "HN"):
        options = {"return_lse": True, "lse_layout": layout}
        given = wrapper.run(q, *kv, **given_outputs(q, inputs.case, layout), **options)
        with poisoned_memory():
            new = wrapper.run(q, *kv, **options)
            alone = wrapper.run(q, *kv)
        assert same_bits(alone, new[0])
        given, new = ((out, lse if layout == "NH" else lse.t()) for out, lse in (given, new))
        for out, lse in (given, new):
            runner.compare(inputs, out[own], lse[own]).check()
        for written in given:
            foreign = written[~own]
            assert same_bits(foreign, poison(foreign.shape, foreign.dtype, foreign.device))
        for written, blank in zip(new, (0.0, -math.inf), strict=True):
            assert torch.all(written[~own].float() == blank)


IN_THE_MIDDLE = [
    dataclasses.replace(RAGGED, fixed_split_size=32),
    dataclasses.replace(PAGED, mask=MaskKind.CUSTOM),
    dataclasses.replace(PAGED, dtype=torch.float8_e4m3fn),
    TOKENS,
]


@pytest.mark.parametrize("case", IN_THE_MIDDLE, ids=lambda case: case.id)
def test_indptr_may_start_anywhere(target, case, monkeypatch):
    """An engine plans the prefills of a batch and hands over the arrays of the whole batch. The
    fuzzer draws other batches, and longer masks."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # foreign pages are not checked even then
    inputs, wrapper = unplanned(case, target)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    for where in sorted({"cpu", target.device}):
        arrays = ("qo_indptr", "kv_indptr")
        later = {name: (getattr(inputs, name) + BEFORE).to(where) for name in arrays}
        if case.paged:
            # Entries before the first request may be anything: pages outside of the pool.
            foreign = torch.tensor([10**6, -1, 2**31 - 1], dtype=torch.int32)
            later["indices"] = torch.cat([foreign, inputs.indices.cpu(), foreign]).to(where)
            later["last_page_len"] = inputs.last_page_len.to(where)
        runner.plan(wrapper, dataclasses.replace(inputs, **later))
        for after in (0, AFTER):
            check_rows(inputs, wrapper, padded(inputs.q, after=after), kv, BEFORE)


@CASES
def test_padded_q(target, case):
    """CUDA-graph buckets: q has more rows than the plan, which serves q without padding too."""
    inputs, wrapper = planned(case, target)
    q, (_, *kv) = padded(inputs.q, before=0), tensors(inputs)
    check_rows(inputs, wrapper, q, kv, before=0)
    check_run(inputs, wrapper)
    rows = inputs.q.shape[0]
    refused(r"q has shape .*at least qo_indptr\[-1\]", wrapper.run, q[: rows - 1], *kv)
    for which in ("out", "lse"):
        outputs = given_outputs(q, case, "NH")
        outputs[which] = outputs[which][:rows]
        refused(f"^{which} has shape", wrapper.run, q, *kv, **outputs)


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
