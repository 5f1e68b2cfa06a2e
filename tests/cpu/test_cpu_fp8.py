"""fp8 on the CPU is right for every code of both formats and every rounding to e4m3."""

import contextlib
import math

import preflash
import pytest
import torch
from preflash.testing import Case, build, runner
from processes import python

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT = torch.float32
CODES = torch.arange(256, dtype=torch.uint8)


def of_one_key(q, k, v, **options):
    """Computes attention over one key, whose weight is 1: v itself, times its factors."""
    return preflash.single_prefill_with_kv_cache(q, k, v, backend="cpu", **options)


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compares bits, but for those of NaN."""
    assert torch.equal(got.isnan(), wanted.isnan())
    finite = ~wanted.isnan()
    assert torch.equal(got[finite].view(torch.int32), wanted[finite].view(torch.int32))


@contextlib.contextmanager
def subnormals_are_zero():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, subnormals_are_zero])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_code_of_v(dtype, mode):
    v = CODES.view(dtype).reshape(1, 1, 256)
    wanted = v.float()
    k = torch.zeros(1, 1, 256).to(dtype)
    q = torch.zeros(1, 1, 256)
    with mode():
        got = of_one_key(q, k, v)
    # 0 * weight is 0 of either sign.
    assert_same(got + 0.0, wanted + 0.0)


def test_subnormal_halves_where_subnormals_are_zero():
    """float16's own subnormals, which include those of e5m2, keep their bits."""
    v = torch.arange(256, dtype=torch.int16).view(torch.float16).reshape(1, 1, 256)
    q = k = torch.zeros(1, 1, 256, dtype=torch.float16)
    with subnormals_are_zero():
        got = of_one_key(q, k, v)
    assert torch.equal(got.view(torch.int16), v.view(torch.int16))


@pytest.mark.parametrize(("q_dtype", "dtype"), [(FLOAT, E4M3), (FLOAT, E5M2), (E4M3, E4M3)])
def test_every_code_of_k(q_dtype, dtype):
    """Each code has a request, whose logit is the code's value."""
    q, k = torch.zeros(256, 1, 16), torch.zeros(256, 1, 16)
    q[..., 3] = 1.0
    k[:, 0, 3] = CODES.view(dtype).float()
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 20, dtype=torch.uint8), backend="cpu"
    )
    steps = torch.arange(257, dtype=torch.int32)
    wrapper.plan(steps, steps, 1, 1, 16, sm_scale=1.0, q_data_type=q_dtype, kv_data_type=dtype)
    k = k.to(dtype)
    k.view(torch.uint8)[:, 0, 3] = CODES
    v = torch.ones(256, 1, 16).to(dtype)
    _, lse = wrapper.run(q.to(q_dtype), k, v, return_lse=True, lse_base="ln")
    values = CODES.view(dtype).double()
    finite = values.isfinite()
    torch.testing.assert_close(lse[finite, 0].double(), values[finite], rtol=3e-7, atol=0)
    assert lse[values.isnan(), 0].isnan().all()


def edges() -> torch.Tensor:
    """Returns e4m3's numbers, those half-way between two, and their neighbours in float32."""
    numbers = CODES.view(E4M3).float()
    numbers = numbers[numbers.isfinite()].unique()
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    below, above = (torch.nextafter(points, torch.tensor(to)) for to in (-1e9, 1e9))
    beyond = [448.5, 463.0, 464.0, 464.1, 480.0, 1e5, 3e38, math.inf]
    tiny = [1e-45, 1e-40, 2.0**-10, math.nextafter(2.0**-10, 1), 2.0**-11, 0.0]
    others = torch.tensor([*beyond, *tiny])
    return torch.cat([below, points, above, others, -others, torch.tensor([math.nan])])


def test_every_rounding_to_e4m3():
    """Each number is the factor of a head, whose v is ones."""
    factors = edges()
    heads = len(factors)
    ones = torch.ones(1, heads, 16).to(E4M3)
    got = of_one_key(ones, ones, ones, scale_v=factors, o_dtype=E4M3)
    wanted = factors.clamp(-448.0, 448.0).to(E4M3).float()
    assert got.dtype == E4M3
    assert_same(got[0].float(), wanted[:, None].expand(heads, 16))


def test_q_quantization_leaves_queries_of_the_cpu_as_they_are():
    """It is a permission: only some kernels of fa3 quantise queries."""
    case = Case("exact", (9, 3), (30, 5), 4, 2, 128, dtype=torch.bfloat16, kv_dtype=E4M3)
    inputs = build(case)
    exact = runner.run(runner.planned(inputs, backend="cpu"), inputs)
    allowed = runner.run(runner.planned(inputs, backend="cpu", q_quantization="row"), inputs)
    assert all(map(torch.equal, allowed, exact))


def test_a_quantization_of_the_environment_that_is_none_is_refused():
    one = "preflash.single_prefill_with_kv_cache(*[torch.ones(1, 1, 8)] * 3, backend='cpu')"
    with pytest.raises(AssertionError, match="PREFLASH_Q_QUANTIZATION='all': must be one of"):
        python(f"import preflash, torch; {one}", PREFLASH_Q_QUANTIZATION="all")
