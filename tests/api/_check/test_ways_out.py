"""Mistakes that users make first raise an error with the value, the rule and the way out.

A row is a call, the type of its error, words that the message must hold, and words that would
mislead: names of another call's arguments, and ways out that lead nowhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import preflash
import pytest
import torch
from preflash.testing import Case, MaskKind, build, runner
from refusals import refused

PAGED = Case("paged", (33, 5), (40, 90), 8, 2, 64, page_size=16, mask=MaskKind.CAUSAL)
RAGGED = Case("ragged", (33, 5), (40, 90), 8, 2, 64, mask=MaskKind.CAUSAL)
SINGLE = Case("single", (9,), (30,), 8, 2, 64, mask=MaskKind.CAUSAL)
HEADS = (8, 2, 64)


def swapped(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-3, -2).contiguous()


SHORT = {
    "Paged": "BatchPrefillWithPagedKVCacheWrapper",
    "Ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "Decode": "BatchDecodeWithPagedKVCacheWrapper",
}


def made(name: str, **options):
    if name == "BatchAttention":
        return preflash.BatchAttention(**{"device": "cpu", **options})
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    return getattr(preflash, SHORT.get(name, name))(workspace, **options)


@functools.cache
def inputs_of(case: Case):
    return build(case)


Q, K, V = inputs_of(SINGLE).q, inputs_of(SINGLE).k[:30], inputs_of(SINGLE).v[:30]
TABLE = {
    "qo_indptr": inputs_of(PAGED).qo_indptr,
    "paged_kv_indptr": inputs_of(PAGED).kv_indptr,
    "paged_kv_indices": inputs_of(PAGED).indices,
    "paged_kv_last_page_len": inputs_of(PAGED).last_page_len,
}
INTS = torch.tensor([0, 3], dtype=torch.int32)


def single(**changed) -> object:
    return preflash.single_prefill_with_kv_cache(**{"q": Q, "k": K, "v": V, **changed})


def planned_wrapper(case: Case, backend: str = "cpu"):
    wrapper = runner.make_wrapper(case, backend=backend)
    runner.plan(wrapper, inputs_of(case))
    return wrapper


def run(case: Case, change: Callable) -> object:
    inputs = inputs_of(case)
    return planned_wrapper(case).run(*change(inputs.q, inputs.k, inputs.v))


TOKENS = torch.zeros(3, 2, 64)


def fmha(**options) -> object:
    return preflash.trtllm_fmha_v2_prefill(
        (TOKENS,) * 3, "SEPARATE_Q_K_V", torch.empty(0, dtype=torch.uint8), INTS[1:], 3, 3, 0.125,
        1.0, 1, INTS, INTS, **options,
    )  # fmt: skip


def cudnn(**options) -> object:
    lengths = torch.full((1, 1, 1, 1), 3, dtype=torch.int32)
    return preflash.cudnn_batch_prefill_with_kv_cache(
        TOKENS, TOKENS, TOKENS, 0.125, torch.empty(0, dtype=torch.uint8),
        max_token_per_sequence=3, max_sequence_kv=3, actual_seq_lens_q=lengths,
        actual_seq_lens_kv=lengths, causal=False, return_lse=False, **options,
    )  # fmt: skip


class Row(NamedTuple):
    id: str
    call: Callable[[], object]
    words: tuple[str, ...]
    error: type[Exception] = ValueError
    misleading: tuple[str, ...] = ()


def fours(*shape: int) -> dict:
    return dict.fromkeys("qkv", torch.zeros(*shape))


BATCHED = (".flatten(0, 1)", "indptr", "BatchPrefillWithRaggedKVCacheWrapper")
LAYOUTS = [
    Row("4-D single", lambda: single(**fours(2, 3, 8, 64)),
        ("q has shape (2, 3, 8, 64)", "q.flatten(0, 1)", *BATCHED)),
    Row("4-D single decode",
        lambda: preflash.single_decode_with_kv_cache(torch.zeros(2, 1, 8, 64), K, V),
        ("q has shape (2, 1, 8, 64)", "[num_qo_heads, head_dim]", SHORT["Decode"])),
    Row("4-D k, ragged", lambda: run(RAGGED, lambda q, k, v: (q, k[None], v[None])),
        ("k has shape (1, 135, 2, 64)", "k.flatten(0, 1)", *BATCHED)),
    Row("4-D q, paged", lambda: run(PAGED, lambda q, k, v: (q[None], (k, v))),
        ("q has shape (1, 38, 8, 64)", *BATCHED)),
    Row("HND, single", lambda: single(k=swapped(K), v=swapped(V)),
        ("k has shape (2, 30, 64)", "num_kv_heads = 30", "pass kv_layout='HND'")),
    Row("NHD, single", lambda: single(kv_layout="HND"),
        ("k has shape (30, 2, 64)", "num_kv_heads = 30", "pass kv_layout='NHD'")),
    Row("HND, ragged", lambda: run(RAGGED, lambda q, k, v: (q, swapped(k), swapped(v))),
        ("k has shape (2, 135, 64)", "kv_layout='HND'")),
    Row("HND, paged", lambda: run(PAGED, lambda q, k, v: (q, (swapped(k), swapped(v)))),
        ("k_cache has shape (12, 2, 16, 64)", "kv_layout='HND'")),
    Row("single(q, k, v, True)", lambda: preflash.single_prefill_with_kv_cache(Q, K, V, True),
        ("custom_mask=True", "must be a torch.Tensor", "pass causal=True by name"), TypeError),
    Row("latent attention", lambda: single(**fours(3, 2, 576)), ("head_dim_qk = 576: must be",
        "What would work: torch's scaled_dot_product_attention; for latent")),
    # 7 tokens of 3 heads: 8 query heads divide by neither.
    *(Row(f"{layout}, 7 tokens of 3 heads",
          functools.partial(single, k=kv, v=kv, kv_layout=layout), ("num_kv_heads",),
          misleading=("pass kv_layout",))
      for layout, kv in (("NHD", Q.new_zeros(7, 3, 64)), ("HND", Q.new_zeros(3, 7, 64)))),
]  # fmt: skip

# A tuple of FlashInfer's "AttentionSink".
JIT_SINK = ("uri", *[torch.bfloat16] * 3, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"])
JIT_SINK += (["double"], "AttentionSink", "")
PAIRS = [
    Row(f"run(q, k, v) of {name} {','.join(options)}",
        lambda name=name, options=options: made(name, **options).run(
            inputs_of(PAGED).q, inputs_of(PAGED).k, inputs_of(PAGED).v),
        ("run(q, k, v)", "(12, 16, 2, 64)", "pass run(q, (k, v))"), TypeError)
    for name, options in [
        ("Paged", {}), ("Decode", {}), ("BatchAttentionWithAttentionSinkWrapper", {}),
        ("Paged", {"jit_args": JIT_SINK}), ("BatchAttention", {}),
        ("BatchPrefillWithCausalBidirectionalRangesWrapper", {}),
    ]
]  # fmt: skip

BUFFERS = [f"{name}_buf" for name in TABLE]
# A call with the arrays of TABLE, and its names of them.
TAKE_INT32 = {
    "paged plan": (lambda *t: made("Paged").plan(*t, *HEADS, 16), list(TABLE)),
    "decode plan": (lambda _, *t: made("Decode").plan(*t, *HEADS, 16),
        [None, "indptr", "indices", "last_page_len"]),
    "attention plan": (lambda *t: made("BatchAttention").plan(*t[:3], torch.tensor([40, 90]),
        *HEADS, 64, 16), ["qo_indptr", "kv_indptr", "kv_indices"]),
    "buffers": (lambda *t: made("Paged", use_cuda_graph=True, **dict(zip(BUFFERS, t, strict=True))),
        [BUFFERS[0], None, BUFFERS[2]]),
}  # fmt: skip


def with_dtype(at: int, dtype=torch.int64) -> list[torch.Tensor]:
    return [x.to(dtype) if i == at else x for i, x in enumerate(TABLE.values())]


def paged_plan(*arrays, **options):
    return lambda: made("Paged").plan(*arrays, *HEADS, 16, **options)


INT64 = [
    *(Row(f"int64 {what} {name}", lambda call=call, at=at: call(*with_dtype(at)),
          (f"{name} is torch.int64", f"pass {name}.int()"), TypeError,
          ("paged_kv",) if what == "decode plan" else ())
      for what, (call, names) in TAKE_INT32.items() for at, name in enumerate(names) if name),
    Row("int64 block_tables", paged_plan(*TABLE.values(), block_tables=torch.zeros(2, 6).long()),
        ("block_tables is torch.int64", "must be torch.int32", "pass block_tables.int()"),
        TypeError),
    # Rounding would be another page.
    Row("float32 paged_kv_indices", paged_plan(*with_dtype(2, torch.float32)),
        ("paged_kv_indices is torch.float32; must be torch.int32",), TypeError, (".int()",)),
]  # fmt: skip

OURS, WITH_CUDNN = (f"must be one of auto, fa3, fa2, cpu{more}" for more in ("", ", cudnn"))
FOREIGN = ("backend='trtllm-gen'", OURS, "pass backend='auto'")
FOREIGN += ("PREFLASH_BACKEND=auto in the environment",)
ON_CPU = ("computes on CUDA tensors", "on cpu", "pass backend='auto' or 'cpu', or CUDA tensors")
# A call that takes backend=, and the names of backends that it lists.
TAKE_BACKEND = {
    **{name: (functools.partial(made, name), WITH_CUDNN) for name in ("Paged", "Ragged")},
    "cudnn": (cudnn, WITH_CUDNN),
    **{name: (functools.partial(made, name), OURS)
     for name in ("Decode", "PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper",
     "BatchAttentionWithAttentionSinkWrapper")},
    "single": (single, OURS),
    "fmha": (fmha, OURS),
}  # fmt: skip
BACKENDS = [
    *(Row(f"trtllm-gen {name}", functools.partial(made, name, backend="trtllm-gen"), FOREIGN)
      for name in ("Paged", "Ragged", "Decode", "BatchAttention")),
    *(Row(f"{backend} on the CPU, {case.name}",
          lambda backend=backend, case=case: planned_wrapper(case, backend),
          (f"backend='{backend}' ", *ON_CPU))
      for backend in ("fa2", "fa3") for case in (PAGED, RAGGED)),
    *(Row(f"{backend} on the CPU, single", functools.partial(single, backend=backend),
          (f"'{backend}'", *ON_CPU))
      for backend in ("fa2", "fa3")),
    *(Row(f"cudnn of {name}", functools.partial(call, backend="cudnn"),
          ("is taken by cudnn_batch_prefill_with_kv_cache",), NotImplementedError)
      for name, (call, names) in TAKE_BACKEND.items() if names == OURS),
    *(Row(f"foo of {name}", functools.partial(call, backend="foo"), (f"backend='foo': {names}",))
      for name, (call, names) in TAKE_BACKEND.items()),
]  # fmt: skip
CONSTRUCTED = (
    "Paged", "Ragged", "Decode", "BatchAttentionWithAttentionSinkWrapper",
    "PODWithPagedKVCacheWrapper", "BatchPODWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
)  # fmt: skip
# Calls with a keyword that they do not have, and the nearest one that they have.
MISSPELT = {
    **{f"kv_layot of {name}": (functools.partial(made, name, kv_layot="NHD"), "kv_layout")
       for name in CONSTRUCTED},
    "casual": (lambda: single(casual=True), "causal"),
    "casual with LSE": (lambda: preflash.single_prefill_with_kv_cache_return_lse(
        Q, K, V, casual=True), "causal"),
    **{f"casual of {name}": (lambda name=name: getattr(made("Ragged"), name)(
        INTS, INTS, *HEADS, casual=True), "causal")
       for name in ("plan", "begin_forward")},
    "casual of forward": (lambda: made("Ragged").forward(Q, K, V, casual=True), "causal"),
    "skinks of decode": (lambda: made("Decode").run(Q, (K, V), skinks=None), "sinks"),
}  # fmt: skip
if sys.version_info >= (3, 13):  # before, run() is Python's own call
    MISSPELT["retrun_lse"] = (lambda: made("Ragged").run(Q, K, V, retrun_lse=True), "return_lse")
NAMES = [
    *(Row(name, call, (f"argument '{name.split()[0]}'. Did you mean '{nearest}'?",), TypeError)
      for name, (call, nearest) in MISSPELT.items()),
    *(Row(f"{mask} of decode", functools.partial(
        made("Decode").plan, INTS, INTS[:1], INTS[1:], *HEADS, 16, **{mask: INTS}),
        (mask, "use BatchPrefillWithPagedKVCacheWrapper with one query per request"), TypeError)
      for mask in ("custom_mask", "packed_custom_mask")),
    Row("xyzzy", lambda: made("Ragged", xyzzy=1), ("'xyzzy'",), TypeError, ("Did you mean",)),
    Row("no argument", preflash.BatchPrefillWithRaggedKVCacheWrapper,
        ("missing 1 required positional argument",), TypeError),
]  # fmt: skip
CONSTRUCTORS = [
    *(Row(f"layout {layout} of {name}", functools.partial(made, name, kv_layout=layout), (says,),
          error)
      for name in ("Paged", "Ragged")
      for layout, says, error in (("NDH", "kv_layout='NDH': must be one of NHD, HND", ValueError),
                                  (None, "kv_layout must be a str", TypeError))),
    *(Row(f"workspace {x} of {name}", functools.partial(getattr(preflash, SHORT[name]), x),
          ("float_workspace_buffer must be a torch.Tensor",), TypeError)
      for name in ("Paged", "Ragged") for x in (None, 1024)),
]  # fmt: skip
ROWS = [*CONSTRUCTORS, *LAYOUTS, *PAIRS, *INT64, *BACKENDS, *NAMES]


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_value_rule_and_way_out(row):
    with pytest.raises(row.error) as caught:
        row.call()
    assert type(caught.value) is row.error
    says = str(caught.value)
    assert [word for word in row.words if word not in says] == [], says
    assert [word for word in row.misleading if word in says] == [], says


def test_a_renamed_error_has_the_original_as_its_cause():
    """The words of decode's errors are not those of the source; the cause's are."""
    with pytest.raises(ValueError, match=r"^indices holds -1") as caught:
        made("Decode").plan(INTS.clamp(max=1), INTS[:1] - 1, INTS[1:], *HEADS, 16)
    assert str(caught.value.__cause__).startswith("paged_kv_indices holds -1")
    with pytest.raises(ValueError, match=r"^num_qo_heads = 8 is not") as caught:
        made("Decode").plan(INTS.clamp(max=1), INTS[:1], INTS[1:], 8, 3, 64, 16)
    assert caught.value.__cause__ is None  # the original error


def test_backend_that_is_no_text_in_spite_of_the_environment(monkeypatch):
    monkeypatch.setenv("PREFLASH_BACKEND", "cpu")
    says = f"^backend must be a str, {WITH_CUDNN[8:]}; got int 3$"
    refused(says, made, "Paged", error=TypeError, backend=3)


def test_batch_attention_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ({}, {"device": "cuda:1"}, {"device": torch.device("cuda")}):
        says = r"^device='cuda.*no CUDA device.*device='cpu'"
        refused(says, preflash.BatchAttention, **arguments)
    assert preflash.BatchAttention(device="cpu").device.type == "cpu"


VMAP = r"inside of torch\.vmap, and transforms of torch\.func are not supported; loop over the"


def test_vmap():
    """A call that was seen before refuses too."""
    single(), single(k=K.contiguous())
    for name, call, x in (
        ("q", lambda q: single(q=q), Q),
        ("k", lambda k: single(k=k), K),
        ("x", preflash.packbits, torch.ones(16).bool()),
        ("v_a", lambda v: preflash.merge_state(v, v[..., 0], v, v[..., 0]), torch.zeros(3, 2, 8)),
    ):
        for _ in range(2):
            refused(f"^{name} .*{VMAP}", torch.vmap(call), torch.stack([x, x]))


def test_derivatives():
    words = "computes no gradients: it is forward only|inside of torch.vmap"
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        call = transform(lambda q: single(q=q).float().sum())
        refused(words, call, Q, error=(NotImplementedError, ValueError))
