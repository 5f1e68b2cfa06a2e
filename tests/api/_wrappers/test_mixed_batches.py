"""BatchAttention, and causal attention with two-way spans, against the float64 oracle."""

from __future__ import annotations

import dataclasses

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, comparison, runner

MIXED = Case(
    "mixed",
    (1, 9, 1, 0, 33),
    (30, 9, 77, 5, 40),
    4,
    2,
    64,
    dtype=torch.float16,
    mask=MaskKind.CAUSAL,
    page_size=8,
)


def lengths(inputs) -> torch.Tensor:
    return torch.tensor(inputs.case.kv_lens, dtype=torch.int32)


def plan(wrapper, inputs, **options):
    case = inputs.case
    usual = {
        "causal": case.mask is MaskKind.CAUSAL,
        "sm_scale": case.sm_scale,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype_kv or case.dtype,
    }
    tables = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, lengths(inputs))
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.dim_vo, case.page_size)
    wrapper.plan(*tables, *sizes, **{**usual, **options})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "HND", "mask": MaskKind.NONE},
        {"soft_cap": 20.0, "page_size": 1},
        {"dtype": torch.bfloat16, "num_qo_heads": 6, "num_kv_heads": 1},
    ],
    ids=["usual", "hnd", "cap", "bfloat16"],
)
def test_batch_attention(target, changes):
    case = dataclasses.replace(MIXED, **changes)
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchAttention(case.layout, target.device, backend=target.backend)
    plan(wrapper, inputs)
    shape = inputs.q.shape
    out = comparison.poison(shape, case.dtype, inputs.q.device)
    lse = comparison.poison(shape[:2], torch.float32, inputs.q.device)
    cap = {"logits_soft_cap": case.soft_cap} if case.soft_cap else {}
    results = wrapper.run(inputs.q, inputs.cache, out, lse, **cap)
    assert results[0] is out
    assert results[1] is lse
    runner.compare(inputs, out, lse).check()


def test_pages_behind_the_keys_are_not_read(target):
    inputs = build(MIXED, device=target.device)
    at, pages = [0], []
    for request, kv_len in enumerate(MIXED.kv_lens):
        own = inputs.indices[inputs.kv_indptr[request] : inputs.kv_indptr[request + 1]].cpu()
        assert own.numel() == -(-kv_len // 8)
        pages += [*own.tolist(), *[10**6] * request]
        at.append(len(pages))
    wrapper = preflash.BatchAttention("NHD", target.device, backend=target.backend)
    wrapper.plan(
        inputs.qo_indptr, torch.tensor(at, dtype=torch.int32),
        torch.tensor(pages, dtype=torch.int32), lengths(inputs).to(target.device), 4, 2, 64, 64, 8,
        True, q_data_type=torch.float16, kv_data_type=torch.float16,
        sm_scale=MIXED.scale,
    )  # fmt: skip
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache)).check()


def test_batch_attention_refuses(target):
    inputs = build(MIXED, device=target.device)
    wrapper = preflash.BatchAttention("NHD", target.device, backend=target.backend)
    with pytest.raises(ValueError, match="before plan"):
        wrapper.run(inputs.q, inputs.cache)
    with pytest.raises(NotImplementedError, match="use_profiler"):
        plan(wrapper, inputs, use_profiler=True)
    plan(wrapper, inputs)
    with pytest.raises(ValueError, match="logits_soft_cap"):
        wrapper.run(inputs.q, inputs.cache, logits_soft_cap=3.0)
    with pytest.raises(NotImplementedError, match="profiler_buffer"):
        wrapper.run(inputs.q, inputs.cache, profiler_buffer=inputs.q)
    table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices)
    sizes = (4, 2, 64, 64, 8)
    for longest, text in ((9 + 100, 109), (2**31 - 1, 2**31 - 1)):
        longer = lengths(inputs)
        longer[1] = longest
        with pytest.raises(ValueError, match=rf"kv_len_arr\[1\] = {text}"):
            wrapper.plan(*table, longer, *sizes)
    indptr = inputs.kv_indptr.cpu()
    shorter = lengths(inputs)
    shorter[0] = 0
    for wrong in (indptr - 1, indptr + 1, indptr.flip(0)):
        for given in (lengths(inputs), shorter):
            with pytest.raises(ValueError, match="kv_indptr goes from"):
                wrapper.plan(inputs.qo_indptr, wrong, inputs.indices, given, *sizes)


# Ranges.

SPANS = {1: [(2, 0, 6), (3, 0, 6), (8, 5, 8)], 4: [(10, 12, 30), (32, 3, 39), (0, 39, 39)]}


def ranges_of(inputs) -> torch.Tensor:
    ranges = torch.full((inputs.q.shape[0], 2), -1, dtype=torch.int32)
    for request, spans in SPANS.items():
        for row, first, last in spans:
            ranges[int(inputs.qo_indptr[request]) + row] = torch.tensor([first, last])
    return ranges.to(inputs.q.device)


