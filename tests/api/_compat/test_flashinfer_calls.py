"""FlashInfer's own tests make calls that its documentation does not show: variants by jit_args,
scales by position, shared prefixes, queries per request."""

import copy
import dataclasses
import functools
import math

import preflash
import pytest
import torch
from planned_cases import planned, tensors, unplanned
from preflash.testing import Case, MaskKind, Sinks, build, compare, poison, runner
from preflash.testing.inputs import HeadScales
from preflash.testing.oracle import Pipeline, reference
from shared_prefixes import shared_prefix, table_of

HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RAGGED = Case("calls", (9, 0, 33, 1), (40, 7, 90, 5), 8, 2, 128, dtype=HALF, mask=MaskKind.CAUSAL)
PAGED = dataclasses.replace(RAGGED, page_size=16)
BOTH = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=["ragged", "paged"])
SIZES = (8, 2, 128, 16)


def new(name, target, *args, **options):
    """Makes a wrapper of that name on a workspace of its own."""
    return getattr(preflash, name)(runner.workspace(target.device), *args, **options)


def in_nats(result) -> tuple:
    return result[0], result[1] / math.log(2)


# --- jit_args of attention sinks ---------------------------------------------


def jit_args(dtype=HALF, **replaced) -> tuple:
    given = {
        "uri": "batch_prefill_attention_sink", "q": dtype, "kv": dtype, "o": dtype,
        "indices": torch.int32, "head_dim_qk": 128, "head_dim_vo": 128, "tensors": ["sink"],
        "tensor_types": ["float"], "scalars": ["sm_scale"], "scalar_types": ["double"],
        "variant": "AttentionSink", "source": "struct AttentionSink;",
    }  # fmt: skip
    return tuple({**given, **replaced}.values())


def with_sinks(case, target, **options):
    inputs = build(dataclasses.replace(case, sinks=Sinks.MIXED), device=target.device)
    return inputs, unplanned(case, target, **{"jit_args": jit_args(case.dtype), **options})[1]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 20])
@BOTH
def test_sinks_by_jit_args(target, case, window, causal, dtype):
    case = dataclasses.replace(case, dtype=dtype)
    inputs, wrapper = with_sinks(case, target, jit_kwargs={"use_sliding_window": window >= 0})
    runner.plan(wrapper, inputs, causal=causal, window_left=window)
    expected = reference(inputs, pipeline=Pipeline(0.11, causal, window, sinks=inputs.sinks))
    given = (*tensors(inputs), inputs.sinks, 0.11)
    compare(wrapper.run(*given), None, expected).check()
    compare(*wrapper.run_return_lse(*given), expected).check()


@BOTH
def test_sinks_by_jit_args_with_options_by_name(target, case):
    inputs, wrapper = with_sinks(case, target)
    runner.plan(wrapper, inputs, sm_scale=0.2)
    out = poison(inputs.q.shape, case.dtype, target.device)
    options = {"v_scale": 0.5, "q_scale": 2.0, "out": out, "return_lse": True, "lse_base": "ln"}
    pipeline = Pipeline(0.4, True, 30, out_scale=0.5, sinks=inputs.sinks)
    expected = reference(inputs, pipeline=pipeline)
    for each in (wrapper, copy.copy(wrapper)):
        for sinks, named in (((inputs.sinks,), {}), ((), {"sinks": inputs.sinks})):
            result = each.run(*tensors(inputs), *sinks, window_left=30, **named, **options)
            assert result[0] is out
            compare(*in_nats(result), expected).check()


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
        unplanned(case, target, **options)


def replan(head_dim=128, **wrong):
    """Plans with something else than the constructor fixed."""

    def call(wrapper, inputs, _given):
        positional, options = runner.plan_arguments(inputs)
        at = 6 if inputs.case.paged else 4
        wrapper.plan(*positional[:at], head_dim, *positional[at + 1 :], **{**options, **wrong})

    return call


