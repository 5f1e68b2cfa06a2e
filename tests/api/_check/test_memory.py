"""Tensors that have no memory, or the same memory twice, or whose memory holds other numbers, are
refused by name: kernels get addresses."""

import contextlib
import math

import preflash
import pytest
import torch
from preflash._check import validate
from preflash._wrappers import single
from preflash.testing import Case, MaskKind, build, oracle, runner
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.testing._internal.two_tensor import TwoTensor


def fake(t):
    return FakeTensorMode().from_tensor(t)


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def freed_view(t):
    """View of freed storage: its address is an offset from null, not null."""
    wide = torch.cat([t, t])
    view = wide[t.shape[0] :]
    wide.untyped_storage().resize_(0)
    return view


def too_small(t):
    t = t.clone()
    t.untyped_storage().resize_(t.nbytes - 1)
    return t


def too_small_strided(t):
    wide = torch.cat([t, t], -1)
    view = wide[..., : t.shape[-1]]
    wide.untyped_storage().resize_(wide.nbytes - t.shape[-1] * t.itemsize - 1)
    return view


def nested(t):
    return torch.nested.nested_tensor([t, t[:1]])


def jagged(t):
    return torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged)


WITHOUT_MEMORY = {
    "meta": (lambda t: t.to("meta"), "on the device meta"),
    "fake": (fake, "FakeTensor"),
    "freed": (freed, "0 bytes and it needs"),
    "freed_view": (freed_view, "0 bytes and it needs"),
    "too_small": (too_small, "was it freed"),
    "too_small_strided": (too_small_strided, "was it freed"),
    "zero_tensor": (
        lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
        "ZeroTensor",
    ),
    "wrapper_subclass": (lambda t: TwoTensor(t, t), "TwoTensor"),
}
OTHER_LAYOUTS = {
    "sparse": (torch.Tensor.to_sparse, "sparse_coo"),
    "nested": (nested, "nested"),
    "jagged": (jagged, "nested"),
}
BAD = {
    **{name: (*entry, ValueError) for name, entry in WITHOUT_MEMORY.items()},
    "negative": (torch._neg_view, "negative view", ValueError),
    **{name: (*entry, TypeError) for name, entry in OTHER_LAYOUTS.items()},
}
bad_tensors = pytest.mark.parametrize(("spoil", "why", "error"), BAD.values(), ids=BAD)


@bad_tensors
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_one_tensor(target, spoil, why, error, dtype):
    t = target.to(torch.ones(6, 4, dtype=dtype))
    assert validate.tensor("x", t) is t
    with pytest.raises(error, match=f"x .*{why}"):
        validate.tensor("x", spoil(t))


def test_mkldnn():
    with pytest.raises(TypeError, match=r"x .*_mkldnn"):
        validate.tensor("x", torch.ones(2, 3).to_mkldnn())


def test_uninitialized_parameter():
    with pytest.raises(ValueError, match=r"x has no memory"):
        validate.tensor("x", torch.nn.UninitializedParameter())


def test_quantized(target):
    q = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"x is torch\.quint8"):
        preflash.packbits(q)


def test_a_nested_mask(target):
    q, k = (torch.zeros(n, 1, 64, dtype=torch.float16, device=target.device) for n in (2, 5))
    with pytest.raises(TypeError, match="custom_mask is a nested tensor"):
        preflash.single_prefill_with_kv_cache(q, k, k, custom_mask=nested(torch.ones(2, 5) > 0))


@pytest.mark.parametrize(
    "good",
    [
        torch.ones(6, 4)[2:],
        torch.ones(6, 4)[:, 1:3],
        torch.ones(6, 4).t(),
        torch.ones(1, 4).expand(5, 4),
        torch.ones(6, 4)[5:, 3:],
        torch.empty(0, 4),
        torch.ones(6, 4)[6:],
        torch.tensor(3.0),
        torch.nn.Parameter(torch.ones(3)),
        torch.empty_strided((3, 0), (1000, 1)),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.stride()}",
)
def test_what_has_memory_passes(target, good):
    good = target.to(good)
    assert validate.tensor("x", good) is good


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.vmap(f)(x[None]),
        lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
        lambda f, x: torch.func.functionalize(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
    ],
    ids=["vmap", "grad", "functionalize", "jvp"],
)
def test_transforms(transform):
    def inner(t):
        validate.tensor("x", t)
        return t

    with pytest.raises(ValueError, match=r"x has no memory.*torch\.func"):
        transform(inner, torch.ones(6, 4))


@pytest.mark.parametrize("transform", ["functionalize", "grad", "jvp"])
def test_transforms_around_plain_tensors(transform):
    """Tensors made inside a transform may have no memory, even if made from plain tensors."""
    bits = torch.ones(32).bool()
    v, s = torch.ones(3, 2, 8), torch.ones(3, 2)

    def inner(t):
        for call in (lambda: preflash.packbits(bits), lambda: preflash.merge_state(v, s, v, s)):
            with contextlib.suppress(NotImplementedError):
                call()  # or its result is right
        return t.sum()

    x = torch.ones(4)
    if transform == "jvp":
        torch.func.jvp(inner, (x,), (x,))
    else:
        getattr(torch.func, transform)(inner)(x)


