"""fa3's soft cap by the GPU's own tanh, which is what runs unless PREFLASH_SOFT_CAP=exact."""

import itertools
import math

import preflash
import pytest
import torch
from backends import check, on_cases
from preflash.fmha_v2 import trtllm_fmha_v2_prefill
from preflash.testing import Case, KvForm, MaskKind, Position, runner
from preflash.testing.comparison import HARDWARE_TANH_ERROR
from preflash.testing.inputs import indptr

HALF, BFLOAT = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def capped_by_hardware(fa3, monkeypatch):
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "hardware")


def planned(lengths, num_heads, head_dim, **options):
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(runner.workspace("cuda"), backend="fa3")
    offsets = indptr(lengths)
    wrapper.plan(offsets, offsets, num_heads, num_heads, head_dim, **options)
    return wrapper


def logits_of_keys(logits, cap):
    """Returns logits as fa3 computes them: LSE of rows with one key each, in natural logarithms."""
    q, k = torch.zeros(2, len(logits), 1, 128, dtype=HALF, device="cuda")
    q[:, 0, 0], k[:, 0, 0] = logits.half(), 1.0
    wrapper = planned((1,) * len(logits), 1, 128, sm_scale=1.0, logits_soft_cap=cap)
    _, lse = wrapper.run(q, k, k, return_lse=True)
    return lse[:, 0].double() * math.log(2)


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 50.0, 1e3, 1e5])
def test_the_error_of_a_logit(cap):
    """Relative to what the cap leaves, whatever a logit's size."""
    logits = torch.cat([torch.logspace(-4, math.log10(6e4), 400), torch.linspace(0, 200, 401)])
    logits = torch.cat([logits, -logits]).to("cuda").half().double()
    exact = cap * torch.tanh(logits / cap)
    error = (logits_of_keys(logits, cap) - exact).abs()
    assert (error <= HARDWARE_TANH_ERROR * exact.abs() + 2.0**-22 * exact.abs() + 1e-7).all()


def test_the_environment_chooses(monkeypatch):
    logits = torch.linspace(-100, 100, 501, device="cuda").half().double()
    exact = 50.0 * torch.tanh(logits / 50.0)
    assert (logits_of_keys(logits, 50.0) - exact).abs().max() > 1e-4
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "exact")
    assert (logits_of_keys(logits, 50.0) - exact).abs().max() <= 3e-5
    monkeypatch.setenv("PREFLASH_SOFT_CAP", "roughly")
    with pytest.raises(RuntimeError, match="PREFLASH_SOFT_CAP"):
        logits_of_keys(logits, 50.0)


def capped_cases():
    lens = (130, 1, 0, 257), (700, 300, 5, 1111)
    dims = [*itertools.product((64, 128), (HALF, BFLOAT)), (256, BFLOAT), (512, HALF)]
    for (dim, dtype), cap, scale in itertools.product(dims, (5.0, 30.0, 50.0), (1.0, 8.0, 20.0)):
        how = {"soft_cap": cap, "sm_scale": scale / math.sqrt(dim), "mask": MaskKind.CAUSAL}
        yield Case("cap", *lens, 8, 2, dim, dtype=dtype, **how)
    given = {"mask": MaskKind.CAUSAL, "soft_cap": 30.0, "sm_scale": 0.5}
    for more in (
        {"position": Position.ALIBI},
        {"mask": MaskKind.CUSTOM},
        {"position": Position.ALIBI, "mask": MaskKind.CUSTOM},
        {"window_left": 99},
        {"page_size": 16, "form": KvForm.COMBINED},
        {"page_size": 5, "form": KvForm.COMBINED},
        {"kv_dtype": torch.float8_e4m3fn},
        {"fixed_split_size": 128},
        {"sm_scale": -0.3},
    ):
        yield Case("cap", *lens, 8, 2, 128, **(given | more))


@on_cases(capped_cases())
def test_outputs(case):
    check(case, "fa3")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_of_a_key(head_dim):
    """Reaches every row that sees the key and no other, whichever way its exponential is made."""
    q, k, v = torch.randn(3, 300, 2, head_dim, device="cuda").bfloat16()
    wrapper = planned((300,), 2, head_dim, causal=True, logits_soft_cap=30.0, q_data_type=BFLOAT)
    for key in range(64, 80):
        poisoned = k.clone()
        poisoned[key] = math.nan
        for result in wrapper.run(q, poisoned, v, return_lse=True):
            assert result[:key].isfinite().all()
            assert result[key:].isnan().all()


def test_statistics_are_exact():
    """A launch that returns row maxima caps as if it had been asked for exactness."""
    q = torch.zeros(1, 1, 128, dtype=HALF, device="cuda")
    q[..., 0] = 40.0
    cache = torch.zeros(1, 2, 1, 16, 128, dtype=HALF, device="cuda")
    cache[:, 0, :, 0, 0] = 1.0
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    _, stats = trtllm_fmha_v2_prefill(
        (q, cache), "Q_PAGED_KV_HND", workspace, one, 1, 1, 1.0, 1.0, 1,
        indptr((1,), "cuda"), indptr((1,), "cuda"), block_tables=torch.zeros_like(one[None]),
        logits_soft_cap_scale=50.0, save_softmax_stats=True, backend="fa3",
    )  # fmt: skip
    expected = 50.0 * math.tanh(40.0 / 50.0) / math.sqrt(128)
    assert abs(float(stats.flatten()[0]) - expected) <= 5e-7 * 50.0
