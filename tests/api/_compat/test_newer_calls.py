"""Calls written for later releases of the API: order, neutral arguments, numbers of other types."""

import dataclasses
import functools

import preflash
import pytest
import torch
from preflash import _core
from preflash._plan import pipeline as _pipeline
from preflash.testing import Case, MaskKind, build, compare, reference, runner
from preflash.testing.oracle import Pipeline

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)
WRAPPERS = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)


def made(case, target):
    inputs = build(case, device=target.device)
    return inputs, runner.make_wrapper(case, backend=target.backend, device=target.device)


def leading(inputs) -> tuple:
    """Arguments that both orders begin with."""
    positional, _ = runner.plan_arguments(inputs)
    return positional


def check(inputs, wrapper, pipeline: Pipeline) -> None:
    out, lse = runner.run(wrapper, inputs)
    expected = reference(inputs, pipeline=pipeline)
    compare(out, lse, expected, soft_cap=pipeline.soft_cap).check()


# Positional arguments behind the leading ones, for either wrapper, and what they mean.
SCALE, WINDOW, CAP = 0.2, 7, 30.0
PAGED_TAIL = (SCALE, WINDOW, CAP, None, None)
RAGGED_TAIL = (WINDOW, CAP, SCALE, None, None)


def orders(case) -> dict[str, tuple]:
    tail = PAGED_TAIL if case.paged else RAGGED_TAIL
    dtype = case.dtype
    return {
        "older": (None, None, True, "NONE", False, *tail, dtype, dtype),
        "newer": (64, None, None, True, "NONE", False, *tail, dtype, dtype, dtype, True),
        "newer without head_dim_vo": (None, None, None, True, "NONE", False, *tail, dtype, dtype),
        "newer to the end": (
            *(64, None, None, True, "NONE", False, *tail, dtype, dtype, None, True),
            *(None, None, 0, None),
            *((None,) * 5 + (32, False, 0) if case.paged else (32, False, *(None,) * 6, 0)),
        ),
    }


@pytest.mark.parametrize("order", orders(RAGGED))
@WRAPPERS
def test_plan_in_both_orders(target, case, order):
    inputs, wrapper = made(case, target)
    wrapper.plan(*leading(inputs), *orders(case)[order])
    check(inputs, wrapper, Pipeline(SCALE, True, WINDOW, CAP))


@pytest.mark.parametrize("method", ["begin_forward", "workspace_size"])
@WRAPPERS
def test_other_methods_in_both_orders(target, case, method):
    inputs, wrapper = made(case, target)
    results = [
        getattr(wrapper, method)(*leading(inputs), *arguments)
        for arguments in (orders(case)["older"], orders(case)["newer"])
    ]
    assert results[0] == results[1]
    if method == "begin_forward":
        check(inputs, wrapper, Pipeline(SCALE, True, WINDOW, CAP))


@pytest.mark.parametrize("kind", [MaskKind.CUSTOM, MaskKind.PACKED])
@pytest.mark.parametrize("newer", [False, True])
@WRAPPERS
def test_masks_in_both_orders(target, case, newer, kind):
    inputs, wrapper = made(dataclasses.replace(case, mask=kind), target)
    head_dim_vo = (64,) if newer else ()
    masks = (inputs.custom_mask, inputs.packed_custom_mask)
    wrapper.plan(*leading(inputs), *head_dim_vo, *masks, q_data_type=case.dtype)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_a_bool_mask_behind_none_is_dense(target):
    """A bool mask in the packed mask's place of the older order is dense: its dtype decides."""
    inputs, wrapper = made(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target)
    wrapper.plan(*leading(inputs), None, inputs.custom_mask, q_data_type=PAGED.dtype)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_mla_head_dims_by_position(target):
    case = Case("mla", (9, 3), (30, 5), 4, 4, 192, 128)
    inputs, wrapper = made(case, target)
    wrapper.plan(*leading(inputs), 128, None, None, True, q_data_type=case.dtype)
    check(inputs, wrapper, Pipeline(case.scale, True))


