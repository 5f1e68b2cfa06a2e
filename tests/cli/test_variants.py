"""`variants` shows what the registry holds, and filters it."""

import json

import pytest
from preflash import _core


@pytest.fixture
def listed(preflash_command):
    """Returns a function: the rows that `variants --json` prints with these options."""
    return lambda options="": json.loads(preflash_command(f"variants --json {options}").out)


def ids_of(kernels):
    return [kernel["id"] for kernel in kernels]


def test_the_list_is_the_registry(listed, preflash_command):
    assert sorted(ids_of(listed())) == sorted(ids_of(_core.kernels()))
    out = preflash_command("variants --family cpu").out
    for kernel in _core.kernels():
        assert (kernel["id"] in out) == (kernel["family"] == "cpu")


def test_a_dtype_has_two_names(listed):
    for short, long in (("bf16", "bfloat16"), ("f32", "float32"), ("e4m3", "float8_e4m3fn")):
        chosen = listed(f"--family cpu --dtype {short}")
        assert {(kernel["family"], kernel["q_dtype"]) for kernel in chosen} == {("cpu", short)}
        assert listed(f"--family cpu --dtype {long}") == chosen


BUILD = [  # rows as of _core.kernels(), as far as `variants` looks at them
    {
        "id": f"{dtype}_{qk}x{vo}",
        **{"family": "sm90", "backend": "fa3", "q_dtype": dtype, "kv_dtype": dtype},
        **{"head_dim_qk": qk, "head_dim_vo": vo, "smem_bytes": vo},
        "tile": {"m": 64, "n": 64, "stages": 2, "warps": 4},
    }
    for dtype, qk, vo in [
        *(("bf16", d, d) for d in (64, 128, 256)),
        *(("bf16", 192, 128), ("f16", 64, 64), ("e4m3", 256, 256)),
    ]
]


@pytest.mark.parametrize(
    ("size", "ids", "shown"),
    [
        (None, set(ids_of(BUILD)), ["64", "128", "256", "192x128", "64", "256"]),
        ("128", {"bf16_128x128", "e4m3_256x256"}, ["128", "up to 256"]),
        ("128x128", {"bf16_128x128", "e4m3_256x256"}, ["128", "up to 256"]),
        ("64", {"bf16_64x64", "f16_64x64", "e4m3_256x256"}, ["64", "64", "up to 256"]),
        ("80", {"bf16_128x128", "e4m3_256x256"}, ["up to 128", "up to 256"]),
        ("192x128", {"bf16_192x128", "e4m3_256x256"}, ["192x128", "up to 256"]),
        ("192", set(ids_of(BUILD[2:4] + BUILD[5:])), ["192x128", "up to 256", "up to 256"]),
        ("256", {"bf16_256x256", "e4m3_256x256"}, ["256", "256"]),
    ],
)
def test_a_head_dim_finds_what_serves_it(monkeypatch, listed, preflash_command, size, ids, shown):
    """The table says up to which head_dim a larger kernel serves."""
    monkeypatch.setattr(_core, "kernels", lambda: BUILD)
    options = f"--head-dim {size}" if size else ""
    assert set(ids_of(listed(options))) == ids
    lines = [line.split("|") for line in preflash_command(f"variants {options}").out.splitlines()]
    column = [cells[5].strip() for cells in lines if "fa3" in "".join(cells[2:3])]
    assert sorted(column) == sorted(shown)


def test_the_cpu_serves_any_head_dim_with_its_largest(listed, preflash_command):
    """The list has the kernel that plan() takes."""
    dtype = _core.DType.bfloat16
    for size in ("8", "192", "192x128", "512"):
        qk, *vo = map(int, size.split("x"))
        wanted = _core.Variant(_core.Family.cpu, dtype, dtype, qk, *(vo or [qk]))
        chosen = listed(f"--family cpu --head-dim {size}")
        assert _core.find_id(wanted) in ids_of(chosen)
        out = preflash_command(f"variants --family cpu --head-dim {size}").out
        assert out.count("up to 512") == len(chosen) * (size != "512")
