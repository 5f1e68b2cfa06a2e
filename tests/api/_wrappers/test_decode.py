"""Decode is prefill with one query per request, or several, by other signatures."""

import dataclasses
import functools

import preflash
import pytest
import torch
from planned_cases import check_run, shared_prefix, table
from preflash.testing import (
    Case,
    KvForm,
    MaskKind,
    Position,
    Sinks,
    build,
    compare,
    reference,
    runner,
)
from preflash.testing.oracle import Pipeline
from refusals import refused

KV_LENS = (90, 0, 17, 1, 333)
CASE = Case("decode", (1,) * 5, KV_LENS, 8, 2, 128, page_size=16)
TOKENS = dataclasses.replace(CASE, name="page1", page_size=1, form=KvForm.FLAT)
HND = dataclasses.replace(CASE, name="hnd", layout="HND", dtype=torch.float16, head_dim=96)
Wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper


def arrays(inputs) -> tuple:
    case = inputs.case
    return (*table(inputs), case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)


def made(case, target, **options):
    inputs = build(case, device=target.device)
    return inputs, Wrapper(runner.workspace(target.device), case.layout, **options)


def check_plan(case, target, *positional, **options):
    inputs, wrapper = made(case, target)
    wrapper.plan(*arrays(inputs), *positional, **options)
    check_run(inputs, wrapper)
    return inputs, wrapper


@pytest.mark.parametrize("case", [CASE, TOKENS, HND], ids=lambda case: case.name)
def test_batch(target, case):
    tensor_cores = case is HND
    options = {"use_tensor_cores": tensor_cores, "backend": target.backend, "jit_args": None}
    inputs, wrapper = made(case, target, **options)
    wrapper.prewarm_paged_kv_stride_variant()
    sizes = wrapper.workspace_size(*arrays(inputs), q_data_type=case.dtype)
    wrapper.reset_workspace_buffer(*(runner.workspace(target.device, size) for size in sizes))
    wrapper.plan(*arrays(inputs), q_data_type=case.dtype)
    assert wrapper.use_tensor_cores is tensor_cores
    assert wrapper._causal is False
    assert wrapper.resolved_backend == wrapper._backend == target.backend
    result = check_run(inputs, wrapper)
    assert all(map(torch.equal, wrapper.run_return_lse(inputs.q, inputs.cache), result))


OPTIONS = {"position": Position.ROPE, "rope_scale": 8.0, "rope_theta": 5e5, "window_left": 40,
           "soft_cap": 25.0, "sm_scale": 0.2}  # fmt: skip


def check_scaled(inputs, out, lse) -> None:
    """Compares a result with v_scale=3, and with q_scale and k_scale whose product is 1."""
    pipeline = dataclasses.replace(inputs.pipeline, out_scale=3.0)
    runner.compare(inputs, out, lse, reference(inputs, pipeline=pipeline)).check()


def test_every_option(target):
    case = dataclasses.replace(CASE, sinks=Sinks.ORDINARY, **OPTIONS)
    inputs, wrapper = made(case, target)
    wrapper.plan(
        *arrays(inputs), "ROPE_LLAMA", 40, 25.0, case.dtype, case.dtype, None, 0.2, 8.0, 5e5, True,
        None, torch.tensor(KV_LENS, dtype=torch.int32), 64, False,
    )  # fmt: skip
    result = runner.run(wrapper, inputs, q_scale=0.5, k_scale=2.0, v_scale=3.0, enable_pdl=True)
    check_scaled(inputs, *result)


F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# Dtypes of q and of the cache, and the options of plan() that name them; float16 by default.
DATA_TYPES = [
    (BF16, BF16, {"data_type": BF16}),
    (BF16, BF16, {"data_type": BF16, "q_data_type": None}),
    (BF16, BF16, {"data_type": "bfloat16", "q_data_type": BF16}),
    (BF16, BF16, {"q_data_type": BF16, "kv_data_type": BF16}),
    (BF16, BF16, {"q_data_type": BF16, "kv_data_type": BF16, "data_type": "bfloat16"}),
    (F16, E5M2, {"data_type": "float8_e5m2"}),  # an 8-bit data_type is the cache's
    (F16, E5M2, {"data_type": "float8_e5m2", "q_data_type": "float16"}),
    (E4M3, E4M3, {"data_type": E4M3, "q_data_type": None}),
    (F16, F16, {"q_data_type": None}),
    (BF16, BF16, {"q_data_type": BF16, "o_data_type": BF16, "q_len_per_req": 1}),
]


