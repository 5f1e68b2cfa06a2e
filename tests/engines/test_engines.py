"""Attention backends of engines compute the reference's logits and tokens on preflash, where their
files are fetched: CONTRIBUTING.md says how."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = os.environ.get("PREFLASH_ENGINES")
RELEASES = sorted(Path(FETCHED).glob("*-*")) if FETCHED else []

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not RELEASES, reason="PREFLASH_ENGINES names no directory of releases"),
]

REFUSALS = (
    "FlashInfer backend on SM90 currently crashes with sliding-window",  # says vLLM 0.27
    "RTP-LLM's wrappers pass neither",
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["FLASHINFER", "PREFLASH"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_outputs_and_tokens_are_the_references(release, backend, device, tmp_path):
    if backend == "PREFLASH" and not release.name.startswith(("vllm-", "sglang-0.5.23")):
        pytest.skip("preflash has no backend of its own for this engine")
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.engines", str(release), "--device", device]
    command += ["--backend", backend]
    command += ["--json", str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    results = [json.loads(row) for row in rows.read_text().splitlines()]
    assert results, done.stderr
    ours = [row for row in results if not any(text in row["result"] for text in REFUSALS)]
    assert {row["path"] for row in ours} >= {"eager", "chunked", "prefix"}
    assert all(row["result"] == "ok" for row in ours), [row["result"] for row in ours]
