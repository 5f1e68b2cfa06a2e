"""The tensors of a run that hold a number for each head: Python and C++ know the same ones."""

import preflash
import pytest
import torch
from preflash import _core
from preflash._check import torch_modes
from preflash._check.arguments import PER_HEAD_OPERANDS, PerHead
from preflash._check.rules import TENSORS

HEADS = {"num_qo_heads": 8, "num_kv_heads": 4}


@pytest.mark.parametrize("name", PerHead._fields)
def test_the_binding_takes_them_by_name(name):
    _core.RunMemory(torch_modes.TORCH, None, **{name: torch.ones(4)})


def test_the_binding_takes_no_others():
    with pytest.raises(TypeError, match="RunMemory has no tensor named slopes"):
        _core.RunMemory(torch_modes.TORCH, None, mask_bits=torch.ones(4), slopes=torch.ones(4))


@pytest.mark.parametrize("name", PerHead._fields)
def test_a_launch_knows_how_many_heads_they_have(name):
    """The last of them may not lie in the output, and what is behind it may."""
    scaled = name in PER_HEAD_OPERANDS
    dtype = torch.float8_e4m3fn if scaled else torch.float16
    num_qo_heads, num_kv_heads = HEADS.values()
    q = torch.zeros(3, num_qo_heads, 64).to(dtype)
    k, v = (torch.zeros(5, num_kv_heads, 64).to(dtype) for _ in range(2))
    options = {"o_dtype": torch.float16} if scaled else {}
    count = HEADS[TENSORS[name].shape[0]]
    # As many float32 as heads, and the output from the last of them on or from behind it.
    memory = torch.ones(64 + 3 * num_qo_heads * 64, dtype=torch.float16)
    begin = 32 - 2 * count
    of_heads = memory[begin : begin + 2 * count].view(torch.float32)
    wrapper = preflash.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
    lengths = (torch.tensor([0, 3]), torch.tensor([0, 5]))
    wrapper.plan(
        *(one.int() for one in lengths), num_qo_heads, num_kv_heads, 64,
        q_data_type=dtype, kv_data_type=dtype, **options,
    )  # fmt: skip
    behind = memory[32:][: q.numel()].view(q.shape)
    wrapper.run(q, k, v, out=behind, **{name: of_heads})
    over = memory[24:][: q.numel()].view(q.shape)
    with pytest.raises(ValueError, match=f"out shares memory with {name}"):
        wrapper.run(q, k, v, out=over, **{name: of_heads})
