"""The documents keep up with the code: links and anchors lead somewhere, every example runs."""

import contextlib
import functools
import pathlib
import re
from types import SimpleNamespace

import preflash
import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "cpp/**/*.md", "wheels/*.md", "third_party/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def prose(document):
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def anchors(document):
    """What GitHub makes of the headings."""
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


def test_readme_starts_with_the_two_commands():
    top = ROOT.joinpath("README.md").read_text()[:800]
    assert "make demo" in top
    assert "make test" in top


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run(name, containing, names):
    (example,) = [block for block in blocks(name) if containing in block]
    exec(compile(example, name, "exec"), names)
    return names


def test_every_example_is_run_below():
    here = pathlib.Path(__file__).read_text()
    called = re.findall(r'run\(\s*"([^"]+)",\s*"([^"]+)"', here)
    for name in ("README.md", "docs/guide.md", "docs/flashinfer.md"):
        for block in blocks(name):
            assert [1 for file, text in called if file == name and text in block], block


@pytest.fixture
def batch():
    """What examples take as given: two requests, 3 new tokens on 20 keys and 5 on 33."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lists = {
        "qo_indptr": [0, 3, 8], "paged_kv_indptr": [0, 2, 5],
        "paged_kv_indices": [0, 1, 2, 3, 4], "paged_kv_last_page_len": [4, 1],
    }  # fmt: skip
    return {
        "torch": torch, "preflash": preflash, "flashinfer": preflash, "device": device,
        "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16,
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()},
        "workspace": torch.empty(128 << 20, dtype=torch.uint8, device=device),
        "q": torch.randn(8, 32, 128, device=device).bfloat16(),
        "kv": torch.randn(5, 2, 16, 8, 128, device=device).bfloat16(),
    }  # fmt: skip


def test_readme():
    names = run("README.md", "import preflash as flashinfer", {})
    assert names["o"].shape == (8, 32, 128)
    assert names["lse"].shape == (8, 32)
    assert names["o"].isfinite().all()


def test_one_request():
    names = run("docs/guide.md", "single_prefill_with_kv_cache_return_lse", {})
    assert names["o"].shape == (128, 32, 128)
    assert names["lse"].shape == (128, 32)


def test_a_batch(batch):
    batch |= {"model": range(2), "kv_cache": [batch["kv"]] * 2}
    assert run("docs/guide.md", "for layer in model", batch)["o"].isfinite().all()


def test_prefill_beside_decode(batch):
    q_p, q_d = batch["q"], batch["q"][:2]
    k_p, v_p = torch.randn(2, 40, 8, 128, device=batch["device"]).bfloat16()
    batch |= {"q_p": q_p, "k_p": k_p, "v_p": v_p, "q_d": q_d, "kv_cache": batch["kv"]}
    batch |= {name[6:]: batch[name] for name in list(batch) if name.startswith("paged_")}
    names = run("docs/guide.md", "pod.run(", batch)
    assert names["out_p"].shape == q_p.shape
    assert names["out_d"].shape == q_d.shape


def test_merging(batch):
    v_a, v_b = torch.randn(2, 6, 4, 64)
    s_a, s_b = torch.randn(2, 6, 4)
    stacks = torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1)
    merged = preflash.merge_state(v_a, s_a, v_b, s_b)
    given = {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b, "v_all": stacks[0], "s_all": stacks[1]}
    names = run("docs/guide.md", "merge_state_in_place", batch | given)
    torch.testing.assert_close((names["v"], names["s"]), merged)
    torch.testing.assert_close((v_a, s_a), merged)


def plans(batch):
    """Arguments of plan() for the batch, and for one whose second request is empty."""
    arrays = [batch[name] for name in ("paged_kv_indptr", "paged_kv_indices")]
    rest = [*arrays, batch["paged_kv_last_page_len"], 32, 8, 128, 16]
    return [batch["qo_indptr"], *rest], [torch.tensor([0, 3, 3], dtype=torch.int32), *rest]


def test_cuda_graphs(batch, monkeypatch):
    q, kv, out = batch["q"], batch["kv"], torch.empty_like(batch["q"])
    if batch["device"] == "cpu":  # a graph is then what replays it

        def graph():
            return SimpleNamespace(replay=lambda: names["wrapper"].run(q, kv, out=out))

        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    largest, smaller = plans(batch)
    new_q = torch.randn_like(q[:3])
    options = {"causal": True, "q_data_type": torch.bfloat16}
    names = batch | {
        "out": out, "batch_size": 2, "most_pages": 8, "largest_batch": largest,
        "batches": [(largest, q.clone()), (smaller, new_q)], "options": options,
    }  # fmt: skip
    run("docs/guide.md", "graph.replay()", names)
    alone = preflash.BatchPrefillWithPagedKVCacheWrapper(batch["workspace"].clone())
    alone.plan(*smaller, **options)
    assert torch.equal(out[:3], alone.run(new_q, kv))


def test_compile(batch, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    x = torch.randn(8, 64, device=batch["device"]).bfloat16()
    k_cache, v_cache = batch["kv"].unbind(1)
    names = run("docs/guide.md", "@torch.compile", batch | {
        "wrapper": preflash.BatchPrefillWithPagedKVCacheWrapper(batch["workspace"]),
        "w_q": torch.randn(64, 32 * 128, device=batch["device"]).bfloat16(),
        "w_o": torch.randn(32 * 128, 64, device=batch["device"]).bfloat16(),
        "x": x, "k_cache": k_cache, "v_cache": v_cache,
        "batches": plans(batch), "options": {"q_data_type": torch.bfloat16},
    })  # fmt: skip
    assert names["o"].shape == x.shape


def test_several_gpus(tmp_path):
    dist = torch.distributed
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        q, k, v = torch.randn(3, 16, 4, 64)
        names = run("docs/guide.md", "context_parallel_prefill", {"q": q, "k": k, "v": v})
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(
        names["out"], preflash.single_prefill_with_kv_cache(q, k, v, causal=True)
    )


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    small = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    names = {"name": str(tmp_path), "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    model = run("docs/guide.md", "from_pretrained", names)["model"]
    with torch.no_grad():
        assert model(torch.arange(9)[None]).logits.isfinite().all()


def test_trtllm():
    names = run("docs/guide.md", "trtllm_fmha_v2_prefill", {})
    assert names["out"].shape == (300, 8, 128)
    assert names["stats"].shape == (300, 8, 2)


def test_patches():
    run("docs/flashinfer.md", "as patch:", {})
    run("docs/flashinfer.md", "sys.stderr", {})
