"""Mistakes that users make first: the error names the value, the rule and the way out.

Every row is one call: the arguments that make the mistake, the type of the error, and the words
that its message must hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner

PAGED = Case("paged", (33, 5), (40, 90), 8, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = Case("ragged", (33, 5), (40, 90), 8, 2, 64, mask=MaskKind.CAUSAL)
SINGLE = Case("single", (9,), (30,), 8, 2, 64, mask=MaskKind.CAUSAL)
DECODE = Case("decode", (1, 1), (40, 90), 8, 2, 64, page_size=16)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8)


def swapped(x: torch.Tensor) -> torch.Tensor:
    """The other kv_layout: tokens and heads exchanged."""
    return x.transpose(-3, -2).contiguous()


def table(**spoilt: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The index arrays of paged calls, of which `spoilt` converts some."""
    inputs = build(PAGED)
    arrays = {
        "qo_indptr": inputs.qo_indptr,
        "kv_indptr": inputs.kv_indptr,
        "kv_indices": inputs.indices,
        "last_page_len": inputs.last_page_len,
    }
    return [spoilt.get(name, lambda x: x)(value) for name, value in arrays.items()]


# Calls. Each takes what is wrong and makes the rest.


def single(**wrong: Any) -> object:
    inputs = build(SINGLE)
    tensors = {"q": inputs.q, "k": inputs.k[:30], "v": inputs.v[:30], **wrong}
    return preflash.single_prefill_with_kv_cache(**tensors)


def single_at(*more: Any) -> object:
    """By position behind q, k and v."""
    inputs = build(SINGLE)
    return preflash.single_prefill_with_kv_cache(inputs.q, inputs.k[:30], inputs.v[:30], *more)


def single_other_layout(kv_layout: str) -> object:
    inputs = build(SINGLE)
    k, v = inputs.k[:30], inputs.v[:30]
    if kv_layout == "NHD":
        k, v = swapped(k), swapped(v)
    return single(k=k, v=v, kv_layout=kv_layout)


def single_decode(**wrong: Any) -> object:
    inputs = build(SINGLE)
    tensors = {"q": inputs.q[0], "k": inputs.k[:30], "v": inputs.v[:30], **wrong}
    return preflash.single_decode_with_kv_cache(**tensors)


def ragged_run(spoil: Callable[[Tensors], Tensors]) -> object:
    inputs = build(RAGGED)
    wrapper = runner.make_wrapper(RAGGED, backend="cpu")
    runner.plan(wrapper, inputs)
    return wrapper.run(*spoil((inputs.q, inputs.k, inputs.v)))


def paged_run(spoil: Callable[[Tensors], tuple]) -> object:
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    return wrapper.run(*spoil((inputs.q, inputs.k, inputs.v)))


def decode_run(spoil: Callable[[Tensors], tuple]) -> object:
    inputs = build(PAGED)
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*table()[1:], 8, 2, 64, 16, q_data_type=inputs.q.dtype)
    return wrapper.run(*spoil((inputs.q[:2], inputs.k, inputs.v)))


def sink_run(spoil: Callable[[Tensors], tuple]) -> object:
    inputs = build(PAGED)
    wrapper = preflash.BatchAttentionWithAttentionSinkWrapper(
        workspace(), q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype, head_dim_qk=64,
        head_dim_vo=64,
    )  # fmt: skip
    return wrapper.run(*spoil((inputs.q, inputs.k, inputs.v)))


def jit_sink_run(spoil: Callable[[Tensors], tuple]) -> object:
    """A wrapper with jit_args of FlashInfer's "AttentionSink"."""
    inputs = build(PAGED)
    dtypes = (inputs.q.dtype, inputs.k.dtype, inputs.q.dtype, torch.int32)
    names = (["sink"], ["float"], ["sm_scale"], ["double"])
    jit_args = ("uri", *dtypes, 64, 64, *names, "AttentionSink", "")
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace(), jit_args=jit_args)
    return wrapper.run(*spoil((inputs.q, inputs.k, inputs.v)))


def ranges_run(spoil: Callable[[Tensors], tuple]) -> object:
    inputs = build(PAGED)
    make = preflash.BatchPrefillWithCausalBidirectionalRangesWrapper
    return make(workspace()).run(*spoil((inputs.q, inputs.k, inputs.v)))


