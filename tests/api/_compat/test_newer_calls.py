"""Calls written for later releases of FlashInfer: order of arguments, neutral arguments, numbers of
other types, attributes."""

import dataclasses

import numpy as np
import preflash
import pytest
import torch
from planned_cases import PAGED_ARRAYS, planned, tensors
from planned_cases import unplanned as made
from preflash.testing import Case, MaskKind, build, compare, reference, runner
from preflash.testing.oracle import Pipeline

RAGGED = Case("ragged", (9, 3), (30, 5), 4, 2, 64)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)
WRAPPERS = pytest.mark.parametrize("case", [RAGGED, PAGED], ids=lambda case: case.name)


def leading(inputs) -> tuple:
    """Returns the arguments that both orders begin with."""
    return runner.plan_arguments(inputs)[0]


def check(inputs, wrapper, pipeline: Pipeline | None = None, result=None) -> None:
    """Compares the result, or that of run(), with the oracle's."""
    out, lse = runner.run(wrapper, inputs) if result is None else result
    if pipeline is None:
        runner.compare(inputs, out, lse).check()
        return
    expected = reference(inputs, pipeline=pipeline)
    compare(out, lse, expected, soft_cap=pipeline.soft_cap).check()


# Positional arguments after the leading ones, for either wrapper, and the options they mean.
SCALE, WINDOW, CAP = 0.2, 7, 30.0
MEANT = Pipeline(SCALE, True, WINDOW, CAP)


def orders(case) -> dict[str, tuple]:
    tail = (SCALE, WINDOW, CAP) if case.paged else (WINDOW, CAP, SCALE)
    both = (True, "NONE", False, *tail, None, None, case.dtype, case.dtype)
    rest = (None,) * 5 + (32, False, 0) if case.paged else (32, False, *(None,) * 6, 0)
    return {
        "older": (None, None, *both),
        "newer": (64, None, None, *both, case.dtype, True),
        "newer without head_dim_vo": (None, None, None, *both),
        "newer to the end": (64, None, None, *both, None, True, None, None, 0, None, *rest),
    }


@pytest.mark.parametrize("order", orders(RAGGED))
@WRAPPERS
def test_plan_in_both_orders(target, case, order):
    inputs, wrapper = made(case, target)
    given = (*leading(inputs), *orders(case)[order])
    for method in (wrapper.plan, wrapper.begin_forward):
        method(*given)
        check(inputs, wrapper, MEANT)
    older = wrapper.workspace_size(*leading(inputs), *orders(case)["older"])
    assert wrapper.workspace_size(*given) == older


@pytest.mark.parametrize("kind", [MaskKind.CUSTOM, MaskKind.PACKED])
@pytest.mark.parametrize("head_dim_vo", [(), (64,), (None,)], ids=["older", "newer", "None"])
@WRAPPERS
def test_masks_in_both_orders(target, case, head_dim_vo, kind):
    """A bool tensor after None is a dense mask."""
    inputs, wrapper = made(dataclasses.replace(case, mask=kind), target)
    packed = () if kind is MaskKind.CUSTOM else (inputs.packed_custom_mask,)
    wrapper.plan(
        *leading(inputs), *head_dim_vo, inputs.custom_mask, *packed, q_data_type=case.dtype
    )
    check(inputs, wrapper)


def test_mla_head_dims_by_position(target):
    case = Case("mla", (9, 3), (30, 5), 4, 4, 192, 128)
    inputs, wrapper = made(case, target)
    wrapper.plan(*leading(inputs), 128, None, None, True, q_data_type=case.dtype)
    check(inputs, wrapper, Pipeline(case.scale, True))


TAIL = (True, "NHD", "NONE", False, SCALE, WINDOW, CAP)
SINGLE_ORDERS = {
    "older": ("_return_lse", (None, None, *TAIL)),
    "newer": ("_return_lse", (None,) * 6 + TAIL),
    "newer with o_dtype": (
        "",
        (*(None,) * 3, SINGLE.dtype, None, None, *TAIL, None, None, "auto", True, *(None,) * 3),
    ),
}


@pytest.mark.parametrize(("name", "arguments"), SINGLE_ORDERS.values(), ids=SINGLE_ORDERS)
def test_single_in_both_orders(target, name, arguments):
    inputs = build(SINGLE, device=target.device)
    call = getattr(preflash, f"single_prefill_with_kv_cache{name}")
    check(inputs, None, MEANT, call(inputs.q, inputs.k[:30], inputs.v[:30], *arguments))


