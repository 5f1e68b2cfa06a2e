"""Calls as FlashInfer's own tests make them, which differ from the documented ones: variants by
jit_args, scales by position, prefixes beside pages, offsets in elements."""

import copy
import dataclasses
import functools
import math

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, Sinks, build, compare, oracle, poison, runner
from preflash.testing.oracle import Pipeline, reference

HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RAGGED = Case(
    "calls", (9, 0, 33, 1), (40, 7, 90, 5), 8, 2, 128, dtype=HALF, mask=MaskKind.CAUSAL
)  # fmt: skip
PAGED = dataclasses.replace(RAGGED, page_size=16)
BOTH = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=["ragged", "paged"])


def tensors_of(inputs) -> tuple:
    return (inputs.cache,) if inputs.case.paged else (inputs.k, inputs.v)


# --- jit_args of attention sinks ---------------------------------------------


def jit_args(dtype=HALF, head_dim=128, **replaced) -> tuple:
    given = {
        "uri": "batch_prefill_attention_sink",
        "q": dtype,
        "kv": dtype,
        "o": dtype,
        "indices": torch.int32,
        "head_dim_qk": head_dim,
        "head_dim_vo": head_dim,
        "tensors": ["sink"],
        "tensor_types": ["float"],
        "scalars": ["sm_scale"],
        "scalar_types": ["double"],
        "variant": "AttentionSink",
        "source": "struct AttentionSink;",
    }
    return tuple({**given, **replaced}.values())


