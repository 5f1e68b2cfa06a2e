"""Examples that measure run on the CPU and print a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def rows_of(text):
    """Returns the cells of the table in the text, without its head."""
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return table[2:]


def test_throughput(monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.20")
    if torch.cuda.is_available():
        pytest.skip("it would take a minute")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--layers", "1", "--rounds", "1"])
    import throughput

    throughput.main()
    rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["preflash", "torch varlen", "sdpa", "eager"]
    for name, *cells in rows:
        for cell in cells:  # torch has its operator on GPUs alone
            assert "NotImplementedError" in cell if name == "torch varlen" else cell[0].isdigit()


def test_context_parallel():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, EXAMPLES / "context_parallel.py", "256", "512"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [row[:2] for row in rows] == [["256", "2"], ["512", "2"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
