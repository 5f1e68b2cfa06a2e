"""Kernels get addresses, so tensors without memory, tensors that share memory, and tensors whose
memory holds other numbers are refused by name."""

import contextlib
import itertools
import math
import types

import preflash
import pytest
import torch
from planned_cases import PAGED_ARRAYS, check_run, plan_arguments, planned
from preflash.testing import Case, MaskKind, build, oracle, runner
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
KINDS = [kind for kind in BAD if kind != "jagged"]

PAGED = Case("paged", (33, 5), (40, 90), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.PACKED)
RUN = Case("run", (33, 5), (40, 90), 4, 2, 64)


def plan_with(case, target, name, spoil):
    """Calls plan() with one argument spoilt."""
    inputs = build(case, device=target.device, index_device="cpu")
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    hints = {
        "seq_lens": torch.tensor(case.kv_lens),
        "seq_lens_q": torch.tensor(case.qo_lens),
        "block_tables": torch.zeros(2, 6, dtype=torch.int32),
    }
    given = plan_arguments(inputs)
    wrapper.plan(**{**given, name: spoil({**hints, **given}[name])})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((PAGED, name) for name in (*PAGED_ARRAYS, "custom_mask", "seq_lens", "block_tables")),
        *((RAGGED, name) for name in ("kv_indptr", "packed_custom_mask", "seq_lens_q")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_plan(target, case, name, kind):
    spoil, why, error = BAD[kind]
    with pytest.raises(error, match=f"{name} .*{why}"):
        plan_with(case, target, name, spoil)


@pytest.mark.parametrize("name", ["seq_lens", "seq_lens_q"])
@pytest.mark.parametrize("case", [PAGED, RAGGED], ids=lambda case: case.name)
def test_lengths_on_another_device(case, name):
    elsewhere = torch.empty(2, dtype=torch.int32, device="meta")
    host = types.SimpleNamespace(device="cpu", backend="cpu")
    with pytest.raises(ValueError, match=f"{name} is on meta; must be on the CPU or on cpu"):
        plan_with(case, host, name, lambda _: elsewhere)


# A call of shapes that were seen before looks at addresses alone; only the first one asks how large
# a storage still is.
BEHIND = "has no memory behind it"
SEEN_AND_KIND = [
    (seen, kind)
    for seen in ("first", "cached")
    for kind in BAD
    if seen == "first" or not kind.startswith("too_small")
]


@pytest.mark.parametrize(("seen", "kind"), SEEN_AND_KIND)
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_run(target, kind, name, seen):
    spoil, why, error = BAD[kind]
    inputs, wrapper = planned(RUN, target)
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": torch.empty_like(inputs.q)}
    arguments |= {"lse": torch.empty(38, 4, device=target.device), "return_lse": True}
    if seen == "cached":
        wrapper.run(**arguments)
    with pytest.raises(error, match=f"^{name} .*({why}|{BEHIND})"):
        wrapper.run(**{**arguments, name: spoil(arguments[name])})


TOKENS = itertools.count(11)  # no two calls have the same shapes


@pytest.mark.parametrize(("seen", "kind"), SEEN_AND_KIND)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_single(target, kind, name, seen):
    spoil, why, error = BAD[kind]
    heads = {"q": 4, "k": 2, "v": 2}
    tokens = next(TOKENS)
    tensors = {name: target.to(torch.ones(tokens, n, 64).half()) for name, n in heads.items()}
    if seen == "cached":
        preflash.single_prefill_with_kv_cache(**tensors, backend=target.backend)
    with pytest.raises(error, match=f"^{name} .*({why}|{BEHIND})"):
        preflash.single_prefill_with_kv_cache(
            **{**tensors, name: spoil(tensors[name])}, backend=target.backend
        )


V, S = torch.ones(3, 2, 8), torch.ones(3, 2)
MERGES = {
    preflash.merge_state: {"v_a": V, "s_a": S, "v_b": V, "s_b": S},
    preflash.merge_state_in_place: {"v": V, "s": S, "v_other": V.clone(), "s_other": S.clone()},
    preflash.merge_states: {"v": torch.ones(3, 2, 2, 8), "s": torch.ones(3, 2, 2)},
}
BITS = {"x": torch.ones(16, dtype=torch.uint8)}
INDPTR = {"indptr": torch.tensor([0, 7, 16], dtype=torch.int32)}
# A call, its arguments, and those that are spoilt one at a time.
CALLS = {
    **{merge.__name__: (merge, given, tuple(given)) for merge, given in MERGES.items()},
    "packbits": (preflash.packbits, BITS, ("x",)),
    "segment_packbits": (preflash.segment_packbits, BITS | INDPTR, ("x", "indptr")),
    "workspace": (
        preflash.BatchPrefillWithPagedKVCacheWrapper,
        {"float_workspace_buffer": torch.empty(64, 64, dtype=torch.uint8)},
        ("float_workspace_buffer",),
    ),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(("call", "given", "names"), CALLS.values(), ids=CALLS)
def test_calls_without_a_plan(target, call, given, names, kind):
    spoil, why, error = BAD[kind]
    given = {name: target.to(value) for name, value in given.items()}
    for name in names:
        with pytest.raises(error, match=f"{name} .*{why}"):
            call(**{**given, name: spoil(given[name])})


def functionalized():
    return torch.func.functionalize(preflash.packbits)(torch.ones(8).bool())


def quantized():
    preflash.packbits(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8))


def merge_of(v):
    preflash.merge_state(v, S, V, S)


def nested_mask():
    q, k = (torch.zeros(n, 1, 64) for n in (2, 5))
    preflash.single_prefill_with_kv_cache(q, k, k, custom_mask=nested(torch.ones(2, 5) > 0))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (functionalized, ValueError, r"x has no memory.*torch\.func"),
        (quantized, TypeError, r"x is torch\.quint8"),
        (nested_mask, TypeError, "custom_mask is a nested tensor"),
        (lambda: merge_of(torch.ones(3, 2, 8).to_mkldnn()), TypeError, "v_a .*_mkldnn"),
        (lambda: merge_of(UninitializedParameter(requires_grad=False)), ValueError, "v_a has no"),
    ],
)
def test_other_refusals(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    "s",
    [
        torch.ones(6, 4)[2:],
        torch.ones(6, 4)[:, 1:3],
        torch.ones(6, 4).t(),
        torch.ones(1, 4).expand(5, 4),
        torch.ones(6, 4)[5:, 3:],
        torch.empty(0, 4),
        torch.ones(6, 4)[6:],
        torch.nn.Parameter(torch.ones(3, 2), requires_grad=False),
        torch.empty_strided((0, 3), (1, 1000)),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.stride()}",
)
def test_views_have_memory(target, s):
    s = target.to(s)
    v = torch.full((*s.shape, 8), 3.0, device=target.device)
    merged_v, merged_s = preflash.merge_state(v, s, v, s)
    torch.testing.assert_close(merged_v, v, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged_s, s + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transform", ["functionalize", "grad", "jvp"])
def test_transforms_around_plain_tensors(transform):
    """Tensors made inside a transform may have no memory, even if made from plain tensors."""
    bits = torch.ones(32).bool()

    def inner(t):
        for call in (lambda: preflash.packbits(bits), lambda: preflash.merge_state(V, S, V, S)):
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
    bits = target.to(torch.ones(16, dtype=torch.uint8))
    v, s = target.to(V), target.to(S)
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


def check_merge(v, s, v_other, s_other):
    """Compares merge_state_in_place() of states that share memory with the oracle."""
    expected_v, expected_s = oracle.merge(
        torch.stack([v, v_other], 1), torch.stack([s, s_other], 1)
    )
    preflash.merge_state_in_place(v, s, v_other, s_other)
    assert float((v.double() - expected_v).abs().max()) < 1e-5
    finite = expected_s.isfinite()
    assert torch.equal(s.isfinite(), finite)
    assert float((s.double() - expected_s)[finite].abs().max()) < 1e-5


@pytest.mark.parametrize("same", ["vs", "v", "s"])
def test_merge_in_place_with_itself(target, same):
    v, s = pair(target, tokens=301, heads=5, dim=264)
    v_other, s_other = pair(target, 1, tokens=301, heads=5, dim=264)
    s[3] = -math.inf
    check_merge(v, s, v if "v" in same else v_other, s if "s" in same else s_other)


def test_merge_in_place_with_a_strided_view_of_itself(target):
    """A view that is not contiguous is copied before anything is written."""
    v, s = pair(target, heads=7)
    check_merge(v, s, v.transpose(0, 1), s.transpose(0, 1))


def overlapping(t):
    """Makes two views of t's shape, one row apart."""
    wide = torch.cat([t, t])
    return wide[: t.shape[0]], wide[1 : t.shape[0] + 1]


def test_merge_in_place_overlaps(target):
    v, s = pair(target)
    v_other, s_other = pair(target, 1)
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
        for key, value in arguments.items():
            assert torch.equal(value, before[key])


def test_merge_in_place_of_neighbours(target):
    v, s = pair(target)
    v_other, s_other = pair(target, 1)
    both_v, both_s = torch.cat([v, v_other]), torch.cat([s, s_other])
    expected_v, expected_s = preflash.merge_state(v, s, v_other, s_other)
    preflash.merge_state_in_place(both_v[:7], both_s[:7], both_v[7:], both_s[7:])
    assert torch.equal(both_v[:7], expected_v)
    assert torch.equal(both_s[:7], expected_s)
    assert torch.equal(both_v[7:], v_other)
    empty = both_v[3:3], both_s[3:3]
    preflash.merge_state_in_place(*empty, *empty)


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [("sinks", 8, torch.float16)]
    + [(f"scale_{name}", n, torch.float8_e4m3fn) for name, n in (("q", 8), ("k", 4), ("v", 4))],
)
def test_out_on_the_last_factor_of_the_heads(name, count, dtype):
    """The output may begin where the factors end, and no earlier."""
    q = torch.zeros(3, 8, 64).to(dtype)
    k, v = (torch.zeros(5, 4, 64).to(dtype) for _ in range(2))
    memory = torch.ones(64 + q.numel(), dtype=torch.float16)
    of_heads = memory[32 - 2 * count : 32].view(torch.float32)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    lengths = (torch.tensor([0, 3]).int(), torch.tensor([0, 5]).int())
    dtypes = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": torch.float16}
    wrapper.plan(*lengths, 8, 4, 64, **dtypes)
    wrapper.run(q, k, v, out=memory[32:][: q.numel()].view(q.shape), **{name: of_heads})
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        wrapper.run(q, k, v, out=memory[24:][: q.numel()].view(q.shape), **{name: of_heads})
