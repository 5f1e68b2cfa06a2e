"""q_quantization="row": 16-bit queries over e4m3 keys and values, multiplied in 8 bits on fa3. The
oracle rounds the queries as the kernel does (oracle.quantized_rows())."""

import dataclasses
import itertools
import math

import backends
import pytest
import torch
from backends import captured, on_cases, replay, same_bits
from converted_cases import E4M3
from preflash import _core
from preflash.testing import Case, KvForm, MaskKind, Sinks, runner
from preflash.testing.case import Garbage
from preflash.testing.oracle import quantized_rows

pytestmark = pytest.mark.usefixtures("fa3")

BF16, F16 = torch.bfloat16, torch.float16
CAUSAL, FULL = MaskKind.CAUSAL, MaskKind.NONE
BASE = Case(
    "quantized", (190, 0, 77, 3), (470, 9, 77, 0), 4, 2, 128, dtype=BF16, kv_dtype=E4M3,
    mask=CAUSAL, q_quantization="row",
)  # fmt: skip
KERNEL = "sm90_e4m3_d128"


def changed(**changes) -> Case:
    return dataclasses.replace(BASE, **changes)


def planned(case):
    """Plans, and requires products of 8 bits: another kernel's result proves nothing here."""
    if KERNEL not in {kernel["id"] for kernel in _core.kernels()}:
        raise NotImplementedError(f"{KERNEL} is not compiled")
    wrapper, inputs = backends.planned(case, "fa3")
    assert wrapper.variant == KERNEL
    return wrapper, inputs


def cases():
    for dtype, head_dim, page_size in itertools.product(
        (BF16, F16), (80, 96, 112, 128), (0, 1, 3, 8, 16, 64, 256)
    ):
        yield changed(dtype=dtype, head_dim=head_dim, page_size=page_size)
    for qo_len, mask in itertools.product((17, 31, 63, 64, 65, 127, 128, 129, 300), (CAUSAL, FULL)):
        lens = {"qo_lens": (qo_len, 1), "kv_lens": (433, 50)}
        yield changed(mask=mask, garbage=Garbage.ANY, **lens)
    for heads, kv_heads in ((1, 1), (8, 1), (7, 1), (6, 3), (160, 1)):
        lens = {"qo_lens": (40, 21), "kv_lens": (300, 21)}
        yield changed(num_qo_heads=heads, num_kv_heads=kv_heads, **lens)
    for window_left, page_size in itertools.product((0, 60, 128, 300), (0, 3, 16)):
        lens = {"qo_lens": (200, 90, 3, 1), "kv_lens": (700, 90, 400, 5)}
        yield changed(window_left=window_left, page_size=page_size, **lens)
    yield from (changed(form=form) for form in (KvForm.PADDED, KvForm.TRANSPOSED))
    yield from (changed(sinks=one) for one in Sinks if one is not Sinks.NONE)
    yield from (changed(head_scales=True, page_size=page_size) for page_size in (0, 16))
    for sm_scale, disable_split_kv in itertools.product((-0.1, 0.0, 1.0, 4.0), (False, True)):
        lens = {"kv_lens": (1470, 9, 77, 0)}
        yield changed(sm_scale=sm_scale, disable_split_kv=disable_split_kv, **lens)
    lens = {"qo_lens": (33, 40, 0, 18), "kv_lens": (3000, 333, 5, 700)}
    for page_size, size in itertools.product((0, 1, 16), (128, 256, 1024)):
        yield changed(page_size=page_size, fixed_split_size=size, **lens)
    # Many items to a CTA: both buffers of Q are used again and again.
    yield changed(qo_lens=(5000, 3000), kv_lens=(5000, 4000), num_qo_heads=16)


@pytest.mark.sanitizer
@on_cases(cases())
def test_numbers(case):
    wrapper, inputs = planned(case)
    out, _ = backends.check_run(wrapper, inputs)
    assert same_bits([runner.run(wrapper, inputs, lse=None, return_lse=False)], [out])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_queries_that_e4m3_holds_have_the_bits_of_e4m3_queries(dtype, page_size):
    wrapper, inputs = planned(changed(dtype=dtype, page_size=page_size))
    narrow = quantized_rows(inputs.q)
    largest = narrow.abs().amax(-1, keepdim=True)
    narrow *= torch.exp2(torch.floor(torch.log2(224 / largest)) + 1)  # into (224, 448]
    given = narrow.float().to(E4M3)
    inputs.q.copy_(given.float())
    case = changed(dtype=E4M3, kv_dtype=None, o_dtype=dtype, page_size=page_size)
    eight = dataclasses.replace(inputs, case=case, q=given)
    other = runner.planned(eight, backend="fa3")
    assert same_bits(runner.run(other, eight), runner.run(wrapper, inputs))


