"""Batches may be a part of larger arrays: indptr start anywhere, q is padded, masks are longer."""

import contextlib
import dataclasses
import itertools
import math

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case, MaskKind, build, poison, runner

BEFORE, AFTER = 3, 5
RAGGED = Case("ragged", (9, 0, 33, 1), (40, 7, 90, 0), 4, 2, 64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
TOKENS = dataclasses.replace(RAGGED, name="page1", page_size=1)
CASES = pytest.mark.parametrize("case", [RAGGED, PAGED, TOKENS], ids=lambda case: case.name)
LAYOUTS = pytest.mark.parametrize("layout", ["NH", "HN"])


def padded(rows: torch.Tensor, before: int = BEFORE, after: int = AFTER) -> torch.Tensor:
    """Returns the rows between others that hold NaN."""
    ends = [poison((n, *rows.shape[1:]), rows.dtype, rows.device) for n in (before, after)]
    return torch.cat([ends[0], rows, ends[1]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def by_token(lse, layout: str):
    return lse if layout == "NH" else lse.t()


def check_in_the_middle(inputs, q, result, before: int = BEFORE) -> None:
    """Checks the rows of requests, and that the other rows are untouched."""
    out, lse = result
    assert out.shape[0] == q.shape[0]
    end = before + inputs.q.shape[0]
    runner.compare(inputs, out[before:end], lse[before:end]).check()
    for written in (out, lse):
        untouched = poison(written.shape, written.dtype, written.device)
        assert same_bits(written[:before], untouched[:before])
        assert same_bits(written[end:], untouched[end:])


def check_blank_rows(inputs, out, lse, before: int) -> None:
    """Checks results of requests, and 0 and -inf in the rows of no request."""
    end = before + inputs.q.shape[0]
    assert before or out.shape[0] > end
    runner.compare(inputs, out[before:end], lse[before:end]).check()
    for rows in (slice(0, before), slice(end, None)):
        assert torch.all(out[rows].float() == 0.0)
        assert torch.all(lse[rows] == -math.inf)


def outputs_for(q, case) -> dict:
    shape = (q.shape[0], case.num_qo_heads)
    return {
        "out": poison((*shape, case.dim_vo), case.dtype, q.device),
        "lse": poison(shape, torch.float32, q.device),
        "return_lse": True,
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


def planned_in_the_middle(case, target, where="cpu"):
    """Returns inputs, a wrapper planned with arrays of a larger batch, and its keys and values."""
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    later = dataclasses.replace(
        inputs,
        qo_indptr=(inputs.qo_indptr + BEFORE).to(where),
        kv_indptr=(inputs.kv_indptr + BEFORE).to(where),
    )
    if case.paged:
        # Entries before the first request may be anything: pages outside of the pool.
        foreign = torch.tensor([10**6, -1, 2**31 - 1], dtype=torch.int32)
        indices = torch.cat([foreign, inputs.indices.cpu(), foreign])
        later.indices, later.last_page_len = indices.to(where), inputs.last_page_len.to(where)
    runner.plan(wrapper, later)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    return inputs, wrapper, kv


@CASES
@pytest.mark.parametrize(
    ("changes", "on_host"),
    [
        *itertools.product(({}, {"fixed_split_size": 32}), (True, False)),
        ({"mask": MaskKind.CUSTOM}, True),
        ({"mask": MaskKind.PACKED}, True),
    ],
)
def test_indptr_may_start_anywhere(target, case, changes, on_host, monkeypatch):
    """An engine plans the prefills of a batch and hands over the arrays of the whole batch."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # foreign pages are not checked even then
    case = dataclasses.replace(case, **changes)
    inputs, wrapper, kv = planned_in_the_middle(case, target, "cpu" if on_host else target.device)
    q = padded(inputs.q)
    check_in_the_middle(inputs, q, wrapper.run(q, *kv, **outputs_for(q, case)))


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_indptr_below_zero_is_refused(target, name):
    inputs, wrapper = planned(RAGGED, target)
    below = dataclasses.replace(inputs, **{name: getattr(inputs, name) - 1})
    with pytest.raises(ValueError, match=rf"{name}\[0\] = -1"):
        runner.plan(wrapper, below)


@CASES
@LAYOUTS
def test_padded_q(target, case, layout):
    """CUDA-graph buckets: q has more rows than the plan."""
    inputs, wrapper = planned(case, target)
    q = padded(inputs.q, before=0)
    kv = (inputs.cache,) if case.paged else (inputs.k, inputs.v)
    outputs = outputs_for(q, case)
    if layout == "HN":
        outputs |= {"lse": outputs["lse"].t().contiguous(), "lse_layout": "HN"}
    out, lse = wrapper.run(q, *kv, **outputs)
    check_in_the_middle(inputs, q, (out, by_token(lse, layout)), before=0)
    fresh, fresh_lse = wrapper.run(q, *kv, return_lse=True, lse_layout=layout)
    assert fresh.shape == q.shape
    rows = inputs.q.shape[0]
    runner.compare(inputs, fresh[:rows], by_token(fresh_lse, layout)[:rows]).check()
    # The plan serves q without padding too, and no q that is too short.
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    with pytest.raises(ValueError, match=r"q has shape .*at least qo_indptr\[-1\]"):
        wrapper.run(q[: rows - 1], *kv)
    for which in ("out", "lse"):
        outputs = outputs_for(q, case)
        outputs[which] = outputs[which][:rows]
        with pytest.raises(ValueError, match=rf"^{which} has shape"):
            wrapper.run(q, *kv, **outputs)


FP8 = dataclasses.replace(PAGED, name="fp8", dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "case",
    [RAGGED, PAGED, TOKENS]
    + [dataclasses.replace(FP8, o_dtype=out) for out in (torch.bfloat16, torch.float8_e4m3fn)],
    ids=lambda case: case.name,
)
@LAYOUTS
@pytest.mark.parametrize("after", [0, AFTER])
def test_rows_of_no_request_in_new_outputs(target, case, layout, after):
    inputs, wrapper, kv = planned_in_the_middle(case, target)
    q = padded(inputs.q, after=after)
    with poisoned_memory():
        out, lse = wrapper.run(q, *kv, return_lse=True, lse_layout=layout)
        alone = wrapper.run(q, *kv)
    inputs.variant = wrapper.variant  # whose products may be of 8 bits
    check_blank_rows(inputs, out, by_token(lse, layout), BEFORE)
    assert same_bits(alone, out)


@pytest.mark.parametrize("lengths_on", ["cpu", "device"])
def test_rows_of_no_request_in_one_call(target, lengths_on):
    """Rows of no request in the outputs and statistics of trtllm_fmha_v2_prefill."""
    case = dataclasses.replace(RAGGED, kv_lens=(40, 7, 90, 1))
    inputs = build(case, device=target.device)
    where = "cpu" if lengths_on == "cpu" else target.device
    tensors = (padded(inputs.q, before=0), inputs.k, inputs.v)
    with poisoned_memory():
        out, stats = preflash.trtllm_fmha_v2_prefill(
            tensors, "SEPARATE_Q_K_V", runner.workspace(target.device),
            seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32, device=where),
            max_q_len=max(case.qo_lens), max_kv_len=max(case.kv_lens),
            bmm1_scale=case.head_dim**-0.5, bmm2_scale=1.0, batch_size=len(case.qo_lens),
            cum_seq_lens_q=inputs.qo_indptr.to(where), cum_seq_lens_kv=inputs.kv_indptr.to(where),
            mask_mode="causal", save_softmax_stats=True, backend=target.backend,
        )  # fmt: skip
    maximum, total = stats.unbind(-1)
    check_blank_rows(inputs, out, (maximum + total.log()) / math.log(2.0), before=0)
    rows = inputs.q.shape[0]
    assert torch.all(maximum[rows:] == -math.inf)
    assert torch.all(total[rows:] == 0.0)


def test_decode_takes_the_planned_rows_alone(target):
    case = Case("decode", (1, 1), (5, 21), 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    heads, options = (4, 2, 64, 16), {"q_data_type": case.dtype}
    wrapper.plan(inputs.kv_indptr, inputs.indices, inputs.last_page_len, *heads, **options)
    q = torch.cat([inputs.q, inputs.q])
    message = r"q has 4 rows; a decode batch of 2 requests .* exactly 2: pass q\[:2\]"
    for call in (wrapper.run, wrapper.run_return_lse, wrapper.forward):
        with pytest.raises(ValueError, match=message):
            call(q, inputs.cache)
        with pytest.raises(ValueError, match="q has 1 rows"):
            call(q[:1], inputs.cache)
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()
    # A later plan() with the tensors of this one counts its own rows.
    wrapper.plan(inputs.kv_indptr[:2], inputs.indices, inputs.last_page_len[:1], *heads, **options)
    with pytest.raises(ValueError, match="q has 2 rows"):
        wrapper.run(inputs.q, inputs.cache)


@pytest.mark.parametrize("name", ["packed_custom_mask", "custom_mask"])
@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 2, 1)])
@CASES
def test_masks_longer_than_needed(target, case, name, shape):
    """A preallocated buffer of any shape; its bits after the last request are not read."""
    kind = MaskKind.PACKED if name == "packed_custom_mask" else MaskKind.CUSTOM
    inputs = build(dataclasses.replace(case, mask=kind), device=target.device)
    mask = getattr(inputs, name)
    for fill in (0, 1):
        spare = torch.full((100 + mask.numel() % 2,), fill, dtype=mask.dtype, device=mask.device)
        setattr(inputs, name, torch.cat([mask, spare]).view(shape))
        wrapper = runner.planned(inputs, backend=target.backend)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


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
        with pytest.raises(ValueError, match=r"custom_mask has shape .*flatten"):
            runner.single(inputs, backend=target.backend, custom_mask=mask)
