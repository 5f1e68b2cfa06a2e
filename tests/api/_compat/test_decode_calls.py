"""Calls of decode: several queries per request, scales by position, shared prefixes."""

import dataclasses
import functools

import preflash
import pytest
import torch
from planned_cases import check_run
from preflash.testing import Case, MaskKind, build, compare, oracle, reference, runner

HALF, E4M3 = torch.float16, torch.float8_e4m3fn
SIZES = (8, 2, 128, 16)


def table_of(inputs) -> tuple:
    return inputs.kv_indptr, inputs.indices, inputs.last_page_len


def verification(target, q_len, **changes):
    """Returns inputs, a decode wrapper without a plan, and the first arguments of its plan()."""
    case = Case(
        "verify", (q_len,) * 4, (q_len, 128, 64, 100), 8, 2, 128, dtype=HALF, page_size=16,
        mask=MaskKind.CAUSAL if q_len > 1 else MaskKind.NONE,
    )  # fmt: skip
    inputs = build(dataclasses.replace(case, **changes), device=target.device)
    work = runner.workspace(target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        work, use_tensor_cores=True, backend=target.backend
    )
    return inputs, wrapper, (*table_of(inputs), *SIZES)


@pytest.mark.parametrize(("q_len", "window"), [(1, 40), (2, -1), (3, 40)])
def test_queries_per_request(target, q_len, window):
    inputs, wrapper, table = verification(target, q_len)
    pipeline = dataclasses.replace(inputs.pipeline, window_left=window)
    expected = reference(inputs, pipeline=pipeline)
    options = {"q_data_type": HALF, "window_left": window, "q_len_per_req": q_len}
    for plan in (wrapper.plan, functools.partial(preflash.fast_decode_plan, wrapper)):
        plan(*table, **options)
        for q_len_per_req in (None, q_len):
            check_run(inputs, wrapper, expected, q_len_per_req=q_len_per_req)
    assert wrapper._q_len_per_req == q_len


@pytest.mark.parametrize("inference", [False, True])
def test_queries_per_request_of_run_alone(target, inference):
    """run(q_len_per_req=) plans the values of the last plan() again, as in trtllm-gen; the caller
    may have overwritten its arrays, but for pages on the GPU. None is plan()'s number."""
    inputs, wrapper, table = verification(target, 3)
    one = torch.ones_like(inputs.q[:4])
    with torch.inference_mode(inference):
        arrays = [array.clone() for array in table[:3]]
        wrapper.plan(*arrays, *SIZES, q_data_type=HALF)
        for array in arrays:
            if array.is_cpu or array is not arrays[1]:
                array.fill_(77)
    alone = None
    for _ in range(2):
        check_run(inputs, wrapper, q_len_per_req=3)
        assert wrapper._q_len_per_req == 3
        before, alone = alone, wrapper.run(one, inputs.cache)
        assert before is None or torch.equal(before, alone)
    wrapper.begin_forward(*table, q_data_type=HALF)
    assert torch.equal(wrapper.run(one, inputs.cache), alone)
    with pytest.raises(ValueError, match=r"q_len_per_req=3 in run.*plan again"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=3)


EMPTY = "empty KV range"
REFUSED = [
    ("q_len_per_req", lambda w, i, more: w.run(more, i.cache)),
    ("=3 has exactly 12", lambda w, i, more: w.run(i.q, i.cache, q_len_per_req=3)),
    (EMPTY, lambda w, i, more: w.run(more, i.cache, q_len_per_req=3)),
    (EMPTY, lambda w, i, more: w.plan(*table_of(i), *SIZES, q_data_type=HALF, q_len_per_req=3)),
]


@pytest.mark.parametrize(("match", "call"), REFUSED)
def test_refusals(target, match, call):
    inputs, wrapper, table = verification(target, 2)
    wrapper.plan(*table, q_data_type=HALF, q_len_per_req=2)
    with pytest.raises(ValueError, match=match):
        call(wrapper, inputs, torch.cat([inputs.q, inputs.q[:4]]))
    check_run(inputs, wrapper)


def test_scales_by_position(target):
    inputs, wrapper, table = verification(target, 1, dtype=E4M3, head_scales=True)
    wrapper.plan(*table, q_data_type=E4M3, sm_scale=inputs.pipeline.sm_scale)
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    result = wrapper.run(inputs.q, inputs.cache, *scales, return_lse=True)
    runner.compare(inputs, *result).check()
    for wrong in (scales[:2], (1.0, 1.0, True), (1.0, 1.0)):
        with pytest.raises(TypeError, match="too many"):
            wrapper.run(inputs.q, inputs.cache, *wrong)


def shared_prefix(
    device, queries, prefix, keys, layout="NHD", dtype=HALF, causal=False, scale=None
):
    """Returns inputs over the pages, (k, v) of the prefix, and the oracle's attention over both."""
    case = Case(
        "prefix", queries, keys, 8, 2, 128, dtype=dtype, page_size=16, layout=layout,
        mask=MaskKind.CAUSAL if causal else MaskKind.NONE, sm_scale=scale,
    )  # fmt: skip
    inputs = build(case, device=device)
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn((2, prefix, 2, 128), generator=generator).to(dtype).to(device)
    parts = []
    for request in map(inputs.request, range(len(queries))):
        whole = [torch.cat([a.cpu(), b.cpu()]) for a, b in ((k, request.k), (v, request.v))]
        parts.append(oracle.attend(request.q.cpu(), *whole, inputs.pipeline))
    expected = oracle.concatenate(parts)
    expected.spread = expected.spread + 2 * expected.out.abs()  # the roundings of the merge
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return inputs, (k, v), expected.map(lambda t: t.to(device))


@pytest.mark.parametrize(
    ("layout", "prefix", "dtype"),
    [("NHD", 0, torch.bfloat16), ("HND", 1, HALF), ("HND", 128, HALF)],
)
def test_decode_with_a_shared_prefix(target, layout, prefix, dtype):
    device = target.device
    inputs, (k, v), expected = shared_prefix(
        device, (1,) * 4, prefix, (37, 17, 1, 90), layout, dtype
    )
    wrapper = preflash.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        runner.workspace(device), layout
    )
    wrapper.begin_forward(*table_of(inputs), *SIZES, dtype)
    for _ in range(2):
        compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(runner.workspace(device), runner.workspace(device, 1 << 20))
    compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    with pytest.raises(ValueError, match=r"must be|must have"):
        wrapper.forward(inputs.q, k[:, :1], v[:, :1, :64], inputs.cache)


@pytest.mark.parametrize(
    ("layout", "prefix", "options"),
    [
        ("NHD", 0, {"causal": False}),
        ("HND", 1, {"causal": True, "sm_scale": 0.3}),
        ("HND", 128, {"causal": True}),
    ],
)
def test_prefill_with_a_shared_prefix(target, layout, prefix, options):
    lengths = ((9, 0, 33, 1), prefix, (40, 7, 90, 5))
    inputs, (k, v), expected = shared_prefix(
        target.device, *lengths, layout, causal=options["causal"], scale=options.get("sm_scale")
    )
    wrapper = preflash.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        runner.workspace(target.device), layout
    )
    for _ in range(2):
        wrapper.begin_forward(inputs.qo_indptr, *table_of(inputs), *SIZES)
        out = wrapper.forward(inputs.q, k, v, inputs.cache, rope_scale=1.0, **options)
        compare(out, None, expected).check()
        with pytest.raises(ValueError, match="rope_theta"):
            wrapper.forward(inputs.q, k, v, inputs.cache, rope_theta=5e5)
        wrapper.end_forward()
