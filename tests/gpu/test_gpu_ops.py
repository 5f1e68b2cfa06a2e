"""packbits at sizes that fill a GPU, and the stream of merges; tests/api has the rest."""

import math

import preflash
import pytest
import torch
from backends import sleep


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits_equals_the_cpu(bitorder):
    bits = torch.rand((1 << 25) + 3) < 0.5
    lengths = torch.randint(0, 3000, (500,))
    lengths[::7] = 0
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    packed = preflash.packbits(bits.cuda(), bitorder)
    segments = preflash.segment_packbits(bits[: ends[-1]].cuda(), ends.cuda(), bitorder)
    expected = preflash.segment_packbits(bits[: ends[-1]], ends, bitorder)
    assert torch.equal(packed.cpu(), preflash.packbits(bits, bitorder))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(segments, expected, strict=True))


def test_merge_runs_on_the_current_stream():
    v = torch.full((2000, 8, 128), math.nan, device="cuda")
    s = torch.zeros(2000, 8, device="cuda")
    good = torch.randn_like(v)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sleep(10)
        v.copy_(good)
        out, lse = preflash.merge_state(v, s, v, s)
        torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(out, good, rtol=1e-6, atol=1e-6)
    assert bool((lse == 1.0).all())
