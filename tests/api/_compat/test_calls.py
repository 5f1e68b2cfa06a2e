"""One table of calls as releases of FlashInfer and its own tests spell them: orders of positional
arguments, neutral arguments, numbers of other types, variants by jit_args, scales by position.

A row of CALLS has cases, what the oracle computes other than the case says, and a call that yields
results; a row of REFUSED has cases, a call, and the error that it raises.
"""

import copy
import dataclasses
import functools
import math

import numpy as np
import preflash
import pytest
import torch
from planned_cases import PAGED_ARRAYS, tensors, unplanned
from preflash.testing import Case, MaskKind, Sinks, build, compare, poison, runner
from preflash.testing.oracle import reference
from refusals import refused

HALF, BFLOAT = torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RAGGED = Case("ragged", (9, 0, 33, 1), (40, 7, 90, 5), 4, 2, 64, dtype=HALF)
PAGED = dataclasses.replace(RAGGED, name="paged", page_size=16)
SINGLE = Case("single", (9,), (30,), 4, 2, 64)
BOTH = (RAGGED, PAGED)


def both(**changes) -> tuple[Case, ...]:
    return tuple(dataclasses.replace(case, **changes) for case in BOTH)


def leading(inputs) -> tuple:
    """Returns the arguments that all orders of plan() begin with."""
    return runner.plan_arguments(inputs)[0]


def remade(wrapper, inputs, **options):
    """Makes another wrapper like one without a plan; options: of the constructor."""
    work = runner.workspace(inputs.q.device)
    return type(wrapper)(work, inputs.case.layout, backend=wrapper._backend, **options)


