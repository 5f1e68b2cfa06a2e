"""Where KV is cut: only where the machine would idle, and only as far as the workspace reaches."""

import pytest
from planned import FINAL, check, plan, planner, ragged

SLOT_BYTES = 64 * (128 + 1) * 4  # tile_m rows of head_dim_vo floats and one LSE each


def decode(batch, kv_len, **options):
    """One query per request, 32 query heads over 8 KV heads, on 132 SMs of two CTAs."""
    return plan(**ragged([1] * batch, [kv_len] * batch, num_qo_heads=32, num_kv_heads=8, **options))


def split_tiles(made):
    return int((made.merges["num_slots"] > 0).sum())


def test_long_decode_fills_one_wave():
    made = decode(4, 32768)
    check(made)
    assert set(made.merges["num_slots"].tolist()) == {8}
    assert made.sizes["num_items"] == 4 * 8 * 8 <= made.cta_slots()


def test_single_long_request_fills_the_machine():
    made = decode(1, 131072)
    assert made.cta_slots() * 0.9 <= made.sizes["num_items"] <= made.cta_slots()


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_split_counts_follow_the_machine(batch):
    """As many chunks as fill one wave, also where that is no round number."""
    made = decode(batch, 65536)
    per_wave = made.cta_slots() // (batch * 8)
    assert set(made.merges["num_slots"].tolist()) == {per_wave}


def test_even_waves_are_left_alone():
    """512 equal items on 264 slots: two waves at 97 percent."""
    made = decode(64, 4096)
    assert made.sizes["num_merges"] == 0
    assert made.layout["float_bytes"] == 0
    assert made.layout["partial_o"] == made.layout["merges"] == -1


def test_uneven_waves_are_split():
    """272 equal items on 264 slots would take two waves for one wave's work."""
    made = decode(34, 4096)
    whole = decode(34, 4096, disable_split_kv=True)
    assert split_tiles(made) > 0
    assert made.sizes["makespan_kv_tiles"] < 0.8 * whole.sizes["makespan_kv_tiles"]


def test_short_sequences_are_not_cut_into_crumbs():
    made = decode(1, 500)
    assert made.sizes["num_merges"] == 0


def test_big_prefill_is_not_split():
    made = plan(
        **ragged([512] * 64, [4096] * 64, num_qo_heads=32, num_kv_heads=8, causal=True, tile_m=128)
    )
    assert made.sizes["num_merges"] == 0
    assert made.sizes["num_items"] == 64 * 16 * 8


def test_small_append_to_long_context_is_split():
    made = plan(**ragged([100], [32768], num_qo_heads=32, num_kv_heads=8, causal=True, tile_m=128))
    assert made.cta_slots() * 0.8 <= made.sizes["num_items"] <= made.cta_slots()


@pytest.mark.parametrize("slots", [0, 1, 2, 15, 16, 31, 32, 100, 255, 256, 1000])
def test_workspace_bounds_the_split(slots):
    made = decode(1, 65536, float_workspace_bytes=slots * SLOT_BYTES)
    check(made)
    assert made.sizes["num_slots"] <= slots
    # Two chunks for each of the eight heads are the least that a split can be.
    assert (split_tiles(made) > 0) == (slots >= 16)


def test_more_workspace_never_makes_it_slower():
    estimates = [
        decode(3, 20000, float_workspace_bytes=slots * SLOT_BYTES).sizes["makespan_kv_tiles"]
        for slots in (0, 48, 96, 200, 400)
    ]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] < estimates[0] / 5


