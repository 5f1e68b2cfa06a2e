"""BatchAttention and causal attention with two-way spans compute what the oracle does."""

import dataclasses

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, comparison, runner

MIXED = Case(
    "mixed", (1, 9, 1, 0, 33), (30, 9, 77, 5, 40), 4, 2, 64, dtype=torch.float16,
    mask=MaskKind.CAUSAL, page_size=8,
)  # fmt: skip
EITHER = (NotImplementedError, ValueError)
F16 = {"q_data_type": torch.float16, "kv_data_type": torch.float16}


def lengths(inputs) -> torch.Tensor:
    return torch.tensor(inputs.case.kv_lens, dtype=torch.int32)


def made(target, case=MIXED):
    inputs = build(case, device=target.device)
    return inputs, preflash.BatchAttention(case.layout, target.device, backend=target.backend)


def plan(wrapper, inputs, tables=(), **options):
    """Plans with arrays {index: array} in place of those of the inputs."""
    case = inputs.case
    arrays = [inputs.qo_indptr, inputs.kv_indptr, inputs.indices, lengths(inputs)]
    for at, array in dict(tables).items():
        arrays[at] = array
    usual = {
        "causal": case.mask is MaskKind.CAUSAL,
        "sm_scale": case.scale,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype_kv or case.dtype,
    }
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.dim_vo, case.page_size)
    wrapper.plan(*arrays, *sizes, **{**usual, **options})


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
    inputs, wrapper = made(target, case)
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
    inputs, wrapper = made(target)
    at, pages = [0], []
    for request, kv_len in enumerate(MIXED.kv_lens):
        own = inputs.indices[inputs.kv_indptr[request] : inputs.kv_indptr[request + 1]].cpu()
        assert own.numel() == -(-kv_len // 8)
        pages += [*own.tolist(), *[10**6] * request]
        at.append(len(pages))
    arrays = {1: torch.tensor(at).int(), 2: torch.tensor(pages).int()}
    plan(wrapper, inputs, {**arrays, 3: lengths(inputs).to(target.device)})
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache)).check()


def with_length(inputs, request, length):
    changed = lengths(inputs)
    changed[request] = length
    return changed


# Calls of a planned wrapper with its inputs, and of one without a plan.
REFUSED = [
    (lambda w, x, new: new.run(x.q, x.cache), ValueError, "before plan"),
    (lambda w, x, _: plan(w, x, use_profiler=True), NotImplementedError, "use_profiler"),
    (lambda w, x, _: w.run(x.q, x.cache, logits_soft_cap=3.0), ValueError, "logits_soft_cap"),
    (lambda w, x, _: w.run(x.q, x.cache, profiler_buffer=x.q), NotImplementedError,
     "profiler_buffer"),
    *(
        (
            lambda w, x, _, longest=longest: plan(w, x, {3: with_length(x, 1, longest)}),
            ValueError,
            rf"kv_len_arr\[1\] = {longest}",
        )
        for longest in (9 + 100, 2**31 - 1)
    ),
    *(
        (
            lambda w, x, _, change=change, length=length: plan(
                w, x, {1: change(x.kv_indptr.cpu()), 3: with_length(x, 0, length)}
            ),
            ValueError,
            "kv_indptr goes from",
        )
        for change in (lambda t: t - 1, lambda t: t + 1, lambda t: t.flip(0))
        for length in (MIXED.kv_lens[0], 0)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), REFUSED)
def test_batch_attention_refuses(target, call, error, says):
    (inputs, wrapper), (_, new) = made(target), made(target)
    plan(wrapper, inputs)
    with pytest.raises(error, match=says):
        call(wrapper, inputs, new)
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache)).check()


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
        runner.workspace(target.device), **F16, head_dim_qk=64, head_dim_vo=64,
        backend=target.backend, **options,
    )  # fmt: skip


def plan_ranges(wrapper, inputs, **options):
    """Plans from arrays that are overwritten afterwards."""
    names = ("qo_indptr", "kv_indptr", "indices", "last_page_len")
    arrays = [getattr(inputs, name).clone() for name in names]
    options = {"head_dim_qk": 64, "page_size": 8, "sm_scale": MIXED.scale, **options}
    wrapper.plan(*arrays, 4, 2, **options)
    for array in (arrays[0], arrays[1], arrays[3]):
        array.fill_(1)


def ranges_planned(target):
    inputs, wrapper = expected(target), ranges_wrapper(target)
    plan_ranges(wrapper, inputs)
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


RANGES_REFUSED = [
    *(
        (lambda _, w, x, options=options: plan_ranges(w, x, **options), EITHER, next(iter(options)))
        for options in (
            {"causal": True},
            {"custom_mask": torch.ones(3)},
            {"window_left": 3},
            {"logits_soft_cap": 3.0},
            {"head_dim_qk": 128},
            {"q_data_type": torch.bfloat16},
            {"prefix_len_ptr": torch.ones(3)},
        )
    ),
    (lambda _, w, x: w.run(x.q, x.cache, ranges_of(x).long()), TypeError,
     r"bidirectional_ranges is torch\.int64"),
    (lambda _, w, x: w.run(x.q, x.cache, ranges_of(x)[1:]), ValueError, "rows of q"),
    (lambda to, *_: ranges_wrapper(to, use_cuda_graph=True), NotImplementedError, "use_cuda_graph"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), RANGES_REFUSED)
def test_ranges_refuse(target, call, error, says):
    inputs, wrapper = ranges_planned(target)
    with pytest.raises(error, match=says):
        call(target, wrapper, inputs)
    runner.compare(inputs, wrapper.run(inputs.q, inputs.cache, ranges_of(inputs)), None).check()
