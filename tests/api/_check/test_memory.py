"""Kernels get addresses, so tensors without memory, of another dtype or shape, or that share memory
are refused by name."""

import contextlib
import itertools
import math

import preflash
import pytest
import torch
from planned_cases import PAGED_ARRAYS, check_run, plan_arguments, planned
from preflash.testing import Case, MaskKind, build, runner
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor


def resized(t, size):
    t = t.clone()
    t.untyped_storage().resize_(size)
    return t


def freed_view(t):
    """Makes a view of freed storage, whose address is an offset from null, not null."""
    wide = torch.cat([t, t])
    view = wide[t.shape[0] :]
    wide.untyped_storage().resize_(0)
    return view


def too_small_strided(t):
    wide = torch.cat([t, t], -1)
    view = wide[..., : t.shape[-1]]
    wide.untyped_storage().resize_(wide.nbytes - t.shape[-1] * t.itemsize - 1)
    return view


def nested(t, **options):
    return torch.nested.nested_tensor([t, t[:1]], **options)


# (spoil, a pattern of the message, error)
BAD = {
    "meta": (lambda t: t.to("meta"), "on (the device )?meta", ValueError),
    "fake": (lambda t: FakeTensorMode().from_tensor(t), "FakeTensor", ValueError),
    "freed": (lambda t: resized(t, 0), "0 bytes and it needs", ValueError),
    "freed_view": (freed_view, "0 bytes and it needs", ValueError),
    "too_small": (lambda t: resized(t, t.nbytes - 1), "was it freed", ValueError),
    "too_small_strided": (too_small_strided, "was it freed", ValueError),
    "zero_tensor": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
        "ZeroTensor", ValueError),
    "wrapper_subclass": (lambda t: TwoTensor(t, t), "TwoTensor", ValueError),
    "negative": (torch._neg_view, "negative view", ValueError),
    "sparse": (torch.Tensor.to_sparse, "sparse_coo", TypeError),
    "nested": (nested, "nested", TypeError),
    "jagged": (lambda t: nested(t, layout=torch.jagged), "nested", TypeError),
}  # fmt: skip
PAGED = Case("paged", (33, 5), (40, 90), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.PACKED)
RUN = Case("run", (33, 5), (40, 90), 4, 2, 64)


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "jagged"])
@pytest.mark.parametrize(
    ("case", "names"),
    [
        (PAGED, (*PAGED_ARRAYS, "custom_mask", "seq_lens", "block_tables")),
        (RAGGED, ("kv_indptr", "packed_custom_mask", "seq_lens_q")),
    ],
    ids=["paged", "ragged"],
)
def test_plan(target, case, names, kind):
    spoil, why, error = BAD[kind]
    inputs = build(case, device=target.device, index_device="cpu")
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    given = {
        "seq_lens": torch.tensor(case.kv_lens),
        "seq_lens_q": torch.tensor(case.qo_lens),
        "block_tables": torch.zeros(2, 6, dtype=torch.int32),
        **plan_arguments(inputs),
    }
    for name in names:
        with pytest.raises(error, match=f"{name} .*{why}"):
            wrapper.plan(**{**plan_arguments(inputs), name: spoil(given[name])})


TOKENS = itertools.count(11)  # no two calls of the single function have the same shapes


def run_of_a_wrapper(target):
    inputs, wrapper = planned(RUN, target)
    lse = torch.empty(38, 4, device=target.device)
    outputs = {"out": torch.empty_like(inputs.q), "lse": lse, "return_lse": True}
    return wrapper.run, {"q": inputs.q, "k": inputs.k, "v": inputs.v, **outputs}


def single(target):
    tokens = next(TOKENS)
    heads = {"q": 4, "k": 2, "v": 2}
    tensors = {name: target.to(torch.ones(tokens, n, 64).half()) for name, n in heads.items()}
    return preflash.single_prefill_with_kv_cache, {**tensors, "backend": target.backend}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    ("make", "names"), [(run_of_a_wrapper, ("q", "k", "v", "out", "lse")), (single, "qkv")]
)
def test_attention(target, make, names, kind):
    """A call of shapes that were seen before looks at addresses alone; only the first one asks how
    large a storage still is."""
    spoil, why, error = BAD[kind]
    for name in names:
        call, arguments = make(target)
        for seen in (False, True):
            if not (seen and kind.startswith("too_small")):
                with pytest.raises(error, match=f"^{name} .*({why}|has no memory behind it)"):
                    call(**{**arguments, name: spoil(arguments[name])})
            call(**arguments)


