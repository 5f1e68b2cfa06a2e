"""trtllm_batch_context_with_kv_cache and the calls like it against the float64 oracle."""

from __future__ import annotations

import copy
import dataclasses
import math

import preflash
import pytest
import torch
from preflash._fmha.lengths import FmhaLengths
from preflash.testing import Case, MaskKind, Sinks, build, comparison, reference, runner


@dataclasses.dataclass
class Target:
    """Device and backend, with the attributes of the fixture `target`."""

    device: str
    backend: str


CONTEXT = Case(
    "context",
    (9, 1, 33),
    (30, 77, 40),
    4,
    2,
    64,
    dtype=torch.float16,
    mask=MaskKind.CAUSAL,
    page_size=16,
    layout="HND",
)
DECODE = dataclasses.replace(CONTEXT, name="decode", qo_lens=(1, 1, 1))
SHORT = dataclasses.replace(CONTEXT, name="short", qo_lens=(3, 3, 3))


def table_of(inputs) -> torch.Tensor:
    """[batch_size, pages + 1], int32; what no request uses is no page."""
    indptr, indices = inputs.kv_indptr.cpu(), inputs.indices.cpu()
    most = int(indptr.diff().max())
    table = torch.full((inputs.case.batch_size, most + 1), 10**6, dtype=torch.int32)
    for i in range(inputs.case.batch_size):
        own = indices[indptr[i] : indptr[i + 1]]
        table[i, : own.numel()] = own
    return table


def arrays(inputs, device) -> dict[str, torch.Tensor]:
    """Block tables and lengths on a device; a dict of given ones is returned as it is."""
    if isinstance(device, dict):
        return device
    kv_lens = torch.tensor(inputs.case.kv_lens, dtype=torch.int32)
    return {"block_tables": table_of(inputs).to(device), "seq_lens": kv_lens.to(device)}


def rows_of(inputs, on) -> torch.Tensor:
    return inputs.qo_indptr if isinstance(on, dict) else inputs.qo_indptr.to(on)


def context(inputs, target, on="cpu", **options):
    case = inputs.case
    usual = {
        "max_q_len": max(case.qo_lens),
        "max_kv_len": max(case.kv_lens) + 5,
        "bmm1_scale": case.scale,
        "bmm2_scale": 1.0,
        "batch_size": case.batch_size,
        "cum_seq_lens_q": rows_of(inputs, on),
        "cum_seq_lens_kv": None,
        "kv_layout": case.layout,
        "causal": case.mask is MaskKind.CAUSAL,
        "window_left": case.window_left,
        "sinks": None if inputs.sinks is None else [inputs.sinks],
        "backend": target.backend,
        **arrays(inputs, on),
    }
    return preflash.trtllm_batch_context_with_kv_cache(
        inputs.q, inputs.cache, runner.workspace(target.device), **{**usual, **options}
    )


def decode(inputs, target, on="cpu", **options):
    case = inputs.case
    usual = {
        "max_seq_len": max(case.kv_lens),
        "bmm1_scale": case.scale,
        "kv_layout": case.layout,
        "window_left": case.window_left,
        "q_len_per_req": max(case.qo_lens),
        "sinks": inputs.sinks,
        "backend": target.backend,
        **arrays(inputs, on),
    }
    return preflash.trtllm_batch_decode_with_kv_cache(
        inputs.q, inputs.cache, runner.workspace(target.device), **{**usual, **options}
    )


def cudnn_decode(inputs, target, on="cpu", **options):
    case = inputs.case
    given = arrays(inputs, on)
    usual = {
        "max_sequence_kv": max(case.kv_lens),
        "actual_seq_lens_kv": given["seq_lens"],
        "block_tables": given["block_tables"],
        "q_len_per_req": max(case.qo_lens),
        "window_left": case.window_left,
        "sinks": inputs.sinks,
        "backend": target.backend,
    }
    cache = inputs.cache
    k, v = cache if isinstance(cache, tuple) else (cache[:, 0], cache[:, 1])
    buffer = runner.workspace(target.device)
    return preflash.cudnn_batch_decode_with_kv_cache(
        inputs.q, k, v, case.scale, buffer, **{**usual, **options}
    )


def places(target) -> list[str]:
    """Devices that lengths may be on."""
    return ["cpu"] if target.device == "cpu" else ["cpu", target.device]