def check(inputs, result, **changes) -> None:
    """Compares (out, lse) or out with the oracle's. changes: of the case's pipeline."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    if not changes:
        runner.compare(inputs, out, lse).check()
        return
    pipeline = dataclasses.replace(inputs.pipeline, **changes)
    expected = reference(inputs, pipeline=pipeline)
    compare(out, lse, expected, soft_cap=pipeline.soft_cap).check()


def in_nats(result) -> tuple:
    return result[0], result[1] / math.log(2)


# --- plan() ---------------------------------------------------------------------

SCALE, WINDOW, CAP = 0.2, 7, 30.0
MEANT = {"sm_scale": SCALE, "causal": True, "window_left": WINDOW, "soft_cap": CAP}


def orders(case) -> dict[str, tuple]:
    """Returns positional arguments after the leading ones, which mean MEANT in every order."""
    tail = (SCALE, WINDOW, CAP) if case.paged else (WINDOW, CAP, SCALE)
    common = (True, "NONE", False, *tail, None, None, case.dtype, case.dtype)
    rest = (None,) * 5 + (128, False, 0) if case.paged else (128, False, *(None,) * 6, 0)
    return {
        "older": (None, None, *common),
        "newer": (64, None, None, *common, case.dtype, True),
        "newer without head_dim_vo": (None, None, None, *common),
        "newer to the end": (64, None, None, *common, None, True, None, None, 0, None, *rest),
    }


def in_order(name):
    def call(wrapper, inputs):
        arguments = (*leading(inputs), *orders(inputs.case)[name])
        for plan in (wrapper.plan, wrapper.begin_forward):
            plan(*arguments)
            yield runner.run(wrapper, inputs)
        older = wrapper.workspace_size(*leading(inputs), *orders(inputs.case)["older"])
        assert wrapper.workspace_size(*arguments) == older

    return call


def masks(wrapper, inputs):
    """A bool tensor after None is a dense mask, in the older order and in the newer one."""
    packed = () if inputs.packed_custom_mask is None else (inputs.packed_custom_mask,)
    for head_dim_vo in ((), (64,), (None,)):
        mask = (*head_dim_vo, inputs.custom_mask, *packed)
        wrapper.plan(*leading(inputs), *mask, q_data_type=inputs.case.dtype)
        yield runner.run(wrapper, inputs)


def latent(wrapper, inputs):
    dtype, (qo_indptr, kv_indptr, *_) = inputs.case.dtype, leading(inputs)
    wrapper.plan(*leading(inputs), 128, None, None, True, q_data_type=dtype)
    yield runner.run(wrapper, inputs)
    wrapper.begin_forward(
        qo_indptr=qo_indptr, kv_indptr=kv_indptr, num_qo_heads=4, num_kv_heads=4,
        head_dim_qk=192, head_dim_vo=128, q_data_type=dtype, causal=True,
    )  # fmt: skip
    yield wrapper.forward_return_lse(*tensors(inputs), causal=True, logits_soft_cap=0.0)


def numbers(wrapper, inputs):
    """Integers, bools and floats of numpy and torch."""
    case = inputs.case
    names = PAGED_ARRAYS if case.paged else ("qo_indptr", "kv_indptr")
    wrapper.plan(
        **dict(zip(names, leading(inputs), strict=False)), num_qo_heads=np.int64(4),
        num_kv_heads=np.int32(2), head_dim=torch.tensor(64), causal=np.bool_(True),
        sm_scale=torch.tensor([SCALE]), rope_scale=1.0, window_left=np.int32(WINDOW),
        logits_soft_cap=np.float32(CAP), rope_theta=1e4, disable_split_kv=np.bool_(True),
        q_data_type=case.dtype, **{"page_size": np.int64(16)} if case.paged else {},
    )  # fmt: skip
    assert wrapper._causal is True
    yield runner.run(wrapper, inputs)


def soft_caps_that_are_none(wrapper, inputs):
    for cap in (0, -30.0):
        runner.plan(wrapper, inputs, logits_soft_cap=cap)
        assert wrapper._logits_soft_cap == 0.0
        yield runner.run(wrapper, inputs)


def indptr_of_values_and_outputs(wrapper, inputs):
    """Plans with offsets of V and O in tokens and in elements, on the host and on the device."""
    runner.plan(wrapper, inputs, v_indptr=None, o_indptr=None)
    for place in {"cpu", inputs.q.device.type}:
        for kv_width, qo_width in ((1, 1), (2 * 64, 4 * 64)):
            v_indptr, o_indptr = inputs.kv_indptr * kv_width, inputs.qo_indptr * qo_width
            runner.plan(wrapper, inputs, v_indptr=v_indptr.to(place), o_indptr=o_indptr.to(place))
            yield runner.run(wrapper, inputs)


# --- run() ----------------------------------------------------------------------


def neutral_values(wrapper, inputs):
    """TensorRT-LLM gives buffers without graphs; engines give -1 and False for no split size."""
    names = PAGED_ARRAYS if inputs.case.paged else ("qo_indptr", "kv_indptr")
    buffers = {f"{name}_buf": torch.zeros_like(array).to(inputs.q.device)
               for name, array in zip(names, leading(inputs), strict=False)}  # fmt: skip
    neutral = {"jit_args": None, "jit_kwargs": None, "variant_owns_mask": False}
    wrapper = remade(wrapper, inputs, use_cuda_graph=False, **neutral, **buffers)
    runner.plan(wrapper, inputs, fixed_split_size=4096, disable_split_kv=True)
    yield runner.run(wrapper, inputs)
    runner.plan(wrapper, inputs, fixed_split_size=-1, disable_split_kv=False)
    for name, value in (("o_scale", 1.0), ("use_fp16_softmax", False), ("uses_spcompress", False)):
        for neutral in (None, value):
            yield runner.run(wrapper, inputs, **{name: neutral})
    yield wrapper.run(*tensors(inputs), *(None,) * 5)


def return_lse_by_position(wrapper, inputs):
    """The paged wrapper has k_scale and v_scale before it."""
    runner.plan(wrapper, inputs)
    scales = (0.5, 2.0) if inputs.case.paged else ()
    yield wrapper.run(*tensors(inputs), *scales, True)


def scales_by_position(wrapper, inputs):
    """Factors of heads, one for each head or one for all, or factors of tensors."""
    runner.plan(wrapper, inputs)
    inputs.variant = wrapper.variant  # bounds depend on it
    scales = (inputs.scales.q, inputs.scales.k, inputs.scales.v)
    run = functools.partial(wrapper.run, *tensors(inputs))
    yield run(*scales)
    yield wrapper.run_return_lse(*tensors(inputs), *scales)
    yield in_nats(run(*scales, return_lse=True, lse_base="ln"))
    assert torch.equal(run(2.0, 0.25, 2.0), run(q_scale=2.0, k_scale=0.25, v_scale=2.0))
    inputs.scales = dataclasses.replace(inputs.scales, v=torch.full_like(scales[2], 2.0))
    yield run(*scales[:2], 2.0, return_lse=True)


def queries_of_e5m2(o_dtype, **options):
    """The oracle's queries have the output's dtype, with values of float8_e5m2."""

    def call(wrapper, inputs):
        q = inputs.q.to(E5M2)
        inputs.q = q.to(o_dtype or BFLOAT)
        types = {"q_data_type": E5M2, "kv_data_type": o_dtype and E5M2, "o_data_type": o_dtype}
        runner.plan(wrapper, inputs, **types)
        assert wrapper._cached_q_data_type == E5M2
        for _ in range(2):
            out, lse = wrapper.run(q, *tensors(inputs)[1:], return_lse=True, **options)
            assert out.dtype == (o_dtype or BFLOAT)
            yield out, lse
        with pytest.raises(TypeError, match=r"q is torch.*; must be torch.float8_e5m2"):
            wrapper.run(*tensors(inputs), **options)

    return call


def jit_args(dtype=HALF, **replaced) -> tuple:
    """Returns jit_args of FlashInfer's variant with attention sinks."""
    given = {
        "uri": "batch_prefill_attention_sink", "q": dtype, "kv": dtype, "o": dtype,
        "indices": torch.int32, "head_dim_qk": 64, "head_dim_vo": 64, "tensors": ["sink"],
        "tensor_types": ["float"], "scalars": ["sm_scale"], "scalar_types": ["double"],
        "variant": "AttentionSink", "source": "struct AttentionSink;",
    }  # fmt: skip
    return tuple({**given, **replaced}.values())