def with_sinks(case, target, **options):
    inputs = build(dataclasses.replace(case, sinks=Sinks.MIXED), device=target.device)
    options = {"jit_args": jit_args(case.dtype), **options}
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, **options)
    return inputs, wrapper


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 20])
@BOTH
def test_sinks_by_jit_args(target, case, window, causal, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    inputs, wrapper = with_sinks(case, target, jit_kwargs={"use_sliding_window": window >= 0})
    runner.plan(wrapper, inputs, causal=causal, window_left=window)
    pipeline = Pipeline(0.11, causal, window, sinks=inputs.sinks)
    expected = reference(inputs, pipeline=pipeline)
    out = wrapper.run(inputs.q, *tensors_of(inputs), inputs.sinks, 0.11)
    compare(out, None, expected).check()
    out, lse = wrapper.run_return_lse(inputs.q, *tensors_of(inputs), inputs.sinks, 0.11)
    compare(out, lse, expected).check()


@BOTH
def test_sinks_by_jit_args_with_options_by_name(target, case):
    inputs, wrapper = with_sinks(case, target)
    runner.plan(wrapper, inputs, sm_scale=0.2)
    out = poison(inputs.q.shape, case.dtype, target.device)
    options = {"v_scale": 0.5, "q_scale": 2.0, "out": out, "return_lse": True, "lse_base": "ln"}
    for each in (wrapper, copy.copy(wrapper)):
        for sinks in ((inputs.sinks,), ()):
            named = {} if sinks else {"sinks": inputs.sinks}
            result, lse = each.run(
                inputs.q, *tensors_of(inputs), *sinks, window_left=30, **named, **options
            )
            assert result is out
            pipeline = Pipeline(0.4, True, 30, out_scale=0.5, sinks=inputs.sinks)
            compare(out, lse / math.log(2), reference(inputs, pipeline=pipeline)).check()


REFUSED_VARIANTS = {
    "another": {"jit_args": jit_args(variant="FlashSigmoid")},
    "scalars": {"jit_args": jit_args(scalars=["logits_scale", "sigmoid_bias"])},
    "int64": {"jit_args": jit_args(indices=torch.int64)},
    "short": {"jit_args": jit_args()[:7]},
    "no names": {"jit_args": jit_args(tensors=None)},
    "text": {"jit_args": "AttentionSink"},
    "kwargs": {"jit_args": jit_args(), "jit_kwargs": {"fp8_enabled": True}},
    "kwargs_alone": {"jit_args": None, "jit_kwargs": {"use_sliding_window": True}},
}


@pytest.mark.parametrize("options", REFUSED_VARIANTS.values(), ids=REFUSED_VARIANTS)
@BOTH
def test_other_variants_are_refused(target, case, options):
    with pytest.raises(NotImplementedError, match="jit_"):
        runner.make_wrapper(case, backend=target.backend, device=target.device, **options)
    with pytest.raises(NotImplementedError, match="jit_args"):
        preflash.PODWithPagedKVCacheWrapper(runner.workspace(target.device), jit_args=jit_args())


@BOTH
def test_what_contradicts_jit_args_is_refused(target, case):
    inputs, wrapper = with_sinks(case, target)
    for wrong in (
        {"q_data_type": BFLOAT, "kv_data_type": BFLOAT},
        {"head_dim": 64},
        {"pos_encoding_mode": "ALIBI"},
    ):
        positional, options = runner.plan_arguments(inputs)
        if "head_dim" in wrong:
            at = 6 if case.paged else 4
            positional = (*positional[:at], 64, *positional[at + 1 :])
        else:
            options = {**options, **wrong}
        with pytest.raises(ValueError, match="contradicts the constructor"):
            wrapper.plan(*positional, **options)
    runner.plan(wrapper, inputs)
    with pytest.raises(TypeError, match="sink"):
        wrapper.run(inputs.q, *tensors_of(inputs))
    with pytest.raises(TypeError, match="takes no sink"):
        wrapper.forward(inputs.q, *tensors_of(inputs))
    with pytest.raises(TypeError, match="too many"):
        wrapper.run(inputs.q, *tensors_of(inputs), inputs.sinks, 0.1, 0.2)
    with pytest.raises(TypeError, match="Did you mean 'v_scale'"):
        wrapper.run(inputs.q, *tensors_of(inputs), inputs.sinks, vscale=0.2)


# --- fp8: scales by position, queries of float8_e5m2 --------------------------


@BOTH
def test_scales_by_position(target, case):
    case = dataclasses.replace(case, dtype=E4M3, kv_dtype=E4M3, head_scales=True)
    inputs = build(case, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend)
    inputs.variant = wrapper.variant  # bounds depend on it
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    expected = reference(inputs)
    out = wrapper.run(inputs.q, *tensors_of(inputs), *scales)
    runner.compare(inputs, out, None, expected).check()
    out, lse = wrapper.run_return_lse(inputs.q, *tensors_of(inputs), *scales)
    runner.compare(inputs, out, lse, expected).check()
    named = wrapper.run(inputs.q, *tensors_of(inputs), *scales, return_lse=True, lse_base="ln")
    runner.compare(inputs, named[0], named[1] / math.log(2), expected).check()
    out, lse = wrapper.run(inputs.q, *tensors_of(inputs), *scales[:2], 2.0, return_lse=True)
    of_v = dataclasses.replace(inputs.scales, v=torch.full_like(inputs.scales.v, 2.0))
    runner.compare(inputs, out, lse, reference(dataclasses.replace(inputs, scales=of_v))).check()
    out = wrapper.run(inputs.q, *tensors_of(inputs), 2.0, 0.25, 2.0)
    same = wrapper.run(inputs.q, *tensors_of(inputs), q_scale=2.0, k_scale=0.25, v_scale=2.0)
    assert torch.equal(out, same)
    with pytest.raises(TypeError, match="q_scale beside scales"):
        wrapper.run(inputs.q, *tensors_of(inputs), *scales, q_scale=2.0)
    for wrong in (scales[:1], scales[:2], (*scales, scales[0])):
        with pytest.raises((TypeError, ValueError)):
            wrapper.run(inputs.q, *tensors_of(inputs), *wrong)
    with pytest.raises(TypeError, match="scale"):
        wrapper.run(inputs.q, *tensors_of(inputs), *scales, scale_k=inputs.scales.k)


@BOTH
def test_what_stands_by_position_is_not_given_twice(target, case):
    inputs = build(case, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend)
    before = (0.5, 2.0) if case.paged else ()  # k_scale and v_scale
    out, _ = wrapper.run(inputs.q, *tensors_of(inputs), *before, True)
    same = dict(zip(("k_scale", "v_scale"), before, strict=False))
    assert torch.equal(out, wrapper.run(inputs.q, *tensors_of(inputs), **same))
    with pytest.raises(TypeError, match="multiple values for argument 'return_lse'"):
        wrapper.run(inputs.q, *tensors_of(inputs), *before, True, return_lse=True)
    for name in same:
        with pytest.raises(TypeError, match=f"multiple values for argument {name!r}"):
            wrapper.run(inputs.q, *tensors_of(inputs), *before, **{name: 1.0})


def test_scales_by_position_in_decode(target):
    case = dataclasses.replace(
        PAGED, qo_lens=(1,) * len(PAGED.kv_lens), mask=MaskKind.NONE,
        dtype=E4M3, kv_dtype=E4M3, head_scales=True,
    )  # fmt: skip
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), case.layout, backend=target.backend
    )
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    wrapper.plan(
        *table, 8, 2, 128, 16, q_data_type=E4M3, kv_data_type=E4M3,
        o_data_type=inputs.case.o_dtype, sm_scale=inputs.pipeline.sm_scale,
    )  # fmt: skip
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    out, lse = wrapper.run(inputs.q, inputs.cache, *scales, return_lse=True)
    runner.compare(inputs, out, lse).check()
    for wrong in (scales[:2], (1.0, 1.0, True), (1.0, 1.0)):
        with pytest.raises(TypeError, match="too many"):
            wrapper.run(inputs.q, inputs.cache, *wrong)