def check(inputs, result) -> None:
    runner.compare(inputs, *(result if isinstance(result, tuple) else (result, None))).check()


OPTIONS = {
    "usual": {},
    "NHD": {"layout": "NHD", "page_size": 8},
    "window": {"window_left": 7},
    "sinks": {"sinks": Sinks.MIXED},
    "bfloat16": {"dtype": torch.bfloat16},
    "wide q": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
}
CALLS = {
    "context": (context, CONTEXT),
    "decode": (decode, DECODE),
    "decode of three": (decode, SHORT),
    "cudnn": (cudnn_decode, DECODE),
    "cudnn of three": (cudnn_decode, SHORT),
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls(target, call, changes):
    attend, case = call
    case = dataclasses.replace(case, **changes)
    if attend is cudnn_decode and case.layout == "NHD":
        case = dataclasses.replace(case, layout="HND")
    inputs = build(case, device=target.device)
    for place in places(target):
        check(inputs, attend(inputs, target, place, return_lse=True))
        out = comparison.poison(inputs.q.shape, case.dtype, inputs.q.device)
        lse = comparison.poison(inputs.q.shape[:2], torch.float32, inputs.q.device)
        assert attend(inputs, target, place, out=out, lse=lse) is out
        check(inputs, (out, lse))


def test_context_without_a_mask(target):
    case = dataclasses.replace(CONTEXT, mask=MaskKind.NONE)
    inputs = build(case, device=target.device)
    for place in places(target):
        check(inputs, context(inputs, target, place, return_lse=True))
    with pytest.raises(NotImplementedError, match="window_left=3"):
        context(inputs, target, window_left=3)


def test_decode_of_other_numbers_of_queries(target):
    inputs = build(CONTEXT, device=target.device)
    for place in places(target):
        rows = {"max_q_len": 33, "cum_seq_lens_q": inputs.qo_indptr.to(place)}
        result = decode(inputs, target, place, **rows, q_len_per_req=None, return_lse=True)
        check(inputs, result)
    with pytest.raises(ValueError, match="max_q_len=None"):
        decode(inputs, target, cum_seq_lens_q=inputs.qo_indptr, q_len_per_req=None)


def test_scales(target):
    inputs = build(DECODE, device=target.device)
    expected = decode(inputs, target, bmm2_scale=0.5)
    log2 = torch.tensor([DECODE.scale * math.log2(math.e)], dtype=torch.float64)
    same = decode(inputs, target, bmm1_scale=3.0, bmm1_scale_log2=log2, bmm2_scale=0.5)
    torch.testing.assert_close(same, expected)
    # Callers divide bmm2_scale by o_scale, and multiply the output by it.
    wanted = decode(inputs, target, bmm2_scale=0.5, out_dtype=torch.float8_e4m3fn)
    for eight in (torch.float8_e4m3fn, "fp8"):
        out = decode(inputs, target, bmm2_scale=0.5, o_scale=2.0, out_dtype=eight)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    back = (out.float() * 2.0).to(DECODE.dtype)
    # Half a step of e4m3: 2^-4 of a number, 2^-10 below 2^-6, times o_scale; and that of 16 bits.
    torch.testing.assert_close(back, decode(inputs, target), rtol=0.065, atol=0.0022)
    with pytest.raises(ValueError, match="o_scale=2"):
        decode(inputs, target, o_scale=2.0)


def test_one_cache_for_keys_and_values(target):
    inputs = build(DECODE, device=target.device)
    cache = inputs.cache if isinstance(inputs.cache, tuple) else inputs.cache.unbind(1)
    one = decode(dataclasses.replace(inputs, cache=cache[0][:, None]), target)
    two = decode(dataclasses.replace(inputs, cache=(cache[0], cache[0])), target)
    assert torch.equal(one, two)
    with pytest.raises(TypeError, match="kv_cache must be a tensor or a tuple of two"):
        decode(dataclasses.replace(inputs, cache=(*cache, cache[0])), target)


def test_shapes_of_lengths(target):
    inputs = build(DECODE, device=target.device)
    kv_lens = torch.tensor(DECODE.kv_lens)
    expected = cudnn_decode(inputs, target)
    for lengths in (kv_lens, kv_lens.int()[:, None, None, None]):
        assert torch.equal(cudnn_decode(inputs, target, actual_seq_lens_kv=lengths), expected)
    unsigned = kv_lens.to(torch.uint32)
    assert torch.equal(decode(inputs, target, seq_lens=unsigned), expected)
    elements = torch.arange(4) * 4 * 64
    offsets = {"batch_offsets_q": elements, "batch_offsets_o": elements[:3]}
    assert torch.equal(cudnn_decode(inputs, target, **offsets), expected)
    with pytest.raises(ValueError, match="batch_offsets_o: requests must"):
        cudnn_decode(inputs, target, batch_offsets_o=elements * 2)
    with pytest.raises(TypeError, match=r"batch_offsets_q is torch\.float32"):
        cudnn_decode(inputs, target, batch_offsets_q=elements.float())


def test_offsets_follow_strides(target):
    inputs = build(DECODE, device=target.device)
    expected = cudnn_decode(inputs, target)
    elements = torch.arange(4) * 4 * 64
    wide = torch.empty(3, 4, 128, dtype=DECODE.dtype, device=target.device)[..., :64]
    cudnn_decode(inputs, target, out=wide, batch_offsets_o=elements * 2)
    assert torch.equal(wide, expected)
    with pytest.raises(ValueError, match="512 elements from row to row"):
        cudnn_decode(inputs, target, out=wide, batch_offsets_o=elements)
    # The stride of one row says nothing.
    one = build(dataclasses.replace(DECODE, qo_lens=(1,), kv_lens=(30,)), device=target.device)
    expected = cudnn_decode(one, target)
    one.q = one.q.as_strided(one.q.shape, (10**4, 64, 1))
    assert torch.equal(cudnn_decode(one, target, batch_offsets_q=elements[:2]), expected)


def test_errors_name_the_arguments_of_the_call(target):
    inputs = build(DECODE, device=target.device)
    k, v = inputs.cache if isinstance(inputs.cache, tuple) else inputs.cache.unbind(1)
    with pytest.raises(TypeError, match=r"^k_cache must be a torch"):
        cudnn_decode(dataclasses.replace(inputs, cache=(None, v)), target)
    with pytest.raises(ValueError, match=r"^q, k_cache, v_cache: k_cache has head_dim 32"):
        cudnn_decode(dataclasses.replace(inputs, cache=(k[..., :32], v)), target)


def test_lengths_beyond_int32(target):
    inputs = build(DECODE, device=target.device)
    lengths = torch.tensor(DECODE.kv_lens)
    for beyond in (2**32, -(2**32)):
        with pytest.raises(ValueError, match=r"max_seq_len|negative"):
            decode(inputs, target, seq_lens=lengths + beyond)


def test_masks_of_queries_that_are_causal(target):
    inputs = build(SHORT, device=target.device)
    expected = decode(inputs, target)
    causal = torch.tensor([1, 3, 7]).repeat(3, 1)  # a word of 32 bits each
    words = causal.to(torch.int32)[..., None].view(torch.uint16)
    for mask in (words, words.view(torch.uint32), words.to(target.device)):
        assert torch.equal(decode(inputs, target, mask=mask), expected)
    for mask in (words[:2], words[:, :2], words[0], words.float()):
        with pytest.raises(ValueError, match=r"mask is .*\[batch_size, q_len_per_req, words\]"):
            decode(inputs, target, mask=mask)
    with pytest.raises(ValueError, match="mask has 0 bits for each query"):
        decode(inputs, target, mask=words[..., :0])
    rows = {"max_q_len": 3, "cum_seq_lens_q": inputs.qo_indptr}
    with pytest.raises(NotImplementedError, match="mask with cum_seq_lens_q"):
        decode(inputs, target, **rows, q_len_per_req=None, mask=words)


DRAFTS = dataclasses.replace(
    CONTEXT, name="drafts", qo_lens=(4, 4, 4), kv_lens=(30, 77, 2), mask=MaskKind.CUSTOM
)
FULL = torch.ones(3, 4, 4, dtype=torch.bool)
TREES = {
    "full": FULL,
    "a tree with its root": FULL.tril() & ~torch.eye(4, dtype=torch.bool).roll(-1, 1),
    "no draft": ~FULL,
    "random": torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(5)) < 0.5,
}


