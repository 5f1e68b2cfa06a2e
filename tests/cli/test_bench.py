"""`bench` writes reports of its rows, compares reports, and draws them."""

import functools
import json
import re

import pytest
import torch
from preflash.cli.bench import plot
from preflash.cli.machine import choose_places
from preflash.testing import timing

pytest.importorskip("matplotlib")


@pytest.fixture
def bench(preflash_command):
    return functools.partial(preflash_command, "bench --quick --repeats 1 --backend cpu")


def texts(path) -> list[str]:
    """Returns the texts of an SVG file of matplotlib, which are comments next to their outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL)


def test_a_report_is_written_compared_and_drawn(bench, preflash_command, tmp_path):
    files = ("--json", "a.json", "--plot", "a.png")
    done = bench("--rows", "d64,decode,mixed", *files)
    assert done.code == 0, done.out + done.err
    assert "not timed" not in done.out  # as torch's calls would be if the oracle differed
    assert "wrote a.json\nno roof" in done.out or "wrote a.json\nwrote a.png" in done.out
    assert done.out.endswith("wrote a.png: 2 of 4 rows, the rows named dense or decode\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    report = json.loads((tmp_path / "a.json").read_text())
    assert report["machine"]["backend"] == "cpu"
    dense = next(row for row in report["rows"] if row["name"] == "dense d64 s512 full")
    tflops = dense["flops"] / dense["us"]["preflash"] / 1e6
    assert dense["speed"]["preflash"] == pytest.approx(tflops)
    assert "sdpa" in dense["us"]
    for row in report["rows"]:
        assert row["name"] in done.out
        assert row["variant"].startswith("cpu_bf16_")
        assert min(*row["us"].values(), row["plan_us"]) > 0
        assert row["error_ratio"] <= 1

    for row in report["rows"]:
        row["us"] = {name: us / 2 for name, us in row["us"].items()}
        row["dtype"] = "bf16"  # the same row: a report may have either name of bfloat16
    (tmp_path / "b.json").write_text(json.dumps(report))
    done = preflash_command("bench --compare a.json b.json --plot b.svg")
    assert done.code == 0, done.err
    assert done.out.count("2.000x") == len(report["rows"]) + 1
    assert done.out.endswith("wrote b.svg: 2 of 4 rows, the rows named dense or decode\n")
    drawn = texts(tmp_path / "b.svg")
    assert (drawn.count("A"), drawn.count("B")) == (2, 2)
    assert "sdpa" not in drawn
    assert "wrote" not in preflash_command("bench --compare a.json b.json").out


def row(name: str, dtype: str = "bfloat16", **speed: float) -> dict:
    return {"name": name, "dtype": dtype, "speed": speed}


ROWS = [
    row("dense d64 s512 full", preflash=0.5, sdpa=0.25),
    row("dense d64 s1024 full", preflash=0.75, sdpa=0.5),
    row("dense d128 s512 causal", "f32", preflash=0.001, sdpa=0.0005),
    row("decode 4x512 page 16", preflash=8.0, base=4.0),
]


def test_only_what_is_drawn_has_a_legend_and_a_roof_has_a_dtype(tmp_path):
    path = tmp_path / "a.svg"
    plot.draw(ROWS, "a title", path)
    drawn = texts(path)
    for text in ("a title", "bfloat16 full d64", "float32 causal d128", "decode", "512", "1024"):
        assert text in drawn
    # Two panels of dense rows have both calls; decode has preflash alone.
    assert (drawn.count("preflash"), drawn.count("sdpa")) == (3, 2)
    assert not {"base", "matrix product"} & set(drawn)
    plot.draw(ROWS, "a title", path, {"float32": 3.0})
    assert texts(path).count("matrix product") == 1


def test_a_roof_is_a_product_in_the_dtype_of_rows_and_none_below_the_data(monkeypatch, capsys):
    times = {torch.float32: 2e4, torch.bfloat16: 1e5}  # so slow that no larger product is tried
    monkeypatch.setattr(timing, "cpu_wall_time", lambda call: times[call().dtype])
    found = plot.roofs(choose_places("cpu")[0], ROWS)
    assert found == {"float32": pytest.approx(2 * 256**3 / 2e10)}
    assert capsys.readouterr().out == (
        "no roof for bfloat16: a matrix product of torch has 0.00034 TFLOP/s here, "
        "attention up to 0.75\n"
    )