CONTRADICTS = "contradicts the constructor"
REFUSED_WITH_SINKS = {
    "dtypes": (replan(q_data_type=BFLOAT, kv_data_type=BFLOAT), ValueError, CONTRADICTS),
    "head_dim": (replan(64), ValueError, CONTRADICTS),
    "position": (replan(pos_encoding_mode="ALIBI"), ValueError, CONTRADICTS),
    "no sink": (lambda w, _, given: w.run(*given), TypeError, "sink"),
    "forward": (lambda w, _, given: w.forward(*given), TypeError, "takes no sink"),
    "too many": (lambda w, i, given: w.run(*given, i.sinks, 0.1, 0.2), TypeError, "too many"),
    "unknown": (
        lambda w, i, given: w.run(*given, i.sinks, vscale=0.2), TypeError, "Did you mean 'v_scale'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "match"), REFUSED_WITH_SINKS.values(), ids=REFUSED_WITH_SINKS
)
@BOTH
def test_refusals_with_jit_args(target, case, call, error, match):
    inputs, wrapper = with_sinks(case, target)
    runner.plan(wrapper, inputs)
    with pytest.raises(error, match=match):
        call(wrapper, inputs, tensors(inputs))


# --- fp8: scales by position, queries of float8_e5m2 --------------------------


@BOTH
def test_scales_by_position(target, case):
    case = dataclasses.replace(case, dtype=E4M3, kv_dtype=E4M3, head_scales=True)
    inputs = build(case, device=target.device)
    wrapper = runner.planned(inputs, backend=target.backend)
    inputs.variant = wrapper.variant  # bounds depend on it
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    expected = reference(inputs)
    run = functools.partial(wrapper.run, *tensors(inputs))
    runner.compare(inputs, run(*scales), None, expected).check()
    result = wrapper.run_return_lse(*tensors(inputs), *scales)
    runner.compare(inputs, *result, expected).check()
    result = in_nats(run(*scales, return_lse=True, lse_base="ln"))
    runner.compare(inputs, *result, expected).check()
    of_v = dataclasses.replace(inputs.scales, v=torch.full_like(inputs.scales.v, 2.0))
    result = run(*scales[:2], 2.0, return_lse=True)
    doubled = reference(dataclasses.replace(inputs, scales=of_v))
    runner.compare(inputs, *result, doubled).check()
    assert torch.equal(run(2.0, 0.25, 2.0), run(q_scale=2.0, k_scale=0.25, v_scale=2.0))
    for wrong, named, match in (
        (scales, {"q_scale": 2.0}, "q_scale beside scales"),
        (scales, {"scale_k": inputs.scales.k}, "scale"),
        (scales[:1], {}, "one factor for each head|all three of them"),
        (scales[:2], {}, "one factor for each head|all three of them"),
        ((*scales, scales[0]), {}, r"all three|run\(\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            run(*wrong, **named)


@BOTH
def test_an_argument_by_position_is_not_given_twice(target, case):
    inputs, wrapper = planned(case, target)
    run = functools.partial(wrapper.run, *tensors(inputs))
    before = (0.5, 2.0) if case.paged else ()  # k_scale and v_scale
    named = dict(zip(("k_scale", "v_scale"), before, strict=False))
    assert torch.equal(run(*before, True)[0], run(**named))
    with pytest.raises(TypeError, match="multiple values for argument 'return_lse'"):
        run(*before, True, return_lse=True)
    for name in named:
        with pytest.raises(TypeError, match=f"multiple values for argument {name!r}"):
            run(*before, **{name: 1.0})


def test_scales_by_position_in_decode(target):
    case = dataclasses.replace(
        PAGED, qo_lens=(1,) * len(PAGED.kv_lens), mask=MaskKind.NONE,
        dtype=E4M3, kv_dtype=E4M3, head_scales=True,
    )  # fmt: skip
    inputs = build(case, device=target.device)
    wrapper = new("BatchDecodeWithPagedKVCacheWrapper", target, backend=target.backend)
    wrapper.plan(
        *table_of(inputs), *SIZES, q_data_type=E4M3, kv_data_type=E4M3,
        o_data_type=inputs.case.o_dtype, sm_scale=inputs.pipeline.sm_scale,
    )  # fmt: skip
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    result = wrapper.run(inputs.q, inputs.cache, *scales, return_lse=True)
    runner.compare(inputs, *result).check()
    for wrong in (scales[:2], (1.0, 1.0, True), (1.0, 1.0)):
        with pytest.raises(TypeError, match="too many"):
            wrapper.run(inputs.q, inputs.cache, *wrong)


def of_e5m2(case, target, o_dtype=None, **options):
    """Returns inputs whose queries have values of float8_e5m2, and those queries."""
    wide = BFLOAT if o_dtype is None else o_dtype
    inputs = build(
        dataclasses.replace(case, dtype=wide, kv_dtype=E5M2, **options), device=target.device
    )
    q = inputs.q.to(E5M2)
    return dataclasses.replace(inputs, q=q.to(wide)), q


@pytest.mark.parametrize("o_dtype", [None, HALF, BFLOAT])
@BOTH
def test_queries_of_e5m2(target, case, o_dtype):
    (inputs, q), wrapper = of_e5m2(case, target, o_dtype), unplanned(case, target)[1]
    kv_dtype = None if o_dtype is None else E5M2  # None: that of the queries
    runner.plan(wrapper, inputs, q_data_type=E5M2, kv_data_type=kv_dtype, o_data_type=o_dtype)
    assert wrapper._cached_q_data_type == E5M2
    given, expected = (q, *tensors(inputs)[1:]), reference(inputs)
    for _ in range(2):
        out, lse = wrapper.run(*given, return_lse=True)
        assert out.dtype == (o_dtype or BFLOAT)
        runner.compare(inputs, out, lse, expected).check()
    pipeline = dataclasses.replace(inputs.pipeline, window_left=12)
    out = wrapper.run(*given, window_left=12)
    runner.compare(inputs, out, None, reference(inputs, pipeline=pipeline)).check()
    heads = {"q": 8, "k": 2, "v": 2}
    factors = {n: torch.rand(h, device=target.device) + 0.5 for n, h in heads.items()}
    result = wrapper.run_return_lse(*given, *factors.values())
    scaled = dataclasses.replace(inputs, scales=HeadScales(**factors))
    runner.compare(inputs, *result, reference(scaled)).check()
    with pytest.raises(TypeError, match=r"q is torch.*; must be torch.float8_e5m2"):
        wrapper.run(*tensors(inputs))


def test_queries_of_e5m2_with_buffers_of_graphs_and_in_pod(target):
    inputs, q = of_e5m2(PAGED, target)
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=target.device)
    wrapper = new(
        "BatchPrefillWithPagedKVCacheWrapper", target, "NHD", True, ints(5), ints(5), ints(64),
        ints(4), backend=target.backend,
    )  # fmt: skip
    for _ in range(2):
        runner.plan(wrapper, inputs, q_data_type=E5M2, kv_data_type=E5M2)
        runner.compare(inputs, *wrapper.run(q, inputs.cache, return_lse=True)).check()
    pod = new("PODWithPagedKVCacheWrapper", target, backend=target.backend)
    pod.plan(*table_of(inputs), *SIZES, q_data_type=E5M2, kv_data_type=E5M2)
    k, v = (t.flatten(0, 1)[:9] for t in (inputs.k, inputs.v))
    with pytest.raises(TypeError, match="float8_e5m2"):
        pod.run(q[:9], k, v, q[:4], inputs.cache)


@pytest.mark.parametrize("o_dtype", [None, HALF])
@pytest.mark.parametrize("masked", [False, True])
def test_a_single_request_of_e5m2(target, o_dtype, masked):
    case = dataclasses.replace(RAGGED, qo_lens=(33,), kv_lens=(90,))
    inputs, q = of_e5m2(case, target, o_dtype)
    mask = target.to(torch.ones(33, 90, dtype=torch.bool).tril(57))
    options = {"custom_mask": mask} if masked else {"causal": True}
    out, lse = preflash.single_prefill_with_kv_cache(
        q, inputs.k[:90], inputs.v[:90], **options, sm_scale=inputs.pipeline.sm_scale,
        o_dtype=o_dtype, return_lse=True, backend=target.backend,
    )  # fmt: skip
    assert out.dtype == (o_dtype or BFLOAT)
    runner.compare(inputs, out, lse).check()


# --- shared prefixes -----------------------------------------------------------


PREFIXES = pytest.mark.parametrize(("layout", "prefix"), [("NHD", 0), ("HND", 1), ("HND", 128)])


@PREFIXES
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_decode_with_a_shared_prefix(target, layout, prefix, dtype):
    inputs, (k, v), expected = shared_prefix(
        target.device, (1,) * 4, prefix, (37, 17, 1, 90), layout, dtype
    )
    wrapper = new("BatchDecodeWithSharedPrefixPagedKVCacheWrapper", target, layout)
    wrapper.begin_forward(*table_of(inputs), *SIZES, dtype)
    for _ in range(2):
        compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    wrapper.end_forward()
    device = target.device
    wrapper.reset_workspace_buffer(runner.workspace(device), runner.workspace(device, 1 << 20))
    compare(wrapper.forward(inputs.q, k, v, inputs.cache), None, expected).check()
    with pytest.raises(ValueError, match=r"must be|must have"):
        wrapper.forward(inputs.q, k[:, :1], v[:, :1, :64], inputs.cache)


@PREFIXES
@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3), (True, None)])
def test_prefill_with_a_shared_prefix(target, layout, prefix, causal, scale):
    inputs, (k, v), expected = shared_prefix(
        target.device, (9, 0, 33, 1), prefix, (40, 7, 90, 5), layout, causal=causal, scale=scale
    )
    wrapper = new("BatchPrefillWithSharedPrefixPagedKVCacheWrapper", target, layout)
    options = {"causal": causal} if scale is None else {"causal": causal, "sm_scale": scale}
    for _ in range(2):
        wrapper.begin_forward(inputs.qo_indptr, *table_of(inputs), *SIZES)
        out = wrapper.forward(inputs.q, k, v, inputs.cache, rope_scale=1.0, **options)
        compare(out, None, expected).check()
        with pytest.raises(ValueError, match="rope_theta"):
            wrapper.forward(inputs.q, k, v, inputs.cache, rope_theta=5e5)
        wrapper.end_forward()