@WRAPPERS
def test_an_argument_given_twice(target, case):
    inputs, wrapper = made(case, target)
    with pytest.raises(TypeError, match="head_dim_vo was given by position and by name"):
        wrapper.plan(*leading(inputs), 64, head_dim_vo=64)


@WRAPPERS
def test_what_fits_neither_order_is_named(target, case):
    inputs, wrapper = made(case, target)
    with pytest.raises(TypeError, match="custom_mask"):
        wrapper.plan(*leading(inputs), "mask", q_data_type=case.dtype)


SINGLE_ORDERS = {
    "older": (None, None, True, "NHD", "NONE", False, SCALE, WINDOW, CAP),
    "newer": (None,) * 6 + (True, "NHD", "NONE", False, SCALE, WINDOW, CAP),
    "newer with o_dtype": (
        *(None, None, None, SINGLE.dtype, None, None, True, "NHD", "NONE", False),
        *(SCALE, WINDOW, CAP, None, None, "auto", True, None, None, None),
    ),
}


@pytest.mark.parametrize("order", SINGLE_ORDERS)
def test_single_in_both_orders(target, order):
    inputs = build(SINGLE, device=target.device)
    arguments = SINGLE_ORDERS[order]
    call = preflash.single_prefill_with_kv_cache
    if len(arguments) < 15:
        call = functools.partial(preflash.single_prefill_with_kv_cache_return_lse)
    out, lse = call(inputs.q, inputs.k[:30], inputs.v[:30], *arguments)
    pipeline = Pipeline(SCALE, True, WINDOW, CAP)
    compare(out, lse, reference(inputs, pipeline=pipeline), soft_cap=CAP).check()


def test_a_float_tensor_is_a_scale(target):
    """Fourth by position: factors of the heads of an fp8 q, not a mask."""
    inputs = build(SINGLE, device=target.device)
    ones = torch.ones(4, device=target.device)
    with pytest.raises(ValueError, match="scale_q: only an fp8 tensor"):
        preflash.single_prefill_with_kv_cache(inputs.q, inputs.k[:30], inputs.v[:30], ones)


# Arguments that change nothing.


@pytest.mark.parametrize(
    "wrapper",
    [preflash.BatchPrefillWithPagedKVCacheWrapper, preflash.BatchPrefillWithRaggedKVCacheWrapper],
)
def test_constructor_arguments_of_run_time_compilers(wrapper):
    work = runner.workspace("cpu", 1024)
    wrapper(work, jit_args=None, jit_kwargs=None, variant_owns_mask=False)
    for name, value in (
        ("jit_args", ["uri"]),
        ("jit_kwargs", {"use_sliding_window": True}),
        ("variant_owns_mask", True),
    ):
        with pytest.raises(NotImplementedError, match=name):
            wrapper(work, **{name: value})


NEUTRAL = {
    "o_scale": (1.0, 0.5),
    "use_fp16_softmax": (False, True),
    "uses_spcompress": (False, True),
}


@pytest.mark.parametrize("name", NEUTRAL)
@WRAPPERS
def test_run_takes_neutral_values_alone(target, case, name):
    inputs, wrapper = made(case, target)
    runner.plan(wrapper, inputs)
    neutral, other = NEUTRAL[name]
    for value in (None, neutral):
        runner.compare(inputs, *runner.run(wrapper, inputs, **{name: value})).check()
    with pytest.raises(NotImplementedError, match=name):
        runner.run(wrapper, inputs, **{name: other})


@WRAPPERS
def test_run_takes_nothing_by_position(target, case):
    inputs, wrapper = made(case, target)
    runner.plan(wrapper, inputs)
    kv = (inputs.cache,) if case.paged else (inputs.k, inputs.v)
    out = wrapper.run(inputs.q, *kv, *(None,) * 5)
    runner.compare(inputs, out, None).check()
    with pytest.raises(TypeError, match=r"run\(\) got"):
        wrapper.run(inputs.q, *kv, *(None,) * 5, torch.ones(4))


