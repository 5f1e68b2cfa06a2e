"""Decode is prefill with one query per request: the same numbers by other signatures."""

import dataclasses
import functools
import inspect

import preflash
import pytest
import torch
from preflash.testing import Case, KvForm, Sinks, build, compare, reference, runner
from preflash.testing.oracle import Pipeline

KV_LENS = (90, 0, 17, 1, 333)
CASE = Case("decode", (1,) * 5, KV_LENS, 8, 2, 128, page_size=16)
TOKENS = dataclasses.replace(CASE, name="page1", page_size=1, form=KvForm.FLAT)
HND = dataclasses.replace(CASE, name="hnd", layout="HND", dtype=torch.float16, head_dim=96)
CASES = pytest.mark.parametrize("case", [CASE, TOKENS, HND], ids=lambda case: case.name)
Wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper


def arrays(inputs) -> tuple:
    case = inputs.case
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    return (inputs.kv_indptr, inputs.indices, inputs.last_page_len, *heads)


def made(case, target, **options):
    inputs = build(case, device=target.device)
    wrapper = Wrapper(runner.workspace(target.device), case.layout, **options)
    return inputs, wrapper


@pytest.mark.parametrize("tensor_cores", [False, True])
@CASES
def test_batch(target, case, tensor_cores):
    inputs, wrapper = made(
        case, target, use_tensor_cores=tensor_cores, backend=target.backend, jit_args=None
    )
    assert wrapper.use_tensor_cores is tensor_cores
    wrapper.plan(*arrays(inputs), q_data_type=case.dtype)
    assert wrapper._causal is False
    result = runner.run(wrapper, inputs)
    runner.compare(inputs, *result).check()
    out, lse = wrapper.run_return_lse(inputs.q, inputs.cache)
    assert torch.equal(out, result[0])
    assert torch.equal(lse, result[1])


def test_every_option(target):
    case = dataclasses.replace(CASE, sinks=Sinks.ORDINARY)
    inputs, wrapper = made(case, target)
    wrapper.plan(
        *arrays(inputs),
        "NONE",
        40,
        25.0,
        case.dtype,
        case.dtype,
        None,
        0.2,
        None,
        None,
        True,
        None,
        torch.tensor(KV_LENS, dtype=torch.int32),
        64,
        False,
    )
    out, lse = runner.run(wrapper, inputs, q_scale=0.5, k_scale=2.0, v_scale=3.0, enable_pdl=True)
    pipeline = Pipeline(0.2, False, 40, 25.0, out_scale=3.0, sinks=inputs.sinks)
    compare(out, lse, reference(inputs, pipeline=pipeline), soft_cap=25.0).check()