def of_sinks(wrapper, inputs, jit_kwargs=None, **replaced):
    """Makes a wrapper of that kind by jit_args; replaced: of them."""
    options = {"jit_args": jit_args(inputs.case.dtype, **replaced), "jit_kwargs": jit_kwargs}
    return remade(wrapper, inputs, **options)


def sinks_by_position(**options):
    def call(wrapper, inputs):
        sliding = {"use_sliding_window": "window_left" in options}
        wrapper = of_sinks(wrapper, inputs, jit_kwargs=sliding)
        runner.plan(wrapper, inputs, **options)
        for run in (wrapper.run, wrapper.run_return_lse):
            yield run(*tensors(inputs), inputs.sinks, 0.11)

    return call


def sinks_with_options_by_name(wrapper, inputs):
    wrapper = of_sinks(wrapper, inputs)
    runner.plan(wrapper, inputs, sm_scale=0.2)
    out = poison(inputs.q.shape, inputs.case.dtype, inputs.q.device)
    options = {"v_scale": 0.5, "q_scale": 2.0, "out": out, "return_lse": True, "lse_base": "ln"}
    for each in (wrapper, copy.copy(wrapper)):
        for sinks, named in (((inputs.sinks,), {}), ((), {"sinks": inputs.sinks})):
            result = each.run(*tensors(inputs), *sinks, window_left=30, **named, **options)
            assert result[0] is out
            yield in_nats(result)


# --- single requests --------------------------------------------------------------

TAIL = (True, "NHD", "NONE", False, SCALE, WINDOW, CAP)
FORWARD_ONLY = (None, None, "auto", True, *(None,) * 3)


def single(*arguments, name="single_prefill_with_kv_cache_return_lse"):
    def call(_, inputs):
        yield getattr(preflash, name)(inputs.q, inputs.k[:30], inputs.v[:30], *arguments)

    return call


def single_of_e5m2(wrapper, inputs):
    q = inputs.q.to(E5M2)
    inputs.q = q.to(BFLOAT)
    attend = preflash.single_prefill_with_kv_cache_return_lse
    out, lse = attend(q, inputs.k[:30], inputs.v[:30], causal=True, backend=wrapper._backend)
    assert out.dtype == BFLOAT
    yield out, lse