def with_tree(inputs, tree: torch.Tensor):
    """The inputs with the mask of a tree, and the argument that says it."""
    masks = []
    for kept, kv_len in zip(tree, inputs.case.kv_lens, strict=True):
        mask = torch.ones(4, kv_len, dtype=torch.bool)
        mask[:, max(kv_len - 4, 0) :] = kept[:, max(4 - kv_len, 0) :]
        masks.append(mask.to(inputs.q.device))
    words = (tree.to(torch.int32) << torch.arange(4)).sum(-1, dtype=torch.int32)[..., None]
    return dataclasses.replace(inputs, masks=masks), words.view(torch.uint16)


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_draft_trees(target, tree, changes):
    case = dataclasses.replace(DRAFTS, **changes)
    inputs, words = with_tree(build(case, device=target.device), tree)
    for place in places(target):
        options = {"mask": words.to(place), "return_lse": True}
        check(inputs, decode(inputs, target, place, **options))
        out = comparison.poison(inputs.q.shape, case.dtype, inputs.q.device)
        assert decode(inputs, target, place, mask=words, out=out) is out
        check(inputs, out)


def test_draft_trees_are_exact_means(target):
    """Every mask of two queries: with equal logits an output counts the keys that are kept."""
    case = dataclasses.replace(DRAFTS, qo_lens=(2,) * 16, kv_lens=(2, 3) * 8, num_kv_heads=4)
    inputs = build(case, device=target.device)
    k, v = inputs.cache
    for tensor in (inputs.q, k, v):
        tensor.zero_()
    table = table_of(inputs)
    bits = torch.arange(16)[:, None] >> torch.arange(4) & 1
    for page in table[:, 0].tolist():  # v [heads, page_size, head_dim] is one-hot by key
        v[page].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    words = (bits.view(16, 2, 2) << torch.arange(2)).sum(-1, dtype=torch.int32)[..., None]
    out = decode(inputs, target, mask=words.view(torch.uint16)).view(16, 2, 4, 64).cpu()
    for request, kv_len in enumerate(case.kv_lens):
        kept = torch.ones(2, kv_len)
        kept[:, kv_len - 2 :] = bits[request].view(2, 2)
        mean = kept / kept.sum(-1, keepdim=True).clamp(min=1.0)
        expected = torch.zeros(2, 4, 64)
        expected[..., :kv_len] = mean[:, None]
        assert torch.equal(out[request], expected.to(case.dtype))


