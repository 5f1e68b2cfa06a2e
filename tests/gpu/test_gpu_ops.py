"""packbits and merge_state on the GPU at sizes that fill it, against the CPU."""

import math

import preflash
import pytest
import torch
from backends import sleep
from preflash.testing import oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits_equals_the_cpu(bitorder):
    for n in (1, 8, 1000, 1 << 20, (1 << 25) + 3):
        x = torch.rand(n) < 0.5
        packed = preflash.packbits(x.cuda(), bitorder).cpu()
        assert torch.equal(packed, preflash.packbits(x, bitorder)), n
    lengths = torch.randint(0, 3000, (500,))
    lengths[::7] = 0
    indptr = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    x = torch.rand(int(indptr[-1])) < 0.5
    got = preflash.segment_packbits(x.cuda(), indptr.cuda(), bitorder)
    expected = preflash.segment_packbits(x, indptr, bitorder)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, expected, strict=True))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(300, 5, 16, 128), (3, 2, 1, 8), (17, 33, 3, 256)], ids=str)
def test_merge_states_against_the_oracle(shape, dtype):
    v = torch.randn(shape, device="cuda").to(dtype)
    s = torch.randn(shape[:3], device="cuda") * 8
    s[torch.rand_like(s) < 0.2] = -math.inf
    out, lse = preflash.merge_states(v, s)
    expected_out, expected_lse = oracle.merge(v, s)
    bound = torch.finfo(dtype).eps / 2 * expected_out.abs() + 2.0**-19
    assert bool(((out.double() - expected_out).abs() <= bound).all())
    assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=2e-6)


def test_merge_runs_on_the_current_stream():
    v = torch.full((2000, 8, 128), math.nan, device="cuda")
    s = torch.zeros(2000, 8, device="cuda")
    good = torch.randn_like(v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sleep(10)
        v.copy_(good)
        out, lse = preflash.merge_state(v, s, v, s)
    side.synchronize()
    torch.testing.assert_close(out, good, rtol=1e-6, atol=1e-6)
    assert bool((lse == 1.0).all())