# --- q_len_per_req --------------------------------------------------------------


def verification(target, q_len, **options):
    case = Case(
        "verify", (q_len,) * 4, (q_len, 128, 64, 100), 8, 2, 128, dtype=HALF, page_size=16,
        mask=MaskKind.CAUSAL if q_len > 1 else MaskKind.NONE,
    )  # fmt: skip
    inputs = build(case, device=target.device)
    wrapper = new("BatchDecodeWithPagedKVCacheWrapper", target, backend=target.backend, **options)
    return inputs, wrapper, (*table_of(inputs), *SIZES)


@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_queries_per_request_of_decode(target, q_len, window):
    inputs, wrapper, table = verification(target, q_len, use_tensor_cores=True)
    pipeline = dataclasses.replace(inputs.pipeline, window_left=window)
    expected = reference(inputs, pipeline=pipeline)
    options = {"q_data_type": HALF, "window_left": window, "q_len_per_req": q_len}
    for plan in (wrapper.plan, functools.partial(preflash.fast_decode_plan, wrapper)):
        plan(*table, **options)
        for given in (None, q_len):
            out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True, q_len_per_req=given)
            runner.compare(inputs, out, lse, expected).check()
    assert wrapper._q_len_per_req == q_len


def test_wrong_queries_per_request(target):
    inputs, wrapper, table = verification(target, 2)
    wrapper.plan(*table, q_data_type=HALF, q_len_per_req=2)
    more = torch.cat([inputs.q, inputs.q[:4]])
    empty = "empty KV range"
    for call, match in (
        (lambda: wrapper.run(more, inputs.cache), "q_len_per_req"),
        (lambda: wrapper.run(inputs.q, inputs.cache, q_len_per_req=3), "=3 has exactly 12"),
        (lambda: wrapper.run(more, inputs.cache, q_len_per_req=3), empty),
        (lambda: wrapper.plan(*table, q_data_type=HALF, q_len_per_req=3), empty),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    runner.compare(inputs, *wrapper.run(inputs.q, inputs.cache, return_lse=True)).check()


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
        out, lse = wrapper.run(inputs.q, inputs.cache, return_lse=True, q_len_per_req=3)
        runner.compare(inputs, out, lse).check()
        assert wrapper._q_len_per_req == 3
        before, alone = alone, wrapper.run(one, inputs.cache)
        assert before is None or torch.equal(before, alone)
    wrapper.begin_forward(*table, q_data_type=HALF)
    assert torch.equal(wrapper.run(one, inputs.cache), alone)
    with pytest.raises(ValueError, match=r"q_len_per_req=3 in run.*plan again"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=3)


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_graph_buffers_that_are_set_afterwards(target, kind):
    """RTP-LLM sets graph buffers before its first plan()."""
    case = PAGED
    if kind == "Decode":
        case = dataclasses.replace(PAGED, qo_lens=(1,) * 4, mask=MaskKind.NONE)
    inputs = build(case, device=target.device)
    wrapper = new(f"Batch{kind}WithPagedKVCacheWrapper", target, backend=target.backend)
    assert wrapper._qo_indptr_buf is None
    assert wrapper._fixed_batch_size == 0
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._paged_kv_indices_buf = inputs.indices
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=target.device)
    wrapper._use_cuda_graph = True
    assert wrapper.is_cuda_graph_enabled
    if kind == "Prefill":
        wrapper._qo_indptr_buf = ints(5)
    wrapper._paged_kv_indptr_buf = indptr = ints(5)
    wrapper._paged_kv_last_page_len_buf = ints(4)
    wrapper._paged_kv_indices_buf = ints(64)
    wrapper._fixed_batch_size = 4
    assert wrapper._paged_kv_indptr_buf is indptr
    assert wrapper._fixed_batch_size == 4
    for _ in range(2):
        if kind == "Decode":
            wrapper.plan(*table_of(inputs), *SIZES, q_data_type=HALF)
        else:
            runner.plan(wrapper, inputs)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    assert torch.equal(indptr, inputs.kv_indptr.to(indptr.device))
    wrapper._use_cuda_graph = True  # no change
    with pytest.raises(AttributeError, match=r"after plan\(\)"):
        wrapper._use_cuda_graph = False
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._paged_kv_indptr_buf = indptr.clone()