@pytest.mark.parametrize(("q", "kv", "options"), DATA_TYPES)
def test_data_types(target, q, kv, options):
    case = dataclasses.replace(CASE, dtype=q, kv_dtype=kv, head_scales=q is E4M3)
    check_plan(case, target, **options)


def test_forward_has_options_of_its_own(target):
    inputs, wrapper = made(CASE, target)
    wrapper.begin_forward(*arrays(inputs), q_data_type=CASE.dtype)
    given = (inputs.q, inputs.cache, "NONE", 0.5, 3.0, 0.25, 30, 10.0, 0.1)
    out, lse = wrapper.forward_return_lse(*given)
    pipeline = Pipeline(0.15, False, 30, 10.0, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline), soft_cap=10.0).check()
    assert torch.equal(wrapper.forward(*given), out)


@pytest.mark.parametrize("data_type", [None, CASE.dtype])
def test_newer_order(target, data_type):
    """o_data_type before data_type, which moves the scale by one place."""
    inputs, wrapper = made(CASE, target)
    expected = reference(inputs, pipeline=Pipeline(0.2, False, 40, 25.0))
    for o_data_type in ((CASE.dtype,), ()):
        order = (CASE.dtype, CASE.dtype, *o_data_type, data_type, 0.2, None, None, True)
        for plan in (wrapper.plan, wrapper.begin_forward):
            plan(*arrays(inputs), "NONE", 40, 25.0, *order)
            result = wrapper.run_return_lse(inputs.q, inputs.cache)
            compare(*result, expected, soft_cap=25.0).check()


def test_fast_decode_plan_in_either_positional_order(target):
    """global_override_indptr_cpu was last but for q_len_per_req, which now precedes it."""
    inputs, wrapper = made(CASE, target)
    indptr, *rest = arrays(inputs)
    other = indptr.flip(0).contiguous()  # would be refused
    plan = (other, *rest, "NONE", -1, None, CASE.dtype, None, None, None, None, None, True, None)
    for last in ((indptr.cpu(),), (1, indptr.cpu())):
        preflash.fast_decode_plan(wrapper, *plan, False, *last)
        check_run(inputs, wrapper)
    # SGLang puts it in the place of a wrapper's method.
    wrapper.begin_forward = functools.partial(preflash.fast_decode_plan, wrapper)
    wrapper.begin_forward(*arrays(inputs), q_data_type=CASE.dtype, q_len_per_req=1)
    out = wrapper.forward(inputs.q, inputs.cache, sm_scale=0.2, logits_soft_cap=0.0)
    compare(out, None, reference(inputs, pipeline=Pipeline(0.2))).check()


