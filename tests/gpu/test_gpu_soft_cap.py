"""fa3's soft cap by the GPU's own tanh, which is what runs unless PREFLASH_SOFT_CAP=exact."""

from __future__ import annotations

import itertools
import math

import preflash
import pytest
import torch
from preflash.fmha_v2 import trtllm_fmha_v2_prefill
from preflash.testing import runner
from preflash.testing.case import Case, KvForm, MaskKind, Position
from preflash.testing.comparison import HARDWARE_TANH_ERROR
from preflash.testing.inputs import build
from require_variant import why_no_fa3

FA3 = {"backend": "fa3"}
HALF, BFLOAT = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def capped_by_hardware(monkeypatch):
    if why_no_fa3():
        pytest.skip(why_no_fa3())
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "hardware")


def logits_of_keys(logits, cap, head_dim=128):
    """Returns logits as fa3 computes them: LSE of rows with one key each, in natural logarithms."""
    count = len(logits)
    q = torch.zeros(count, 1, head_dim, dtype=torch.float16, device="cuda")
    k = torch.zeros(count, 1, head_dim, dtype=torch.float16, device="cuda")
    q[:, 0, 0], k[:, 0, 0] = logits.half(), 1.0
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace("cuda"), **FA3)
    indptr = torch.arange(count + 1, dtype=torch.int32)
    wrapper.plan(indptr, indptr, 1, 1, head_dim, sm_scale=1.0, logits_soft_cap=cap)
    _, lse = wrapper.run(q, k, k, return_lse=True)
    return lse[:, 0].double() * math.log(2)


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 50.0, 1e3, 1e5])
def test_the_error_of_a_logit(cap):
    """Relative to what the cap leaves, whatever a logit's size."""
    logits = torch.cat([torch.logspace(-4, math.log10(6e4), 400), torch.linspace(0, 200, 401)])
    logits = torch.cat([logits, -logits]).to("cuda").half().double()
    exact = cap * torch.tanh(logits / cap)
    found = logits_of_keys(logits, cap)
    error = (found - exact).abs()
    assert (error <= HARDWARE_TANH_ERROR * exact.abs() + 2.0**-22 * exact.abs() + 1e-7).all()


def test_the_environment_chooses(monkeypatch):
    logits = torch.linspace(-100, 100, 501, device="cuda").half().double()
    exact = 50.0 * torch.tanh(logits / 50.0)
    by_hardware = logits_of_keys(logits, 50.0)
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "exact")
    by_float32 = logits_of_keys(logits, 50.0)
    assert (by_float32 - exact).abs().max() <= 3e-5
    assert (by_hardware - exact).abs().max() > 1e-4
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "roughly")
    with pytest.raises(RuntimeError, match="PREFLASH_SOFT_CAP"):
        logits_of_keys(logits, 50.0)


LENGTHS = {"qo_lens": (130, 1, 0, 257), "kv_lens": (700, 300, 5, 1111)}


@pytest.mark.parametrize("scale", [1.0, 8.0, 20.0])
@pytest.mark.parametrize("cap", [5.0, 30.0, 50.0])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*itertools.product((64, 128), (HALF, BFLOAT)), (256, BFLOAT), (512, HALF)],
)
def test_outputs(head_dim, dtype, cap, scale):
    case = Case("cap", *LENGTHS.values(), 8, 2, head_dim, dtype=dtype, mask=MaskKind.CAUSAL,
                soft_cap=cap, sm_scale=scale / math.sqrt(head_dim))  # fmt: skip
    runner.check(build(case, device="cuda"), **FA3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_of_a_key(head_dim):
    """Reaches every row that sees the key and no other, whichever way its exponential is made."""
    tokens, tile = 300, 16
    q, k, v = torch.randn(3, tokens, 2, head_dim, device="cuda").bfloat16().unbind(0)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace("cuda"), **FA3)
    indptr = torch.tensor([0, tokens], dtype=torch.int32)
    wrapper.plan(
        indptr, indptr, 2, 2, head_dim, causal=True, logits_soft_cap=30.0, q_data_type=q.dtype
    )
    for key in range(64, 64 + tile):
        poisoned = k.clone()
        poisoned[key] = math.nan
        out, lse = wrapper.run(q, poisoned, v, return_lse=True)
        assert torch.cat([out[:key].flatten(), lse[:key].flatten()]).isfinite().all()
        assert torch.cat([out[key:].flatten(), lse[key:].flatten()]).isnan().all()


@pytest.mark.parametrize(
    "more",
    [
        {"position": Position.ALIBI},
        {"mask": MaskKind.CUSTOM},
        {"position": Position.ALIBI, "mask": MaskKind.CUSTOM},
        {"window_left": 99},
        {"page_size": 16, "form": KvForm.COMBINED},
        {"page_size": 5, "form": KvForm.COMBINED},
        {"kv_dtype": torch.float8_e4m3fn},
        {"fixed_split_size": 128},
        {"sm_scale": -0.3},
    ],
    ids=lambda options: "-".join(options),
)
def test_beside_other_options(more):
    given = {"mask": MaskKind.CAUSAL, "soft_cap": 30.0, "sm_scale": 0.5, "dtype": torch.bfloat16}
    case = Case("cap", *LENGTHS.values(), 8, 2, 128, **(given | more))
    runner.check(build(case, device="cuda"), **FA3)


def test_statistics_are_exact():
    """A launch that returns row maxima caps as if it had been asked for exactness."""
    q = torch.zeros(1, 1, 128, dtype=torch.float16, device="cuda")
    q[..., 0] = 40.0
    cache = torch.zeros(1, 2, 1, 16, 128, dtype=torch.float16, device="cuda")
    cache[:, 0, :, 0, 0] = 1.0
    _, stats = trtllm_fmha_v2_prefill(
        (q, cache),
        "Q_PAGED_KV_HND",
        torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
        1, 1, 1.0, 1.0, 1,
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        logits_soft_cap_scale=50.0,
        save_softmax_stats=True,
        backend="fa3",
    )  # fmt: skip
    expected = 50.0 * math.tanh(40.0 / 50.0) / math.sqrt(128)
    assert abs(float(stats.flatten()[0]) - expected) <= 5e-7 * 50.0
