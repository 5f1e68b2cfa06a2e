"""Serving engines' calls compute, argument by argument as each engine makes them."""

import dataclasses
import math

import preflash as flashinfer
import pytest
import torch
from preflash.testing import Case, KvForm, MaskKind, Sinks, build, compare, poison, runner
from preflash.testing.oracle import Pipeline, reference

CAUSAL = {"mask": MaskKind.CAUSAL}
SLOTS = {"page_size": 1}
HEADS = (8, 2, 128)
# Prefill chunks with history and decodes, K and V as two halves of one last dimension.
VLLM = Case(
    "vllm", (1, 1, 40, 9), (90, 17, 40, 129), *HEADS, page_size=16, form=KvForm.HALVES, **CAUSAL
)
CHUNKS = Case("chunks", (1, 40, 9), (90, 40, 129), *HEADS, page_size=16, **CAUSAL)
MLA = Case("mla", (37, 100, 1), (37, 211, 9), 4, 4, 192, 128, mask=MaskKind.CAUSAL)
DTYPES = {"q_data_type": VLLM.dtype, "kv_data_type": VLLM.dtype}
VLLM_PLAN = {
    "sm_scale": VLLM.scale, "window_left": -1, "logits_soft_cap": None, **DTYPES,
    "fixed_split_size": -1, "disable_split_kv": False,
}  # fmt: skip
NO_SCALES = {"k_scale": 1.0, "v_scale": 1.0}


def paged(target, layout="NHD", **options):
    work = runner.workspace(target.device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(work, layout, **options)


def ragged(target):
    return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace(target.device), "NHD")


def check(inputs, out, lse=None, pipeline=None) -> None:
    if pipeline is None:
        runner.compare(inputs, out, lse).check()
        return
    expected = reference(inputs, pipeline=pipeline)
    compare(out, lse, expected, soft_cap=pipeline.soft_cap).check()


# vLLM, and SGLang's calls that are like its


def vllm_plan(wrapper, inputs, **changes) -> None:
    """Plans with arrays on the host, in pinned memory where there is a GPU; page indices stay."""
    arrays = {
        "qo_indptr": inputs.qo_indptr, "paged_kv_indptr": inputs.kv_indptr,
        "paged_kv_last_page_len": inputs.last_page_len,
        "seq_lens": torch.tensor(inputs.case.kv_lens, dtype=torch.int32),
    }  # fmt: skip
    pinned = (
        t.cpu().pin_memory() if torch.cuda.is_available() else t.cpu() for t in arrays.values()
    )
    options = dict(zip(arrays, pinned, strict=True))
    options |= {"paged_kv_indices": inputs.indices, "num_qo_heads": 8, "num_kv_heads": 2}
    options |= {"head_dim_qk": 128, "page_size": 16, **VLLM_PLAN, "causal": True}
    wrapper.plan(**{**options, "o_data_type": VLLM.dtype, **changes})


TRTLLM_BUFFERS = {
    "qo_indptr_buf": 5, "paged_kv_indptr_buf": 5, "paged_kv_indices_buf": 64,
    "paged_kv_last_page_len_buf": 4,
}  # fmt: skip
# A case, buffers of the constructor, and options of plan().
VLLM_LAYERS = {
    "NHD": ({}, {}, {}),
    "HND": ({"layout": "HND"}, {}, {}),
    "batch invariance": ({}, {}, {"fixed_split_size": 4096, "disable_split_kv": True}),
    "gemma": ({}, {}, {"window_left": 31, "logits_soft_cap": 20.0, "sm_scale": 0.11}),
    "TensorRT-LLM's buffers without graphs": ({}, TRTLLM_BUFFERS, {}),
}