def test_graph_buffers_that_are_missing(target):
    inputs, wrapper = unplanned(PAGED, target)
    wrapper._use_cuda_graph = True
    with pytest.raises(ValueError, match="qo_indptr_buf=None"):
        runner.plan(wrapper, inputs)
    wrapper._use_cuda_graph = False
    runner.plan(wrapper, inputs)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    with pytest.raises(AttributeError, match=r"after plan\(\)"):
        wrapper._use_cuda_graph = True
    assert wrapper._kv_lens_buffer.tolist() == list(PAGED.kv_lens)
    assert (wrapper._pos_encoding_mode, wrapper._rope_scale) == ("NONE", 1.0)
    assert wrapper._jit_module is None
    with pytest.raises(NotImplementedError, match="_jit_module"):
        wrapper._jit_module = object()


def test_attributes_of_pod_and_of_a_cascade(target):
    inputs, _, table = verification(target, 1)
    wrapper = new("PODWithPagedKVCacheWrapper", target, backend=target.backend)
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
    cascade = preflash.MultiLevelCascadeAttentionWrapper(2, runner.workspace(target.device))
    kinds = [type(level) for level in cascade._batch_prefill_wrappers]
    assert kinds == [preflash.BatchPrefillWithPagedKVCacheWrapper] * 2
    assert cascade._num_levels == 2