def run_after_forward(wrapper, inputs):
    """run() has the options of begin_forward(), forward() its own, and none of the call before."""
    step = {"causal": True, "window_left": 11, "logits_soft_cap": 20.0, "sm_scale": 0.3}
    for names in (list(step), ["causal"], ["sm_scale", "window_left"], [], list(step)):
        options = {name: step[name] for name in names}
        wrapper.begin_forward(*leading(inputs), q_data_type=inputs.case.dtype)
        out, lse = wrapper.forward_return_lse(*tensors(inputs), **options)
        assert torch.equal(wrapper.forward(*tensors(inputs), **options), out)
        options["soft_cap"] = options.pop("logits_soft_cap", 0.0)
        check(inputs, (out, lse), **options)
        shown = (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap)
        assert shown == (False, -1, 0.0)
        yield runner.run(wrapper, inputs)
    assert wrapper.end_forward() is None


OF_E5M2 = both(dtype=HALF, kv_dtype=E5M2)
OF_SINKS = both(sinks=Sinks.MIXED)
OF_FP8 = both(dtype=E4M3, kv_dtype=E4M3, head_scales=True, mask=MaskKind.CAUSAL)
CALLS = {
    **{f"plan, {name}": (BOTH, MEANT, in_order(name)) for name in orders(RAGGED)},
    "dense masks": (both(mask=MaskKind.CUSTOM), {}, masks),
    "packed masks": (both(mask=MaskKind.PACKED), {}, masks),
    "latent": ((Case("mla", (9, 3), (30, 5), 4, 4, 192, 128),), {"causal": True}, latent),
    "numbers": (BOTH, {**MEANT, "sm_scale": float(torch.tensor(SCALE))}, numbers),
    "soft caps": (BOTH, {}, soft_caps_that_are_none),
    "v_indptr": ((RAGGED,), {}, indptr_of_values_and_outputs),
    "neutral": (BOTH, {}, neutral_values),
    "return_lse": ((RAGGED,), {}, return_lse_by_position),
    "return_lse, paged": (
        (PAGED,), {"sm_scale": PAGED.scale * 0.5, "out_scale": 2.0}, return_lse_by_position
    ),
    "scales": (OF_FP8, {}, scales_by_position),
    "e5m2": (both(dtype=BFLOAT, kv_dtype=E5M2), {}, queries_of_e5m2(None)),
    "e5m2 to float16": (OF_E5M2, {"window_left": 12}, queries_of_e5m2(HALF, window_left=12)),
    "sinks": (OF_SINKS, {"sm_scale": 0.11, "causal": True}, sinks_by_position(causal=True)),
    "sinks, window": (
        both(sinks=Sinks.MIXED, dtype=BFLOAT), {"sm_scale": 0.11, "window_left": 20},
        sinks_by_position(window_left=20),
    ),
    "sinks, options": (
        OF_SINKS, {"sm_scale": 0.4, "window_left": 30, "out_scale": 0.5},
        sinks_with_options_by_name,
    ),
    "single, older": ((SINGLE,), MEANT, single(None, None, *TAIL)),
    "single, newer": ((SINGLE,), MEANT, single(*(None,) * 6, *TAIL)),
    "single, o_dtype": (
        (SINGLE,), MEANT,
        single(*(None,) * 3, SINGLE.dtype, None, None, *TAIL, *FORWARD_ONLY,
               name="single_prefill_with_kv_cache"),
    ),
    "single, e5m2": (
        (dataclasses.replace(SINGLE, kv_dtype=E5M2),), {"causal": True}, single_of_e5m2
    ),
    "run after forward": (BOTH, {}, run_after_forward),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "means", "call"),
    [
        pytest.param(case, *row, id=f"{name} {case.name}")
        for name, (cases, *row) in CALLS.items()
        for case in cases
    ],
)
def test_calls(target, case, means, call):
    inputs, wrapper = unplanned(case, target)
    for result in call(wrapper, inputs):
        check(inputs, result, **means)