@pytest.mark.parametrize(
    "options",
    [
        {"data_type": torch.bfloat16},
        {"data_type": torch.bfloat16, "q_data_type": None},
        {"data_type": "bfloat16", "q_data_type": torch.bfloat16},
        {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16},
    ],
    ids=str,
)
def test_data_types(target, options):
    inputs, wrapper = made(CASE, target)
    wrapper.plan(*arrays(inputs), **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("options", [{}, {"q_data_type": "float16"}], ids=str)
def test_data_type_of_8_bits_is_that_of_the_cache(target, options):
    case = dataclasses.replace(CASE, dtype=torch.float16, kv_dtype=torch.float8_e5m2)
    inputs, wrapper = made(case, target)
    wrapper.plan(*arrays(inputs), data_type="float8_e5m2", **options)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_fp8_queries(target):
    case = dataclasses.replace(CASE, dtype=torch.float8_e4m3fn, head_scales=True)
    inputs, wrapper = made(case, target)
    wrapper.plan(*arrays(inputs), data_type=case.dtype, q_data_type=None)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_float16_by_default(target):
    case = dataclasses.replace(CASE, dtype=torch.float16)
    inputs, wrapper = made(case, target)
    wrapper.plan(*arrays(inputs), q_data_type=None)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("return_lse", [False, True])
def test_forward_has_options_of_its_own(target, return_lse):
    inputs, wrapper = made(CASE, target)
    wrapper.begin_forward(*arrays(inputs), q_data_type=CASE.dtype)
    call = wrapper.forward_return_lse if return_lse else wrapper.forward
    result = call(inputs.q, inputs.cache, "NONE", 0.5, 3.0, 0.25, 30, 10.0, 0.1)
    out, lse = result if return_lse else (result, None)
    pipeline = Pipeline(0.15, False, 30, 10.0, out_scale=0.25)
    compare(out, lse, reference(inputs, pipeline=pipeline), soft_cap=10.0).check()


@pytest.mark.parametrize("override", [False, True])
def test_fast_decode_plan_in_the_place_of_begin_forward(target, override):
    inputs, wrapper = made(CASE, target, use_tensor_cores=True)
    wrapper.begin_forward = functools.partial(preflash.fast_decode_plan, wrapper)
    options = {"q_data_type": CASE.dtype, "data_type": CASE.dtype, "non_blocking": True}
    positional = arrays(inputs)
    if override:
        options["global_override_indptr_cpu"] = inputs.kv_indptr.cpu()
        positional = (torch.full_like(inputs.kv_indptr, -3), *positional[1:])
    wrapper.begin_forward(*positional, **options)
    out = wrapper.forward(inputs.q, inputs.cache, sm_scale=0.2, logits_soft_cap=0.0)
    compare(out, None, reference(inputs, pipeline=Pipeline(0.2))).check()


@pytest.mark.parametrize("data_type", [None, CASE.dtype])
def test_newer_order(target, data_type):
    """o_data_type before data_type, which moves the scale by one place."""
    inputs, wrapper = made(CASE, target)
    dtype = CASE.dtype
    newer = ("NONE", 40, 25.0, dtype, dtype, dtype, data_type, 0.2, None, None, True)
    older = ("NONE", 40, 25.0, dtype, dtype, data_type, 0.2, None, None, True)
    expected = reference(inputs, pipeline=Pipeline(0.2, False, 40, 25.0))
    for order in (newer, older):
        for plan in (wrapper.plan, wrapper.begin_forward):
            plan(*arrays(inputs), *order)
            result = wrapper.run_return_lse(inputs.q, inputs.cache)
            compare(*result, expected, soft_cap=25.0).check()


def test_newer_keywords(target):
    inputs, wrapper = made(CASE, target)
    newer = {"q_data_type": CASE.dtype, "o_data_type": CASE.dtype, "q_len_per_req": 1}
    wrapper.plan(*arrays(inputs), **newer)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    preflash.fast_decode_plan(wrapper, *arrays(inputs), q_data_type=CASE.dtype, q_len_per_req=1)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    with pytest.raises(NotImplementedError, match="o_data_type"):
        wrapper.plan(*arrays(inputs), **{**newer, "o_data_type": torch.float8_e4m3fn})
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.plan(*arrays(inputs), **{**newer, "q_len_per_req": 0})
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_fast_decode_plan_in_either_positional_order(target):
    """global_override_indptr_cpu was last but for q_len_per_req, which now precedes it."""
    inputs, wrapper = made(CASE, target)
    indptr, *rest = arrays(inputs)
    other = indptr.flip(0).contiguous()  # would be refused
    plan = (other, *rest, "NONE", -1, None, CASE.dtype, None, None, None, None, None, True, None)
    for last in ((indptr.cpu(),), (1, indptr.cpu())):
        preflash.fast_decode_plan(wrapper, *plan, False, *last)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_stride_variants_and_resolved_backend(target):
    _, wrapper = made(CASE, target)
    wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(ValueError, match="variant='shared'"):
        wrapper.prewarm_paged_kv_stride_variant("shared")
    runner_inputs, wrapper = made(CASE, target)
    wrapper.plan(*arrays(runner_inputs), q_data_type=CASE.dtype)
    assert wrapper.resolved_backend == wrapper._backend != "auto"


def test_sinks_as_an_attribute_are_not_lost(target):
    _, wrapper = made(CASE, target)
    wrapper._sinks = None
    assert wrapper._sinks is None
    with pytest.raises(NotImplementedError, match="sinks="):
        wrapper._sinks = torch.zeros(CASE.num_qo_heads)


def test_workspace_size(target):
    inputs, wrapper = made(CASE, target)
    float_bytes, int_bytes = wrapper.workspace_size(*arrays(inputs), q_data_type=CASE.dtype)
    wrapper.reset_workspace_buffer(
        runner.workspace(target.device, float_bytes), runner.workspace(target.device, int_bytes)
    )
    wrapper.plan(*arrays(inputs), q_data_type=CASE.dtype)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_refusals(target):
    inputs, wrapper = made(CASE, target)
    work = runner.workspace(target.device)
    with pytest.raises(TypeError, match="use_tensor_cores"):
        Wrapper(work, use_tensor_cores="yes")
    with pytest.raises(ValueError, match=r"=None with use_cuda_graph=True"):
        Wrapper(work, use_cuda_graph=True)
    with pytest.raises(TypeError, match=r"^use_cuda_graph must be True or False"):
        Wrapper(work, use_cuda_graph=inputs.last_page_len)
    with pytest.raises(NotImplementedError, match="jit_args"):
        Wrapper(work, jit_args=["uri"])
    with pytest.raises(ValueError, match=r"paged_kv_indptr_buf has 5 elements; must have 6"):
        preflash.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            work, inputs.kv_indptr[:-1], inputs.indices, inputs.last_page_len
        )
    with pytest.raises(ValueError, match="before plan"):
        wrapper.run(inputs.q, inputs.cache)
    with pytest.raises(ValueError, match=r"^indptr has 5 elements and last_page_len 5"):
        wrapper.plan(inputs.kv_indptr[:-1], *arrays(inputs)[1:], q_data_type=CASE.dtype)
    with pytest.raises(TypeError, match=r"^indptr must be a torch.Tensor"):
        wrapper.plan(None, *arrays(inputs)[1:], q_data_type=CASE.dtype)
    wrapper.plan(*arrays(inputs), q_data_type=CASE.dtype)
    with pytest.raises(ValueError, match="q_len_per_req=0"):
        wrapper.run(inputs.q, inputs.cache, q_len_per_req=0)
    with pytest.raises(TypeError, match=r"run\(\) got"):
        wrapper.run(inputs.q, inputs.cache, 0.5)
    for name in ("foo", "k", "args"):
        with pytest.raises(TypeError, match=r"BatchDecode\w+\.run\(\) got .*'" + name):
            wrapper.run(inputs.q, inputs.cache, **{name: 1})
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