@pytest.mark.parametrize(("case", "buffers", "options"), VLLM_LAYERS.values(), ids=VLLM_LAYERS)
def test_vllm_paged(target, case, buffers, options):
    inputs = build(dataclasses.replace(VLLM, **case), device=target.device)
    buffers = {name: torch.zeros(n).int().to(target.device) for name, n in buffers.items()}
    wrapper = paged(target, inputs.case.layout, backend="auto", use_cuda_graph=False, **buffers)
    vllm_plan(wrapper, inputs, **options)
    wanted = {**VLLM_PLAN, **options}
    window, cap, scale = wanted["window_left"], wanted["logits_soft_cap"] or 0.0, wanted["sm_scale"]
    read = (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale, wrapper._causal)
    assert read == (window, cap, scale, True)
    out = poison(inputs.q.shape, VLLM.dtype, target.device)
    scales = {"q_scale": 1.0, **NO_SCALES, "kv_cache_sf": None}
    _, lse = wrapper.run(inputs.q, (inputs.k, inputs.v), **scales, out=out, return_lse=True)
    check(inputs, out, lse, Pipeline(scale, True, window, cap) if cap else None)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_context_and_new_tokens(target, engine):
    """merge_state() joins the paged context, without a mask, and new tokens, ragged and causal:
    vLLM's context parallelism by run(), SGLang's extend by forward()."""
    old_lens, new_lens = (50, 1, 130), (20, 7, 40)
    page_size = 16 if engine == "vLLM" else 1
    case = Case("context", new_lens, old_lens, *HEADS, page_size=page_size)
    old = build(case, device=target.device)
    new = build(Case("new", new_lens, new_lens, *HEADS, **CAUSAL), device=target.device)
    new.q = old.q
    context, fresh = paged(target, backend=target.backend), ragged(target)
    options = {"sm_scale": 0.1, "window_left": -1}
    if engine == "vLLM":
        vllm_plan(context, old, causal=False, o_data_type=None, sm_scale=0.1)
        fresh.plan(
            qo_indptr=new.qo_indptr, kv_indptr=new.kv_indptr, num_qo_heads=8, num_kv_heads=2,
            head_dim_qk=128, head_dim_vo=128, causal=True, logits_soft_cap=None,
            q_data_type=VLLM.dtype, **options,
        )  # fmt: skip
        one = context.run(old.q, (old.k, old.v), **NO_SCALES, return_lse=True)
        out_n, lse_n = fresh.run(new.q, new.k, new.v, return_lse=True)
        # The engine keeps natural logarithms as [heads, tokens].
        other = (out_n, (lse_n * math.log(2)).t().contiguous().t() / math.log(2))
    else:
        sglang_begin(context, old)
        fresh.begin_forward(new.qo_indptr, new.qo_indptr, *HEADS, q_data_type=VLLM.dtype)
        options["logits_soft_cap"] = 0.0
        cache = (old.k, old.v)
        one = context.forward_return_lse(old.q, cache, causal=False, **options, **NO_SCALES)
        other = fresh.forward_return_lse(new.q, new.k, new.v, causal=True, **options)
    out, lse = flashinfer.merge_state(*one, *other)

    kv_lens = tuple(a + b for a, b in zip(old_lens, new_lens, strict=True))
    whole = build(Case("whole", new_lens, kv_lens, *HEADS, **CAUSAL), device=target.device)
    whole.q = old.q
    for name in ("k", "v"):
        rows = [getattr(part.request(i), name) for i in range(3) for part in (old, new)]
        getattr(whole, name)[: sum(kv_lens)] = torch.cat(rows)
    expected = reference(whole, pipeline=Pipeline(0.1, True))
    # The partial outputs were rounded once each before the merge.
    expected.spread = expected.spread + expected.out.abs()
    compare(out, lse, expected).check()


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("index_device", ["host", "device"])
def test_mla_prefill(target, engine, index_device):
    where = target.device if index_device == "device" else "cpu"
    inputs = build(MLA, device=target.device, index_device=where)
    wrapper = ragged(target)
    arrays = {"qo_indptr": inputs.qo_indptr, "kv_indptr": inputs.kv_indptr}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim_qk": 192, "head_dim_vo": 128}
    options = {"sm_scale": MLA.scale, "logits_soft_cap": 0.0, "causal": True}
    if engine == "SGLang":
        wrapper.begin_forward(**arrays, **sizes, q_data_type=MLA.dtype, causal=True)
        check(inputs, wrapper.forward(inputs.q, inputs.k, inputs.v, **options))
        return
    types = {"q_data_type": MLA.dtype, "o_data_type": MLA.dtype}
    options |= {"logits_soft_cap": None, "window_left": -1}
    wrapper.plan(**arrays, **sizes, **types, **options)
    out = poison((138, 4, 128), MLA.dtype, target.device)
    _, lse = wrapper.run(q=inputs.q, k=inputs.k, v=inputs.v, out=out, return_lse=True)
    check(inputs, out, lse)


def test_vllm_sinks(target):
    case = dataclasses.replace(CHUNKS, sinks=Sinks.ORDINARY, window_left=31)
    inputs = build(case, device=target.device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        runner.workspace(target.device), "NHD", backend="auto", **DTYPES, head_dim_qk=128,
        head_dim_vo=128, window_left=31,
    )  # fmt: skip
    vllm_plan(wrapper, inputs, window_left=31)
    out = poison(inputs.q.shape, case.dtype, target.device)
    scale = case.scale * 1.0 * 0.5
    wrapper.run(inputs.q, (inputs.k, inputs.v), inputs.sinks, scale, v_scale=2.0, out=out)
    check(inputs, out, None, Pipeline(scale, True, 31, out_scale=2.0, sinks=inputs.sinks))


# SGLang


def with_spare(inputs) -> tuple:
    """Returns a page table of 256 indices more than are used."""
    spare = torch.zeros(256, dtype=torch.int32, device=inputs.indices.device)
    return inputs.kv_indptr, torch.cat([inputs.indices, spare]), inputs.last_page_len


def sglang_begin(wrapper, inputs, **changes) -> None:
    items = dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"))
    options = {**DTYPES, "custom_mask": None, "non_blocking": True, "fixed_split_size": None}
    options |= {**items, "token_pos_in_items_len": 0, **changes}
    wrapper.begin_forward(inputs.qo_indptr, *with_spare(inputs), *HEADS, 1, **options)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
@pytest.mark.parametrize("buffer", ["exact", "longer"])
def test_sglang_tree_mask(target, dtype, buffer):
    """An EAGLE step's mask is flat, of any dtype, and the beginning of a preallocated buffer."""
    case = Case("tree", (5, 5, 5), (60, 33, 200), *HEADS, **SLOTS, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    wrapper = paged(target, backend=target.backend)
    mask = inputs.custom_mask.to(dtype)
    if buffer == "longer":
        mask = torch.cat([mask, torch.ones(4096, dtype=dtype, device=target.device)])
    sglang_begin(wrapper, inputs, custom_mask=mask)
    options = {"sm_scale": case.scale, "window_left": -1, "logits_soft_cap": 0.0}
    out = wrapper.forward(inputs.q, (inputs.k, inputs.v), causal=False, **options)
    check(inputs, out)
    # The next step has no mask.
    sglang_begin(wrapper, inputs)
    out = wrapper.forward(inputs.q, (inputs.k, inputs.v), causal=True, sm_scale=case.scale)
    causal = dataclasses.replace(case, mask=MaskKind.CAUSAL)
    check(dataclasses.replace(inputs, case=causal, masks=None, custom_mask=None), out)