# Each entry point, with the name of each of its tensors.

PAGED = Case("paged", (33, 5), (40, 90), 4, 2, 64, page_size=16, mask=MaskKind.CUSTOM)
RAGGED = Case("ragged", (33, 5), (40, 90), 4, 2, 64, mask=MaskKind.PACKED)
PAGED_TABLE = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def planned_with(case, target, name, spoil):
    """plan() with one argument spoilt."""
    inputs = build(case, device=target.device, index_device="cpu")
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    positional, options = runner.plan_arguments(inputs)
    table = PAGED_TABLE if case.paged else ("qo_indptr", "kv_indptr")
    lengths = dict(zip(table, positional, strict=False))
    extra = {
        "seq_lens": torch.tensor(case.kv_lens),
        "seq_lens_q": torch.tensor(case.qo_lens),
        "block_tables": torch.zeros(2, 6, dtype=torch.int32),
    }
    given = {**lengths, **options}
    given[name] = spoil(given[name] if name in given else extra[name])
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    heads = dict(zip(names, positional[len(table) :], strict=False))
    wrapper.plan(**given, **heads)


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "jagged"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((PAGED, name) for name in (*PAGED_TABLE, "custom_mask", "seq_lens", "block_tables")),
        *((RAGGED, name) for name in ("kv_indptr", "packed_custom_mask", "seq_lens_q")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_plan(target, case, name, kind):
    spoil, _, error = BAD[kind]
    with pytest.raises(error, match=name):
        planned_with(case, target, name, spoil)


def test_a_workspace(target):
    for spoil, _, error in BAD.values():
        buffer = target.to(torch.empty(64, 64, dtype=torch.uint8))
        with pytest.raises(error, match="float_workspace_buffer"):
            preflash.BatchPrefillWithPagedKVCacheWrapper(spoil(buffer))


# A call of shapes that were seen before looks at addresses alone; only the first one asks how large
# a storage still is.
SEEN_AND_KIND = [
    (seen, kind)
    for seen in ("first", "cached")
    for kind in BAD
    if seen == "first" or not kind.startswith("too_small")
]


@pytest.mark.parametrize(("seen", "kind"), SEEN_AND_KIND)
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_run(target, kind, name, seen):
    spoil = BAD[kind][0]
    case = Case("run", (33, 5), (40, 90), 4, 2, 64)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    runner.plan(wrapper, inputs)
    arguments = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "out": torch.empty_like(inputs.q),
        "lse": torch.empty(38, 4, device=target.device),
    }
    if seen == "cached":
        wrapper.run(**arguments, return_lse=True)
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        wrapper.run(**{**arguments, name: spoil(arguments[name])}, return_lse=True)


@pytest.mark.parametrize(("seen", "kind"), SEEN_AND_KIND)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_single(target, kind, name, seen, monkeypatch):
    spoil = BAD[kind][0]
    arguments = {
        "q": target.to(torch.ones(5, 4, 64).half()),
        "k": target.to(torch.ones(9, 2, 64).half()),
        "v": target.to(torch.ones(9, 2, 64).half()),
    }
    monkeypatch.setattr(single, "_cache", single._Cache())
    if seen == "cached":
        preflash.single_prefill_with_kv_cache(**arguments, backend=target.backend)
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        preflash.single_prefill_with_kv_cache(
            **{**arguments, name: spoil(arguments[name])}, backend=target.backend
        )


@bad_tensors
def test_merges(target, spoil, why, error):
    v, s = target.to(torch.ones(3, 2, 8)), target.to(torch.ones(3, 2))
    for position, name in enumerate(("v_a", "s_a", "v_b", "s_b")):
        arguments = [v, s, v.clone(), s.clone()]
        arguments[position] = spoil(arguments[position])
        with pytest.raises(error, match=f"{name} "):
            preflash.merge_state(*arguments)
    for position, name in enumerate(("v", "s", "v_other", "s_other")):
        arguments = [v, s, v.clone(), s.clone()]
        arguments[position] = spoil(arguments[position])
        with pytest.raises(error, match=f"{name} "):
            preflash.merge_state_in_place(*arguments)
    states = torch.ones(3, 2, 2, 8, device=target.device), torch.ones(3, 2, 2, device=target.device)
    for position, name in enumerate("vs"):
        arguments = list(states)
        arguments[position] = spoil(arguments[position])
        with pytest.raises(error, match=f"{name} "):
            preflash.merge_states(*arguments)


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "jagged"])
def test_packbits(target, kind):
    spoil, _, error = BAD[kind]
    bits = target.to(torch.ones(16, dtype=torch.uint8))
    with pytest.raises(error, match="x "):
        preflash.packbits(spoil(bits))
    indptr = torch.tensor([0, 7, 16], dtype=torch.int32)
    with pytest.raises(error, match="x "):
        preflash.segment_packbits(spoil(bits), indptr)
    with pytest.raises(error, match="indptr "):
        preflash.segment_packbits(bits, spoil(indptr))