def of_e5m2(case, target, o_dtype=None, **options):
    """Inputs whose queries have values of float8_e5m2, and those queries."""
    wide = BFLOAT if o_dtype is None else o_dtype
    inputs = build(
        dataclasses.replace(case, dtype=wide, kv_dtype=E5M2, **options), device=target.device
    )
    q = inputs.q.to(E5M2)
    return dataclasses.replace(inputs, q=q.to(wide)), q


@pytest.mark.parametrize("o_dtype", [None, HALF, BFLOAT])
@BOTH
def test_queries_of_e5m2(target, case, o_dtype):
    inputs, q = of_e5m2(case, target, o_dtype)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, q_data_type=E5M2, kv_data_type=E5M2, o_data_type=o_dtype)
    assert wrapper._cached_q_data_type == E5M2
    expected = reference(inputs)
    for _ in range(2):
        out, lse = wrapper.run(q, *tensors_of(inputs), return_lse=True)
        assert out.dtype == (o_dtype or BFLOAT)
        runner.compare(inputs, out, lse, expected).check()
    pipeline = dataclasses.replace(inputs.pipeline, window_left=12)
    out = wrapper.run(q, *tensors_of(inputs), window_left=12)
    runner.compare(inputs, out, None, reference(inputs, pipeline=pipeline)).check()
    with pytest.raises(TypeError, match=r"q is torch.*; must be torch.float8_e5m2"):
        wrapper.run(inputs.q, *tensors_of(inputs))


@BOTH
def test_queries_of_e5m2_with_scales_of_heads(target, case):
    inputs, q = of_e5m2(case, target)
    heads = {"q": 8, "k": 2, "v": 2}
    factors = {n: torch.rand(h, device=target.device) + 0.5 for n, h in heads.items()}
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs, q_data_type=E5M2, kv_data_type=None)
    out, lse = wrapper.run_return_lse(q, *tensors_of(inputs), *factors.values())
    from preflash.testing.inputs import HeadScales

    scaled = dataclasses.replace(inputs, scales=HeadScales(**factors))
    runner.compare(inputs, out, lse, reference(scaled)).check()


def test_queries_of_e5m2_with_buffers_of_graphs_and_beside_prefills(target):
    inputs, q = of_e5m2(PAGED, target)
    new = functools.partial(torch.zeros, dtype=torch.int32, device=target.device)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace(target.device), "NHD", True, new(5), new(5), new(64), new(4),
        backend=target.backend,
    )  # fmt: skip
    for _ in range(2):
        runner.plan(wrapper, inputs, q_data_type=E5M2, kv_data_type=E5M2)
        out, lse = wrapper.run(q, inputs.cache, return_lse=True)
        runner.compare(inputs, out, lse).check()
    pod = preflash.PODWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    pod.plan(*table, 8, 2, 128, 16, q_data_type=E5M2, kv_data_type=E5M2)
    k, v = (t.flatten(0, 1)[:9] for t in (inputs.k, inputs.v))
    with pytest.raises(TypeError, match="float8_e5m2"):
        pod.run(q[:9], k, v, q[:4], inputs.cache)