@pytest.mark.parametrize("page_size", [0, 16])
def test_begin_forward_plans_for_the_call_of_the_last_step(target, page_size):
    """A window leaves fewer tiles in the plan: forward() of the next step need not plan again."""
    case = Case("long", (9,), (900,), 4, 2, 64, page_size=page_size)
    inputs, wrapper = unplanned(case, target)
    tiles = []
    for call in (wrapper.forward, wrapper.forward, wrapper.run, wrapper.run):
        wrapper.begin_forward(*leading(inputs), q_data_type=case.dtype)
        tiles.append(wrapper._plan_info.num_kv_tiles)
        call(*tensors(inputs), **({} if call == wrapper.run else {"window_left": 11}))
    assert tiles[1] == tiles[2] < tiles[0] == tiles[3]


def test_a_mask_comes_and_goes_between_steps(target):
    """forward(causal=True) with a custom mask is not causal; without the mask it is again."""
    masked = build(dataclasses.replace(PAGED, mask=MaskKind.CUSTOM), device=target.device)
    plain, wrapper = unplanned(PAGED, target)
    for inputs in (plain, masked, plain):
        options = {"q_data_type": PAGED.dtype, "custom_mask": inputs.custom_mask}
        wrapper.begin_forward(*leading(inputs), **options)
        result = wrapper.forward_return_lse(*tensors(inputs), causal=True)
        check(inputs, result, causal=inputs is plain)


def calls(method, *more, end=None, **options):
    """Calls a method with its first arguments, which are right, and with more."""

    def call(wrapper, inputs):
        first = tensors(inputs) if method == "run" else leading(inputs)
        getattr(wrapper, method)(*first[:end], *more, **options)

    return call


def constructs(**options):
    return lambda w, i: type(w)(runner.workspace("cpu", 1024), **options)


def replans(**options):
    return lambda w, i: runner.plan(w, i, **options)


def runs_with_scales(names, **options):
    return lambda w, i: calls("run", *(getattr(i.scales, name) for name in names), **options)(w, i)


def misaligned(inputs):
    return runner.workspace(inputs.q.device, 1025)[1:]


