"""plan() is on the critical path of every step: its time is printed, and bounded very loosely."""

import pytest
from planned import planner, ragged

GQA = {"num_qo_heads": 32, "num_kv_heads": 8, "causal": True, "l2_bytes": 50 << 20}

# Microseconds that would mean a mistake in kind, such as work per item where it should be per unit.
GENEROUS = 5000

CASES = {
    "decode 64 x 4k": ragged([1] * 64, [4096] * 64, **GQA, tile_m=64),
    "decode 64 unequal": ragged([1] * 64, range(500, 6900, 100), **GQA, tile_m=64),
    "prefill 64 x 512 of 4k": ragged([512] * 64, [4096] * 64, **GQA, tile_m=128),
    "persistent 64 x 512 of 4k": ragged(
        [512] * 64, [4096] * 64, **GQA, tile_m=128, schedule="persistent"
    ),
    "persistent decode 1024 x 2k": ragged(
        [1] * 1024, [2112] * 1024, **GQA, tile_m=64, schedule="persistent"
    ),
    "mixed 48 decode + 16 x 512": ragged([1] * 48 + [512] * 16, [4096] * 64, **GQA, tile_m=128),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_time(name, capsys):
    times = planner.time_plan(100, **CASES[name])
    with capsys.disabled():
        print(f"\nplan {name}: median {times[50]:.1f} us, least {times[0]:.1f} us")
    assert 0 < times[0] < GENEROUS
