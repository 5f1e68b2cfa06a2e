"""RoPE on the CPU: float32 queries and keys keep their bits at positions of any size."""

import os
import subprocess
import sys

import preflash
import pytest
import torch
from preflash import _core
from preflash.testing.oracle import Pipeline, Rope, attend

HEADS, DIM = 6, 24


@pytest.mark.parametrize("rope", [Rope(), Rope(0.3, 5e5)], ids=str)
@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 20_000}])
@pytest.mark.parametrize("qo_len", [1, 3, 19, 70])
def test_far_positions_keep_their_bits(qo_len, split, rope):
    """2^18 and more: an angle in float32 would be off by 1/64, and so would weights."""
    kv_len = 270_003
    generator = torch.Generator().manual_seed(qo_len)
    q = torch.randn(qo_len, HEADS, DIM, generator=generator)
    k, v = (torch.randn(kv_len, 2, DIM, generator=generator) for _ in "kv")
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8), backend="cpu"
    )
    wrapper.plan(
        torch.tensor([0, qo_len], dtype=torch.int32),
        torch.tensor([0, kv_len], dtype=torch.int32),
        HEADS,
        2,
        DIM,
        causal=True,
        # Few keys weigh: what their logits are off by stays visible.
        window_left=300,
        sm_scale=1.0,
        pos_encoding_mode="ROPE_LLAMA",
        rope_scale=rope.scale,
        rope_theta=rope.theta,
        q_data_type=torch.float32,
        **split,
    )
    out, lse = wrapper.run(q, k, v, return_lse=True)
    expected = attend(q, k, v, Pipeline(1.0, causal=True, window_left=300, rope=rope))
    torch.testing.assert_close(out.double(), expected.out, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=3e-5)


ISAS = ["generic", "avx2", "avx512"]


@pytest.mark.skipif("PREFLASH_CPU_ISA" in os.environ, reason="this is the inner run")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    """The core cases with narrower vectors than this machine's."""
    if ISAS.index(isa) >= ISAS.index(_core.cpu_isa()):
        pytest.skip(f"the tests ran on {_core.cpu_isa()}")
    cases = os.path.join(os.path.dirname(__file__), "test_cpu_cases.py")
    pytest_options = ["-q", "-x", "-p", "no:cacheprovider", "-k", "test_core and rope"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_options, cases],
        env={**os.environ, "PREFLASH_CPU_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