def test_indptr_of_values_and_outputs(target):
    inputs, wrapper = made(RAGGED, target)
    runner.plan(wrapper, inputs, v_indptr=None, o_indptr=None)
    tokens = {"v_indptr": inputs.kv_indptr, "o_indptr": inputs.qo_indptr}
    heads = {"v_indptr": RAGGED.num_kv_heads, "o_indptr": RAGGED.num_qo_heads}
    for place in {"cpu", target.device}:
        for elements in (False, True):
            given = {n: t.to(place) * (64 * heads[n] if elements else 1) for n, t in tokens.items()}
            runner.plan(wrapper, inputs, **given)
            runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    for name, indptr in tokens.items():
        with pytest.raises(ValueError, match=name):
            runner.plan(wrapper, inputs, **{name: indptr + 1})


# Numbers of other types.


@WRAPPERS
def test_numbers_of_other_types(target, case):
    np = pytest.importorskip("numpy")
    inputs, wrapper = made(case, target)
    options = {
        "num_qo_heads": np.int64(4),
        "num_kv_heads": np.int32(2),
        "head_dim": torch.tensor(64),
        "causal": np.bool_(True),
        "sm_scale": torch.tensor([SCALE]),
        "window_left": np.int32(WINDOW),
        "logits_soft_cap": np.float32(CAP),
        "disable_split_kv": np.bool_(True),
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "q_data_type": case.dtype,
    }
    arrays = {"qo_indptr": inputs.qo_indptr}
    if case.paged:
        arrays |= {
            "paged_kv_indptr": inputs.kv_indptr,
            "paged_kv_indices": inputs.indices,
            "paged_kv_last_page_len": inputs.last_page_len,
            "page_size": np.int64(16),
        }
    else:
        arrays["kv_indptr"] = inputs.kv_indptr
    wrapper.plan(**arrays, **options)
    assert wrapper._causal is True
    check(inputs, wrapper, Pipeline(float(torch.tensor(SCALE)), True, WINDOW, CAP))


def test_numbers_of_other_types_for_one_request(target):
    np = pytest.importorskip("numpy")
    inputs = build(SINGLE, device=target.device)
    scale = torch.tensor(SCALE, device=target.device)
    out, lse = runner.single(
        inputs, backend=target.backend, causal=np.bool_(True), sm_scale=scale, rope_theta=1e4
    )
    compare(out, lse, reference(inputs, pipeline=Pipeline(float(scale), True))).check()


@pytest.mark.parametrize("value", [0, 1, 2, -1, "yes", 1.0, None])
def test_what_is_no_flag(target, value):
    inputs, wrapper = made(RAGGED, target)
    with pytest.raises(TypeError, match="causal"):
        runner.plan(wrapper, inputs, causal=value)


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
def test_rope_parameters_that_would_count(target, name):
    inputs, wrapper = made(RAGGED, target)
    with pytest.raises(ValueError, match=f"{name}=500000.0.*ROPE_LLAMA"):
        runner.plan(wrapper, inputs, **{name: 5e5})


# The backend of the environment.


def test_the_environment_overrides_the_backend(monkeypatch):
    inputs = build(RAGGED)
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    for backend in ("fa2", "fa3", "cutlass"):
        wrapper = runner.make_wrapper(RAGGED, backend=backend)
        assert f"PREFLASH_BACKEND=auto instead of '{backend}'" in repr(wrapper)
        assert wrapper._backend == backend
        runner.plan(wrapper, inputs)
        assert wrapper._backend == backend  # engines compare it with the name in their code
        assert wrapper.variant.startswith("cpu_")
        assert f"'cpu' (PREFLASH_BACKEND=auto instead of '{backend}')" in repr(wrapper)
        runner.compare(inputs, *runner.run(wrapper, inputs)).check()
    case = dataclasses.replace(SINGLE, qo_lens=(11,))  # not planned by another test
    inputs = build(case)
    runner.compare(inputs, *runner.single(inputs, backend="fa2")).check()


