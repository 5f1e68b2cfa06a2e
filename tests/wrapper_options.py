"""Options of the wrappers that repeat or hold what plan() is told."""

import torch
from preflash.testing import Inputs


def graph_options(inputs: Inputs) -> dict:
    """Returns use_cuda_graph=True and buffers for such batches, some larger than needed."""
    case, device = inputs.case, inputs.q.device
    ints = {"dtype": torch.int32, "device": device}
    indptr = torch.full((case.batch_size + 1,), -7, **ints)
    found = {"use_cuda_graph": True, "qo_indptr_buf": indptr.clone()}
    if case.paged:
        found["paged_kv_indptr_buf"] = indptr.clone()
        found["paged_kv_indices_buf"] = torch.full((inputs.indices.numel() + 3,), -7, **ints)
        found["paged_kv_last_page_len_buf"] = indptr[1:].clone()
    else:
        found["kv_indptr_buf"] = indptr.clone()
    pairs = sum(a * b for a, b in zip(case.qo_lens, case.kv_lens, strict=True))
    room = pairs // 8 + case.batch_size + 8
    found["custom_mask_buf"] = torch.full((room,), 255, dtype=torch.uint8, device=device)
    found["mask_indptr_buf"] = indptr.clone()
    return found


def hints(inputs: Inputs) -> dict:
    """Optional arguments of plan() that repeat the lengths and pages in other forms."""
    case, device = inputs.case, inputs.qo_indptr.device
    found = {
        "seq_lens_q": torch.tensor(case.qo_lens, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor(case.kv_lens, dtype=torch.int64, device=device),
        "max_token_per_sequence": max(case.qo_lens),
        "max_sequence_kv": max(case.kv_lens) + 1,
        "uniform_q_len": case.qo_lens[0] if len(set(case.qo_lens)) == 1 else -1,
    }
    if case.paged:
        found["block_tables"] = block_table(inputs).to(device)
    return found


def block_table(inputs: Inputs, spare: int = 1, unused: int = -7) -> torch.Tensor:
    """Returns the pages of each request as a row, with spare columns, on the CPU."""
    shape = (inputs.case.batch_size, max(map(len, inputs.page_table)) + spare)
    table = torch.full(shape, unused, dtype=torch.int32, device="cpu")
    for row, pages in zip(table, inputs.page_table, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
    return table