@pytest.mark.parametrize("power", [-80, -20, 20, 80])
def test_rows_of_every_size(power):
    """A power of two of q and its inverse in sm_scale cancel."""
    wrapper, inputs = planned(changed(sm_scale=2.0**-3))
    expected = runner.run(wrapper, inputs)
    inputs.q.mul_(2.0**power)
    runner.plan(wrapper, inputs, sm_scale=2.0 ** (-3 - power))
    assert same_bits(runner.run(wrapper, inputs), expected)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("head_scales", [False, True])
def test_a_row_that_is_not_finite_changes_no_other(value, dtype, head_scales):
    wrapper, inputs = planned(changed(dtype=dtype, head_scales=head_scales))
    before, lse_before = runner.run(wrapper, inputs)
    inputs.q[100, 1, 5] = value
    if value == 0.0:
        inputs.q[100, 1] = 0.0
    out, lse = runner.run(wrapper, inputs)
    if value == 0.0:
        runner.compare(inputs, out, lse).check()
    else:
        assert out[100, 1].isnan().all()
        assert lse[100, 1].isnan()
    out[100, 1], lse[100, 1] = before[100, 1], lse_before[100, 1]
    assert same_bits([out, lse], [before, lse_before])


@pytest.mark.parametrize("sm_scale", [1e-8, -1e-8, 1e-35])
def test_rows_of_zeros_and_tiny_factors(sm_scale):
    """The factor of the exponents may underflow, where masked scores are infinite."""
    wrapper, inputs = planned(changed(sm_scale=sm_scale))
    inputs.q[50:90, 1] = 0.0
    inputs.q[90:100, 2] = 2.0**-120
    backends.check_run(wrapper, inputs)


def test_cuda_graph():
    case = changed(page_size=16, qo_lens=(190, 30, 77, 3), kv_lens=(470, 30, 77, 20))
    wrapper, inputs = planned(case)
    expected = runner.run(wrapper, inputs)
    outputs = backends.poisoned(inputs)
    graph, _ = captured(lambda: runner.run(wrapper, inputs, **outputs))
    replay(graph, *outputs.values())
    assert same_bits(outputs.values(), expected)


@pytest.mark.parametrize("cut", [1, 64, 100, 128])
def test_batch_invariant(cut):
    """The last rows of a prompt have the same bits in a call of their own."""
    whole = changed(qo_lens=(300,), kv_lens=(900,), batch_invariant=True)
    wrapper, inputs = planned(whole)
    out, lse = backends.check_run(wrapper, inputs)
    case = dataclasses.replace(whole, qo_lens=(cut,))
    part = dataclasses.replace(
        inputs,
        case=case,
        q=inputs.q[300 - cut : 300],
        qo_indptr=torch.tensor([0, cut], dtype=torch.int32),
    )
    alone = runner.planned(part, backend="fa3")
    assert alone.variant == KERNEL
    assert same_bits(runner.run(alone, part), (out[300 - cut :], lse[300 - cut :]))


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64},
        {"head_dim": 256},
        {"soft_cap": 20.0},
        {"mask": MaskKind.CUSTOM},
        {"kv_dtype": torch.float8_e5m2},
        {"kv_dtype": None},
        {"qo_lens": (1, 1, 1, 1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_other_kernels_take_queries_as_they_are(changes, backend):
    wrapper, inputs = backends.planned(changed(**changes), backend)
    assert "e4m3" not in wrapper.variant
    exact = runner.planned(inputs, backend=backend, q_quantization="none")
    assert exact.variant == wrapper.variant
    assert same_bits(runner.run(wrapper, inputs), runner.run(exact, inputs))


def test_twenty_runs_are_equal():
    backends.check_runs(*planned(changed(page_size=16, qo_lens=(300, 5, 77, 3))))


def test_the_environment_sets_it_for_every_call():
    printed = backends.output_of(
        """
        import preflash, torch
        q = torch.randn(200, 4, 128, device="cuda").bfloat16()
        k = q.to(torch.float8_e4m3fn)
        preflash.single_prefill_with_kv_cache(q, k, k, backend="fa3")
        print(preflash._core.last_variant())
        """,
        PREFLASH_Q_QUANTIZATION="row",
    )
    assert printed == f"{KERNEL}\n"
