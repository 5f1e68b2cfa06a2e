"""Tables and progress read well with rich and without."""

import io
import sys

import pytest
from preflash.cli.console import Table, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[True, False], ids=["with rich", "without rich"])
def rich(request, monkeypatch) -> bool:
    if request.param:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    return request.param


ROWS = [["name", "us", "of base"], ["plan [0] :x:", "7.0", "1.2x"], ["a longer name", "-", "1.00"]]


def test_a_table(rich, monkeypatch):
    """rich lines columns up; a column without values is left out, and no terminal breaks a row."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    table = Table({"name": "", "us": ".1f", "GB/s": ".2f", "of base": ".2f"})
    table.add("plan [0] :x:", 7, None, "1.2x")
    table.add("a longer name", None, None, 1)
    header, rule, *rows = str(table).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, *rows)] == ROWS
    assert set(rule) <= set("|- ")
    assert (len({len(line) for line in (header, rule, *rows)}) == 1) == rich
    assert not rich or rows[1].endswith("|   - |    1.00 |")  # numbers are on the right
    with pytest.raises(ValueError, match="zip"):
        table.add(1, 2, 3)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_is_a_bar_of_rich_on_a_terminal_else_a_line_per_quarter(rich, monkeypatch, stream):
    for steps, lines in ((200, (50, 100, 150, 200)), (3, (1, 2, 3)), (0, ())):
        monkeypatch.setattr(sys, "stderr", stream())
        with progress(steps, "layers") as step:
            for layer in range(steps):
                step(f"layer [{layer}]")
        seen = sys.stderr.getvalue()
        if rich and stream is Terminal:
            assert all(part in seen for part in ("layers", f"{steps}/{steps}"))
            assert not steps or f"layer [{steps - 1}]" in seen
        else:
            assert seen.splitlines() == [f"layers: {n}/{steps}" for n in lines]