def test_backend_attributes_under_the_override(monkeypatch):
    inputs = build(PAGED)
    for asked, override, told in (("auto", "cpu", "cpu"), ("cudnn", "auto", "cpu")):
        monkeypatch.setenv("PREFLASH_BACKEND", override)
        wrapper = runner.make_wrapper(PAGED, backend=asked)
        runner.plan(wrapper, inputs)
        assert wrapper._backend == told
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    decode = preflash.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), backend="fa2")
    table = torch.zeros(2, 3, dtype=torch.int32)
    indptr, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    decode.plan(indptr, table, last, 4, 2, 64, 16)
    assert (decode._backend, decode.resolved_backend) == ("fa2", "cpu")


def test_no_override_is_told_of_where_none_is(monkeypatch):
    assert "PREFLASH_BACKEND" not in repr(runner.make_wrapper(RAGGED, backend="cpu"))
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    assert "PREFLASH_BACKEND" not in repr(runner.make_wrapper(RAGGED, backend="cpu"))
    monkeypatch.setenv("PREFLASH_BACKEND", "")
    with pytest.raises(ValueError, match="cutlass"):
        runner.make_wrapper(RAGGED, backend="cutlass")


def test_an_override_that_is_none(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "fa4")
    with pytest.raises(ValueError, match="PREFLASH_BACKEND='fa4'"):
        runner.make_wrapper(RAGGED, backend="cpu")


# begin_forward() and forward().


@pytest.fixture
def plans(monkeypatch):
    """Records the arguments of every plan made: by Python, or by C++ alone."""
    made = []
    plan, plan_again = _pipeline.plan, _core.plan_again

    def counted(*args):
        made.append(args)
        return plan(*args)

    def counted_again(*args):
        planned = plan_again(*args)
        made.extend([args] * planned)
        return planned

    monkeypatch.setattr(_pipeline, "plan", counted)
    monkeypatch.setattr(_core, "plan_again", counted_again)
    return made


STEP = {"causal": True, "window_left": 11, "logits_soft_cap": 20.0, "sm_scale": 0.3}


def forward(wrapper, inputs, **options):
    kv = ((inputs.cache,)) if inputs.case.paged else (inputs.k, inputs.v)
    return wrapper.forward_return_lse(inputs.q, *kv, **options)


def check_forward(wrapper, inputs, **options) -> None:
    out, lse = forward(wrapper, inputs, **options)
    pipeline = Pipeline(0.3, True, 11, 20.0)
    compare(out, lse, reference(inputs, pipeline=pipeline), soft_cap=20.0).check()


@WRAPPERS
def test_a_step_plans_once(target, case, plans):
    """begin_forward() plans with the options of the previous step's forward()."""
    inputs, wrapper = made(case, target)
    positional = leading(inputs)
    wrapper.begin_forward(*positional, q_data_type=case.dtype)
    check_forward(wrapper, inputs, **STEP)
    assert len(plans) == 2
    for step in range(3):
        inputs = build(case, device=target.device, seed=step)
        wrapper.begin_forward(*leading(inputs), q_data_type=case.dtype)
        for _ in range(2):
            check_forward(wrapper, inputs, **STEP)
        assert len(plans) == 3 + step
    # What begin_forward() itself was asked for is told, and run, as ever.
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap) == (False, -1, 0.0)
    check(inputs, wrapper, Pipeline(case.scale))
    check(inputs, wrapper, Pipeline(case.scale))
    assert len(plans) == 6
    # run() came after it, so the next step is planned for run().
    wrapper.begin_forward(*leading(inputs), q_data_type=case.dtype)
    check(inputs, wrapper, Pipeline(case.scale))
    assert len(plans) == 7
    check_forward(wrapper, inputs, **STEP)


