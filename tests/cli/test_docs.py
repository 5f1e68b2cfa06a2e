"""Links and anchors of the documents lead somewhere, and every example runs."""

import os
import pathlib
import re
from unittest import mock

import preflash
import pytest
import torch
from documents import DOCUMENTS, ROOT, python_blocks


def prose(document):
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def anchors(document):
    """Returns the anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(document)):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        assert file.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{document.name} links to {target}#{anchor}"


def run(name, containing):
    """Runs the one block of a document that contains these words, as it is printed."""
    (example,) = [
        block
        for place, block in python_blocks().items()
        if place.startswith(f"{name}:") and containing in block
    ]
    names = {"__name__": "__main__"}
    with mock.patch.dict(os.environ):
        exec(compile(example, name, "exec"), names)
    return names


def test_every_example_is_run_below():
    here = pathlib.Path(__file__).read_text()
    called = re.findall(r'(?:run)?\(\s*"([^"]+\.md)",\s*"([^"]+)"', here)
    for place, block in python_blocks().items():
        document = place.partition(":")[0]
        assert [1 for file, text in called if file == document and text in block], place


# Document, words of the block, and shapes of what it computes.
SHAPES = [
    ("README.md", "import preflash as flashinfer", {"o": (8, 32, 128), "lse": (8, 32)}),
    ("docs/invariance.md", "batch_invariant=True", {}),
    (
        "docs/guide.md",
        "single_prefill_with_kv_cache(q, k, v, causal=True)",
        {"o": (128, 32, 128), "lse": (128, 32)},
    ),
    ("docs/guide.md", "@torch.compile", {"o": (9, 96)}),
    ("docs/guide.md", "trtllm_fmha_v2_prefill", {"out": (300, 8, 128), "stats": (300, 8, 2)}),
    ("docs/flashinfer.md", "as patch:", {}),
    ("docs/flashinfer.md", "sys.stderr", {}),
]


@pytest.mark.parametrize(("document", "containing", "shapes"), SHAPES)
def test_examples_that_show_shapes(document, containing, shapes):
    names = run(document, containing)
    for name, shape in shapes.items():
        assert names[name].shape == shape
        assert names[name].isfinite().all()


def assert_close(result, expected):
    """Compares bfloat16 results of kernels that may add in another order."""
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def cached(kv, pages, length):
    """Returns keys and values of a request from its pages of a cache."""
    return (x.flatten(0, 1)[:length] for x in kv[pages].unbind(1))


def test_a_batch():
    names = run("docs/guide.md", "wrapper.run(q, kv_cache[layer])")
    q, kv = names["q"], names["kv_cache"][-1]
    second = preflash.single_prefill_with_kv_cache(q[3:], *cached(kv, [2, 3, 4], 33), causal=True)
    assert_close(names["o"][3:], second)


def test_prefill_beside_decode():
    names = run("docs/guide.md", "pod.run(")
    prefill = preflash.single_prefill_with_kv_cache(
        names["q_p"], names["k_p"], names["v_p"], causal=True
    )
    assert_close(names["out_p"], prefill)
    first = preflash.single_decode_with_kv_cache(
        names["q_d"][0], *cached(names["kv_cache"], [0, 1], 20)
    )
    assert_close(names["out_d"][0], first)


def test_merging():
    names = run("docs/guide.md", "merge_state_in_place")
    whole = preflash.single_prefill_with_kv_cache_return_lse(names["q"], names["k"], names["v"])
    torch.testing.assert_close((names["o"], names["lse"]), whole)
    torch.testing.assert_close((names["v_a"], names["s_a"]), whole)


def test_cuda_graphs():
    names = run("docs/guide.md", "graph.replay()")
    keys = cached(names["kv"], [5, 6, 7], 40)
    alone = preflash.single_prefill_with_kv_cache(names["q"][:3], *keys, causal=True)
    assert_close(names["out"][:3], alone)


def test_several_gpus():
    names = run("docs/guide.md", "context_parallel_prefill")
    whole = preflash.single_prefill_with_kv_cache(names["q"], names["k"], names["v"], causal=True)
    assert_close(names["out"], whole)


def test_transformers():
    pytest.importorskip("transformers", minversion="5.20")
    assert run("docs/guide.md", "from_config")["logits"].isfinite().all()
