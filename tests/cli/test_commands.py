"""Every command has its exit codes, and output that a program can read."""

import json

import pytest
from preflash import _core


@pytest.mark.parametrize("name", ["info", "variants", "check", "bench", "demo"])
def test_every_command_explains_itself(preflash_command, name):
    assert name in preflash_command("--help").out
    done = preflash_command(name, "--help")
    assert done.code == 0
    assert f"preflash {name}" in done.out


def test_info(preflash_command):
    """It says in both forms what the installation has and lacks."""
    done = preflash_command("info")
    assert done.code == 0
    assert "backend='auto'" in done.out
    assert "  cpu: cpu" in done.out
    assert "does not exist" not in done.out
    facts = json.loads(preflash_command("info", "--json").out)
    assert facts["kernels"]["cpu"] > 0
    assert facts["cpu"]["threads"] >= 1
    assert facts["cpu"]["isa"]
    # Either there is a GPU or a sentence that says why not.
    assert bool(facts["gpus"]) != bool(facts["gpu_absent"])
    picked = {choice["device"]: choice for choice in facts["auto"]}
    assert picked["cpu"]["backend"] == "cpu"
    assert all(choice["why"] for choice in picked.values())
    alone = "the CPU backend alone, without GPU kernels; pip install with nvcc"
    compiled = {kernel["family"] for kernel in _core.kernels()} > {"cpu"}
    assert facts["build"] == ("gpu and cpu" if compiled else "cpu alone")
    for out in (done.out, preflash_command("variants").out):
        assert (alone in out) == (not compiled)


def test_info_says_what_the_environment_overrides(preflash_command, monkeypatch):
    monkeypatch.delenv("PREFLASH_SOFT_CAP")
    monkeypatch.delenv("PREFLASH_ENGINES", raising=False)  # of make test
    assert "in the environment" not in preflash_command("info").out
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    assert "PREFLASH_BACKEND=cpu in the environment" in preflash_command("info").out


def test_check(preflash_process):
    done = preflash_process("check", "--backend", "cpu")
    assert done.code == 0, done.out + done.err
    assert "all good" in done.out
    assert "FAILED" not in done.out
    for area in ("prefill", "paged", "decode", "mask", "softcap", "split", "merge", "packbits"):
        assert area in done.out
    # It tells which kernels ran.
    assert "\n  cpu_bf16_d512\n" in done.out


def test_demo(preflash_process):
    done = preflash_process("demo", "--quick", "--backend", "cpu")
    assert done.code == 0, done.out + done.err
    assert "all verified" in done.out
    assert "documented example" in done.out
    assert "serving batch" in done.out
    # Piped: no cursor movement, and the bar prints a line per quarter.
    assert "\r" not in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("demo: ")]) == 4


def test_bench_of_one_row(preflash_process, tmp_path):
    report = tmp_path / "bench.json"
    done = preflash_process(
        *("bench", "--quick", "--backend", "cpu", "--dtype", "f32", "--rows", "d64"),
        *("--repeats", "1", "--json", str(report)),
    )
    assert done.code == 0, done.out + done.err
    assert "dense d64 s512 full" in done.out
    written = json.loads(report.read_text())
    assert written["machine"]["backend"] == "cpu"
    (row,) = written["rows"]
    assert row["name"] == "dense d64 s512 full"
    assert row["variant"].startswith("cpu_f32_")
    assert row["us"]["preflash"] > 0
    assert row["us"]["sdpa"] > 0
    assert row["plan_us"] > 0
    assert row["error_ratio"] <= 1
    seconds = row["us"]["preflash"] * 1e-6
    assert row["speed"]["preflash"] == pytest.approx(row["flops"] / seconds / 1e12)
