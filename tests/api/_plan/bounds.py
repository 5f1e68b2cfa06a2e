"""Options of plan() for upper bounds of the keys."""

import torch
from preflash.testing import Inputs


def bounds_of(inputs: Inputs) -> dict:
    """Returns the options with the numbers of keys of the case, which runs read."""
    lens = torch.tensor(inputs.case.kv_lens, dtype=torch.int32, device=inputs.q.device)
    return {"seq_lens": lens, "lengths_are_upper_bounds": True}