@pytest.mark.parametrize("name", ["o_scale", "use_fp16_softmax", "uses_spcompress"])
@WRAPPERS
def test_neutral_values(target, case, name):
    inputs = build(case, device=target.device)
    options = {"jit_args": None, "jit_kwargs": None, "variant_owns_mask": False}
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device, **options)
    runner.plan(wrapper, inputs)
    for value in (None, 1.0 if name == "o_scale" else False):
        check(inputs, wrapper, None, runner.run(wrapper, inputs, **{name: value}))
    check(inputs, wrapper, None, (wrapper.run(*tensors(inputs), *(None,) * 5), None))


def test_indptr_of_values_and_outputs(target):
    inputs, wrapper = made(RAGGED, target)
    runner.plan(wrapper, inputs, v_indptr=None, o_indptr=None)
    for place in {"cpu", target.device}:
        for kv_width, qo_width in ((1, 1), (2 * 64, 4 * 64)):  # in tokens, in elements
            v_indptr, o_indptr = inputs.kv_indptr * kv_width, inputs.qo_indptr * qo_width
            indptr = {"v_indptr": v_indptr.to(place), "o_indptr": o_indptr.to(place)}
            runner.plan(wrapper, inputs, **indptr)
            check(inputs, wrapper)


@WRAPPERS
def test_numbers_of_other_types(target, case):
    inputs, wrapper = made(case, target)
    options = {
        "num_qo_heads": np.int64(4), "num_kv_heads": np.int32(2), "head_dim": torch.tensor(64),
        "causal": np.bool_(True), "sm_scale": torch.tensor([SCALE]), "rope_scale": 1.0,
        "window_left": np.int32(WINDOW), "logits_soft_cap": np.float32(CAP), "rope_theta": 1e4,
        "disable_split_kv": np.bool_(True), "q_data_type": case.dtype,
    }  # fmt: skip
    names = PAGED_ARRAYS if case.paged else ("qo_indptr", "kv_indptr")
    if case.paged:
        options["page_size"] = np.int64(16)
    wrapper.plan(**dict(zip(names, leading(inputs), strict=False)), **options)
    assert wrapper._causal is True
    check(inputs, wrapper, Pipeline(float(torch.tensor(SCALE)), True, WINDOW, CAP))
    inputs, scale = build(SINGLE, device=target.device), torch.tensor(SCALE, device=target.device)
    options = {"causal": np.bool_(True), "sm_scale": scale, "allow_fp16_qk_reduction": True}
    result = runner.single(inputs, backend=target.backend, rope_theta=1e4, **options)
    check(inputs, None, Pipeline(float(scale), True), result)


def plans(*more, **options):
    return lambda w, i: w.plan(*leading(i), *more, **options)


def runs(**options):
    return lambda w, i: runner.run(w, i, **options)


def constructs(**options):
    return lambda w, i: type(w)(runner.workspace("cpu", 1024), **options)


BOTH = (RAGGED, PAGED)
LACKING = r"missing .*: '(head_dim|page_size)'"
UNBOUND = {
    "missing": (lambda given: (given[:-1], {}), LACKING),
    "unknown": (lambda given: (given, {"casual": True}), "casual"),
    "too many": (lambda given: (given + (None,) * 60, {}), "too many positional"),
    "twice": (lambda given: (given, {"num_qo_heads": 4}), "multiple values .*num_qo_heads"),
}


def unbound(method, spoil):
    def call(wrapper, inputs):
        args, kwargs = spoil(leading(inputs))
        getattr(wrapper, method)(*args, **kwargs)

    return call