def test_fake_mode_around_plain_tensors(target):
    """Results made inside the mode are fake, even from plain tensors; plan() fails, because a plan
    cannot be fake."""
    case = Case("fake", (33,), (40,), 4, 2, 64, mask=MaskKind.CUSTOM)
    inputs = build(case, device=target.device)
    wrapper = runner.make_wrapper(case, backend=target.backend, device=target.device)
    positional, options = runner.plan_arguments(inputs)
    runner.plan(wrapper, inputs)
    bits = target.to(torch.ones(16, dtype=torch.uint8))
    v, s = target.to(torch.ones(3, 2, 8)), target.to(torch.ones(3, 2))
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
            wrapper.plan(*positional, **options)
        with pytest.raises(DynamicOutputShapeException):  # its size is in the values
            preflash.segment_packbits(bits, torch.tensor([0, 16]))
    runner.compare(inputs, *runner.run(wrapper, inputs)).check()


@pytest.mark.parametrize("name", ["seq_lens", "seq_lens_q"])
def test_lengths_on_a_foreign_device(name):
    """Compared or not, they must be where the rest is. "meta" is a device that every machine has; a
    fake tensor on cuda:1 asks CUDA whether there are two."""
    elsewhere = torch.empty(2, dtype=torch.int32, device="meta")
    for case in (PAGED, RAGGED):
        with pytest.raises(ValueError, match=f"{name} is on meta; must be on the CPU or on cpu"):
            planned_with(case, Host(), name, lambda _: elsewhere)


class Host:
    device = backend = "cpu"


# Memory that is shared.


def pair(target, generator_seed=0, tokens=7, heads=3, dim=40):
    generator = torch.Generator().manual_seed(generator_seed)
    v = torch.randn(tokens, heads, dim, generator=generator)
    s = torch.randn(tokens, heads, generator=generator)
    return target.to(v), target.to(s)


def test_merge_in_place_with_itself(target):
    """The same tensor in both places: the weights double, v stays."""
    for v_same, s_same in ((True, True), (True, False), (False, True)):
        v, s = pair(target, tokens=301, heads=5, dim=264)
        other_v, other_s = pair(target, 1, tokens=301, heads=5, dim=264)
        s[3] = -math.inf
        v_other = v if v_same else other_v
        s_other = s if s_same else other_s
        states = torch.stack([v, v_other], 1), torch.stack([s, s_other], 1)
        expected_v, expected_s = oracle.merge(*states)
        preflash.merge_state_in_place(v, s, v_other, s_other)
        assert float((v.double() - expected_v).abs().max()) < 1e-5
        finite = expected_s.isfinite()
        assert torch.equal(s.isfinite(), finite)
        assert float((s.double() - expected_s)[finite].abs().max()) < 1e-5


def test_merge_in_place_with_a_strided_view_of_itself(target):
    """A view that is not contiguous is copied before anything is written."""
    v, s = pair(target, heads=7)
    v_other, s_other = v.transpose(0, 1), s.transpose(0, 1)
    expected_v, expected_s = oracle.merge(
        torch.stack([v, v_other], 1), torch.stack([s, s_other], 1)
    )
    preflash.merge_state_in_place(v, s, v_other, s_other)
    assert float((v.double() - expected_v).abs().max()) < 1e-5
    assert float((s.double() - expected_s).abs().max()) < 1e-5


def overlapping(t):
    """Two views of t's shape, one row apart."""
    wide = torch.cat([t, t])
    return wide[: t.shape[0]], wide[1 : t.shape[0] + 1]


def test_merge_in_place_overlaps(target):
    v, s = pair(target)
    v_other, s_other = pair(target, 1)
    cases = {
        ("v", "v_other"): dict(zip(("v", "v_other"), overlapping(v), strict=True)),
        ("s", "s_other"): dict(zip(("s", "s_other"), overlapping(s), strict=True)),
        ("v", "s"): {"s": v.view(-1)[: s.numel()].view(s.shape)},
        ("v", "s_other"): {"s_other": v.view(-1)[-s.numel() :].view(s.shape)},
        ("s", "mask"): {"mask": s.view(torch.uint8).view(-1)[-7:]},
        ("v", "mask"): {"mask": v.view(torch.uint8).view(-1)[:7]},
    }
    wide = torch.zeros(v.numel() + s.numel() - 1, device=v.device)
    cases["s", "v_other"] = {
        "s": wide[: s.numel()].view(s.shape),
        "v_other": wide[s.numel() - 1 :].view(v.shape),
    }
    for (name, other), changes in cases.items():
        arguments = {"v": v, "s": s, "v_other": v_other, "s_other": s_other, **changes}
        before = {key: value.clone() for key, value in arguments.items()}
        with pytest.raises(ValueError, match=f"^{name} shares memory with {other}"):
            preflash.merge_state_in_place(**arguments)
        for key, value in arguments.items():
            assert torch.equal(value, before[key])


def test_merge_in_place_of_neighbours(target):
    """One tensor that begins where the other ends is apart from it."""
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