def test_attributes_of_batches_of_pod(target):
    sides = []
    for inputs in (build(PAGED, device=target.device), verification(target, 1)[0]):
        sides += [inputs.qo_indptr, *table_of(inputs)]
    wrapper = new("BatchPODWithPagedKVCacheWrapper", target, backend=target.backend)
    assert wrapper._kv_indptr_buf_p is None
    wrapper.plan(*sides, *SIZES, q_data_type=HALF)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    found = [getattr(wrapper, f"_{name}_buf_{side}") for side in "pd" for name in names]
    for values, given in zip(found, sides, strict=True):
        assert torch.equal(values.cpu(), given.cpu()[: values.numel()])
    with pytest.raises(AttributeError, match="is read-only"):
        wrapper._kv_indptr_buf_p = sides[1]
    with pytest.raises(NotImplementedError, match="CUDA graphs"):
        wrapper._use_cuda_graph = True


@pytest.mark.parametrize("cap", [0, -1, -0.0, -30.0])
@BOTH
def test_soft_caps_that_are_none(target, case, cap):
    inputs, wrapper = planned(case, target, logits_soft_cap=cap)
    assert wrapper._logits_soft_cap == 0.0
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_an_unaligned_workspace(target):
    sliced = runner.workspace(target.device, 1025)[1:]
    with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
        preflash.BatchDecodeWithPagedKVCacheWrapper(sliced)
    wrapper = new("BatchDecodeWithPagedKVCacheWrapper", target)
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(runner.workspace(target.device), sliced)
