"""Tables and progress read well with rich and without."""

import io
import sys

import pytest
from preflash.cli.console import Table, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["with rich", "without rich"])
def rich(request, monkeypatch) -> bool:
    """Returns whether rich is there."""
    if request.param == "with rich":
        pytest.importorskip("rich")
        return True
    monkeypatch.setitem(sys.modules, "rich", None)
    return False


PLAIN = [
    "| name | us | of base |",
    "| --- | --- | --- |",
    "| plan [0] :x: | 7.0 | 1.2x |",
    "| a longer name | - | 1.00 |",
]
LINED_UP = [
    "| name          |  us | of base |",
    "|---------------|-----|---------|",
    "| plan [0] :x:  | 7.0 |    1.2x |",
    "| a longer name |   - |    1.00 |",
]


def test_a_table(rich, monkeypatch):
    """rich lines columns up; a column without values is left out, and no terminal breaks a row."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    table = Table({"name": "", "us": ".1f", "GB/s": ".2f", "of base": ".2f"})
    table.add("plan [0] :x:", 7, None, "1.2x")
    table.add("a longer name", None, None, 1)
    assert str(table).splitlines() == (LINED_UP if rich else PLAIN)


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Table({"a": "", "b": ""}).add(1, 2, 3)


def shown(monkeypatch, stream, steps: int) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(steps, "layers") as step:
        for layer in range(steps):
            step(f"layer [{layer}]")
    return stream.getvalue()


def test_a_terminal_shows_the_bar_of_rich_or_lines(rich, monkeypatch):
    seen = shown(monkeypatch, Terminal(), 3)
    if rich:
        assert all(part in seen for part in ("layers", "3/3", "layer [2]"))
    else:
        assert seen == "layers: 1/3\nlayers: 2/3\nlayers: 3/3\n"


@pytest.mark.parametrize(("steps", "lines"), [(200, (50, 100, 150, 200)), (0, ())])
def test_progress_in_a_log_prints_one_line_per_quarter(monkeypatch, steps, lines):
    seen = shown(monkeypatch, io.StringIO(), steps)
    assert seen.splitlines() == [f"layers: {n}/{steps}" for n in lines]