@pytest.mark.parametrize("o_dtype", [None, HALF])
def test_a_single_request_of_e5m2(target, o_dtype):
    case = dataclasses.replace(RAGGED, qo_lens=(33,), kv_lens=(90,))
    inputs, q = of_e5m2(case, target, o_dtype)
    expected = reference(inputs)
    for masked in (False, True):
        options = {"causal": True}
        if masked:
            options = {"custom_mask": torch.ones(33, 90, dtype=torch.bool).tril(57).to(q.device)}
        options |= {"sm_scale": inputs.pipeline.sm_scale, "o_dtype": o_dtype}
        out, lse = preflash.single_prefill_with_kv_cache(
            q, inputs.k[:90], inputs.v[:90], **options, return_lse=True, backend=target.backend
        )
        assert out.dtype == (o_dtype or BFLOAT)
        runner.compare(inputs, out, lse, expected).check()


# --- prefixes beside pages -----------------------------------------------------


def shared_prefix(target, queries, prefix, keys, layout="NHD", dtype=HALF, causal=False):
    """Inputs over the pages, the prefix, and what attention over both gives."""
    case = Case(
        "prefix", queries, keys, 8, 2, 128, dtype=dtype, page_size=16, layout=layout,
        mask=MaskKind.CAUSAL if causal else MaskKind.NONE,
    )  # fmt: skip
    inputs = build(case, device=target.device)
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn((2, prefix, 2, 128), generator=generator).to(dtype).to(target.device)
    parts = []
    for i in range(len(queries)):
        request = inputs.request(i)
        keys_of = torch.cat([k.cpu(), request.k.cpu()])
        values_of = torch.cat([v.cpu(), request.v.cpu()])
        parts.append(oracle.attend(request.q.cpu(), keys_of, values_of, inputs.pipeline))
    expected = oracle.concatenate(parts)
    expected.spread = expected.spread + 2 * expected.out.abs()  # the roundings of the merge
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return inputs, k, v, expected.map(lambda t: t.to(target.device))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prefix", [0, 1, 128])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_decode_with_a_shared_prefix(target, layout, prefix, dtype):
    inputs, k, v, expected = shared_prefix(target, (1,) * 4, prefix, (37, 17, 1, 90), layout, dtype)
    wrapper = preflash.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        runner.workspace(target.device), layout
    )
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    wrapper.begin_forward(*table, 8, 2, 128, 16, dtype)
    for _ in range(2):
        compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(
        runner.workspace(target.device), runner.workspace(target.device, 1 << 20)
    )
    compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    with pytest.raises(ValueError, match=r"must be|must have"):
        wrapper.forward(inputs.q, k[:, :1], v[:, :1, :64], inputs.cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("prefix", [0, 1, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_with_a_shared_prefix(target, layout, prefix, causal):
    lengths = ((9, 0, 33, 1), (40, 7, 90, 5))
    inputs, k, v, expected = shared_prefix(
        target, lengths[0], prefix, lengths[1], layout, causal=causal
    )
    wrapper = preflash.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        runner.workspace(target.device), layout
    )
    table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    for _ in range(2):
        wrapper.begin_forward(*table, 8, 2, 128, 16)
        out = wrapper.forward(inputs.q, k, v, inputs.cache, causal=causal)
        compare(out, None, expected).check()
        wrapper.end_forward()


def test_a_shared_prefix_with_a_scale(target):
    inputs, k, v, _ = shared_prefix(target, (3,), 20, (30,))
    wrapper = preflash.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        runner.workspace(target.device)
    )
    table = (inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    wrapper.begin_forward(*table, 8, 2, 128, 16)
    out = wrapper.forward(inputs.q, k, v, inputs.cache, sm_scale=0.3, rope_scale=1.0)
    request = inputs.request(0)
    whole = oracle.attend(
        request.q.cpu(), torch.cat([k.cpu(), request.k.cpu()]),
        torch.cat([v.cpu(), request.v.cpu()]), Pipeline(0.3),
    )  # fmt: skip
    whole.spread = whole.spread + 2 * whole.out.abs()
    compare(out, None, whole.map(lambda t: t.to(target.device))).check()
    with pytest.raises(ValueError, match="rope_theta"):
        wrapper.forward(inputs.q, k, v, inputs.cache, rope_theta=5e5)


# --- q_len_per_req --------------------------------------------------------------


def verification(target, q_len, **options):
    case = Case(
        "verify", (q_len,) * 4, (q_len, 128, 64, 100), 8, 2, 128, dtype=HALF, page_size=16,
        mask=MaskKind.CAUSAL if q_len > 1 else MaskKind.NONE,
    )  # fmt: skip
    inputs = build(case, device=target.device)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend, **options
    )
    table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
    return inputs, wrapper, (*table, 8, 2, 128, 16)


@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_queries_per_request_of_decode(target, q_len, window):
    inputs, wrapper, table = verification(target, q_len, use_tensor_cores=True)
    pipeline = dataclasses.replace(inputs.pipeline, window_left=window)
    expected = reference(inputs, pipeline=pipeline)
    options = {"q_data_type": HALF, "window_left": window, "q_len_per_req": q_len}
    for plan in (wrapper.plan, lambda *a, **k: preflash.fast_decode_plan(wrapper, *a, **k)):
        plan(*table, **options)
        for given in (None, q_len):
            out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True, q_len_per_req=given)
            runner.compare(inputs, out, lse, expected).check()
    assert wrapper._q_len_per_req == q_len