BOTH_TYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
F8_OUT = {**BOTH_TYPES, "o_data_type": torch.float8_e4m3fn}
GraphWrapper = preflash.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
# Calls of a planned wrapper with its inputs x, or of constructors with a workspace.
REFUSED = [
    (lambda _, x, work: Wrapper(work, use_tensor_cores="yes"), TypeError, "use_tensor_cores"),
    (lambda _, x, work: Wrapper(work, use_cuda_graph=True), ValueError,
     "^paged_kv_last_page_len_buf=None with use_cuda_graph"),
    (lambda _, x, work: Wrapper(work, use_cuda_graph=x.last_page_len), TypeError,
     "^use_cuda_graph must be True or False"),
    (lambda _, x, work: Wrapper(work, jit_args=["uri"]), NotImplementedError, "jit_args"),
    (lambda _, x, work: GraphWrapper(work, x.kv_indptr[:-1], x.indices, x.last_page_len),
     ValueError, "paged_kv_indptr_buf has 5 elements; must have 6"),
    (lambda _, x, work: Wrapper(work).run(x.q, x.cache), ValueError, "before plan"),
    (lambda w, x, _: w.plan(x.kv_indptr[:-1], *arrays(x)[1:], **BOTH_TYPES), ValueError,
     "^indptr has 5 elements and last_page_len 5"),
    (lambda w, x, _: w.plan(None, *arrays(x)[1:], **BOTH_TYPES), TypeError,
     "^indptr must be a torch.Tensor"),
    (lambda w, x, _: w.plan(*arrays(x), **F8_OUT), NotImplementedError, "o_data_type"),
    (lambda w, x, _: w.plan(*arrays(x), q_len_per_req=0), ValueError, "q_len_per_req"),
    (lambda w, x, _: w.plan(*arrays(x), **BOTH_TYPES, data_type=torch.float16), ValueError,
     r"data_type=torch\.float16"),
    (lambda w, x, _: w.run(x.q, x.cache, q_len_per_req=0), ValueError, "q_len_per_req=0"),
    *((lambda w, x, _, name=name: getattr(w, name)(x.q.repeat(2, 1, 1), x.cache), ValueError,
       r"q has 10 rows; a decode batch of 5 requests .* exactly 5: pass q\[:5\]")
      for name in ("run", "run_return_lse", "forward")),
    (lambda w, x, _: w.run(x.q[:1], x.cache), ValueError, "q has 1 rows"),
    (lambda w, x, _: w.run(x.q, x.cache, q_len_per_req=3), ValueError, "=3 has exactly 15"),
    (lambda w, x, _: w.run(x.q.repeat(3, 1, 1), x.cache, q_len_per_req=3), ValueError,
     "empty KV range"),
    (lambda w, x, _: w.plan(*arrays(x), **BOTH_TYPES, q_len_per_req=3), ValueError,
     "empty KV range"),
    *((lambda w, x, _, given=given: w.run(x.q, x.cache, *given), TypeError, says)
      for given, says in (((0.5,), r"run\(\) got"), ((1.0, 1.0), "too many"),
                          ((1.0, 1.0, True), "too many"))),
    (lambda w, x, _: w.run(x.q, x.cache, foo=1), TypeError, r"BatchD\w+\.run\(\) got .*'foo"),
    (lambda w, x, _: w.run(x.q, x.cache, k=1), TypeError, r"BatchD\w+\.run\(\) got .*'k"),
    (lambda w, x, _: w.run(x.q, x.cache, args=1), TypeError, r"BatchD\w+\.run\(\) got .*'args"),
    (lambda w, x, _: w.prewarm_paged_kv_stride_variant("shared"), ValueError, "variant='shared'"),
    # Sinks as an attribute are not dropped in silence.
    (lambda w, x, _: setattr(w, "_sinks", torch.zeros(8)), NotImplementedError, "sinks="),
    (lambda _, x, work: preflash.single_decode_with_kv_cache(x.q, x.k[0], x.v[0]), ValueError,
     r"q has shape \(5, 8, 128\)"),
]  # fmt: skip


def test_refusals(target):
    inputs, wrapper = check_plan(CASE, target, **BOTH_TYPES)
    wrapper._sinks, before = None, wrapper.run(inputs.q, inputs.cache)
    for call, error, says in REFUSED:
        refused(says, call, wrapper, inputs, runner.workspace(target.device), error=error)
        assert wrapper._sinks is None
        assert torch.equal(wrapper.run(inputs.q, inputs.cache), before)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(target, layout):
    case = Case("single", (1,), (300,), 8, 2, 128, layout=layout, **OPTIONS)
    inputs = build(case, device=target.device)
    k, v = (t.narrow(0 if layout == "NHD" else 1, 0, 300) for t in (inputs.k, inputs.v))
    scales, rope = (0.5, 2.0, 3.0), (8.0, 5e5)
    given = (inputs.q[0], k, v, layout, "ROPE_LLAMA", True, *scales, 40, 25.0, 0.2, *rope)
    out, lse = preflash.single_decode_with_kv_cache(*given, return_lse=True)
    assert (out.shape, lse.shape) == ((8, 128), (8,))
    check_scaled(inputs, out[None], lse[None])
    assert torch.equal(preflash.single_decode_with_kv_cache(*given), out)


def verification(target, q_len, **changes):
    case = Case(
        "verify", (q_len,) * 4, (q_len, 128, 64, 100), 8, 2, 128, dtype=F16, page_size=16,
        mask=MaskKind.CAUSAL if q_len > 1 else MaskKind.NONE,
    )  # fmt: skip
    options = {"use_tensor_cores": True, "backend": target.backend}
    inputs, wrapper = made(dataclasses.replace(case, **changes), target, **options)
    return inputs, wrapper, arrays(inputs)


