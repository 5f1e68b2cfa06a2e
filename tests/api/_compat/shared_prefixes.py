"""Requests have the keys of a shared prefix, and pages of their own."""

import torch
from preflash.testing import Case, MaskKind, build, oracle


def shared_prefix(
    device, queries, prefix, keys, layout="NHD", dtype=torch.float16, causal=False, scale=None
):
    """Returns inputs over the pages, (k, v) of the prefix, and the oracle's attention over both."""
    case = Case(
        "prefix", queries, keys, 8, 2, 128, dtype=dtype, page_size=16, layout=layout,
        mask=MaskKind.CAUSAL if causal else MaskKind.NONE, sm_scale=scale,
    )  # fmt: skip
    inputs = build(case, device=device)
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn((2, prefix, 2, 128), generator=generator).to(dtype).to(device)
    parts = []
    for request in map(inputs.request, range(len(queries))):
        whole = [torch.cat([a.cpu(), b.cpu()]) for a, b in ((k, request.k), (v, request.v))]
        parts.append(oracle.attend(request.q.cpu(), *whole, inputs.pipeline))
    expected = oracle.concatenate(parts)
    expected.spread = expected.spread + 2 * expected.out.abs()  # the roundings of the merge
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return inputs, (k, v), expected.map(lambda t: t.to(device))


def table_of(inputs) -> tuple:
    return inputs.kv_indptr, inputs.indices, inputs.last_page_len
