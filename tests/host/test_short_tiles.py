"""Which kernels serve decode-like work: short tiles of fa3 are kernels of their own, which rotate
none and take 16 bits up to head_dim 128."""

import pytest
from preflash import _core

DIMS = [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)]
DTYPE, POSITION = _core.DType, _core.Position


def id_of(q_dtype, kv_dtype, dims, tile_class, position=POSITION.none):
    wanted = _core.Variant(
        _core.Family.sm90, q_dtype, kv_dtype, *dims, tile_class=tile_class, position=position
    )
    return _core.find_in_matrix(wanted).id


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("q_dtype", [DTYPE.float16, DTYPE.bfloat16])
def test_short_tiles_of_fa3(q_dtype, dims):
    for kv_dtype in (DTYPE.float8_e4m3fn, DTYPE.float8_e5m2):
        short = id_of(q_dtype, kv_dtype, dims, _core.TileClass.decode)
        assert short.endswith("_decode_transformed")
        assert "_decode" not in id_of(q_dtype, kv_dtype, dims, _core.TileClass.prefill)
    short = id_of(q_dtype, q_dtype, dims, _core.TileClass.decode)
    assert short.endswith("_decode") == (dims[0] <= 128)
    assert "_decode" not in id_of(q_dtype, q_dtype, dims, _core.TileClass.prefill)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("q_dtype", [DTYPE.float16, DTYPE.bfloat16])
def test_rotated_keys_have_tall_tiles(q_dtype, dims):
    for kv_dtype in (q_dtype, DTYPE.float8_e4m3fn, DTYPE.float8_e5m2):
        found = id_of(q_dtype, kv_dtype, dims, _core.TileClass.decode, POSITION.rope)
        assert found.endswith("_transformed")
        assert "_decode" not in found
