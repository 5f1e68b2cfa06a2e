"""Bad input is refused by name before anything runs; the wrapper keeps its plan.

A row is an argument, the type of the error, and values (planned_cases.mistakes).
"""

import dataclasses
import functools
import math
from fractions import Fraction

import preflash
import pytest
import torch
from changed_tensors import entry, misaligned, strided, wide_rows
from planned_cases import check_run, mistakes, plan_arguments, planned, spoil, unplanned
from preflash.testing import Case, MaskKind, build, oracle, poison, reference, runner
from refusals import refused

REFUSED = (ValueError, TypeError)
EITHER = (ValueError, TypeError, NotImplementedError)

PAGED = Case("paged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = Case("ragged", (33, 5, 0, 70), (40, 90, 7, 70), 4, 2, 64, mask=MaskKind.CAUSAL)
FP8 = Case("fp8", (9, 3), (30, 5), 4, 2, 64, dtype=torch.float8_e4m3fn, page_size=16,
           head_scales=True)  # fmt: skip
FP8_KEYS = dataclasses.replace(FP8, name="fp8_keys", dtype=torch.float16, kv_dtype=FP8.dtype)
BOTH = pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
MASK_SIZE = sum(a * b for a, b in zip(PAGED.qo_lens, PAGED.kv_lens, strict=True))
PACKED_SIZE = sum(-(-a * b // 8) for a, b in zip(PAGED.qo_lens, PAGED.kv_lens, strict=True))


def shorter(t):
    return t[:-1]


def heads(t):
    return t[..., :1, :]


def columns(t):
    return t[..., :56]


def overlapping(t):
    return t[:1].expand(t.shape)


def on_host(*numbers):
    return lambda _: torch.tensor(numbers).int()


def on_meta(_):
    return torch.empty(4, dtype=torch.int32, device="meta")


ELSEWHERE = "is on meta; must be on the CPU or on "
real, half = torch.Tensor.float, torch.Tensor.half
INTEGERS = (10**400, -(10**400), lambda _: 10**5000)  # which no test id can spell
NUMBERS = (*INTEGERS, Fraction(10**400, 3))

COMMON_PLAN = [
    ("qo_indptr", TypeError, None, real),
    ("qo_indptr", ValueError, lambda t: t[None], lambda t: t[:0], entry(2, 20), entry(0, -1)),
    ("qo_indptr", ValueError, [lambda t: torch.cat([t, t[-1:]]), "qo_indptr|kv_indptr"]),
    ("num_qo_heads", ValueError, 0, [5, "num_qo_heads.*5.*2"], 2**31),
    ("num_qo_heads", TypeError, True, 4.0, None),
    ("num_kv_heads", ValueError, -2, 0),
    ("head_dim", ValueError, 0, -64),
    ("head_dim", EITHER, [100, "head_dim.*100.* 8"], [520, "(?s)520.*512"]),
    ("head_dim", TypeError, 64.5),
    ("head_dim_vo", EITHER, [63, "head_dim"], *INTEGERS),
    ("head_dim_qk", TypeError, torch.ones(2)),
    ("head_dim_qk", REFUSED, 128),
    ("window_left", ValueError, [-2, "window_left=-2: .*-1"], *INTEGERS,
     [2**31, "window_left=2147483648: must be in"]),
    ("logits_soft_cap", ValueError, 1e-50, 1.01e30, 3e38, math.nan, *NUMBERS),
    ("sm_scale", ValueError, 2.36e38, -2.36e38, math.inf, math.nan, *NUMBERS),
    ("sm_scale", TypeError, "big"),
    ("pos_encoding_mode", ValueError, ["SINUS", "SINUS.*NONE"]),
    ("rope_scale", ValueError, 2.0, 0.0, math.nan),
    ("rope_theta", ValueError, 5e5, -1e4, math.inf),
    ("rope_scale", TypeError, True),
    ("rope_theta", TypeError, "1e4"),
    ("q_data_type", REFUSED, [torch.int8, "int8.*float16"], torch.float8_e5m2,
     *([name, "q_data_type.*float16.*bf16"]
       for name in ("float17", "fp8", "8", "BF16", "tensor", "torch", "", "e4m3 "))),
    ("q_data_type", EITHER, torch.float64),
    ("kv_data_type", EITHER, torch.float16, torch.float8_e4m3fnuz),
    ("o_data_type", EITHER, torch.int8),
    ("o_data_type", NotImplementedError, torch.float8_e4m3fn),
    ("q_quantization", ValueError, ["rows", "q_quantization='rows': must be one of none, row"]),
    ("q_quantization", TypeError, True, None),
    ("custom_mask", ValueError, torch.ones(MASK_SIZE - 1).bool()),
    ("custom_mask", TypeError, torch.ones(MASK_SIZE)),
    ("packed_custom_mask", ValueError, torch.ones(PACKED_SIZE - 1).byte(),
     torch.ones(-(-MASK_SIZE // 8)).byte(), [torch.ones(MASK_SIZE).byte(),
     rf"packed_custom_mask has {MASK_SIZE} elements, as many as a dense mask "
     ".*custom_mask=.*segment_packbits"]),
    ("packed_custom_mask", TypeError, torch.ones(PACKED_SIZE).bool()),
    ("fixed_split_size", TypeError, "many"),
    ("fixed_split_size", ValueError, *INTEGERS),
    ("seq_lens_q", ValueError, on_host(33, 5, 1, 70), [on_meta, f"seq_lens_q {ELSEWHERE}"]),
    ("seq_lens", ValueError, on_host(40, 90, 7, 71), [on_meta, f"seq_lens {ELSEWHERE}"]),
    ("max_token_per_sequence", ValueError, 69),
    ("max_sequence_kv", ValueError, 89),
    ("uniform_q_len", ValueError, [33, "uniform_q_len.*request 1 has 5"],
     [5, "uniform_q_len.*request 0 has 33"]),
    ("flavour", TypeError, "vanilla"),
]  # fmt: skip
PAGED_PLAN = [
    ("paged_kv_indptr", ValueError, shorter, entry(2, 1)),
    ("paged_kv_indices", ValueError, [shorter, "paged_kv_indices|paged_kv_indptr"],
     lambda t: t[None]),
    ("paged_kv_last_page_len", ValueError, shorter,
     *([entry(*place), "last_page_len"] for place in ((0, 17), (1, 0), (3, -4)))),
    ("page_size", ValueError, [0, "page_size=0"], -16),
]  # fmt: skip
RAGGED_PLAN = [
    ("kv_indptr", ValueError, shorter, entry(2, 1)),
    ("kv_indptr", TypeError, None),
]
SINKS = [
    ("sinks", ValueError, *([torch.zeros(shape), r"^sinks .*; must be \(4,\): \[num_qo_heads\]"]
     for shape in ((3,), (5,), (1, 4))), [torch.zeros(8)[::2], r"^sinks .*\(2,\).* contiguous"]),
    ("sinks", TypeError, [[torch.zeros(4)], "^sinks must be a torch.Tensor; got list"],
     [torch.zeros(4).half(), "^sinks is torch.float16; must be torch.float32"]),
    ("sinks", NotImplementedError, [torch.zeros(4).requires_grad_(), "requires grad"]),
]  # fmt: skip
COMMON_RUN = [
    ("q", TypeError, None, half),
    ("q", ValueError, heads, columns, shorter, lambda t: t.flatten(1), strided, misaligned),
    ("out", TypeError, real, torch.Tensor.cfloat),
    ("out", ValueError, shorter, columns, strided, [overlapping, "elements overlap|strides"]),
    ("lse", TypeError, half),
    ("lse", ValueError, lambda t: t[:, :2], lambda t: t[None], [overlapping, "elements overlap"]),
    ("lse_layout", ValueError, ["HN", r"\blse\b"], "NHL"),
    ("lse_base", ValueError, "log10"),
    ("q_scale", ValueError, *NUMBERS),
    ("k_scale", ValueError, *NUMBERS, lambda _: torch.tensor(math.nan),
     lambda _: torch.ones(1, device="meta")),
    ("k_scale", TypeError, lambda _: torch.ones(1) > 0, lambda _: torch.ones(1).cfloat(),
     lambda _: torch.ones(1).to_sparse(),
     lambda _: torch.nested.nested_tensor([torch.ones(1)])),
    ("k_scale", EITHER, torch.ones(3)),
    ("v_scale", ValueError, *NUMBERS),
    ("v_scale", TypeError, "loud"),
    *SINKS,
    *((f"scale_{x}", ValueError, [torch.ones(n), f"scale_{x}: only an fp8 tensor.*{x}_scale"])
      for x, n in (("q", 4), ("k", 2), ("v", 2))),
    ("window_left", ValueError, -3),
    ("kv_cache_sf", NotImplementedError, torch.zeros(4)),
    ("flavour", TypeError, "vanilla"),
]  # fmt: skip


def both(change):
    return lambda cache: tuple(map(change, cache))


WRONG_CACHES = {
    TypeError: (None, both(half), lambda cache: (*cache, cache[0])),
    ValueError: (
        both(heads), both(lambda t: t[:, :8]), both(columns), both(lambda t: t[0]), torch.stack,
        lambda cache: (cache[0], shorter(cache[1])),
        lambda cache: (cache[0], heads(cache[1])),
        lambda cache: (strided(cache[0]), cache[1]),
        lambda cache: (misaligned(cache[0]), cache[1]),
        lambda cache: (cache[0], cache[1].new_zeros(*cache[1].shape[:-1], 65)[..., :64]),
    ),
}  # fmt: skip
PAGED_RUN = [
    ("paged_kv_cache", error, [value, "paged_kv_cache|k_cache|v_cache|^k starts"])
    for error, values in WRONG_CACHES.items()
    for value in values
]
RAGGED_RUN = [
    ("k", TypeError, half),
    ("k", ValueError, heads, lambda t: t[:206], misaligned),
    ("v", ValueError, lambda t: t[:206], lambda t: t[..., :32], lambda t: t.flatten(1), strided),
]


FACTORS = [
    ("scale_k", TypeError, [[1.0, 1.0], "scale_k must be a torch.Tensor"]),
    ("scale_v", TypeError, [torch.ones(2).half(), "scale_v is torch.float16; must be"]),
    ("scale_q", ValueError, [torch.ones(3), r"scale_q has shape \(3,\).*num_qo_heads"],
     [torch.ones(8)[::2], "scale_q has strides"]),
    ("scale_v", ValueError, [torch.ones(4), r"scale_v has shape \(4,\).*num_kv_heads"]),
    ("k_scale", ValueError, [torch.ones(2), r"k_scale has 2 elements.*scale_k"]),
]  # fmt: skip
FACTORS_OF_KEYS = [("scale_q", ValueError, [torch.ones(4), "scale_q: only an fp8 tensor.*q_scale"])]


def run_arguments(inputs) -> dict:
    case = inputs.case
    shape = (inputs.q.shape[0], case.num_qo_heads)
    tensors = {"paged_kv_cache": inputs.cache} if case.paged else {"k": inputs.k, "v": inputs.v}
    return {
        "q": inputs.q,
        **tensors,
        "out": poison((*shape, case.dim_vo), case.dtype_o, inputs.q.device),
        "lse": poison(shape, torch.float32, inputs.q.device),
        "return_lse": True,
    }


ROW = ("argument", "value", "error", "says")
ROWS = [
    pytest.param(call, case, *row.values, id=f"{call}-{case.name}-{row.id}")
    for call, case, rows in (
        ("plan", PAGED, COMMON_PLAN + PAGED_PLAN),
        ("plan", RAGGED, COMMON_PLAN + RAGGED_PLAN),
        ("run", PAGED, COMMON_RUN + PAGED_RUN),
        ("run", RAGGED, COMMON_RUN + RAGGED_RUN),
        ("run", FP8, FACTORS),
        ("run", FP8_KEYS, FACTORS_OF_KEYS),
    )
    for row in mistakes(*rows)
]


@pytest.mark.parametrize(("call", "case", *ROW), ROWS)
def test_plan_and_run(target, call, case, argument, value, error, says):
    """A call is refused before the first run() and after it."""
    inputs, wrapper = planned(case, target)
    before = repr(wrapper), wrapper.variant
    outputs = run_arguments(inputs)
    arguments = dict(outputs) if call == "run" else plan_arguments(inputs)
    spoil(arguments, argument, value, target)
    for _ in range(2):
        with pytest.raises(error, match=says) as caught:
            getattr(wrapper, call)(**arguments)
        assert "0" * 30 not in str(caught.value)
        assert (repr(wrapper), wrapper.variant) == before
        assert bool(outputs["out"].isnan().all())
        assert bool(outputs["lse"].isnan().all())
        check_run(inputs, wrapper)


@BOTH
def test_run_before_plan(target, case):
    """A first plan that is refused is no plan."""
    inputs, wrapper = unplanned(case, target)
    arguments = run_arguments(inputs)
    wrong = {**plan_arguments(inputs), "head_dim": 0}
    for _ in range(2):
        refused("before plan", wrapper.run, **arguments)
        assert bool(arguments["out"].isnan().all())
        refused("head_dim", wrapper.plan, **wrong)
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("fa2", marks=pytest.mark.gpu)])
def test_page_indices_outside_the_pool(monkeypatch, backend):
    """Indices on the host are compared with the pool; on the GPU only with PREFLASH_DEBUG=1,
    because the comparison waits for the device."""
    monkeypatch.setenv("PREFLASH_DEBUG", str(int(backend != "cpu")))
    inputs = build(PAGED, device="cpu" if backend == "cpu" else "cuda")
    wrapper = runner.make_wrapper(PAGED, backend=backend, device=inputs.q.device)
    arguments = plan_arguments(inputs)

    for value in (inputs.k.shape[0], 2**31 - 1, -1):
        runner.plan(wrapper, inputs)
        check_run(inputs, wrapper)
        run = run_arguments(inputs)
        with pytest.raises(ValueError, match="paged_kv_indices"):  # noqa: PT012, either call
            wrapper.plan(**{**arguments, "paged_kv_indices": entry(3, value)(inputs.indices)})
            wrapper.run(**run)
        assert bool(run["out"].isnan().all())
    runner.plan(wrapper, inputs)
    check_run(inputs, wrapper)


@pytest.mark.gpu
def test_tensors_on_another_device():
    inputs = build(RAGGED, device="cuda")
    wrapper = runner.make_wrapper(RAGGED, backend="cpu", device="cuda")
    refused("cpu", runner.plan, wrapper, inputs, error=EITHER)
    wrapper = runner.planned(inputs, backend="fa2")
    arguments = {**run_arguments(inputs), "sinks": torch.zeros(4, device="cuda")}
    for name in ("q", "k", "v", "out", "lse", "sinks"):
        wrong = {**arguments, name: arguments[name].cpu()}
        refused(rf"\b{name}\b", wrapper.run, error=REFUSED, **wrong)
    check_run(inputs, wrapper)


SINGLE = [
    ("q", TypeError, None),
    ("q", ValueError, lambda t: t[0], [lambda t: t[:, :3], r"\bq\b|num_qo_heads"]),
    ("k", TypeError, half),
    ("v", ValueError, [shorter, r"\bv\b|\bk\b"]),
    ("k", ValueError, [columns, r"\bk\b|head_dim"], misaligned),
    ("kv_layout", ValueError, "XYZ"),
    ("custom_mask", ValueError, *([torch.ones(shape).bool(), "custom_mask has shape .*flatten"]
     for shape in ((9, 29), (9, 31), (30, 9), (10, 30)))),
    ("custom_mask", TypeError,
     *([torch.ones(9, 30, dtype=dtype), f"custom_mask is {dtype}; .*an integer dtype"]
       for dtype in (torch.float32, torch.float16, torch.complex64))),
    ("packed_custom_mask", ValueError, torch.ones(33).byte(),
     [torch.ones(9, 30).byte(),
     "as many as a dense mask .*custom_mask=.*bitorder='little': packbits"]),
    ("o_dtype", NotImplementedError, [torch.float8_e4m3fn, "o_dtype|o_data_type"]),
    ("out", ValueError, torch.zeros(9, 4, 56, dtype=torch.bfloat16)),
    ("flavour", TypeError, 1),
    *SINKS,
]  # fmt: skip


@pytest.mark.parametrize(ROW, mistakes(*SINGLE))
def test_single(target, argument, value, error, says):
    case = Case("single", (9,), (30,), 4, 2, 64, mask=MaskKind.CAUSAL)
    inputs = build(case, device=target.device)
    right = {"q": inputs.q, "k": inputs.k[:30].contiguous(), "v": inputs.v[:30].contiguous()}
    right |= {"causal": True, "return_lse": True}
    wrong = dict(right)
    spoil(wrong, argument, value, target)
    refused(says, preflash.single_prefill_with_kv_cache, error=error, **wrong)
    out, lse = preflash.single_prefill_with_kv_cache(**right)
    runner.compare(inputs, out, lse, reference(inputs)).check()


def padded(t):
    return torch.nn.functional.pad(t, (0, 4))


@pytest.mark.parametrize(
    ("dim", "kv_dtype", "says", "of_q", "of_kv"),
    [
        (100, torch.float16, r"padded with zeros to 104 columns.* 1 / sqrt\(100\)", padded, padded),
        (72, torch.float8_e4m3fn, r"72 bytes.*rows of 80 columns .* first 72$", torch.clone,
         functools.partial(wide_rows, columns=80)),
    ],
    ids=["head_dim of 100", "rows of 72 bytes"],
)  # fmt: skip
def test_what_would_work_works(target, dim, kv_dtype, says, of_q, of_kv):
    """The way out that the message names computes the refused call."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 2, dim, generator=generator).half() for n in (5, 9, 9))
    q, k, v = (t.to(target.device) for t in (q, k.to(kv_dtype), v.to(kv_dtype)))
    options = {"sm_scale": 1 / math.sqrt(dim), "backend": target.backend}
    refused(says, preflash.single_prefill_with_kv_cache, q, k, v, **options)
    out = preflash.single_prefill_with_kv_cache(of_q(q), of_kv(k), of_kv(v), **options)
    pipeline = oracle.Pipeline(options["sm_scale"])
    expected = oracle.attend(q.cpu(), k.cpu(), v.cpu(), pipeline).out
    torch.testing.assert_close(out[..., :dim].cpu().double(), expected, rtol=2e-3, atol=2e-3)
