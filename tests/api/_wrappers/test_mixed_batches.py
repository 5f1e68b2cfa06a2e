"""BatchAttention and causal attention with two-way spans compute what the oracle does."""

import dataclasses
import functools

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, poison, runner

MIXED = Case("mixed", (1, 9, 1, 0, 33), (30, 9, 77, 5, 40), 4, 2, 64, dtype=torch.float16,
             mask=MaskKind.CAUSAL, page_size=8)  # fmt: skip
F16 = {"q_data_type": torch.float16, "kv_data_type": torch.float16}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def made(target, case=MIXED):
    inputs = build(case, device=target.device)
    return inputs, preflash.BatchAttention(case.layout, target.device, backend=target.backend)


def arguments(inputs) -> dict:
    case = inputs.case
    return {
        "qo_indptr": inputs.qo_indptr, "kv_indptr": inputs.kv_indptr, "kv_indices": inputs.indices,
        "kv_len_arr": ints(*case.kv_lens), "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads, "head_dim_qk": case.head_dim,
        "head_dim_vo": case.dim_vo, "page_size": case.page_size,
        "causal": case.mask is MaskKind.CAUSAL, "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype, "kv_data_type": case.dtype,
    }  # fmt: skip


CHANGES = {
    "usual": {},
    "hnd": {"layout": "HND", "mask": MaskKind.NONE},
    "cap": {"soft_cap": 20.0, "page_size": 1},
    "bfloat16": {"dtype": torch.bfloat16, "num_qo_heads": 6, "num_kv_heads": 1},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_batch_attention(target, changes):
    case = dataclasses.replace(MIXED, **changes)
    inputs, wrapper = made(target, case)
    wrapper.plan(**arguments(inputs))
    out = poison(inputs.q.shape, case.dtype, target.device)
    lse = poison(inputs.q.shape[:2], torch.float32, target.device)
    cap = {"logits_soft_cap": case.soft_cap} if case.soft_cap else {}
    results = wrapper.run(inputs.q, inputs.cache, out, lse, **cap)
    assert all(given is result for given, result in zip((out, lse), results, strict=True))
    runner.compare(inputs, out, lse).check()


def test_pages_behind_the_keys_are_not_read(target):
    inputs, wrapper = made(target)
    given, at, pages = arguments(inputs), [0], []
    for request, own in enumerate(inputs.page_table):
        pages += [*own, *[10**6] * request]
        at.append(len(pages))
    given |= {"kv_indptr": ints(*at), "kv_indices": ints(*pages)}
    wrapper.plan(**given | {"kv_len_arr": given["kv_len_arr"].to(target.device)})
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache)).check()


def check_refusals(calls, rows) -> None:
    for method, options, error, says in rows:
        with pytest.raises(error, match=says):
            calls[method](**options)


# A method, wrong options, and the refusal.
REFUSED = [
    ("plan", {"use_profiler": True}, NotImplementedError, "use_profiler"),
    *(("plan", {"kv_len_arr": ints(30, keys, 77, 5, 40)}, ValueError, rf"arr\[1\] = {keys}")
      for keys in (109, 2**31 - 1)),
    *(("plan", {"kv_indptr": indptr}, ValueError, "kv_indptr goes from") for indptr in (
        ints(-1, 3, 5, 15, 16, 21), ints(1, 5, 7, 17, 18, 23), ints(22, 17, 16, 6, 4, 0)
    )),
    ("run", {"logits_soft_cap": 3.0}, ValueError, "logits_soft_cap"),
    ("run", {"profiler_buffer": ints(0)}, NotImplementedError, "profiler_buffer"),
]  # fmt: skip


def test_batch_attention_refuses(target):
    inputs, wrapper = made(target)
    plan = functools.partial(wrapper.plan, **arguments(inputs))
    run = functools.partial(wrapper.run, inputs.q, inputs.cache)
    check_refusals({"run": run}, [("run", {}, ValueError, "before plan")])
    plan()
    check_refusals({"plan": plan, "run": run}, REFUSED)
    runner.compare(inputs, *run()).check()


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
            near = behind[row, first : last + 1] < range_window
            kept[row, first : last + 1] |= near | (range_window <= 0)
        masks.append(kept)
    return masks


def expected(target, *windows):
    inputs = build(dataclasses.replace(MIXED, mask=MaskKind.CUSTOM), device=target.device)
    inputs.masks = masks_of(inputs.case, *windows)
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


def test_the_same_ranges_after_another_plan_or_workspace(target):
    inputs, wrapper = ranges_planned(target)
    given, work = (inputs.q, inputs.cache, ranges_of(inputs)), wrapper._float_workspace_buffer
    wrapper.run(*given)
    inputs.case = dataclasses.replace(inputs.case, sm_scale=0.3, fixed_split_size=16)
    plan_ranges(wrapper, inputs, sm_scale=0.3, fixed_split_size=16)
    runner.compare(inputs, wrapper.run(*given), None).check()
    wrapper.reset_workspace_buffer(*(runner.workspace(target.device, 1 << 24) for _ in range(2)))
    work.untyped_storage().resize_(0)
    runner.compare(inputs, wrapper.run(*given), None).check()


EITHER = (NotImplementedError, ValueError)
REFUSED_RANGES = [
    *(("plan", {name: value}, EITHER, rf"\b{name}\b") for name, value in (
        ("causal", True), ("custom_mask", ints(1)), ("window_left", 3), ("logits_soft_cap", 3.0),
        ("head_dim_qk", 128), ("q_data_type", torch.bfloat16), ("prefix_len_ptr", ints(1)),
    )),
    ("run", {"change": torch.Tensor.long}, TypeError, r"bidirectional_ranges is torch\.int64"),
    ("run", {"change": lambda ranges: ranges[1:]}, ValueError, "rows of q"),
    ("make", {"use_cuda_graph": True}, NotImplementedError, "use_cuda_graph"),
]  # fmt: skip


def test_ranges_refuse(target):
    inputs, wrapper = ranges_planned(target)
    ranges = ranges_of(inputs)

    def run(change=torch.clone):
        return wrapper.run(inputs.q, inputs.cache, change(ranges))

    plan = functools.partial(plan_ranges, wrapper, inputs)
    make = functools.partial(ranges_wrapper, target)
    check_refusals({"plan": plan, "run": run, "make": make}, REFUSED_RANGES)
    runner.compare(inputs, run(), None).check()