def test_wrong_queries_per_request(target):
    inputs, wrapper, table = verification(target, 2)
    wrapper.plan(*table, q_data_type=HALF, q_len_per_req=2)
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(torch.cat([inputs.q, inputs.q[:4]]), inputs.cache)
    with pytest.raises(ValueError, match="q_len_per_req=3 has exactly 12"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=3)
    more = torch.cat([inputs.q, inputs.q[:4]])
    for refused in (lambda: wrapper.run(more, inputs.cache, q_len_per_req=3),
                    lambda: wrapper.plan(*table, q_data_type=HALF, q_len_per_req=3)):  # fmt: skip
        with pytest.raises(ValueError, match="empty KV range"):
            refused()
    out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True)
    runner.compare(inputs, out, lse).check()


def test_queries_per_request_of_run_alone(target):
    """q_len_per_req of run(), as in trtllm-gen: run() plans again, and None is plan()'s number."""
    inputs, wrapper, table = verification(target, 3)
    one = torch.ones_like(inputs.q[:4])
    wrapper.plan(*table, q_data_type=HALF)
    alone = wrapper.run(one, inputs.cache)
    for _ in range(2):
        out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True, q_len_per_req=3)
        runner.compare(inputs, out, lse).check()
        assert wrapper._q_len_per_req == 3
        assert torch.equal(wrapper.run(one, inputs.cache), alone)


@pytest.mark.parametrize("inference", [False, True])
def test_run_plans_what_plan_was_given(target, inference):
    """The caller's arrays may have changed since; pages on the GPU are read where they are."""
    inputs, wrapper, table = verification(target, 3)
    with torch.inference_mode(inference):
        table = (*(array.clone() for array in table[:3]), *table[3:])
        wrapper.plan(*table, q_data_type=HALF)
        for array in table[:3]:
            if array.is_cpu or array is not table[1]:
                array.fill_(77)
    out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True, q_len_per_req=3)
    runner.compare(inputs, out, lse).check()


def test_run_does_not_plan_again_what_begin_forward_planned(target):
    inputs, wrapper, table = verification(target, 3)
    wrapper.begin_forward(*table, q_data_type=HALF)
    with pytest.raises(ValueError, match=r"q_len_per_req=3 in run.*plan again"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=3)