FACTORS = "one factor for each head|all three of them"
WITH_SINKS = both(sinks=Sinks.MIXED, mask=MaskKind.CAUSAL)
# Cases and an error, with pieces of its messages and the calls.
REFUSED = [
    (BOTH, TypeError, [
        ("head_dim_vo was given by position and by name", calls("plan", 64, head_dim_vo=64)),
        ("custom_mask", calls("plan", "mask", q_data_type=HALF)),
        (r"run\(\) got", calls("run", *(None,) * 5, torch.ones(4))),
        *(row for method in ("begin_forward", "workspace_size") for row in (
            (r"missing .*: '(head_dim|page_size)'", calls(method, end=-1)),
            ("casual", calls(method, casual=True)),
            ("too many positional", calls(method, *(None,) * 60)),
            ("multiple values .*num_qo_heads", calls(method, num_qo_heads=4)),
        )),
    ]),
    (BOTH, NotImplementedError, [
        ("variant_owns_mask", constructs(variant_owns_mask=True)),
        ("o_scale", calls("run", o_scale=0.5)),
        ("use_fp16_softmax", calls("run", use_fp16_softmax=True)),
        ("uses_spcompress", calls("run", uses_spcompress=True)),
        *(("jit_args", constructs(jit_args=value)) for value in (
            jit_args(variant="FlashSigmoid"), jit_args(scalars=["logits_scale", "sigmoid_bias"]),
            jit_args(indices=torch.int64), jit_args()[:7], jit_args(tensors=None), "AttentionSink",
        )),
        ("fp8_enabled", constructs(jit_args=jit_args(), jit_kwargs={"fp8_enabled": True})),
        ("jit_kwargs", constructs(jit_args=None, jit_kwargs={"use_sliding_window": True})),
    ]),
    (BOTH, ValueError, [
        ("float_workspace_buffer must be 16-byte aligned", lambda w, i: type(w)(misaligned(i))),
        ("int_workspace_buffer must be 16-byte aligned",
         lambda w, i: w.reset_workspace_buffer(runner.workspace(i.q.device), misaligned(i))),
    ]),
    (BOTH[:1], ValueError, [
        ("v_indptr", lambda w, i: runner.plan(w, i, v_indptr=i.kv_indptr + 1)),
        ("o_indptr", lambda w, i: runner.plan(w, i, o_indptr=i.qo_indptr + 1)),
    ]),
    (BOTH[:1], TypeError, [("argument 'return_lse'", calls("run", True, return_lse=True))]),
    (BOTH[1:], TypeError, [
        *((f"multiple values for argument {name!r}", calls("run", 0.5, 2.0, True, **{name: 1.0}))
          for name in ("return_lse", "k_scale", "v_scale")),
    ]),
    # The fourth positional argument: factors of the heads of an fp8 q, not a mask.
    ((SINGLE,), ValueError, [
        ("scale_q: only an fp8 tensor",
         lambda w, i: next(single(torch.ones(4, device=i.q.device))(w, i))),
    ]),
    (OF_FP8, (TypeError, ValueError), [
        ("q_scale beside scales", runs_with_scales("qkv", q_scale=2.0)),
        ("scale", lambda w, i: runs_with_scales("qkv", scale_k=i.scales.k)(w, i)),
        (FACTORS, runs_with_scales("q")),
        (FACTORS, runs_with_scales("qk")),
        (r"all three|run\(\)", runs_with_scales("qkvq")),
    ]),
    (WITH_SINKS, ValueError, [
        ("contradicts the constructor", call)
        for call in (
            replans(q_data_type=BFLOAT, kv_data_type=BFLOAT), replans(head_dim_vo=128),
            replans(pos_encoding_mode="ALIBI"),
            lambda w, i: runner.plan(of_sinks(w, i, head_dim_qk=128), i),
        )
    ]),
    (WITH_SINKS, TypeError, [
        ("sink", calls("run")),
        ("takes no sink", lambda w, i: w.forward(*tensors(i))),
        ("too many", lambda w, i: w.run(*tensors(i), i.sinks, 0.1, 0.2)),
        ("Did you mean 'v_scale'", lambda w, i: w.run(*tensors(i), i.sinks, vscale=0.2)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "error", "match", "call"),
    [
        pytest.param(case, error, *row, id=f"{case.name} {row[0]}")
        for cases, error, rows in REFUSED
        for case in cases
        for row in rows
    ],
)
def test_refusals(target, case, error, match, call):
    """A refused call leaves the wrapper as it was."""
    inputs, wrapper = unplanned(case, target)
    if inputs.sinks is not None:
        wrapper = of_sinks(wrapper, inputs)
    runner.plan(wrapper, inputs)
    refused(match, call, wrapper, inputs, error=error)
    check(inputs, runner.run(wrapper, inputs))


@pytest.mark.parametrize("backend", ["fa2", "cutlass", "trtllm-gen", "cute-dsl", "xqa", "cudnn"])
def test_the_environment_overrides_the_backend(monkeypatch, backend):
    """Engines compare `_backend` with the name in their code, "cudnn" excepted."""
    inputs = build(RAGGED)
    monkeypatch.setenv("PREFLASH_BACKEND", "auto")
    wrapper = runner.make_wrapper(RAGGED, backend=backend)
    assert backend == "cudnn" or wrapper._backend == backend
    runner.plan(wrapper, inputs)
    assert wrapper._backend == ("cpu" if backend == "cudnn" else backend)
    assert f"'cpu' (PREFLASH_BACKEND=auto instead of '{backend}')" in repr(wrapper)
    check(inputs, runner.run(wrapper, inputs))
    inputs = build(dataclasses.replace(SINGLE, qo_lens=(11,)))  # not planned by another test
    check(inputs, runner.single(inputs, backend=backend))
    decode = preflash.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), backend="fa2")
    decode.plan(*leading(build(PAGED))[1:])
    assert (decode._backend, decode.resolved_backend) == ("fa2", "cpu")


def test_other_environments(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "fa4")
    refused("PREFLASH_BACKEND='fa4'", runner.make_wrapper, RAGGED, backend="cpu")
    for value in ("cpu", ""):  # which override nothing
        monkeypatch.setenv("PREFLASH_BACKEND", value)
        assert "PREFLASH_BACKEND" not in repr(runner.make_wrapper(RAGGED, backend="cpu"))
    for name in ("cutlass", "trtllm-gen", "cute-dsl", "xqa"):
        with pytest.raises(ValueError, match=f"{name}.*PREFLASH_BACKEND=auto in the env"):
            runner.make_wrapper(RAGGED, backend=name)
