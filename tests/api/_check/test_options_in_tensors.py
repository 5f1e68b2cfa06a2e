"""Options in arrays and tensors of one element: what they hold counts, not which object it is."""

import numpy as np
import preflash
import pytest
import torch
from preflash.testing import runner

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@pytest.fixture
def tensors(target):
    torch.manual_seed(0)
    shapes = ((33, HEADS), (90, KV_HEADS), (90, KV_HEADS))
    made = (torch.randn(*shape, HEAD_DIM, device="cpu") for shape in shapes)
    return [one.to(target.device, torch.float16) for one in made]


def single(target, tensors, **options):
    return preflash.single_prefill_with_kv_cache(*tensors, backend=target.backend, **options)


@pytest.fixture
def pod(target, tensors):
    """run() of a prefill with the tensors, beside a request of 5 keys; the prefill's output."""
    device = target.device
    wrapper = preflash.PODWithPagedKVCacheWrapper(runner.workspace(device), backend=target.backend)
    indptr, pages, last = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0], [5]))
    wrapper.plan(indptr, pages, last, HEADS, KV_HEADS, HEAD_DIM, 16)
    q_d = tensors[0][:1].clone()
    cache = torch.randn(1, 2, 16, KV_HEADS, HEAD_DIM, device="cpu").to(device, torch.float16)
    return lambda **options: wrapper.run(*tensors, q_d, cache, **options)[0]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_window_that_changes_in_place(target, tensors, pod, make):
    """The plan of one request is found again by its options."""
    window = make(40)
    narrow = single(target, tensors, window_left=3)
    assert torch.equal(
        single(target, tensors, window_left=window), single(target, tensors, window_left=40)
    )
    assert torch.equal(pod(window_left_p=window), pod(window_left_p=40))
    window[()] = 3
    assert torch.equal(single(target, tensors, window_left=window), narrow)
    assert torch.equal(pod(window_left_p=window), pod(window_left_p=3))
    assert not torch.equal(narrow, single(target, tensors, window_left=40))


def test_arrays_of_numpys(target, tensors, pod):
    """They have no hash."""
    options = {"causal": np.array(True), "logits_soft_cap": np.array(2.0)}
    plain = {"causal": True, "logits_soft_cap": 2.0}
    assert torch.equal(single(target, tensors, **options), single(target, tensors, **plain))
    assert torch.equal(pod(causal_p=np.array(True)), pod(causal_p=True))


def test_what_is_no_integer_is_still_refused(target, tensors, pod):
    single(target, tensors, window_left=1)
    pod(window_left_p=1)
    for wrong in (torch.tensor(True), torch.tensor(1.0), torch.ones(2, dtype=torch.int32), True):
        with pytest.raises(TypeError, match="window_left must be an integer"):
            single(target, tensors, window_left=wrong)
        with pytest.raises(TypeError, match="prefill side: window_left must be an integer"):
            pod(window_left_p=wrong)


def without_memory(kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "meta":
        return torch.empty(1, dtype=dtype, device="meta")
    value = torch.zeros(1, dtype=dtype)
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.parametrize("kind", ["meta", "freed"])
def test_tensors_without_memory(target, tensors, pod, kind):
    """An error does not read what it tells of, either."""
    integer, real = (without_memory(kind, dtype) for dtype in (torch.int32, torch.float32))
    single(target, tensors, logits_soft_cap=2.0, window_left=5, causal=True)  # to compare with
    with pytest.raises(ValueError, match=r"^window_left has no memory"):
        single(target, tensors, window_left=integer)
    with pytest.raises(ValueError, match=r"^prefill side: window_left has no memory"):
        pod(window_left_p=integer)
    for name in ("causal", "logits_soft_cap", "kv_layout"):
        with pytest.raises(
            TypeError, match=rf"^{name} must be .* got Tensor \(1,\) torch.float32$"
        ):
            single(target, tensors, **{name: real})
    device = target.device
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        runner.workspace(device), backend=target.backend
    )
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^num_qo_heads has no memory"):
        wrapper.plan(indptr, indptr, integer, KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"^token_pos_in_items_len has no memory"):
        wrapper.plan(indptr, indptr, HEADS, KV_HEADS, HEAD_DIM, token_pos_in_items_len=integer)