# --- backend="cudnn" with offsets in elements ------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_offsets_in_elements(page_size, kv_heads, causal):
    """The cache is [pages, heads, page_size, head_dim] with strides of its own, also where heads
    and page_size are one number."""
    case = Case(
        "cudnn", (3, 17, 1), (9, 33, 40), 8, kv_heads, 128, dtype=BFLOAT, page_size=page_size,
        layout="NHD", mask=MaskKind.CAUSAL if causal else MaskKind.NONE, sm_scale=0.11,
    )  # fmt: skip
    inputs = build(case)
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(
        runner.workspace("cpu"), "NHD", backend="cudnn"
    )
    lens_q, lens = (
        torch.tensor(given, dtype=torch.int32).view(-1, 1, 1, 1)
        for given in (case.qo_lens, case.kv_lens)
    )
    wrapper.plan(
        inputs.qo_indptr * (8 * 128), inputs.kv_indptr, inputs.indices, inputs.last_page_len,
        8, kv_heads, 128, page_size, pos_encoding_mode="NONE", causal=causal, q_data_type=BFLOAT,
        seq_lens=lens, seq_lens_q=lens_q, sm_scale=0.11, max_token_per_sequence=17,
        max_sequence_kv=40,
    )  # fmt: skip
    k, v = (pool.transpose(1, 2) for pool in (inputs.k, inputs.v))
    out, lse = wrapper.run(inputs.q, (k, v), return_lse=True)
    runner.compare(inputs, out, lse).check()


@BOTH
def test_cudnn_offsets_in_tokens_beside_seq_lens_q(case):
    inputs = build(case)
    wrapper = runner.make_wrapper(case, backend="cudnn")
    lens = {
        "seq_lens_q": torch.tensor(case.qo_lens).view(-1, 1, 1, 1),
        "seq_lens": torch.tensor(case.kv_lens),
    }
    runner.plan(wrapper, inputs, **lens)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    positional, options = runner.plan_arguments(inputs)
    if not case.paged:
        positional = (positional[0] * 8 * 128, positional[1] * 2 * 128, *positional[2:])
        wrapper.plan(*positional, **{**options, **lens})
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    wrong = (inputs.qo_indptr * (8 * 128 + 8), *positional[1:])
    with pytest.raises(ValueError, match=r"qo_indptr|seq_lens_q|max"):
        wrapper.plan(*wrong, **{**options, **lens})


# --- what is set and read -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_graph_buffers_that_are_set_afterwards(target, kind):
    """Sets graph buffers after construction, as RTP-LLM does before its first plan()."""
    lengths = (1,) * 4 if kind == "decode" else (9, 0, 33, 1)
    case = dataclasses.replace(
        PAGED, qo_lens=lengths, mask=MaskKind.NONE if kind == "decode" else MaskKind.CAUSAL
    )
    inputs = build(case, device=target.device)
    cls = preflash.BatchPrefillWithPagedKVCacheWrapper
    if kind == "decode":
        cls = preflash.BatchDecodeWithPagedKVCacheWrapper
    wrapper = cls(runner.workspace(target.device), case.layout, backend=target.backend)
    assert wrapper._qo_indptr_buf is None
    assert wrapper._fixed_batch_size == 0
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._paged_kv_indices_buf = inputs.indices
    new = torch.zeros
    on = {"dtype": torch.int32, "device": target.device}
    wrapper._use_cuda_graph = True
    assert wrapper.is_cuda_graph_enabled
    if kind == "prefill":
        wrapper._qo_indptr_buf = new(5, **on)
    wrapper._paged_kv_indptr_buf = indptr = new(5, **on)
    wrapper._paged_kv_last_page_len_buf = new(4, **on)
    wrapper._paged_kv_indices_buf = new(64, **on)
    wrapper._fixed_batch_size = 4
    assert wrapper._paged_kv_indptr_buf is indptr
    assert wrapper._fixed_batch_size == 4
    for _ in range(2):
        if kind == "decode":
            table = (inputs.kv_indptr, inputs.indices, inputs.last_page_len)
            wrapper.plan(*table, 8, 2, 128, 16, q_data_type=HALF)
        else:
            runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert torch.equal(indptr, inputs.kv_indptr.to(indptr.device))
    wrapper._use_cuda_graph = True  # as it is
    with pytest.raises(AttributeError, match=r"after plan\(\)"):
        wrapper._use_cuda_graph = False
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._paged_kv_indptr_buf = indptr.clone()