REFUSED = {
    "mask is": (decode, ValueError, {"mask": torch.ones(1)}),
    "o_sf_scale": (decode, NotImplementedError, {"o_sf_scale": 1.0}),
    "cp_world": (decode, NotImplementedError, {"cp_world": 2}),
    "out_dtype": (context, NotImplementedError, {"out_dtype": "nvfp4"}),
    "uses_shared_paged_kv_idx": (context, ValueError, {"uses_shared_paged_kv_idx": False}),
    "use_fp16_softmax": (context, NotImplementedError, {"use_fp16_softmax": True}),
    "kv_cache_sf": (context, NotImplementedError, {"kv_cache_sf": torch.ones(1)}),
    "kv_layout": (context, ValueError, {"kv_layout": "other"}),
    "cum_seq_lens_kv": (context, TypeError, {"cum_seq_lens_kv": "none"}),
    "max_seq_len": (decode, ValueError, {"max_seq_len": 3}),
    "query has 3 rows": (decode, ValueError, {"q_len_per_req": 2}),
    "actual_seq_lens_kv": (cudnn_decode, TypeError, {"actual_seq_lens_kv": None}),
    "max_sequence_kv": (cudnn_decode, ValueError, {"max_sequence_kv": 3}),
    "batch_offsets_k": (cudnn_decode, NotImplementedError, {"batch_offsets_k": torch.ones(1)}),
    "trtllm-gen": (decode, ValueError, {"backend": "trtllm-gen"}),
}