def masks_of(case: Case, causal_window=-1, range_window=-1, spans=SPANS) -> list[torch.Tensor]:
    masks = []
    for request, (rows, keys) in enumerate(zip(case.qo_lens, case.kv_lens, strict=True)):
        behind = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)[None]
        kept = behind >= 0
        if causal_window >= 0:
            kept &= behind <= causal_window
        for row, first, last in spans.get(request, []):
            for key in range(first, last + 1):
                if range_window <= 0 or behind[row, key] < range_window:
                    kept[row, key] = True
        masks.append(kept)
    return masks


def expected(target, causal_window=-1, range_window=-1):
    case = dataclasses.replace(MIXED, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    inputs.masks = masks_of(case, causal_window, range_window)
    return inputs


def ranges_wrapper(target, **options):
    return preflash.BatchPrefillWithCausalBidirectionalRangesWrapper(
        runner.workspace(target.device), q_data_type=torch.float16, kv_data_type=torch.float16,
        head_dim_qk=64, head_dim_vo=64, backend=target.backend, **options,
    )  # fmt: skip


def ranges_planned(target):
    inputs = expected(target)
    wrapper = ranges_wrapper(target)
    wrapper.plan(
        inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len, 4, 2, 64, 8,
        sm_scale=MIXED.scale,
    )  # fmt: skip
    return inputs, wrapper


@pytest.mark.parametrize("windows", [(-1, -1), (4, 0), (0, 1), (7, 5)])
def test_ranges(target, windows):
    _, wrapper = ranges_planned(target)
    inputs = expected(target, *windows)
    assert "custom" not in wrapper.variant
    out, lse = wrapper.run_return_lse(inputs.q, inputs.cache, ranges_of(inputs), *windows)
    runner.compare(inputs, out, lse).check()
    # The kernel that ran, of which the CPU has one for every mask.
    assert ("custom" in wrapper.variant) == (target.backend != "cpu")
    assert wrapper.variant in repr(wrapper)


def test_ranges_that_change_between_runs(target):
    inputs, wrapper = ranges_planned(target)
    ranges = ranges_of(inputs)
    first = wrapper.run(inputs.q, inputs.cache, ranges)
    windowed = wrapper.run(inputs.q, inputs.cache, ranges, 4)
    again = wrapper.run(inputs.q, inputs.cache, ranges)
    assert torch.equal(first, again)
    assert not torch.equal(first, windowed)
    ranges.fill_(-1)
    inputs.masks = masks_of(inputs.case, spans={})
    runner.compare(inputs, wrapper.forward(inputs.q, inputs.cache, ranges), None).check()


def test_arrays_that_change_after_plan(target):
    inputs, wrapper = expected(target), ranges_wrapper(target)
    arrays = [
        array.to(target.device, copy=True)
        for array in (inputs.qo_indptr, inputs.kv_indptr, inputs.last_page_len)
    ]
    wrapper.plan(arrays[0], arrays[1], inputs.indices, arrays[2], 4, 2, 64, 8, sm_scale=MIXED.scale)
    for array in arrays:
        array.fill_(1)
    out, lse = wrapper.run(inputs.q, inputs.cache, ranges_of(inputs), return_lse=True)
    runner.compare(inputs, out, lse).check()


REFUSED = {
    "causal": {"causal": True},
    "custom_mask": {"custom_mask": torch.ones(3)},
    "window_left": {"window_left": 3},
    "logits_soft_cap": {"logits_soft_cap": 3.0},
    "head_dim_qk": {"head_dim_qk": 128},
    "q_data_type": {"q_data_type": torch.bfloat16},
    "prefix_len_ptr": {"prefix_len_ptr": torch.ones(3)},
}


@pytest.mark.parametrize(("name", "options"), REFUSED.items(), ids=REFUSED)
def test_ranges_refuse(target, name, options):
    inputs, wrapper = ranges_planned(target)
    table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len, 4, 2)
    with pytest.raises((NotImplementedError, ValueError), match=name):
        wrapper.plan(*table, **{"head_dim_qk": 64, "page_size": 8, **options})
    runner.compare(inputs, wrapper.run(inputs.q, inputs.cache, ranges_of(inputs)), None).check()


def test_ranges_refuse_in_run(target):
    inputs, wrapper = ranges_planned(target)
    ranges = ranges_of(inputs)
    with pytest.raises(TypeError, match=r"bidirectional_ranges is torch\.int64"):
        wrapper.run(inputs.q, inputs.cache, ranges.long())
    with pytest.raises(ValueError, match="rows of q"):
        wrapper.run(inputs.q, inputs.cache, ranges[1:])
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        ranges_wrapper(target, use_cuda_graph=True)