# Cases, the call on a planned wrapper, and the refusal.
REFUSED = {
    "given twice": (
        BOTH, plans(64, head_dim_vo=64), TypeError,
        "head_dim_vo was given by position and by name",
    ),
    "neither order": (BOTH, plans("mask", q_data_type=PAGED.dtype), TypeError, "custom_mask"),
    "by position": (
        BOTH, lambda w, i: w.run(*tensors(i), *(None,) * 5, torch.ones(4)), TypeError,
        r"run\(\) got",
    ),
    "owns mask": (
        BOTH, constructs(variant_owns_mask=True), NotImplementedError, "variant_owns_mask"
    ),
    **{
        f"{name} of run": (BOTH, runs(**{name: value}), NotImplementedError, name)
        for name, value in (
            ("o_scale", 0.5), ("use_fp16_softmax", True), ("uses_spcompress", True)
        )
    },
    "v_indptr": (
        (RAGGED,), lambda w, i: runner.plan(w, i, v_indptr=i.kv_indptr + 1), ValueError, "v_indptr"
    ),
    "o_indptr": (
        (RAGGED,), lambda w, i: runner.plan(w, i, o_indptr=i.qo_indptr + 1), ValueError, "o_indptr"
    ),
    # The fourth positional argument: factors of the heads of an fp8 q, not a mask.
    "a float tensor": (
        (SINGLE,),
        lambda w, i: preflash.single_prefill_with_kv_cache(
            i.q, i.k[:30], i.v[:30], torch.ones(4, device=i.q.device)
        ),
        ValueError, "scale_q: only an fp8 tensor",
    ),
    **{
        f"{method} {name}": (BOTH, unbound(method, spoil), TypeError, match)
        for method in ("begin_forward", "workspace_size")
        for name, (spoil, match) in UNBOUND.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "call", "error", "match"),
    [
        pytest.param(case, *row, id=f"{name} {case.name}")
        for name, (cases, *row) in REFUSED.items()
        for case in cases
    ],
)
def test_refusals(target, case, call, error, match):
    inputs, wrapper = planned(case, target)
    with pytest.raises(error, match=match):
        call(wrapper, inputs)
    check(inputs, wrapper)


@pytest.mark.parametrize(
    "backend", ["fa2", "fa3", "cutlass", "trtllm-gen", "cute-dsl", "xqa", "cudnn"]
)
def test_the_environment_overrides_the_backend(monkeypatch, backend):
    """Engines compare `_backend` with the name in their code, "cudnn" excepted."""
    if backend in ("cutlass", "trtllm-gen", "cute-dsl", "xqa"):
        with pytest.raises(ValueError, match=f"{backend}.*PREFLASH_BACKEND=auto in the env"):
            runner.make_wrapper(RAGGED, backend=backend)
    inputs = build(RAGGED)
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    wrapper = runner.make_wrapper(RAGGED, backend=backend)
    assert f"PREFLASH_BACKEND=auto instead of '{backend}'" in repr(wrapper)
    read = {wrapper._backend} if backend != "cudnn" else set()
    runner.plan(wrapper, inputs)
    assert {*read, wrapper._backend} == {"cpu" if backend == "cudnn" else backend}
    assert wrapper.variant.startswith("cpu_")
    assert f"'cpu' (PREFLASH_BACKEND=auto instead of '{backend}')" in repr(wrapper)
    check(inputs, wrapper)


def test_the_environment_and_other_calls(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    inputs = build(dataclasses.replace(SINGLE, qo_lens=(11,)))  # not planned by another test
    runner.compare(inputs, *runner.single(inputs, backend="fa2")).check()
    decode = preflash.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), backend="fa2")
    table = torch.zeros(2, 3, dtype=torch.int32)
    indptr, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    decode.plan(indptr, table, last, 4, 2, 64, 16)
    assert (decode._backend, decode.resolved_backend) == ("fa2", "cpu")
    for value in ("cpu", ""):
        monkeypatch.setenv("PREFLASH_BACKEND", value)
        assert "PREFLASH_BACKEND" not in repr(runner.make_wrapper(RAGGED, backend="cpu"))
    for value, backend, says in (
        ("", "cutlass", "cutlass"), ("fa4", "cpu", "PREFLASH_BACKEND='fa4'")
    ):  # fmt: skip
        monkeypatch.setenv("PREFLASH_BACKEND", value)
        with pytest.raises(ValueError, match=says):
            runner.make_wrapper(RAGGED, backend=backend)


@WRAPPERS
def test_run_has_the_options_of_begin_forward(target, case):
    """forward() has options of its own in every step: test_wrapper_contract.py."""
    inputs, wrapper = made(case, target)
    step = {"causal": True, "window_left": 11, "logits_soft_cap": 20.0, "sm_scale": 0.3}
    for _ in range(2):
        wrapper.begin_forward(*leading(inputs), q_data_type=case.dtype)
        result = wrapper.forward_return_lse(*tensors(inputs), **step)
        check(inputs, wrapper, Pipeline(0.3, True, 11, 20.0), result)
        attributes = (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap)
        assert attributes == (False, -1, 0.0)
        check(inputs, wrapper, Pipeline(case.scale))
    runner.plan(wrapper, inputs, causal=True)
    check(inputs, wrapper, Pipeline(case.scale, True))


