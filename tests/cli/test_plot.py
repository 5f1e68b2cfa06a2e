"""`bench --plot` draws dense and decode rows, with a legend and a roof for those alone."""

from __future__ import annotations

import re

import pytest
import torch
from preflash.cli.bench import plot
from preflash.cli.machine import Place
from preflash.testing import timing

pytest.importorskip("matplotlib")

CPU = Place("cpu", torch.device("cpu"), "CPU")


def row(name: str, dtype: str = "bfloat16", **speed: float) -> dict:
    return {"name": name, "dtype": dtype, "speed": speed}


ROWS = [
    row("dense d64 s512 full", preflash=0.5, sdpa=0.25),
    row("dense d64 s1024 full", preflash=0.75, sdpa=0.5),
    row("dense d128 s512 causal", "f32", preflash=2.0, sdpa=1.0),
    row("decode 4x512 page 16", preflash=8.0, base=4.0),
]


def texts(path) -> list[str]:
    """Returns the texts of an SVG file of matplotlib, which are comments next to their outlines."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(), re.DOTALL)


def test_only_what_is_drawn_has_a_legend_and_a_roof_has_a_dtype(tmp_path):
    path = tmp_path / "a.svg"
    plot.draw(ROWS, "a title", path)
    drawn = texts(path)
    for text in ("a title", "bfloat16 full d64", "float32 causal d128", "decode", "512", "1024"):
        assert text in drawn
    # Two panels of dense rows have both calls; decode has preflash alone.
    assert drawn.count("preflash") == 3
    assert drawn.count("sdpa") == 2
    assert "base" not in drawn
    assert "matrix product" not in drawn
    plot.draw(ROWS, "a title", path, {"float32": 3.0})
    assert texts(path).count("matrix product") == 1


def test_a_roof_below_the_data_is_none(monkeypatch, capsys):
    products = {torch.bfloat16: 0.0008, torch.float32: 3.0}
    monkeypatch.setattr(plot, "roof", lambda place, dtype: products[dtype])
    assert plot.roofs(CPU, ROWS) == {"float32": 3.0}
    told = capsys.readouterr().out
    assert told.startswith("no roof for bfloat16: a matrix product of torch has 0.0008 TFLOP/s")
    assert told.endswith("attention up to 0.75\n")


def test_a_roof_is_measured_in_the_dtype_given(monkeypatch):
    """The first product seems so slow that no larger one is tried."""
    taken = []
    monkeypatch.setattr(timing, "cpu_wall_time", lambda call: taken.append(call().dtype) or 1e5)
    for dtype in (torch.float32, torch.bfloat16):
        assert plot.roof(CPU, dtype) == pytest.approx(2 * 256**3 / 1e11)
    assert taken == [torch.float32, torch.bfloat16]


def test_draws_a_run(preflash_command, tmp_path):
    options = ("--quick", "--repeats", "1", "--backend", "cpu", "--rows", "d64,decode,mixed")
    done = preflash_command("bench", *options, "--json", "a.json", "--plot", "a.png")
    assert done.code == 0, done.err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote a.json\nno roof" in done.out or "wrote a.json\nwrote a.png" in done.out
    assert done.out.endswith("wrote a.png: 2 of 4 rows, the rows named dense or decode\n")
    done = preflash_command("bench", "--compare", "a.json", "a.json", "--plot", "b.svg")
    assert done.code == 0, done.err
    assert done.out.endswith("wrote b.svg: 2 of 4 rows, the rows named dense or decode\n")
    drawn = texts(tmp_path / "b.svg")
    assert (drawn.count("A"), drawn.count("B")) == (2, 2)
    assert "sdpa" not in drawn