V, S, INT = torch.ones(3, 2, 8), torch.ones(3, 2), torch.int32
VS = {"v": V.clone(), "s": S.clone(), "v_other": V, "s_other": S}
BITS, INDPTR = torch.ones(16, dtype=torch.uint8), torch.tensor([0, 7, 16], dtype=INT)
ONE, ENDS = torch.zeros(1, dtype=INT), torch.tensor([0, 1], dtype=INT)
ROWS = dict.fromkeys("qkv", torch.ones(3, 2, 64).to(torch.float8_e4m3fn))
CACHE = {"append_key": V[:1], "append_value": V[:1], "paged_kv_cache": torch.zeros(2, 2, 4, 2, 8)}
TABLE = {"kv_indptr": ENDS, "kv_last_page_len": ONE + 1}
PLACES = {"batch_indices": ONE, "positions": ONE, "kv_indices": ONE, **TABLE}
HEADS = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 64}


def plan(name: str):
    return getattr(preflash, name)(torch.empty(1 << 20, dtype=torch.uint8)).plan


# A call, its fixed arguments, and those that are spoilt one at a time.
ON_ANY_DEVICE = {
    "merge_state": (preflash.merge_state, {}, {"v_a": V, "s_a": S, "v_b": V, "s_b": S}),
    "in_place": (preflash.merge_state_in_place, {}, {**VS, "mask": S[:, 0] > 0}),
    "merge_states": (
        preflash.merge_states, {}, {"v": torch.ones(3, 2, 2, 8), "s": torch.ones(3, 2, 2)},
    ),
    "packbits": (preflash.packbits, {}, {"x": BITS}),
    "segment_packbits": (preflash.segment_packbits, {}, {"x": BITS, "indptr": INDPTR}),
    "workspace": (
        preflash.BatchPrefillWithPagedKVCacheWrapper, {},
        {"float_workspace_buffer": torch.empty(64, 64, dtype=torch.uint8)},
    ),
}  # fmt: skip
ON_THE_CPU = {
    "single": (
        preflash.single_prefill_with_kv_cache, ROWS,
        {f"scale_{name}": torch.ones(2) for name in "qkv"},
    ),
    "append": (preflash.append_paged_kv_cache, CACHE, PLACES),
    "get_seq_lens": (preflash.get_seq_lens, {"page_size": 4}, TABLE),
    "block sparse": (
        plan("BlockSparseAttentionWrapper"), {"M": 16, "N": 16, "R": 16, "C": 16, **HEADS},
        {"indptr": ENDS, "indices": ONE},
    ),
    "block sizes": (
        plan("VariableBlockSparseAttentionWrapper"), HEADS,
        {"block_mask_map": torch.ones(2, 1, 1).bool(), "block_row_sz": torch.full((2, 1), 3),
         "block_col_sz": torch.full((2, 1), 3)},
    ),
}  # fmt: skip
CALLS = {**ON_ANY_DEVICE, **ON_THE_CPU}
FORMS = {
    "dtype": (torch.Tensor.cfloat, "is torch.complex64", TypeError),
    "shape": (lambda t: t[None, None], "has shape", ValueError),
    "stride": (lambda t: torch.stack([t, t], -1)[..., 0], "has stride", ValueError),
}
OF_ANY_FORM = {("packbits", "dtype"), ("segment_packbits", "dtype")}
OF_ANY_FORM |= {("workspace", "dtype"), ("workspace", "shape")}
OF_ANY_FORM |= {(key, "stride") for key in CALLS if key not in ("in_place", "single")}


