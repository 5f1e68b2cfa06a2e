"""`variants` shows what the registry holds, and filters it."""

import json

import pytest
from preflash import _core, cli


def listed(capsys, *arguments):
    assert cli.main(["variants", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_the_registry(capsys):
    kernels = listed(capsys)
    assert {kernel["id"] for kernel in kernels} == {kernel["id"] for kernel in _core.kernels()}
    assert len(kernels) == len(_core.kernels())


def test_filters(capsys):
    chosen = listed(capsys, "--family", "cpu", "--dtype", "f32")
    assert chosen
    assert {kernel["family"] for kernel in chosen} == {"cpu"}
    assert {kernel["q_dtype"] for kernel in chosen} == {"f32"}
    size = str(chosen[0]["head_dim_qk"])
    assert listed(capsys, "--family", "cpu", "--dtype", "f32", "--head-dim", size) == chosen


def test_table_has_a_line_per_variant(capsys):
    assert cli.main(["variants", "--family", "cpu"]) == 0
    out = capsys.readouterr().out
    for kernel in _core.kernels():
        assert (kernel["id"] in out) == (kernel["family"] == "cpu")


def made(sizes):
    """Rows as of _core.kernels(), as far as `variants` looks at them."""
    return [
        {
            "id": f"{dtype}_{qk}x{vo}",
            "family": "sm90",
            "backend": "fa3",
            "q_dtype": dtype,
            "head_dim_qk": qk,
            "head_dim_vo": vo,
            "tile": {"m": qk},
            "smem_bytes": vo,
        }
        for dtype, qk, vo in sizes
    ]


BUILD = made(
    [("bf16", d, d) for d in (64, 128, 256)]
    + [("bf16", 192, 128), ("f16", 64, 64), ("e4m3", 256, 256)]
)


@pytest.mark.parametrize(
    ("size", "ids"),
    [
        ("128", {"bf16_128x128", "e4m3_256x256"}),
        ("64", {"bf16_64x64", "f16_64x64", "e4m3_256x256"}),
        ("80", {"bf16_128x128", "e4m3_256x256"}),
        ("192x128", {"bf16_192x128", "e4m3_256x256"}),
        ("192", {"bf16_192x128", "bf16_256x256", "e4m3_256x256"}),
        ("256", {"bf16_256x256", "e4m3_256x256"}),
    ],
)
def test_a_head_dim_finds_what_serves_it(monkeypatch, capsys, size, ids):
    monkeypatch.setattr(_core, "kernels", lambda: BUILD)
    assert {kernel["id"] for kernel in listed(capsys, "--head-dim", size)} == ids


@pytest.mark.parametrize("size", ["8", "64", "80", "128", "192", "192x128", "256", "512"])
def test_every_head_dim_is_served_by_the_cpu(capsys, size):
    """Its one kernel has the largest size; it is what plan() takes."""
    sizes = [int(part) for part in size.split("x")]
    dtype = _core.DType.bfloat16
    wanted = _core.Variant(_core.Family.cpu, dtype, dtype, sizes[0], sizes[-1])
    ids = {kernel["id"] for kernel in listed(capsys, "--family", "cpu", "--head-dim", size)}
    assert _core.find_id(wanted) in ids


@pytest.mark.parametrize("size", ["0", "7", "12", "128x", "192x12", "d128", "-8", "128,64"])
def test_a_head_dim_that_is_none(capsys, size):
    assert cli.main(["variants", f"--head-dim={size}"]) == 2
    assert f"--head-dim {size}: must be a multiple of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--family", "sm70"), ("--dtype", "f64"), ("--head-dim", "520")]
)
def test_an_empty_choice_says_what_there_is(capsys, option, value):
    assert cli.main(["variants", option, value]) == 2
    message = capsys.readouterr().err
    assert f"{option} {value}" in message
    assert "families" in message
    assert "cpu" in message
