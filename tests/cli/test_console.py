"""Tables line up; the progress bar redraws on a terminal and stays short in a log."""

import io
import sys

import pytest
from preflash.cli.console import Progress, Table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_line_up():
    table = Table(["name", "us"], right=frozenset({"us"}))
    table.add("plan", 7)
    table.add("a longer name", None)
    assert str(table).splitlines() == [
        "name           us",
        "-------------  --",
        "plan            7",
        "a longer name   -",
    ]


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="3 cells under 2 headers"):
        Table(["a", "b"]).add(1, 2, 3)


def test_empty_columns_are_left_out():
    table = Table(["name", "us", "GB/s"], right=frozenset({"us", "GB/s"}))
    table.add("plan", None, 1)
    table.add("run", None, None)
    assert str(table.without_empty_columns()).splitlines() == [
        "name  GB/s",
        "----  ----",
        "plan     1",
        "run      -",
    ]


def test_progress_in_a_log_prints_one_line_per_quarter():
    log = io.StringIO()
    with Progress(200, "layers", log) as progress:
        for _ in range(200):
            progress.step()
    lines = log.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        f"layers: {done}/200" for done in (50, 100, 150, 200)
    ]
    assert "\r" not in log.getvalue()


def test_progress_on_a_terminal_redraws_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)  # as where it is not installed
    terminal = Terminal()
    with Progress(3, "layers", terminal) as progress:
        for layer in range(3):
            progress.step(f"layer {layer}")
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    last = text.rstrip().split("\r")[-1]
    assert "[" + "#" * 28 + "]" in last
    assert "3/3" in last


def test_progress_over_nothing():
    log = io.StringIO()
    with Progress(0, "layers", log):
        pass
    assert log.getvalue() == ""


def test_a_terminal_shows_the_bar_of_rich():
    pytest.importorskip("rich")
    terminal = Terminal()
    with Progress(3, "layers", terminal) as progress:
        for layer in range(3):
            progress.step(f"layer [{layer}]")
    assert "layers" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "layer [2]" in terminal.getvalue()