@WRAPPERS
def test_plan_means_what_it_says_after_forward(target, case, plans):
    inputs, wrapper = made(case, target)
    runner.plan(wrapper, inputs)
    check_forward(wrapper, inputs, **STEP)
    del plans[:]
    runner.plan(wrapper, inputs, causal=True)
    check(inputs, wrapper, Pipeline(case.scale, True))
    assert len(plans) == 1


def test_a_mask_comes_and_goes_between_steps(target):
    """forward(causal=True) beside a custom mask is not causal; without the mask it is again."""
    masked = build(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), device=target.device)
    plain, wrapper = made(PAGED, target)
    for inputs in (plain, masked, plain):
        wrapper.begin_forward(
            *leading(inputs), q_data_type=PAGED.dtype, custom_mask=inputs.custom_mask
        )
        out, lse = forward(wrapper, inputs, causal=True)
        causal = inputs is plain
        compare(out, lse, reference(inputs, pipeline=Pipeline(PAGED.scale, causal))).check()


def test_what_forward_asked_for_may_not_be_there_any_more(target, monkeypatch):
    """Then begin_forward() plans what it is asked for, and forward() is what refuses."""
    inputs, wrapper = made(RAGGED, target)
    runner.plan(wrapper, inputs)
    forward(wrapper, inputs, **STEP)
    plan = _pipeline.plan

    def without_soft_cap(workspace, name, request):
        if request.options.soft_cap:
            raise NotImplementedError("soft cap")
        return plan(workspace, name, request)

    monkeypatch.setattr(_pipeline, "plan", without_soft_cap)
    wrapper.begin_forward(*leading(inputs), q_data_type=RAGGED.dtype)
    check(inputs, wrapper, Pipeline(RAGGED.scale))
    with pytest.raises(NotImplementedError, match="soft cap"):
        forward(wrapper, inputs, **STEP)


# Attributes.


@WRAPPERS
def test_attributes_before_and_after_plan(target, case):
    inputs, wrapper = made(dataclasses.replace(case, mask=MaskKind.CUSTOM), target)
    case = inputs.case
    arrays = {"_qo_indptr_buf": "qo_indptr"}
    if case.paged:
        arrays |= {
            "_paged_kv_indptr_buf": "kv_indptr",
            "_paged_kv_indices_buf": "indices",
            "_paged_kv_last_page_len_buf": "last_page_len",
        }
    else:
        arrays["_kv_indptr_buf"] = "kv_indptr"
    others = ["_custom_mask_buf", "_mask_indptr_buf", "_plan_info", "_num_qo_heads", "_batch_size"]
    position = ["_pos_encoding_mode", "_rope_scale", "_rope_theta"]
    for name in (*arrays, *others, *position, "_int_workspace_buffer"):
        assert getattr(wrapper, name) is None, name
    runner.plan(wrapper, inputs, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e4)
    assert [getattr(wrapper, name) for name in position] == ["ROPE_LLAMA", 2.0, 5e4]
    runner.plan(wrapper, inputs)
    for name, source in arrays.items():
        told, given = getattr(wrapper, name), getattr(inputs, source)
        assert str(told.device).startswith(target.device)
        assert torch.equal(told.cpu(), given.cpu()[: told.numel()]), name
        assert told.dtype == torch.int32
    packed, indptr = preflash.segment_packbits(
        inputs.custom_mask, torch.tensor([0, 270, 285]).to(target.device), bitorder="little"
    )
    assert torch.equal(wrapper._custom_mask_buf, packed)
    assert torch.equal(wrapper._mask_indptr_buf.cpu(), indptr.cpu())
    assert (wrapper._num_qo_heads, wrapper._num_kv_heads, wrapper._batch_size) == (4, 2, 2)
    assert (wrapper._use_cuda_graph, wrapper._fixed_batch_size) == (False, 0)
    assert wrapper._max_total_num_rows is None
    assert wrapper._plan_info.id == wrapper.variant
    needed = wrapper._plan_info.int_bytes
    assert wrapper._int_workspace_buffer.numel() >= needed
    assert wrapper._float_workspace_buffer.device.type == target.device
    assert wrapper._pin_memory_int_workspace_buffer is None
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        wrapper._cached_module.plan(wrapper._float_workspace_buffer)