def batch_attention_run(spoil: Callable[[Tensors], tuple]) -> object:
    inputs = build(PAGED)
    wrapper = preflash.BatchAttention(device="cpu")
    qo_indptr, kv_indptr, kv_indices, _ = table()
    lengths = torch.tensor(PAGED.kv_lens)
    wrapper.plan(
        qo_indptr, kv_indptr, kv_indices, lengths, 8, 2, 64, 64, 16, q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )  # fmt: skip
    return wrapper.run(*spoil((inputs.q, inputs.k, inputs.v)))


def paged_plan(spoilt: str, convert: Callable = torch.Tensor.long, **options: Any) -> object:
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="cpu")
    return wrapper.plan(*table(**{spoilt: convert}), 8, 2, 64, 16, **options)


def decode_plan(spoilt: str) -> object:
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(workspace())
    return wrapper.plan(*table(**{spoilt: torch.Tensor.long})[1:], 8, 2, 64, 16)


def decode_size(spoilt: str) -> object:
    wrapper = preflash.BatchDecodeWithPagedKVCacheWrapper(workspace())
    return wrapper.workspace_size(*table(**{spoilt: torch.Tensor.long})[1:], 8, 2, 64, 16)


def ragged_plan(spoilt: str) -> object:
    arrays = {name: torch.tensor([0, 3], dtype=torch.int32) for name in ("qo_indptr", "kv_indptr")}
    arrays[spoilt] = arrays[spoilt].long()
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cpu")
    return wrapper.plan(*arrays.values(), 8, 2, 64)


def batch_attention_plan(spoilt: str) -> object:
    wrapper = preflash.BatchAttention(device="cpu")
    *arrays, _ = table(**{spoilt: torch.Tensor.long})
    return wrapper.plan(*arrays, torch.tensor(PAGED.kv_lens), 8, 2, 64, 64, 16)


def block_tables() -> object:
    rows = torch.zeros(2, 6, dtype=torch.int64)
    return paged_plan("qo_indptr", torch.Tensor.int, block_tables=rows)


def graph_buffer(spoilt: str) -> object:
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")
    buffers = dict(zip((*names, "paged_kv_last_page_len_buf"), table(), strict=True))
    buffers[spoilt] = buffers[spoilt].long()
    return preflash.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)


def construct(name: str, backend: str) -> object:
    wrapper = getattr(preflash, name)
    if name == "BatchAttention":
        return wrapper(device="cpu", backend=backend)
    return wrapper(workspace(), backend=backend)


def planned_on_cpu(backend: str) -> object:
    wrapper = preflash.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
    return wrapper.plan(*table(), 8, 2, 64, 16)


class Row(NamedTuple):
    id: str
    call: Callable[..., object]
    arguments: tuple
    error: type[Exception]
    words: tuple[str, ...]


FOREIGN = ("backend='trtllm-gen'", "must be one of auto, fa3, fa2, cpu", "pass backend='auto'")
FOREIGN += ("PREFLASH_BACKEND=auto in the environment",)
PAIR = ("run(q, k, v)", "(12, 16, 2, 64)", "pass run(q, (k, v))")
ON_CPU = ("computes on CUDA tensors", "on cpu", "pass backend='auto' or 'cpu', or CUDA tensors")
BATCHED = (".flatten(0, 1)", "indptr", "BatchPrefillWithRaggedKVCacheWrapper")
ONE_BY_ONE = "[num_qo_heads, head_dim]"

RUNS_OF_PAGES = (paged_run, decode_run, sink_run, jit_sink_run, ranges_run, batch_attention_run)