@pytest.mark.parametrize(("q_len", "window"), [(1, 40), (2, -1), (3, 40)])
def test_queries_per_request(target, q_len, window):
    inputs, wrapper, arguments = verification(target, q_len)
    pipeline = dataclasses.replace(inputs.pipeline, window_left=window)
    expected = reference(inputs, pipeline=pipeline)
    options = {"q_data_type": F16, "window_left": window, "q_len_per_req": q_len}
    for plan in (wrapper.plan, functools.partial(preflash.fast_decode_plan, wrapper)):
        plan(*arguments, **options)
        for q_len_per_req in (None, q_len):
            check_run(inputs, wrapper, expected, q_len_per_req=q_len_per_req)
    assert wrapper._q_len_per_req == q_len


@pytest.mark.parametrize("inference", [False, True])
def test_queries_per_request_of_run_alone(target, inference):
    """run(q_len_per_req=) plans the values of the last plan() again, as in trtllm-gen; the caller
    may have overwritten its arrays, but for pages on the GPU. None is plan()'s number."""
    inputs, wrapper, arguments = verification(target, 3)
    one = torch.ones_like(inputs.q[:4])
    with torch.inference_mode(inference):
        own = [array.clone() for array in arguments[:3]]
        wrapper.plan(*own, *arguments[3:], q_data_type=F16)
        for array in own:
            if array.is_cpu or array is not own[1]:
                array.fill_(77)
    alone = None
    for _ in range(2):
        check_run(inputs, wrapper, q_len_per_req=3)
        assert wrapper._q_len_per_req == 3
        before, alone = alone, wrapper.run(one, inputs.cache)
        assert before is None or torch.equal(before, alone)
    wrapper.begin_forward(*arguments, q_data_type=F16)
    assert torch.equal(wrapper.run(one, inputs.cache), alone)
    with pytest.raises(ValueError, match=r"q_len_per_req=3 in run.*plan again"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=3)


def test_scales_by_position(target):
    inputs, wrapper, arguments = verification(target, 1, dtype=E4M3, head_scales=True)
    wrapper.plan(*arguments, q_data_type=E4M3, sm_scale=inputs.pipeline.sm_scale)
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    result = wrapper.run(inputs.q, inputs.cache, *scales, return_lse=True)
    runner.compare(inputs, *result).check()
    refused("too many", wrapper.run, inputs.q, inputs.cache, *scales[:2], error=TypeError)


LENGTHS = {"Decode": ((1,) * 4, (37, 17, 1, 90)), "Prefill": ((9, 0, 33, 1), (40, 7, 90, 5))}
PREFIXES = [
    ("Decode", "NHD", 0, {"dtype": BF16}),
    ("Decode", "HND", 1, {}),
    ("Decode", "HND", 128, {}),
    ("Prefill", "NHD", 0, {"causal": False}),
    ("Prefill", "HND", 1, {"causal": True, "sm_scale": 0.3}),
    ("Prefill", "HND", 128, {"causal": True}),
]


@pytest.mark.parametrize(("kind", "layout", "prefix", "options"), PREFIXES)
def test_shared_prefixes(target, kind, layout, prefix, options):
    changes = {"dtype": F16, **options}
    causal = changes.pop("causal", False)
    case = Case("prefix", *LENGTHS[kind], 8, 2, 128, page_size=16, layout=layout,
                mask=MaskKind.CAUSAL if causal else MaskKind.NONE, **changes)  # fmt: skip
    inputs, (k, v), expected = shared_prefix(case, target.device, prefix)
    make = getattr(preflash, f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper")
    wrapper = make(runner.workspace(target.device), layout)
    if kind == "Decode":
        plan, of_run = (*arrays(inputs), inputs.case.dtype), {}
    else:
        plan, of_run = (inputs.qo_indptr, *arrays(inputs)), {"rope_scale": 1.0, **options}
    for _ in range(2):
        wrapper.begin_forward(*plan)
        compare(wrapper.forward(inputs.q, k, v, inputs.cache, **of_run), None, expected).check()
        wrapper.reset_workspace_buffer(*(runner.workspace(target.device) for _ in range(2)))
        compare(wrapper.forward(inputs.q, k, v, inputs.cache, **of_run), None, expected).check()
        with pytest.raises(ValueError, match=r"must be|must have"):
            wrapper.forward(inputs.q, k[:, :1], v[:, :1, :64], inputs.cache)
        if kind == "Prefill":
            refused("rope_theta", wrapper.forward, inputs.q, k, v, inputs.cache, rope_theta=5e5)
        wrapper.end_forward()