def readonly_attributes(wrapper) -> list[str]:
    from preflash._compat.engine_attributes import readonly_property

    return [
        name
        for name in dir(type(wrapper))
        if isinstance(getattr(type(wrapper), name), readonly_property)
    ]


@WRAPPERS
def test_attributes_cannot_be_set(target, case):
    _, wrapper = made(case, target)
    names = readonly_attributes(wrapper)
    assert {"_qo_indptr_last", "_qo_indptr_buf", "_causal", "_plan_info"} <= set(names)
    for name in names:
        with pytest.raises(AttributeError, match=rf"{name} is read-only"):
            setattr(wrapper, name, None)


WRITES = {
    "copy_": lambda told: told.copy_(torch.zeros_like(told)),
    "a slice": lambda told: told[:1].copy_(told[1:2]),
    "setitem": lambda told: told.__setitem__(0, 3),
    "add": lambda told: told.__iadd__(1),
    "out": lambda told: torch.add(torch.ones_like(told), 1, out=told),
    "a view": lambda told: told.view(-1).zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_lengths_cannot_be_written(target, write):
    """A kernel would not see it, and a result would be wrong."""
    inputs, wrapper = made(PAGED, target)
    runner.plan(wrapper, inputs)
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        write(wrapper._paged_kv_last_page_len_buf)
    copy = wrapper._paged_kv_last_page_len_buf.clone()
    copy.fill_(1)
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_mask_cannot_be_written(target, write):
    """Neither its bits nor, on a GPU, its full and empty tiles would be what was planned."""
    inputs, wrapper = made(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target)
    runner.plan(wrapper, inputs)
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        write(wrapper._custom_mask_buf)
    wrapper._custom_mask_buf.view(-1).clone().fill_(0)
    wrapper.plan(
        *runner.plan_arguments(inputs)[0],
        packed_custom_mask=wrapper._custom_mask_buf,
        q_data_type=PAGED.dtype,
    )
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


def test_plan_takes_its_own_buffers(target):
    inputs, wrapper = made(PAGED, target)
    runner.plan(wrapper, inputs)
    wrapper.plan(
        wrapper._qo_indptr_buf,
        wrapper._paged_kv_indptr_buf,
        wrapper._paged_kv_indices_buf,
        wrapper._paged_kv_last_page_len_buf,
        4,
        2,
        64,
        16,
        q_data_type=PAGED.dtype,
    )
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


WRONG_CALLS = {
    "missing": (lambda given: (given[:-1], {}), r"missing .*: '(head_dim|page_size)'"),
    "unknown": (lambda given: (given, {"casual": True}), "casual"),
    "too many": (lambda given: (given + (None,) * 60, {}), "too many positional"),
    "twice": (lambda given: (given, {"num_qo_heads": 4}), "multiple values .*num_qo_heads"),
}


@pytest.mark.parametrize("method", ["begin_forward", "workspace_size"])
@pytest.mark.parametrize("wrong", WRONG_CALLS.values(), ids=WRONG_CALLS)
@WRAPPERS
def test_calls_that_do_not_bind(target, case, wrong, method):
    inputs, wrapper = made(case, target)
    spoil, match = wrong
    args, kwargs = spoil(leading(inputs))
    with pytest.raises(TypeError, match=match):
        getattr(wrapper, method)(*args, **kwargs)
