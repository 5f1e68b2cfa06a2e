"""The report of `make test-gpu` says which tests passed, failed, were skipped or crashed."""

import sys
import types

import gpu_suite
import pytest
from processes import finished

TESTS = """
import os, signal, pytest
def test_good(): pass
def test_wrong(): assert 0
def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)
def test_skipped(): pytest.skip("fa3 needs compute capability 9.0")
@pytest.mark.parametrize("i", range(3))
def test_not_compiled(i): pytest.skip(f"not compiled in this build: no kernel for head_dim {i}")
@pytest.fixture
def broken(): raise RuntimeError
def test_setup(broken): pass
@pytest.fixture
def late():
    yield
    raise RuntimeError
def test_teardown(late): pass
@pytest.mark.parametrize("i", range(20))
def test_many(i): pass
def test_one_thread(): assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
"""


def run(tmp_path, text, workers, *arguments):
    pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(text)
    report = tmp_path / "report.md"
    command = (sys.executable, gpu_suite.__file__, "--workers", workers, "--report", report)
    done = finished(*command, *arguments, tmp_path / "test_some.py")
    return done.returncode, report.read_text()


def test_the_report(tmp_path):
    variants = tmp_path / "variants.json"
    variants.write_text('{"preset": "dev"}')
    code, report = run(tmp_path, TESTS, 2, "--seed", "3", "--variants", variants)
    assert code == 1
    cells = [line.strip("| ").split(" | ", 1) for line in report.splitlines() if line[:2] == "| "]
    rows = dict(row for row in cells if len(row) == 2)
    assert (rows["passed"], rows["failed"], rows["skipped"]) == ("22", "4", "4")
    assert (rows["seed"], rows["processes"]) == ("3", "2")
    for name in ("commit", "date", "GPU", "driver", "torch", "seconds", "tests"):
        assert rows[name]
    assert rows["build"].startswith("preset dev, variants: ")
    failed = [line.strip("*` ").rpartition("::")[2] for line in report.splitlines() if "::" in line]
    assert failed == ["test_dies", "test_setup", "test_teardown", "test_wrong"]
    skips = report.partition("## Skipped")[2]
    assert "* 3: not compiled in this build\n* 1: fa3 needs compute capability 9.0\n" in skips


@pytest.mark.parametrize(
    ("text", "passes", "says"),
    [
        ("def test_good(): pass", True, "| commit | abc1234 |"),
        ("import no_such_module", False, "test_some.py (not collected)"),
        ("", False, "nothing was collected"),
    ],
    ids=["good", "broken file", "no test"],
)
def test_what_never_ran_is_a_failure(tmp_path, text, passes, says):
    code, report = run(tmp_path, text, 1, "--commit", "abc1234")
    assert (code == 0) == passes == ("Failed\n\nNone." in report)
    assert says in report


def test_the_order_is_the_seeds():
    def order(seed):
        items = [types.SimpleNamespace(nodeid=str(i)) for i in range(50)]
        config = types.SimpleNamespace(getoption={"order": seed}.get)
        gpu_suite.pytest_collection_modifyitems(config, items)
        return [item.nodeid for item in items]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))
