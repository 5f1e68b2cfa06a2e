"""Tables and progress read well with rich and without."""

import io
import sys

import pytest
from preflash.cli.console import Table, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.fixture
def with_rich():
    pytest.importorskip("rich")


def table():
    made = Table({"name": "", "us": ".1f", "GB/s": ".2f", "of base": ".2f"})
    made.add("plan [0] :x:", 7, None, "1.2x")
    made.add("a longer name", None, None, 1)
    return str(made)


@pytest.mark.usefixtures("without_rich")
def test_a_table_is_plain_lines():
    assert table().splitlines() == [
        "| name | us | of base |",
        "| --- | --- | --- |",
        "| plan [0] :x: | 7.0 | 1.2x |",
        "| a longer name | - | 1.00 |",
    ]


@pytest.mark.usefixtures("with_rich")
def test_rich_lines_columns_up(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert table().splitlines() == [
        "| name          |  us | of base |",
        "|---------------|-----|---------|",
        "| plan [0] :x:  | 7.0 |    1.2x |",
        "| a longer name |   - |    1.00 |",
    ]


@pytest.mark.usefixtures("with_rich")
def test_no_terminal_breaks_a_row(monkeypatch):
    made = Table({"name": ""})
    made.add("x" * 300)
    monkeypatch.setenv("COLUMNS", "40")
    assert len(str(made).splitlines()) == 3


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Table({"a": "", "b": ""}).add(1, 2, 3)


def three_steps(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(3, "layers") as step:
        for layer in range(3):
            step(f"layer [{layer}]")
    return stream.getvalue()


@pytest.mark.usefixtures("with_rich")
def test_a_terminal_shows_the_bar_of_rich(monkeypatch):
    shown = three_steps(monkeypatch, Terminal())
    for part in ("layers", "3/3", "layer [2]"):
        assert part in shown


@pytest.mark.usefixtures("without_rich")
def test_a_terminal_without_rich_shows_lines(monkeypatch):
    assert three_steps(monkeypatch, Terminal()) == "layers: 1/3\nlayers: 2/3\nlayers: 3/3\n"


def test_progress_in_a_log_prints_one_line_per_quarter(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress(200, "layers") as step:
        for _ in range(200):
            step("")
    assert log.getvalue().splitlines() == [f"layers: {n}/200" for n in (50, 100, 150, 200)]


def test_progress_over_nothing(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress(0, "layers"):
        pass
    assert log.getvalue() == ""