@pytest.mark.parametrize(
    ("key", "kind"),
    [row for row in itertools.product(CALLS, {**BAD, **FORMS}) if row not in OF_ANY_FORM],
)
def test_calls_without_a_plan(target, key, kind):
    if key in ON_THE_CPU and target.device != "cpu":
        pytest.skip("a test of the CPU")
    (call, fixed, given), (spoil, why, error) = CALLS[key], {**BAD, **FORMS}[kind]
    given = {**fixed, **{name: target.to(value) for name, value in given.items()}}
    call(**given)
    written = ("v", "s") if (key, kind) == ("in_place", "stride") else CALLS[key][2]
    for name in written:
        with pytest.raises(error, match=rf"\b{name} .*{why}"):
            call(**{**given, name: spoil(given[name])})


def merge_of(v):
    return lambda: preflash.merge_state(v, S, V, S)


def with_nested_mask():
    q, k = (torch.zeros(n, 1, 64) for n in (2, 5))
    preflash.single_prefill_with_kv_cache(q, k, k, custom_mask=nested(torch.ones(2, 5) > 0))


def quantized():
    return torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: torch.func.functionalize(preflash.packbits)(torch.ones(8).bool()), ValueError,
         r"x has no memory.*torch\.func"),
        (lambda: preflash.packbits(quantized()), TypeError, r"x is torch\.quint8"),
        (with_nested_mask, TypeError, "custom_mask is a nested tensor"),
        (merge_of(torch.ones(3, 2, 8).to_mkldnn()), TypeError, "v_a .*_mkldnn"),
        (merge_of(UninitializedParameter(requires_grad=False)), ValueError, "v_a has no"),
    ],
    ids=["functionalized", "quantized", "nested mask", "mkldnn", "uninitialized"],
)  # fmt: skip
def test_other_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_views_have_memory(target):
    for view in (
        torch.ones(6, 4)[:, 1:3],
        torch.ones(6, 4).t(),
        torch.ones(1, 4).expand(5, 4),
        torch.ones(6, 4)[5:, 3:],
        torch.ones(6, 4)[6:],
        torch.nn.Parameter(torch.ones(3, 2), requires_grad=False),
        torch.empty_strided((0, 3), (1, 1000)),
    ):
        s = target.to(view)
        v = torch.full((*s.shape, 8), 3.0, device=target.device)
        merged_v, merged_s = preflash.merge_state(v, s, v, s)
        torch.testing.assert_close(merged_v, v, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(merged_s, s + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transform", ["functionalize", "grad", "jvp"])
def test_transforms_around_plain_tensors(transform):
    """Tensors made inside a transform may have no memory, even if made from plain tensors."""

    def inner(t):
        for call in (lambda: preflash.packbits(BITS), lambda: preflash.merge_state(V, S, V, S)):
            with contextlib.suppress(NotImplementedError):
                call()  # or its result is right
        return t.sum()

    x = torch.ones(4)
    if transform == "jvp":
        torch.func.jvp(inner, (x,), (x,))
    else:
        getattr(torch.func, transform)(inner)(x)


def test_fake_mode_around_plain_tensors(target):
    """Results made inside the mode are fake, even from plain tensors; a plan cannot be fake."""
    inputs, wrapper = planned(Case("fake", (33,), (40,), 4, 2, 64, mask=MaskKind.CUSTOM), target)
    bits, v, s = (target.to(t) for t in (BITS, V, S))
    calls = [
        lambda: wrapper.run(inputs.q, inputs.k, inputs.v),
        lambda: runner.single(inputs, backend=target.backend)[0],
        lambda: preflash.packbits(bits),
        lambda: preflash.merge_state(v, s, v, s)[0],
        lambda: preflash.merge_states(v[None], s[None])[0],
    ]
    for call in calls:
        real = call()
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(call(), FakeTensor)
            assert call().shape == real.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="memory"):
            runner.plan(wrapper, inputs)
        with pytest.raises(DynamicOutputShapeException):  # its size is in the values
            preflash.segment_packbits(bits, torch.tensor([0, 16]))
    check_run(inputs, wrapper)


def pair(target, seed=0, tokens=7, heads=3, dim=40):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(tokens, heads, dim, generator=generator)
    s = torch.randn(tokens, heads, generator=generator)
    return target.to(v), target.to(s)


@pytest.mark.parametrize("same", ["vs", "v", "s", "transposed"])
def test_merge_in_place_with_itself(target, same):
    """A view that is not contiguous is copied before anything is written."""
    v, s = pair(target, tokens=37, heads=37, dim=264)
    v_other, s_other = pair(target, 1, tokens=37, heads=37, dim=264)
    s[3] = -math.inf
    if same == "transposed":
        v_other, s_other = v.transpose(0, 1), s.transpose(0, 1)
    others = (v if "v" in same else v_other, s if same in ("vs", "s") else s_other)
    expected = preflash.merge_state(v, s, *others)
    preflash.merge_state_in_place(v, s, *others)
    assert torch.equal(v, expected[0])
    assert torch.equal(s, expected[1])


def overlapping(t):
    """Makes two views of t's shape, one row apart."""
    wide = torch.cat([t, t])
    return wide[: t.shape[0]], wide[1 : t.shape[0] + 1]


def test_merge_in_place_overlaps(target):
    (v, s), (v_other, s_other) = pair(target), pair(target, 1)
    wide = torch.zeros(v.numel() + s.numel() - 1, device=v.device)
    flat_v, bytes_s, bytes_v = v.view(-1), s.view(torch.uint8).view(-1), v.view(torch.uint8)
    cases = {
        ("v", "v_other"): dict(zip(("v", "v_other"), overlapping(v), strict=True)),
        ("s", "s_other"): dict(zip(("s", "s_other"), overlapping(s), strict=True)),
        ("v", "s"): {"s": flat_v[: s.numel()].view(s.shape)},
        ("v", "s_other"): {"s_other": flat_v[-s.numel() :].view(s.shape)},
        ("s", "mask"): {"mask": bytes_s[-7:]},
        ("v", "mask"): {"mask": bytes_v.view(-1)[:7]},
        ("s", "v_other"): {
            "s": wide[: s.numel()].view(s.shape),
            "v_other": wide[s.numel() - 1 :].view(v.shape),
        },
    }
    for (name, other), changes in cases.items():
        arguments = {"v": v, "s": s, "v_other": v_other, "s_other": s_other, **changes}
        before = {key: value.clone() for key, value in arguments.items()}
        with pytest.raises(ValueError, match=f"^{name} shares memory with {other}"):
            preflash.merge_state_in_place(**arguments)
        assert all(torch.equal(arguments[key], value) for key, value in before.items())


def test_merge_in_place_of_neighbours(target):
    (v, s), (v_other, s_other) = pair(target), pair(target, 1)
    both_v, both_s = torch.cat([v, v_other]), torch.cat([s, s_other])
    expected_v, expected_s = preflash.merge_state(v, s, v_other, s_other)
    preflash.merge_state_in_place(both_v[:7], both_s[:7], both_v[7:], both_s[7:])
    assert torch.equal(both_v, torch.cat([expected_v, v_other]))
    assert torch.equal(both_s, torch.cat([expected_s, s_other]))
    empty = both_v[3:3], both_s[3:3]
    preflash.merge_state_in_place(*empty, *empty)


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [("sinks", 8, torch.float16)]
    + [(f"scale_{name}", n, torch.float8_e4m3fn) for name, n in (("q", 8), ("k", 4), ("v", 4))],
)
def test_out_on_the_last_factor_of_the_heads(name, count, dtype):
    """The output may begin where the factors end, and no earlier."""
    q, k, v = (torch.zeros(*shape, 64).to(dtype) for shape in ((3, 8), (5, 4), (5, 4)))
    memory = torch.ones(64 + q.numel(), dtype=torch.float16)
    of_heads = memory[32 - 2 * count : 32].view(torch.float32)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": torch.float16}
    wrapper.plan(torch.tensor([0, 3]).int(), torch.tensor([0, 5]).int(), 8, 4, 64, **dtypes)
    wrapper.run(q, k, v, out=memory[32:][: q.numel()].view(q.shape), **{name: of_heads})
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        wrapper.run(q, k, v, out=memory[24:][: q.numel()].view(q.shape), **{name: of_heads})