SINGLE = Case("single", (1,), (300,), 8, 2, 128)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_single(target, layout, return_lse):
    case = dataclasses.replace(SINGLE, layout=layout)
    inputs = build(case, device=target.device)
    tokens = 0 if layout == "NHD" else 1
    k, v = (t.narrow(tokens, 0, 300) for t in (inputs.k, inputs.v))
    result = preflash.single_decode_with_kv_cache(
        inputs.q[0], k, v, layout, "NONE", True, 0.5, 2.0, 3.0, 99, 15.0, 0.2, return_lse=return_lse
    )
    out, lse = result if return_lse else (result, None)
    assert out.shape == (8, 128)
    assert lse is None or lse.shape == (8,)
    pipeline = Pipeline(0.2, False, 99, 15.0, out_scale=3.0)
    expected = reference(inputs, pipeline=pipeline)
    compare(out[None], lse if lse is None else lse[None], expected, soft_cap=15.0).check()


def test_single_refuses_more_than_one_query(target):
    inputs = build(SINGLE, device=target.device)
    with pytest.raises(ValueError, match=r"q has shape \(1, 8, 128\)"):
        preflash.single_decode_with_kv_cache(inputs.q, inputs.k, inputs.v)


NONE = None
PLAN = {
    "indptr": inspect.Parameter.empty,
    "indices": inspect.Parameter.empty,
    "last_page_len": inspect.Parameter.empty,
    "num_qo_heads": inspect.Parameter.empty,
    "num_kv_heads": inspect.Parameter.empty,
    "head_dim": inspect.Parameter.empty,
    "page_size": inspect.Parameter.empty,
    "pos_encoding_mode": "NONE",
    "window_left": -1,
    "logits_soft_cap": NONE,
    "q_data_type": "float16",
    "kv_data_type": NONE,
    "data_type": NONE,
    "sm_scale": NONE,
    "rope_scale": NONE,
    "rope_theta": NONE,
    "non_blocking": True,
    "block_tables": NONE,
    "seq_lens": NONE,
    "fixed_split_size": NONE,
    "disable_split_kv": False,
    "o_data_type": NONE,
    "batch_invariant": False,
    "lengths_are_upper_bounds": False,
    "q_len_per_req": 1,
}


@pytest.mark.parametrize("name", ["plan", "begin_forward", "workspace_size"])
def test_signature(name):
    parameters = list(inspect.signature(getattr(Wrapper, name)).parameters.values())[1:]
    assert {p.name: p.default for p in parameters} == PLAN
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert by_name == list(PLAN)[-4:]
    assert [p.name for p in parameters] == list(PLAN)
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[: -len(by_name)])


def test_a_data_type_that_nothing_would_have_is_refused(target):
    inputs, wrapper = made(CASE, target)
    both = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(*arrays(inputs), **both, data_type="bfloat16")
    with pytest.raises(ValueError, match=r"data_type=torch\.float16"):
        wrapper.plan(*arrays(inputs), **both, data_type=torch.float16)