@pytest.mark.parametrize(("size", "chunk"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_fixed_split_is_kept_for_every_request(size, chunk):
    made = plan(**ragged([3, 70, 1], [5000, 40, 1024], fixed_split_size=size, causal=True))
    check(made)
    assert set(made.requests["chunk_keys"].tolist()) == {chunk}
    for merge in made.merges:
        assert merge["num_slots"] <= -(-5000 // chunk)


def test_largest_fixed_split():
    made = plan(**ragged([3], [5000], fixed_split_size=2**31 - 1))
    check(made)
    assert made.sizes["num_merges"] == 0


def test_fixed_split_that_does_not_fit_says_what_it_needs():
    case = ragged([1], [6400], fixed_split_size=64, float_workspace_bytes=1000)
    needed = 100 * 2 * SLOT_BYTES
    with pytest.raises(ValueError, match=f"float_workspace_buffer has 1000 bytes.* {needed} bytes"):
        planner.plan(**case)
    check(plan(**case | {"float_workspace_bytes": needed}))
    with pytest.raises(ValueError, match="float_workspace_buffer"):
        planner.plan(**case | {"float_workspace_bytes": needed - 1})


def test_fixed_split_with_too_many_chunks():
    case = ragged([1], [64 * 40000], fixed_split_size=64, float_workspace_bytes=1 << 50)
    with pytest.raises(ValueError, match=r"fixed_split_size = 64 cuts .* 40000 KV chunks"):
        planner.plan(**case)


def test_disabled_split_is_never_split():
    made = decode(1, 131072, disable_split_kv=True)
    assert made.sizes["num_merges"] == made.sizes["num_slots"] == 0
    assert (made.items["partial_slot"] == FINAL).all()


def test_disable_outweighs_a_fixed_size():
    made = decode(1, 8192, disable_split_kv=True, fixed_split_size=256)
    assert made.sizes["num_merges"] == 0
    assert made.requests["chunk_keys"].tolist() == [8192]


def pieces_of(made, request):
    """How one request is cut, in a form that does not depend on where its slots lie."""
    first_slot = {
        (int(m["row_begin"]), int(m["kv_head"])): int(m["first_slot"])
        for m in made.merges
        if m["request"] == request
    }
    pieces = set()
    for item in made.items[made.items["request"] == request]:
        row, head = int(item["row_begin"]), int(item["kv_head"])
        slot = int(item["partial_slot"])
        place = "final" if slot == FINAL else slot - first_slot[row, head]
        pieces.add((row, head, int(item["chunk"]), place, made.keys_of(item)))
    return pieces


@pytest.mark.parametrize("split", [{"fixed_split_size": 300}, {"disable_split_kv": True}])
def test_fixed_and_disabled_splits_do_not_depend_on_the_batch(split):
    options = {"causal": True, "tile_m": 64, **split}
    alone = plan(**ragged([70], [1500], **options))
    among = plan(**ragged([5, 70, 400, 1], [9000, 1500, 400, 20000], **options))
    crowd = plan(**ragged([70] * 50, [1500] * 50, num_sms=3, **options))
    assert pieces_of(alone, 0) == pieces_of(among, 1) == pieces_of(crowd, 17)
    assert planner.tile_class(**alone.case) == planner.tile_class(**among.case)


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "expected"),
    [
        ([1] * 8, [4000] * 8, {}, "decode"),
        ([16] * 8, [4000] * 8, {}, "decode"),
        ([17] * 8, [4000] * 8, {}, "prefill"),
        ([1] * 60 + [100], [4000] * 61, {}, "decode"),
        ([1] * 2 + [4000], [4000] * 3, {}, "prefill"),
        ([], [], {}, "prefill"),
        ([1] * 8, [4000] * 8, {"fixed_split_size": 256}, "prefill"),
        ([1] * 8, [4000] * 8, {"disable_split_kv": True}, "prefill"),
        ([0] * 8, [4000] * 8, {"graph_max_rows": 8}, "decode"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 8 * 17}, "prefill"),
    ],
)
def test_tile_class(qo_lens, kv_lens, options, expected):
    case = ragged(qo_lens, kv_lens, num_qo_heads=32, num_kv_heads=8, **options)
    assert planner.tile_class(**case) == expected