@pytest.mark.parametrize(("name", "given"), REFUSED.items(), ids=REFUSED)
def test_refusals(target, name, given):
    attend, error, options = given
    inputs = build(CONTEXT if attend is context else DECODE, device=target.device)
    out = comparison.poison(inputs.q.shape, inputs.q.dtype, inputs.q.device)
    before = out.clone()
    with pytest.raises(error, match=name):
        attend(inputs, target, out=out, **options)
    assert torch.equal(out.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("first", [0, 1], ids=["k first", "v first"])
@pytest.mark.parametrize("call", [context, decode])
def test_tables_of_k_and_of_v(target, call, first):
    """K and V pages alternate in one pool, as in TensorRT-LLM."""
    inputs = build(CONTEXT if call is context else DECODE, device=target.device)
    pools = inputs.cache if isinstance(inputs.cache, tuple) else inputs.cache.unbind(1)
    pool = torch.stack(pools if first == 0 else pools[::-1], dim=1).flatten(0, 1)
    interleaved = dataclasses.replace(inputs, cache=(pool, pool))
    table = table_of(inputs)
    tables = torch.stack([2 * table + first, 2 * table + 1 - first], dim=1)
    tables[tables > 10**6] = 7 - first  # what no request uses
    for place in places(target):
        given = {"uses_shared_paged_kv_idx": False, "block_tables": tables.to(place)}
        check(inputs, call(interleaved, target, place, return_lse=True, **given))
    tables[0, 1, 0] += 2
    with pytest.raises(NotImplementedError, match="takes several values"):
        call(interleaved, target, uses_shared_paged_kv_idx=False, block_tables=tables)
    with pytest.raises(ValueError, match=r"must be \[batch_size, pages\] with"):
        call(inputs, target, block_tables=tables)


VARLEN = dataclasses.replace(CONTEXT, name="varlen", page_size=0, layout="NHD")


def varlen(inputs, target, on="cpu", **options):
    case = inputs.case
    usual = {
        "causal": case.mask is MaskKind.CAUSAL,
        "sm_scale": case.scale,
        "backend": target.backend,
    }
    return preflash.fmha_varlen(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.qo_indptr.to(on),
        inputs.kv_indptr.to(on),
        **{**usual, **options},
    )


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.NONE])
def test_fmha_varlen(target, mask):
    inputs = build(dataclasses.replace(VARLEN, mask=mask), device=target.device)
    for place in places(target):
        for longest in (None, 33):
            out, lse = varlen(inputs, target, place, max_qo_len=longest, return_lse=True)
            runner.compare(inputs, out, lse).check()
        plain, none = varlen(inputs, target, place)
        assert none is None
        runner.compare(inputs, plain, None).check()
    scaled, _ = varlen(
        inputs, target, sm_scale=inputs.case.scale / 6.0, q_scale=2.0, k_scale=3.0, v_scale=1.0
    )
    expected = reference(inputs)
    comparison.compare(scaled, None, expected, logit_rounding=48.0).check()


def test_fmha_varlen_refuses(target):
    inputs = build(VARLEN, device=target.device)
    with pytest.raises(NotImplementedError, match="plan_info"):
        varlen(inputs, target, plan_info=[inputs.q])
    with pytest.raises(NotImplementedError, match="o_scale"):
        varlen(inputs, target, o_scale=2.0)
    with pytest.raises(ValueError, match="max_qo_len=3"):
        varlen(inputs, target, max_qo_len=3)
    with pytest.raises(ValueError, match="kv_segment_offsets"):
        preflash.fmha_varlen(inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr[:-1])


# Lengths on a GPU.


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_plans_for_the_longest_requests(call, changes, monkeypatch):
    """Takes, on the CPU, the path for lengths on a GPU that the host does not read."""
    monkeypatch.setattr(FmhaLengths, "on_host", property(lambda self: False))
    test_calls(Target("cpu", "cpu"), call, changes)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_graph_replays_other_lengths(call, backend):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    attend, case = call
    target = Target("cuda", backend)
    inputs = build(case, device="cuda")
    kv_lens = tuple(reversed(case.kv_lens))
    other = build(dataclasses.replace(case, kv_lens=kv_lens), device="cuda")
    kept, expected = arrays(inputs, "cuda"), copy.copy(inputs)
    inputs.qo_indptr = inputs.qo_indptr.to("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend(inputs, target, kept, return_lse=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse = attend(inputs, target, kept, return_lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(expected, (out, lse))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, lse = attend(inputs, target, kept, return_lse=True)
        graph.replay()
        check(expected, (out, lse))
        for name, value in arrays(other, "cuda").items():
            kept[name].copy_(value)
        inputs.q.copy_(other.q)
        for mine, theirs in zip(inputs.cache, other.cache, strict=True):
            mine.copy_(theirs)
        graph.replay()
        check(other, (out, lse))
