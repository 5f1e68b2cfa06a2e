"""Logits beyond the integers of float32, up to 1e30: results are right if float32 products are.

The products are exact, so that float64 yields the weights however large the logits are. fa3 makes
rows NaN, output and LSE, that meet a logit of FA3_LIMIT or more in base 2: no other value of its
results is wrong or NaN. tests/cpu/test_cpu_huge_logits.py has more patterns of the CPU.
"""

import math

import preflash
import pytest
import torch
from planned_cases import planned
from preflash.testing import Case
from preflash.testing.oracle import alibi_slopes

HEAD_DIM, KEYS, TOKENS = 64, 333, 37
# 2^24 is where the rounding of a row's largest product passes one bit of its weights, 2^31 where it
# passes all of them.
MAGNITUDES = [1e6, 1.2e7, 1.3e8, 2.9e9, 1e30]
LARGEST = 256.0
FA3_LIMIT = 2.0**27
# First element of each key; times 256 and the scale it is the key's logit.
KEY = torch.arange(KEYS)
PATTERNS = {
    "equal": torch.full((KEYS,), LARGEST),
    # Ties of four keys in three tiles; the others are smaller.
    "ties": torch.where((KEY % 97 == 3) | (KEY == 131), LARGEST, LARGEST - 1),
    "rising": ((KEY // 64) - 2) / 4 * LARGEST,  # each tile moves the maximum, from -M over 0 to M
    "falling": (2 - (KEY // 64)) / 4 * LARGEST,
}
every_magnitude = pytest.mark.parametrize("magnitude", MAGNITUDES)


def tensors(pattern: str, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Returns q, k, v with rows of M, -M, 0 and ordinary logits in one warp's share of a tile."""
    q = torch.zeros(TOKENS, 4, HEAD_DIM, dtype=dtype)
    row = torch.arange(TOKENS * 4).reshape(TOKENS, 4)
    q[..., 0] = torch.tensor([256.0, -256.0, 0.0, 256.0, 128.0])[row % 5].to(dtype)
    k = torch.zeros(KEYS, 2, HEAD_DIM, dtype=dtype)
    k[..., 0] = PATTERNS[pattern][:, None].to(dtype)
    v = torch.randn(KEYS, 2, HEAD_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    return [q, k, v]


def single(target, q, k, v, sm_scale: float, **options):
    return preflash.single_prefill_with_kv_cache(
        *map(target.to, (q, k, v)), sm_scale=sm_scale, return_lse=True, backend=target.backend,
        **options,
    )  # fmt: skip


def logits_of(q, k, sm_scale: float) -> torch.Tensor:
    return torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * sm_scale


def computed_rows(target, got, logits):
    """Returns output and LSE in float64, and the rows that are not NaN: all but some of fa3's."""
    out, lse = (x.cpu().double() for x in got)
    rows = ~lse.isnan()
    assert torch.equal(rows, ~out.isnan().all(-1))
    largest = logits.abs().amax(-1).T / math.log(2.0)
    assert bool(rows[largest < FA3_LIMIT].all())
    assert bool(rows.all()) or target.backend == "fa3"
    return out, lse, rows


def base_2_lse(logits) -> torch.Tensor:
    return logits.logsumexp(-1).T / math.log(2.0)


def assert_right(target, got, logits, v, keep: torch.Tensor | None = None, atol=1e-4) -> None:
    """Compares with float64; keep: mask of the logits, atol: of the LSE."""
    out, lse, rows = computed_rows(target, got, logits)
    masked = logits if keep is None else logits.masked_fill(~keep, -math.inf)
    expected = torch.einsum("hqk,khd->qhd", masked.softmax(-1), v.double().repeat_interleave(2, 1))
    expected_lse = base_2_lse(masked)
    if target.backend == "fa3":
        # The row's origin is its largest logit but for 15 bits: a NaN, if that is out of range.
        assert not bool(rows[expected_lse.abs() >= FA3_LIMIT * 1.01].any())
    torch.testing.assert_close(out[rows], expected[rows], rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse[rows], expected_lse[rows], rtol=1e-6, atol=atol)


@every_magnitude
@pytest.mark.parametrize("sign", [1, -1])
def test_masks_and_the_sign_of_the_scale(target, magnitude, sign):
    q, k, v = tensors("rising")
    sm_scale = sign * magnitude / LARGEST**2
    reach = torch.arange(KEYS)[None, :] - torch.arange(TOKENS)[:, None] - (KEYS - TOKENS)
    got = single(target, q, k, v, sm_scale, causal=True, window_left=100)
    assert_right(target, got, logits_of(q, k, sm_scale), v, (reach <= 0) & (reach >= -100))


def in_chunks(target, q, k, v, sm_scale: float, page_size: int = 0):
    case = Case("huge", (len(q),), (KEYS,), 4, 2, HEAD_DIM, page_size=page_size, sm_scale=sm_scale,
                fixed_split_size=64)  # fmt: skip
    inputs, wrapper = planned(case, target)
    for memory, rows in ((inputs.k, k), (inputs.v, v)):
        if page_size == 0:
            memory[:KEYS] = rows
            continue
        padded = rows.new_full((len(inputs.indices) * page_size, 2, HEAD_DIM), math.nan)
        padded[:KEYS] = rows
        pages = padded.view(-1, page_size, 2, HEAD_DIM).to(memory.device)
        memory[inputs.indices.long().to(memory.device)] = pages
    kv = (inputs.cache,) if case.paged else (inputs.k, inputs.v)
    return wrapper.run(target.to(q), *kv, return_lse=True)


# Queries, and the page size of keys that are split; None: one chunk.
WAYS = [(TOKENS, None), (1, 16), (TOKENS, 0), (TOKENS, 5)]


@pytest.mark.parametrize(("qo_len", "page_size"), WAYS)
@every_magnitude
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(target, pattern, magnitude, qo_len, page_size):
    """Weights of chunks come from differences of their LSEs, which a float32 LSE would not hold."""
    q, k, v = tensors(pattern, torch.float16 if page_size is None else torch.bfloat16)
    q, sm_scale = q[:qo_len], magnitude / LARGEST**2
    if page_size is None:
        got = single(target, q, k, v, sm_scale)
    else:
        got = in_chunks(target, q, k, v, sm_scale, page_size)
    assert_right(target, got, logits_of(q, k, sm_scale), v)


@pytest.mark.parametrize("run", [single, in_chunks])
@pytest.mark.parametrize("scale", [0.25, 2.0])
@pytest.mark.parametrize("spread", [1, 3])
@pytest.mark.parametrize("base", [2.0**11, 2.0**12, 2.0**13])
def test_weights_between_huge_logits(target, base, spread, scale, run):
    """Differences of a few units on top of 2^22 to 2^26: the weights are ordinary ones, of keys and
    of chunks, whose largest differ. With a scale of 2 logits in base 2 are beyond 2^24, where
    float32 has every second integer."""
    step = max(1.0, base**2 / 2**23)
    q, k, v = tensors("equal")
    q[..., 0], q[..., 1] = base, step
    k[..., 0] = base
    units = KEY % 5 * spread
    k[..., 1] = (units - ((KEY // 64 % 2 == 1) & (KEY % 5 == 4)).int())[:, None].to(torch.bfloat16)
    got = run(target, q, k, v, scale / step)
    assert_right(target, got, logits_of(q, k, scale / step), v)


@pytest.mark.parametrize("cap", [30.0, 1e8, 3e9, 1e30])
def test_soft_caps(target, cap):
    q, k, v = tensors("ties")
    sm_scale = 4 * cap / LARGEST**2
    logits = cap * torch.tanh(logits_of(q, k, sm_scale) / cap)
    got = single(target, q, k, v, sm_scale, logits_soft_cap=cap)
    out, lse, rows = computed_rows(target, got, logits)
    assert bool(out[rows].isfinite().all())
    assert bool((out[rows].abs().amax(-1) > 0).all())
    torch.testing.assert_close(lse[rows], base_2_lse(logits)[rows], rtol=2e-6, atol=1e-3)


def test_alibi(target):
    """Rows of logits of 1e30, which swallow the bias, and rows whose logits are the bias."""
    q, k, v = tensors("equal")
    q.zero_()
    q[::3, :, 0], q[1::3, :, 0] = LARGEST, -LARGEST
    sm_scale = 1e30 / LARGEST**2
    got = single(target, q, k, v, sm_scale, pos_encoding_mode="ALIBI")
    # Float64 has no room for the bias of a logit of 1e30 either.
    distance = torch.arange(KEYS) - torch.arange(TOKENS)[:, None]
    logits = logits_of(q, k, sm_scale)
    logits = torch.where(logits == 0, alibi_slopes(4)[:, None, None] * distance, logits)
    assert_right(target, got, logits, v, atol=1e-3)


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("magnitude", [1e8, 1e30])
def test_sinks(target, magnitude, split):
    """The larger one of sink and logits has all the weight: the sink is a key whose value is 0."""
    q, k, v = tensors("equal")
    q.zero_()
    q[::2, :, 0], q[1::2, :, 0] = LARGEST, -LARGEST
    sinks = torch.tensor([0.0, 2 * magnitude, -2 * magnitude, -math.inf])
    case = Case("sinks", (TOKENS,), (KEYS,), 4, 2, HEAD_DIM, sm_scale=magnitude / LARGEST**2)
    _, wrapper = planned(case, target, fixed_split_size=split)
    got = wrapper.run(*map(target.to, (q, k, v)), sinks=target.to(sinks), return_lse=True)
    of_sinks = sinks.double()[:, None, None].expand(4, TOKENS, 1)
    logits = torch.cat([logits_of(q, k, case.sm_scale), of_sinks], -1)
    assert_right(target, got, logits, torch.cat([v, torch.zeros_like(v[:1])]), atol=1e-3)