ROWS = [
    *(
        Row(f"trtllm-gen {name}", construct, (name, "trtllm-gen"), ValueError, FOREIGN)
        for name in (
            "BatchPrefillWithPagedKVCacheWrapper",
            "BatchPrefillWithRaggedKVCacheWrapper",
            "BatchDecodeWithPagedKVCacheWrapper",
            "BatchAttention",
        )
    ),
    *(
        Row(f"run(q, k, v) {call.__name__}", call, (lambda t: t,), TypeError, PAIR)
        for call in RUNS_OF_PAGES
    ),
    Row(
        "HND in a single call",
        single_other_layout,
        ("NHD",),
        ValueError,
        ("k has shape (2, 30, 64)", "num_kv_heads = 30", "pass kv_layout='HND'"),
    ),
    Row(
        "NHD in a single call with HND",
        single_other_layout,
        ("HND",),
        ValueError,
        ("k has shape (30, 2, 64)", "num_kv_heads = 30", "pass kv_layout='NHD'"),
    ),
    Row(
        "HND in a ragged run",
        ragged_run,
        (lambda t: (t[0], swapped(t[1]), swapped(t[2])),),
        ValueError,
        ("k has shape (2, 135, 64)", "kv_layout='HND'"),
    ),
    Row(
        "HND in a paged run",
        paged_run,
        (lambda t: (t[0], (swapped(t[1]), swapped(t[2]))),),
        ValueError,
        ("k_cache has shape (12, 2, 16, 64)", "kv_layout='HND'"),
    ),
    Row(
        "single(q, k, v, True)",
        single_at,
        (True,),
        TypeError,
        ("custom_mask=True", "must be a torch.Tensor", "pass causal=True by name"),
    ),
    Row(
        "4-D single",
        lambda: single(**dict.fromkeys("qkv", torch.zeros(2, 3, 8, 64))),
        (),
        ValueError,
        ("q has shape (2, 3, 8, 64)", "q.flatten(0, 1)", *BATCHED),
    ),
    Row(
        "4-D single decode",
        lambda: single_decode(q=torch.zeros(2, 1, 8, 64)),
        (),
        ValueError,
        ("q has shape (2, 1, 8, 64)", ONE_BY_ONE, "BatchDecodeWithPagedKVCacheWrapper"),
    ),
    Row(
        "4-D q, ragged",
        ragged_run,
        (lambda t: (t[0][None], *t[1:]),),
        ValueError,
        ("q has shape (1, 38, 8, 64)", *BATCHED),
    ),
    Row(
        "4-D k, ragged",
        ragged_run,
        (lambda t: (t[0], t[1][None], t[2][None]),),
        ValueError,
        ("k has shape (1, 135, 2, 64)", "k.flatten(0, 1)", *BATCHED),
    ),
    Row(
        "4-D q, paged",
        paged_run,
        (lambda t: (t[0][None], t[1:]),),
        ValueError,
        ("q has shape (1, 38, 8, 64)", *BATCHED),
    ),
    *(
        Row(f"int64 {call.__name__} {spoilt}", call, (spoilt,), TypeError, (f"pass {name}.int()",))
        for call, names in {
            paged_plan: {
                "qo_indptr": "qo_indptr",
                "kv_indptr": "paged_kv_indptr",
                "kv_indices": "paged_kv_indices",
                "last_page_len": "paged_kv_last_page_len",
            },
            decode_plan: {
                "kv_indptr": "indptr",
                "kv_indices": "indices",
                "last_page_len": "last_page_len",
            },
            decode_size: {"kv_indptr": "indptr"},
            ragged_plan: {"qo_indptr": "qo_indptr", "kv_indptr": "kv_indptr"},
            batch_attention_plan: {
                "qo_indptr": "qo_indptr",
                "kv_indptr": "kv_indptr",
                "kv_indices": "kv_indices",
            },
            graph_buffer: {
                "qo_indptr_buf": "qo_indptr_buf",
                "paged_kv_indices_buf": "paged_kv_indices_buf",
            },
        }.items()
        for spoilt, name in names.items()
    ),
    Row(
        "int64 block_tables",
        block_tables,
        (),
        TypeError,
        ("block_tables is torch.int64", "must be torch.int32", "pass block_tables.int()"),
    ),
    *(
        Row(f"{backend} on the CPU", call, (backend,), ValueError, (f"'{backend}'", *ON_CPU))
        for backend in ("fa2", "fa3")
        for call in (planned_on_cpu, lambda backend: single(backend=backend))
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_value_rule_and_way_out(row):
    with pytest.raises(row.error) as caught:
        row.call(*row.arguments)
    assert type(caught.value) is row.error
    says = str(caught.value)
    assert [word for word in row.words if word not in says] == [], says


@pytest.mark.parametrize("name", ["indptr", "indices"])
def test_names_of_the_paged_wrapper_stay_out_of_decode(name):
    with pytest.raises(TypeError) as caught:
        decode_plan(f"kv_{name}")
    assert "paged_kv" not in str(caught.value)


def test_indices_that_are_no_integers_have_no_int():
    """Rounding would be another page."""
    with pytest.raises(TypeError, match=r"paged_kv_indices is torch.float32; must be torch.int32$"):
        paged_plan("kv_indices", torch.Tensor.float)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_the_other_layout_is_no_way_out_where_neither_fits(kv_layout):
    """7 tokens of 3 heads: 8 query heads divide by neither."""
    shape = (7, 3, 64) if kv_layout == "NHD" else (3, 7, 64)
    with pytest.raises(ValueError, match="8 is not a multiple of num_kv_heads = 3") as caught:
        single(k=torch.zeros(shape), v=torch.zeros(shape), q=torch.zeros(9, 8, 64),
               kv_layout=kv_layout)  # fmt: skip
    assert "pass kv_layout" not in str(caught.value)


def test_way_out_of_the_layout_computes_the_same():
    inputs = build(SINGLE)
    k, v = inputs.k[:30].contiguous(), inputs.v[:30].contiguous()
    out = preflash.single_prefill_with_kv_cache(inputs.q, k, v, causal=True)
    other = preflash.single_prefill_with_kv_cache(
        inputs.q, swapped(k), swapped(v), causal=True, kv_layout="HND"
    )
    assert torch.equal(out, other)


def test_way_out_of_a_batch_computes_the_same():
    """flatten(0, 1) and an indptr, of [batch, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 9, 8, 64), (2, 30, 2, 64), (2, 30, 2, 64))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cpu")
    indptr = [torch.arange(3, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    wrapper.plan(*indptr, 8, 2, 64, q_data_type=q.dtype)
    out = wrapper.run(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, (2, 9))
    for i in range(2):
        alone = preflash.single_prefill_with_kv_cache(q[i], k[i], v[i], backend="cpu")
        torch.testing.assert_close(out[i], alone)


def test_batch_attention_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ({}, {"device": "cuda:1"}, {"device": torch.device("cuda")}):
        with pytest.raises(ValueError, match=r"^device='cuda.*no CUDA device.*device='cpu'"):
            preflash.BatchAttention(**arguments)
    assert preflash.BatchAttention(device="cpu").device.type == "cpu"


# --- torch.func ---------------------------------------------------------------

VMAP = r"inside of torch\.vmap, and transforms of torch\.func are not supported; loop over the"


@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
def test_vmap_of_a_single_call(which):
    inputs = build(SINGLE)
    usual = [inputs.q, inputs.k[:30].contiguous(), inputs.v[:30].contiguous()]

    def attend(one):
        tensors = [*usual]
        tensors[which] = one
        return preflash.single_prefill_with_kv_cache(*tensors)

    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{'qk'[which]} .*{VMAP}"):
            torch.vmap(attend)(torch.stack([usual[which]] * 2))
        attend(usual[which])


def test_vmap_of_other_calls():
    v, s = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    both = [torch.stack([x, x]) for x in (v, s, v, s)]
    with pytest.raises(ValueError, match=f"^v_a .*{VMAP}"):
        torch.vmap(preflash.merge_state)(*both)
    with pytest.raises(ValueError, match=f"^x .*{VMAP}"):
        torch.vmap(preflash.packbits)(torch.ones(2, 16).bool())
    inputs = build(PAGED)
    wrapper = runner.make_wrapper(PAGED, backend="cpu")
    runner.plan(wrapper, inputs)
    with pytest.raises(ValueError, match=f"^q .*{VMAP}"):
        torch.vmap(lambda q: wrapper.run(q, (inputs.k, inputs.v)))(torch.stack([inputs.q] * 2))
    expected, expected_lse = runner.run(wrapper, inputs)
    runner.compare(inputs, expected, expected_lse).check()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_derivatives(transform):
    inputs = build(SINGLE)
    k, v = inputs.k[:30].contiguous(), inputs.v[:30].contiguous()

    def loss(q):
        return preflash.single_prefill_with_kv_cache(q, k, v).float().sum()

    words = re.compile("computes no gradients: it is forward only|inside of torch.vmap")
    with pytest.raises((NotImplementedError, ValueError), match=words):
        transform(loss)(inputs.q)
