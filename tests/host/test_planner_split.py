"""KV is split only where the machine would idle, and only as far as the workspace reaches."""

import pytest
from planned import FINAL, checked, partial_bytes, plan, planned_rounds, planner, ragged

GQA = {"num_qo_heads": 32, "num_kv_heads": 8}


def decode(batch, kv_len, **options):
    """Plans one query per request, 32 query heads over 8 KV heads, on 132 SMs of two CTAs."""
    return checked([1] * batch, [kv_len] * batch, **GQA, **options)


def prefill(qo_lens, kv_lens):
    return plan(**ragged(qo_lens, kv_lens, **GQA, causal=True, tile_m=128))


@pytest.mark.parametrize(("batch", "kv_len"), [(4, 32768), (3, 65536), (5, 65536)])
def test_long_decode_fills_one_wave(batch, kv_len):
    """Chunks fill one wave, also if their number is not round."""
    made = decode(batch, kv_len)
    assert set(made.merges["num_chunks"].tolist()) == {made.cta_slots() // (batch * 8)}
    assert made.sizes["num_items"] <= made.cta_slots()


def test_one_long_request_fills_the_machine():
    for made, least in ((decode(1, 131072), 0.9), (prefill([100], [32768]), 0.8)):
        assert made.cta_slots() * least <= made.sizes["num_items"] <= made.cta_slots()


def test_what_is_not_split():
    for made in (
        decode(64, 4096),  # 512 equal items on 264 slots: two waves at 97 percent
        decode(1, 100),  # crumbs
        prefill([512] * 64, [4096] * 64),
        decode(1, 131072, disable_split_kv=True),
        decode(1, 8192, disable_split_kv=True, fixed_split_size=256),
        checked([3], [5000], fixed_split_size=2**31 - 1),
    ):
        assert made.sizes["num_merges"] == made.sizes["num_partial_rows"] == 0
        assert made.layout["float_bytes"] == 0
        assert made.layout["partial_o"] == made.layout["merges"] == -1
        assert (made.items["partial_row"] == FINAL).all()


def test_uneven_waves_are_split():
    """272 equal items on 264 slots would take two waves for one wave's work."""
    made, whole = decode(34, 4096), decode(34, 4096, disable_split_kv=True)
    assert made.sizes["num_merges"] > 0
    assert made.sizes["makespan_kv_tiles"] < 0.8 * whole.sizes["makespan_kv_tiles"]


def test_workspace_bounds_the_split():
    """More workspace never makes it slower."""
    estimates = []
    for rows in (0, 63, 64, 127, 128, 400, 1023, 1024, 4000):
        sizes = decode(1, 65536, float_workspace_bytes=partial_bytes(rows)).sizes
        assert sizes["num_partial_rows"] <= rows
        # Two chunks of four rows for each of the eight heads are the least that a split can be.
        assert (sizes["num_merges"] > 0) == (rows >= 64)
        estimates.append(sizes["makespan_kv_tiles"])
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] < estimates[0] / 5


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "chunk"),
    [
        ([1], [512], 64),
        ([1], [2048], 128),
        ([1] * 4, [1024] * 4, 128),
        ([1] * 8, [1024] * 8, 256),  # shorter ones would make more items than CTAs
        ([1] * 3, [4096] * 3, 384),
        ([64], [1024], 256),  # with chunks of 128 keys 16,384 rows would be merged
    ],
)
def test_short_chunks_where_every_item_has_a_cta_and_few_rows_are_merged(qo_lens, kv_lens, chunk):
    made = checked(qo_lens, kv_lens, **GQA)
    assert set(made.requests["chunk_keys"].clip(max=max(kv_lens)).tolist()) == {chunk}


def test_fixed_split_is_kept_for_every_request():
    for size, chunk in ((1, 64), (64, 64), (65, 128), (1000, 1024)):
        made = checked([3, 70, 1], [5000, 40, 1024], fixed_split_size=size, causal=True)
        assert set(made.requests["chunk_keys"].tolist()) == {chunk}


def pieces_of(made, request):
    """Returns the keys of a request's chunks by row, head and chunk, and whether each is final."""
    items = made.items[made.items["request"] == request]
    places = items[["row_begin", "kv_head", "chunk"]].tolist()
    chunks = [(made.keys_of(item), item["partial_row"] == FINAL) for item in items]
    return dict(zip(places, chunks, strict=True))


@pytest.mark.parametrize("split", [{"fixed_split_size": 300}, {"disable_split_kv": True}])
def test_fixed_and_disabled_splits_do_not_depend_on_the_batch(split):
    options = {"causal": True, "tile_m": 64, **split}
    alone = checked([70], [1500], **options)
    among = checked([5, 70, 400, 1], [9000, 1500, 400, 20000], **options)
    crowd = checked([70] * 50, [1500] * 50, num_sms=3, **options)
    assert pieces_of(alone, 0) == pieces_of(among, 1) == pieces_of(crowd, 17)
    assert planner.tile_class(**alone.case) == planner.tile_class(**among.case)


@pytest.mark.parametrize("schedule", ["persistent", "one_per_item"])
def test_fixed_split_beyond_the_workspace_takes_several_launches(schedule):
    """Each request has the chunks of a launch with enough workspace."""
    lengths = [300, 300, 300, 5, 1, 0, 700, 64], [900, 900, 900, 200, 5000, 80, 2100, 700]
    case = ragged(*lengths, fixed_split_size=256, causal=True, schedule=schedule)
    whole = plan(**case)
    rows = whole.sizes["num_partial_rows"]
    for parts in (2, 3, 7):
        room = {"float_workspace_bytes": partial_bytes(rows // parts + 1)}
        rounds = planned_rounds(**case | room)
        assert parts <= len(rounds) <= 2 * parts
        for request in range(len(lengths[0])):
            pieces = [pieces_of(made, request) for made in rounds]
            assert {key: piece for made in pieces for key, piece in made.items()} == pieces_of(
                whole, request
            )


def test_launches_share_their_partial_rows():
    room = {"float_workspace_bytes": partial_bytes(1000), "fixed_split_size": 128}
    rounds = planned_rounds(**ragged([1] * 200, [640] * 200, **room))
    assert [made.sizes["num_partial_rows"] for made in rounds] == [1000] * 4
    # Launches that their tiles fill by half.
    tall = {"num_qo_heads": 1, "num_kv_heads": 1, "fixed_split_size": 2048}
    room = {"float_workspace_bytes": partial_bytes(254 + 127)}
    assert len(planned_rounds(**ragged([64] * 127, [4096] * 127, **tall, **room))) <= 64
    room = {"float_workspace_bytes": partial_bytes(1000), "fixed_split_size": 128}
    most, least = planned_rounds(**ragged([1] * 51, [640] * 51, **room))
    assert most.sizes["num_partial_rows"] - least.sizes["num_partial_rows"] <= 20