def test_graph_buffers_that_are_missing_or_wrong(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.make_wrapper(PAGED, backend=target.backend, device=target.device)
    wrapper._use_cuda_graph = True
    with pytest.raises(ValueError, match="qo_indptr_buf=None"):
        runner.plan(wrapper, inputs)
    wrapper._use_cuda_graph = False
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    with pytest.raises(AttributeError, match=r"after plan\(\)"):
        wrapper._use_cuda_graph = True


def test_attributes_of_a_plan(target):
    inputs = build(PAGED, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend)
    assert wrapper._qo_indptr_last == sum(PAGED.qo_lens)
    assert wrapper._kv_lens_buffer.tolist() == list(PAGED.kv_lens)
    assert wrapper._jit_module is None
    assert (wrapper._pos_encoding_mode, wrapper._rope_scale) == ("NONE", 1.0)
    with pytest.raises(NotImplementedError, match="_jit_module"):
        wrapper._jit_module = object()


def test_attributes_of_a_cascade(target):
    wrapper = preflash.MultiLevelCascadeAttentionWrapper(2, runner.workspace(target.device))
    kind = preflash.BatchPrefillWithPagedKVCacheWrapper
    assert [type(level) for level in wrapper._batch_prefill_wrappers] == [kind, kind]
    assert wrapper._num_levels == 2


def test_attributes_of_pod(target):
    inputs, _, table = verification(target, 1)
    wrapper = preflash.PODWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    assert wrapper._paged_kv_indptr_buf is None
    wrapper.plan(*table, q_data_type=HALF, sm_scale=0.25)
    assert (wrapper._sm_scale, wrapper._window_left, wrapper._use_cuda_graph) == (0.25, -1, False)
    assert (wrapper._pos_encoding_mode, wrapper._rope_theta) == ("NONE", 1e4)
    assert wrapper._cached_q_data_type == HALF
    assert torch.equal(wrapper._paged_kv_indptr_buf.cpu(), inputs.kv_indptr.cpu())
    assert torch.equal(wrapper._paged_kv_last_page_len_buf.cpu(), inputs.last_page_len.cpu())
    assert wrapper._float_workspace_buffer.numel() == runner.WORKSPACE_BYTES
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._sm_scale = 1.0


def test_attributes_of_batches_of_pod(target):
    prefills = build(PAGED, device=target.device)
    decodes, _, _ = verification(target, 1)
    wrapper = preflash.BatchPODWithPagedKVCacheWrapper(
        runner.workspace(target.device), backend=target.backend
    )
    assert wrapper._kv_indptr_buf_p is None
    sides = []
    for inputs in (prefills, decodes):
        sides += [inputs.qo_indptr, inputs.kv_indptr, inputs.indices, inputs.last_page_len]
    wrapper.plan(*sides, 8, 2, 128, 16, q_data_type=HALF)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    told = [getattr(wrapper, f"_{name}_buf_{side}") for side in "pd" for name in names]
    for values, given in zip(told, sides, strict=True):
        assert torch.equal(values.cpu(), given.cpu()[: values.numel()])
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._kv_indptr_buf_p = sides[1]
    with pytest.raises(NotImplementedError, match="CUDA graphs"):
        wrapper._use_cuda_graph = True


@pytest.mark.parametrize("cap", [0, -1, -0.0, -30.0])
@BOTH
def test_soft_caps_that_are_none(target, case, cap):
    inputs = build(case, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend, logits_soft_cap=cap)
    assert wrapper._logits_soft_cap == 0.0
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_an_unaligned_workspace(target):
    sliced = runner.workspace(target.device, 1025)[1:]
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        preflash.BatchDecodeWithPagedKVCacheWrapper(sliced)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(runner.workspace(target.device))
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(runner.workspace(target.device), sliced)