@pytest.mark.parametrize("page_size", [0, 16])
def test_begin_forward_plans_for_the_call_of_the_last_step(target, page_size):
    """A window leaves fewer tiles in the plan: forward() of the next step need not plan again."""
    case = Case("long", (9,), (900,), 4, 2, 64, page_size=page_size)
    inputs, wrapper = made(case, target)
    tiles = []
    for call in (wrapper.forward, wrapper.forward, wrapper.run, wrapper.run):
        wrapper.begin_forward(*leading(inputs), q_data_type=case.dtype)
        tiles.append(wrapper._plan_info.num_kv_tiles)
        call(*tensors(inputs), **({} if call == wrapper.run else {"window_left": 11}))
    assert tiles[1] == tiles[2] < tiles[0] == tiles[3]


def test_a_mask_comes_and_goes_between_steps(target):
    """forward(causal=True) with a custom mask is not causal; without the mask it is again."""
    masked = build(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), device=target.device)
    plain, wrapper = made(PAGED, target)
    for inputs in (plain, masked, plain):
        options = {"q_data_type": PAGED.dtype, "custom_mask": inputs.custom_mask}
        wrapper.begin_forward(*leading(inputs), **options)
        result = wrapper.forward_return_lse(*tensors(inputs), causal=True)
        check(inputs, wrapper, Pipeline(PAGED.scale, inputs is plain), result)


ARRAYS = {
    RAGGED: {"_qo_indptr_buf": "qo_indptr", "_kv_indptr_buf": "kv_indptr"},
    PAGED: {
        "_qo_indptr_buf": "qo_indptr",
        "_paged_kv_indptr_buf": "kv_indptr",
        "_paged_kv_indices_buf": "indices",
        "_paged_kv_last_page_len_buf": "last_page_len",
    },
}
POSITION = ["_pos_encoding_mode", "_rope_scale", "_rope_theta"]
OF_A_PLAN = [
    *POSITION, "_custom_mask_buf", "_mask_indptr_buf", "_plan_info", "_num_qo_heads",
    "_batch_size", "_int_workspace_buffer",
]  # fmt: skip
READ_ONLY = [
    *OF_A_PLAN, "_backend", "_cached_kv_data_type", "_cached_module", "_cached_o_data_type",
    "_cached_q_data_type", "_causal", "_fixed_batch_size", "_float_workspace_buffer",
    "_logits_soft_cap", "_max_total_num_rows", "_num_kv_heads", "_pin_memory_int_workspace_buffer",
    "_qo_indptr_last", "_sm_scale", "_window_left",
]  # fmt: skip


@WRAPPERS
def test_attributes_before_and_after_plan(target, case):
    inputs, wrapper = made(dataclasses.replace(case, mask=MaskKind.CUSTOM), target)
    for name in (*ARRAYS[case], *OF_A_PLAN):
        assert getattr(wrapper, name) is None, name
    runner.plan(wrapper, inputs, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e4)
    assert [getattr(wrapper, name) for name in POSITION] == ["ROPE_LLAMA", 2.0, 5e4]
    runner.plan(wrapper, inputs)
    for name, source in ARRAYS[case].items():
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
    assert wrapper._qo_indptr_last == 12
    assert wrapper._max_total_num_rows is wrapper._pin_memory_int_workspace_buffer is None
    assert wrapper._plan_info.id == wrapper.variant
    assert wrapper._int_workspace_buffer.numel() >= wrapper._plan_info.int_bytes
    assert wrapper._float_workspace_buffer.device.type == target.device
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        wrapper._cached_module.plan(wrapper._float_workspace_buffer)


@WRAPPERS
def test_attributes_cannot_be_set(target, case):
    _, wrapper = made(case, target)
    for name in (*ARRAYS[case], *READ_ONLY, *["_kv_lens_buffer"] * case.paged):
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
@pytest.mark.parametrize("name", ["_paged_kv_last_page_len_buf", "_custom_mask_buf"])
def test_arrays_of_a_plan_cannot_be_written(target, name, write):
    """Kernels would not see a written length; the full and empty tiles of a written mask would
    be those of the plan. plan() itself takes them."""
    inputs, wrapper = planned(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), target)
    with pytest.raises(NotImplementedError, match=r"plan\(\)"):
        write(getattr(wrapper, name))
    getattr(wrapper, name).view(-1).clone().fill_(0)
    check(inputs, wrapper)
    wrapper.plan(
        *(getattr(wrapper, name) for name in ARRAYS[PAGED]), 4, 2, 64, 16,
        packed_custom_mask=wrapper._custom_mask_buf, q_data_type=PAGED.dtype,
    )  # fmt: skip
    check(inputs, wrapper)
