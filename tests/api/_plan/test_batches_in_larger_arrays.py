"""Batches that are a part of larger arrays: indptr that start anywhere, padded q, long masks."""

import contextlib
import dataclasses
import math

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, compare, poison, reference, runner
from preflash.testing.oracle import Pipeline

BEFORE, BEHIND = 3, 5
LENS = {"qo_lens": (9, 0, 33, 1), "kv_lens": (40, 7, 90, 0)}
RAGGED = Case("ragged", **LENS, num_qo_heads=4, num_kv_heads=2, head_dim=64, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
TOKENS = dataclasses.replace(RAGGED, name="page1", page_size=1)
CASES = pytest.mark.parametrize("case", [RAGGED, PAGED, TOKENS], ids=lambda case: case.name)


def padded(rows: torch.Tensor, before: int = BEFORE, behind: int = BEHIND) -> torch.Tensor:
    """The rows between others that hold NaN."""
    shape = rows.shape[1:]
    ends = [poison((n, *shape), rows.dtype, rows.device) for n in (before, behind)]
    return torch.cat([ends[0], rows, ends[1]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def check_in_the_middle(inputs, q, result, before: int = BEFORE) -> None:
    """Right where a request is, and untouched where none is."""
    out, lse = result
    assert out.shape[0] == q.shape[0]
    end = before + inputs.q.shape[0]
    runner.compare(inputs, out[before:end], lse[before:end]).check()
    for written in (out, lse):
        untouched = poison(written.shape, written.dtype, written.device)
        assert same_bits(written[:before], untouched[:before])
        assert same_bits(written[end:], untouched[end:])


def outputs_for(q, case) -> dict:
    shape = (q.shape[0], case.num_qo_heads)
    return {
        "out": poison((*shape, case.dim_vo), case.dtype, q.device),
        "lse": poison(shape, torch.float32, q.device),
        "return_lse": True,
    }


def shifted(inputs, where: str) -> dict:
    """plan()'s arrays for the same batch behind others that it does not plan."""
    arrays = {"qo_indptr": inputs.qo_indptr + BEFORE}
    if not inputs.case.paged:
        return {**arrays, "kv_indptr": (inputs.kv_indptr + BEFORE)}
    # What lies before the first request may be anything: a page beyond the pool, or below it.
    foreign = torch.tensor([10**6, -1, 2**31 - 1], dtype=torch.int32, device=inputs.indices.device)
    assert foreign.numel() == BEFORE
    arrays |= {
        "paged_kv_indptr": inputs.kv_indptr + BEFORE,
        "paged_kv_indices": torch.cat([foreign, inputs.indices, foreign]),
        "paged_kv_last_page_len": inputs.last_page_len,
    }
    return {name: array.to(where) for name, array in arrays.items()}


@contextlib.contextmanager
def poisoned_memory():
    """Makes torch fill every new tensor with NaN, so that values nobody wrote are seen."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_blank_rows(inputs, out, lse, before: int) -> None:
    """Checks results of requests, and 0 and -inf in the rows of no request."""
    end = before + inputs.q.shape[0]
    assert before or out.shape[0] > end
    runner.compare(inputs, out[before:end], lse[before:end]).check()
    for rows in (slice(0, before), slice(end, None)):
        assert torch.all(out[rows].float() == 0.0)
        assert torch.all(lse[rows] == -math.inf)


def planned(inputs, target, arrays: dict):
    case = inputs.case
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    _, options = runner.plan_arguments(inputs)
    if case.paged:
        options["page_size"] = case.page_size
    wrapper.plan(
        **arrays,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        **options,
    )
    return wrapper


@CASES
@pytest.mark.parametrize("index_device", ["host", "device"])
@pytest.mark.parametrize("split", [None, 32])
def test_indptr_may_start_anywhere(target, case, index_device, split, monkeypatch):
    """An engine plans the prefills of a batch and hands over the arrays of the whole batch."""
    monkeypatch.setenv("PREFLASH_DEBUG", "1")  # foreign pages are not looked at even then
    case = dataclasses.replace(case, fixed_split_size=split)
    inputs = build(case, device=target.device)
    where = "cpu" if index_device == "host" else target.device
    wrapper = planned(inputs, target, shifted(inputs, where))
    q = padded(inputs.q)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    check_in_the_middle(inputs, q, wrapper.run(q, *kv, **outputs_for(q, case)))


@pytest.mark.parametrize("mask", [MaskKind.CUSTOM, MaskKind.PACKED])
@CASES
def test_masks_of_batches_that_start_anywhere(target, case, mask):
    inputs = build(dataclasses.replace(case, mask=mask), device=target.device)
    wrapper = planned(inputs, target, shifted(inputs, "cpu"))
    q = padded(inputs.q)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    check_in_the_middle(inputs, q, wrapper.run(q, *kv, **outputs_for(q, case)))


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_indptr_below_zero_is_refused(target, name):
    inputs = build(RAGGED, device=target.device)
    arrays = {"qo_indptr": inputs.qo_indptr, "kv_indptr": inputs.kv_indptr}
    arrays[name] = arrays[name] - 1
    with pytest.raises(ValueError, match=rf"{name}\[0\] = -1"):
        planned(inputs, target, arrays)


@CASES
@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_padded_q(target, case, layout):
    """CUDA-graph buckets: more rows than the plan knows."""
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    q = padded(inputs.q, before=0)
    kv = (inputs.cache,) if case.paged else (inputs.k, inputs.v)
    outputs = outputs_for(q, case)
    if layout == "HN":
        outputs |= {"lse": outputs["lse"].t().contiguous(), "lse_layout": "HN"}
    out, lse = wrapper.run(q, *kv, **outputs)
    check_in_the_middle(inputs, q, (out, lse if layout == "NH" else lse.t()), before=0)
    fresh, fresh_lse = wrapper.run(q, *kv, return_lse=True, lse_layout=layout)
    assert fresh.shape == q.shape
    rows = inputs.q.shape[0]
    fresh_lse = fresh_lse if layout == "NH" else fresh_lse.t()
    runner.compare(inputs, fresh[:rows], fresh_lse[:rows]).check()
    # The plan serves q without padding as before, and no q that is too short.
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    with pytest.raises(ValueError, match=r"q has shape .*at least qo_indptr\[-1\]"):
        wrapper.run(q[: rows - 1], *kv)


@CASES
@pytest.mark.parametrize("layout", ["NH", "HN"])
@pytest.mark.parametrize("behind", [0, BEHIND])
def test_rows_of_no_request_in_new_outputs(target, case, layout, behind):
    inputs = build(case, device=target.device)
    wrapper = planned(inputs, target, shifted(inputs, "cpu"))
    q = padded(inputs.q, behind=behind)
    kv = (inputs.cache,) if case.paged else (padded(inputs.k), padded(inputs.v))
    with poisoned_memory():
        out, lse = wrapper.run(q, *kv, return_lse=True, lse_layout=layout)
        alone = wrapper.run(q, *kv)
    check_blank_rows(inputs, out, lse if layout == "NH" else lse.t(), BEFORE)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("o_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rows_of_no_request_in_outputs_of_8_bit_queries(target, o_dtype):
    case = dataclasses.replace(PAGED, dtype=torch.float8_e4m3fn, o_dtype=o_dtype)
    inputs = build(case, device=target.device)
    wrapper = planned(inputs, target, shifted(inputs, "cpu"))
    with poisoned_memory():
        out, lse = wrapper.run(padded(inputs.q), inputs.cache, return_lse=True)
    inputs.variant = wrapper.variant  # whose products may be of 8 bits
    check_blank_rows(inputs, out, lse, BEFORE)


@pytest.mark.parametrize("lengths_on", ["cpu", "device"])
def test_rows_of_no_request_in_one_call(target, lengths_on):
    """trtllm_fmha_v2_prefill with its statistics, and cudnn_batch_prefill_with_kv_cache."""
    case = dataclasses.replace(RAGGED, kv_lens=(40, 7, 90, 1))
    inputs = build(case, device=target.device)
    where = "cpu" if lengths_on == "cpu" else target.device
    q, k, v = padded(inputs.q, before=0), inputs.k, inputs.v
    qo_indptr, kv_indptr = inputs.qo_indptr.to(where), inputs.kv_indptr.to(where)
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=where)
    scale = case.head_dim**-0.5
    with poisoned_memory():
        out, stats = preflash.trtllm_fmha_v2_prefill(
            (q, k, v), "SEPARATE_Q_K_V", runner.workspace(target.device), seq_lens=kv_lens,
            max_q_len=max(case.qo_lens), max_kv_len=max(case.kv_lens), bmm1_scale=scale,
            bmm2_scale=1.0, batch_size=len(case.qo_lens), cum_seq_lens_q=qo_indptr,
            cum_seq_lens_kv=kv_indptr, mask_mode="causal", save_softmax_stats=True,
            backend=target.backend,
        )  # fmt: skip
    maximum, total = stats.unbind(-1)
    lse = (maximum + total.log()) / math.log(2.0)
    check_blank_rows(inputs, out, lse, before=0)
    rows = inputs.q.shape[0]
    assert torch.all(maximum[rows:] == -math.inf)
    assert torch.all(total[rows:] == 0.0)


def test_decode_takes_the_planned_rows_alone(target):
    """Two requests and four rows of q: the last two are nobody's."""
    case = Case("decode", (1, 1), (5, 21), 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    wrapper.plan(
        inputs.kv_indptr, inputs.indices, inputs.last_page_len, 4, 2, 64, 16, q_data_type=case.dtype
    )
    q = torch.cat([inputs.q, inputs.q])
    message = r"q has 4 rows; a decode batch of 2 requests .* exactly 2: pass q\[:2\]"
    for call in (wrapper.run, wrapper.run_return_lse, wrapper.forward):
        with pytest.raises(ValueError, match=message):
            call(q, inputs.cache)
        with pytest.raises(ValueError, match="q has 1 rows"):
            call(q[:1], inputs.cache)
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()
    # A later plan() with the tensors of this one counts its own rows.
    wrapper.plan(
        inputs.kv_indptr[:2], inputs.indices, inputs.last_page_len[:1], 4, 2, 64, 16,
        q_data_type=case.dtype,
    )  # fmt: skip
    with pytest.raises(ValueError, match="q has 2 rows"):
        wrapper.run(inputs.q, inputs.cache)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_outputs_have_the_rows_of_q(target, which):
    inputs = build(RAGGED, device=target.device)
    wrapper = runner.make_wrapper(RAGGED, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    q = padded(inputs.q, before=0)
    outputs = outputs_for(q, RAGGED)
    outputs[which] = outputs[which][: inputs.q.shape[0]]
    with pytest.raises(ValueError, match=rf"^{which} has shape"):
        wrapper.run(q, inputs.k, inputs.v, **outputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(-1,), (1, -1), (-1, 2, 1)])
@CASES
def test_masks_longer_than_needed(target, case, packed, shape):
    """A preallocated buffer of any shape; what lies behind the last request is not looked at."""
    kind = MaskKind.PACKED if packed else MaskKind.CUSTOM
    inputs = build(dataclasses.replace(case, mask=kind), device=target.device)
    name = "packed_custom_mask" if packed else "custom_mask"
    mask = getattr(inputs, name)
    for fill in (0, 1):
        spare = torch.full((100 + mask.numel() % 2,), fill, dtype=mask.dtype, device=mask.device)
        setattr(inputs, name, torch.cat([mask, spare]).view(shape))
        wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
        runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


SINGLE = Case("single", (9,), (30,), 4, 2, 64, mask=MaskKind.CUSTOM)


@pytest.mark.parametrize("spare", [0, 7])
def test_flat_mask_of_a_single_request(target, spare):
    inputs = build(SINGLE, device=target.device)
    mask = torch.cat([inputs.masks[0].flatten(), inputs.masks[0].flatten()[:spare]])
    result = runner.single(inputs, backend=target.backend, custom_mask=mask)
    runner.compare(inputs, *result).check()


@pytest.mark.parametrize("shape", [(30, 9), (10, 30), (9, 31)])
def test_a_matrix_of_another_shape_is_refused(target, shape):
    """Read flat, its rows would be wrong."""
    inputs = build(SINGLE, device=target.device)
    mask = torch.ones(shape, dtype=torch.bool, device=target.device)
    with pytest.raises(ValueError, match=r"custom_mask has shape .*flatten"):
        runner.single(inputs, backend=target.backend, custom_mask=mask)


def test_decodes_before_prefills_in_one_cache(target):
    """The prefills of a mixed batch: the engine cuts indptr and leaves the indices whole."""
    case = Case("mixed", (1, 1, 20, 8), (50, 17, 60, 8), 4, 2, 64, page_size=16)
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(runner.workspace(target.device))
    qo_indptr = inputs.qo_indptr.cpu()[2:]
    wrapper.plan(
        qo_indptr=qo_indptr - qo_indptr[0],
        paged_kv_indptr=inputs.kv_indptr.cpu()[2:],
        paged_kv_indices=inputs.indices,
        paged_kv_last_page_len=inputs.last_page_len.cpu()[2:],
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim_qk=64,
        page_size=16,
        causal=True,
        q_data_type=case.dtype,
    )
    out, lse = wrapper.run(inputs.q[2:], inputs.cache, return_lse=True)
    expected = reference(inputs, pipeline=Pipeline(case.scale, True)).map(lambda t: t[2:])
    compare(out, lse, expected).check()
