"""Links and anchors of the documents lead somewhere, and every example runs."""

import os
import re
from unittest import mock

import preflash
import pytest
import torch
from documents import DOCUMENTS, python_blocks


def prose(document):
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def anchors(document):
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_links_lead_somewhere():
    links = r"\]\((?!\w+://)([^)#\s]*)(?:#([^)]*))?\)"
    for document in DOCUMENTS:
        for target, anchor in re.findall(links, prose(document)):
            file, link = document.parent / target if target else document, f"{target}#{anchor}"
            assert file.exists(), f"{document.name} links to {link}"
            assert not anchor or anchor in anchors(file), f"{document.name} links to {link}"


def assert_close(result, expected):
    """Compares bfloat16 results of kernels that may add in another order."""
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def cached(kv, pages, length):
    return (x.flatten(0, 1)[:length] for x in kv[pages].unbind(1))


def causal(q, k, v):
    return preflash.single_prefill_with_kv_cache(q, k, v, causal=True)


def shapes(**expected):
    """Returns a check of tensors' shapes, where not None, and of their values to be finite."""

    def check(names):
        for name, shape in expected.items():
            assert shape in (None, names[name].shape)
            assert names[name].isfinite().all()

    return check


def a_batch(names):
    keys = cached(names["kv_cache"][-1], [2, 3, 4], 33)
    assert_close(names["o"][3:], causal(names["q"][3:], *keys))


def prefill_beside_decode(names):
    assert_close(names["out_p"], causal(names["q_p"], names["k_p"], names["v_p"]))
    keys = cached(names["kv_cache"], [0, 1], 20)
    assert_close(names["out_d"][0], preflash.single_decode_with_kv_cache(names["q_d"][0], *keys))


def merging(names):
    whole = preflash.single_prefill_with_kv_cache_return_lse(names["q"], names["k"], names["v"])
    torch.testing.assert_close((names["o"], names["lse"]), whole)
    torch.testing.assert_close((names["v_a"], names["s_a"]), whole)


def cuda_graphs(names):
    keys = cached(names["kv"], [5, 6, 7], 40)
    assert_close(names["out"][:3], causal(names["q"][:3], *keys))


GUIDE = "docs/guide.md"
# A document, words of one of its blocks, and a check of the names that the block leaves.
EXAMPLES = [
    ("README.md", "import preflash as flashinfer", shapes(o=(8, 32, 128), lse=(8, 32))),
    ("docs/invariance.md", "batch_invariant=True", shapes()),
    ("docs/flashinfer.md", "as patch:", shapes()),
    ("docs/flashinfer.md", "sys.stderr", shapes()),
    (GUIDE, "_cache(q, k, v, causal=True)", shapes(o=(128, 32, 128), lse=(128, 32))),
    (GUIDE, "@torch.compile", shapes(o=(9, 96))),
    (GUIDE, "trtllm_fmha_v2_prefill", shapes(out=(300, 8, 128), stats=(300, 8, 2))),
    (GUIDE, "wrapper.run(q, kv_cache[layer])", a_batch),
    (GUIDE, "pod.run(", prefill_beside_decode),
    (GUIDE, "merge_state_in_place", merging),
    (GUIDE, "graph.replay()", cuda_graphs),
    (GUIDE, "context_parallel_prefill",
     lambda names: assert_close(names["out"], causal(names["q"], names["k"], names["v"]))),
    (GUIDE, "from_config", shapes(logits=None)),
]  # fmt: skip


def blocks_of(document: str, words: str) -> list[str]:
    blocks = python_blocks().items()
    return [at for at, block in blocks if at.startswith(f"{document}:") and words in block]


@pytest.mark.parametrize(("document", "words", "check"), EXAMPLES)
def test_examples(document, words, check):
    if words == "from_config":
        pytest.importorskip("transformers", minversion="5.20")
    (place,) = blocks_of(document, words)
    names = {"__name__": "__main__"}
    with mock.patch.dict(os.environ):
        exec(compile(python_blocks()[place], document, "exec"), names)
    check(names)


def test_every_example_is_run():
    run = {place for document, words, _ in EXAMPLES for place in blocks_of(document, words)}
    assert set(python_blocks()) == run
