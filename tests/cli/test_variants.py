"""`variants` shows what the registry holds, and filters it."""

import json

import pytest
from preflash import _core, cli


def listed(capsys, *arguments):
    assert cli.main(["variants", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def ids_of(kernels):
    return [kernel["id"] for kernel in kernels]


def test_the_list_is_the_registry(capsys):
    assert sorted(ids_of(listed(capsys))) == sorted(ids_of(_core.kernels()))
    assert cli.main(["variants", "--family", "cpu"]) == 0
    out = capsys.readouterr().out
    for kernel in _core.kernels():
        assert (kernel["id"] in out) == (kernel["family"] == "cpu")


def test_a_dtype_has_two_names(capsys):
    for short, long in (("bf16", "bfloat16"), ("f32", "float32"), ("e4m3", "float8_e4m3fn")):
        chosen = listed(capsys, "--family", "cpu", "--dtype", short)
        assert {(kernel["family"], kernel["q_dtype"]) for kernel in chosen} == {("cpu", short)}
        assert listed(capsys, "--family", "cpu", "--dtype", long) == chosen


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
def test_a_head_dim_finds_what_serves_it(monkeypatch, capsys, size, ids, shown):
    """The table says up to which head_dim a larger kernel serves."""
    monkeypatch.setattr(_core, "kernels", lambda: BUILD)
    arguments = [] if size is None else ["--head-dim", size]
    assert set(ids_of(listed(capsys, *arguments))) == ids
    assert cli.main(["variants", *arguments]) == 0
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    column = [cells[5].strip() for cells in lines if "fa3" in "".join(cells[2:3])]
    assert sorted(column) == sorted(shown)


def test_the_cpu_serves_any_head_dim_with_its_largest(capsys):
    """The list has the kernel that plan() takes."""
    dtype = _core.DType.bfloat16
    for size in ("8", "192", "192x128", "512"):
        qk, *vo = map(int, size.split("x"))
        wanted = _core.Variant(_core.Family.cpu, dtype, dtype, qk, *(vo or [qk]))
        chosen = listed(capsys, "--family", "cpu", "--head-dim", size)
        assert _core.find_id(wanted) in ids_of(chosen)
        assert cli.main(["variants", "--family", "cpu", "--head-dim", size]) == 0
        assert capsys.readouterr().out.count("up to 512") == len(chosen) * (size != "512")
