"""Helpers call cudnn_batch_prefill_with_kv_cache for a case and compare it with the oracle."""

import math

import preflash
import torch
from preflash.testing import Case, MaskKind, compare, reference
from wrapper_options import block_table

LENGTHS = {
    "odd": ((5, 37, 1, 70), (17, 37, 90, 64)),
    "empty": ((3, 0, 7, 4, 0), (9, 8, 0, 21, 0)),
}


def make_case(lengths="odd", *, dims=(128, 128), page_size=0, causal=True, dtype=torch.bfloat16):
    qo_lens, kv_lens = LENGTHS[lengths]
    return Case(
        lengths, qo_lens, kv_lens, 6, 2, dims[0], dims[1], dtype, page_size,
        layout="HND" if page_size else "NHD", mask=MaskKind.CAUSAL if causal else MaskKind.NONE,
        sm_scale=0.11,
    )  # fmt: skip


def cumulated(lengths):
    return torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32)


def arguments(inputs, units="elements", device="cpu"):
    case = inputs.case
    qo_at, kv_at = cumulated(case.qo_lens).to(device), cumulated(case.kv_lens).to(device)
    in_tokens = units == "tokens"
    heads, kv_heads = case.num_qo_heads, case.num_kv_heads

    def offsets(at, *widths):
        return at if in_tokens else at * math.prod(widths)

    found = {
        "q": inputs.q, "k_cache": inputs.k, "v_cache": inputs.v, "scale": case.scale,
        "workspace_buffer": torch.empty(1 << 22, dtype=torch.uint8, device=inputs.q.device),
        "max_token_per_sequence": max(case.qo_lens), "max_sequence_kv": max(case.kv_lens),
        "actual_seq_lens_q": torch.tensor(case.qo_lens, dtype=torch.int32, device=device),
        "actual_seq_lens_kv": torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        "causal": case.mask is MaskKind.CAUSAL, "return_lse": True,
        "batch_offsets_q": offsets(qo_at, heads, case.head_dim),
        "batch_offsets_o": offsets(qo_at, heads, case.dim_vo), "batch_offsets_units": units,
    }  # fmt: skip
    if case.page_size:
        found["block_tables"] = block_table(inputs, spare=2).to(device)
    else:
        found["batch_offsets_k"] = offsets(kv_at, kv_heads, case.head_dim)
        found["batch_offsets_v"] = offsets(kv_at, kv_heads, case.dim_vo)
    return found


def rows_of(case, lse):
    """Returns [batch, longest, heads] as [rows, heads], and checks that the rest is -inf."""
    for request, length in enumerate(case.qo_lens):
        assert (lse[request, length:] == -math.inf).all()
    return torch.cat([lse[request, :n] for request, n in enumerate(case.qo_lens)])


def check(inputs, out, lse):
    expected = reference(inputs)
    rows = expected.out.shape[0]
    compare(out[:rows], lse, expected).check()


call = preflash.cudnn_batch_prefill_with_kv_cache
