"""KV is split only where the machine would idle, and only as far as the workspace reaches."""

import pytest
from planned import FINAL, check, checked, partial_bytes, plan, planner, ragged, rows_per_tile
from preflash import _core

GQA = {"num_qo_heads": 32, "num_kv_heads": 8}


def decode(batch, kv_len, **options):
    """Plans one query per request, 32 query heads over 8 KV heads, on 132 SMs of two CTAs."""
    return checked([1] * batch, [kv_len] * batch, **GQA, **options)


def prefill(qo_lens, kv_lens):
    return plan(**ragged(qo_lens, kv_lens, **GQA, causal=True, tile_m=128))


def chunks(made):
    return set(made.merges["num_chunks"].tolist())


@pytest.mark.parametrize(("batch", "kv_len"), [(4, 32768), (2, 65536), (3, 65536), (5, 65536)])
def test_long_decode_fills_one_wave(batch, kv_len):
    """Chunks fill one wave, also if their number is not round."""
    made = decode(batch, kv_len)
    assert chunks(made) == {made.cta_slots() // (batch * 8)}
    assert made.sizes["num_items"] <= made.cta_slots()


def test_one_long_request_fills_the_machine():
    for made, least in ((decode(1, 131072), 0.9), (prefill([100], [32768]), 0.8)):
        assert made.cta_slots() * least <= made.sizes["num_items"] <= made.cta_slots()


@pytest.mark.parametrize(
    "made",
    [
        lambda: decode(64, 4096),  # 512 equal items on 264 slots: two waves at 97 percent
        lambda: decode(1, 500),  # crumbs
        lambda: prefill([512] * 64, [4096] * 64),
        lambda: decode(1, 131072, disable_split_kv=True),
        lambda: decode(1, 8192, disable_split_kv=True, fixed_split_size=256),
        lambda: checked([3], [5000], fixed_split_size=2**31 - 1),
    ],
    ids=["even waves", "short", "prefill", "disabled", "disabled and fixed", "longest fixed"],
)
def test_what_is_not_split(made):
    made = made()
    assert made.sizes["num_merges"] == made.sizes["num_partial_rows"] == 0
    assert made.layout["float_bytes"] == 0
    assert made.layout["partial_o"] == made.layout["merges"] == -1
    assert (made.items["partial_row"] == FINAL).all()


def test_uneven_waves_are_split():
    """272 equal items on 264 slots would take two waves for one wave's work."""
    made, whole = decode(34, 4096), decode(34, 4096, disable_split_kv=True)
    assert made.sizes["num_merges"] > 0
    assert made.sizes["makespan_kv_tiles"] < 0.8 * whole.sizes["makespan_kv_tiles"]


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 127, 128, 400, 1023, 1024, 4000])
def test_workspace_bounds_the_split(rows):
    made = decode(1, 65536, float_workspace_bytes=partial_bytes(rows))
    assert made.sizes["num_partial_rows"] <= rows
    # Two chunks of four rows for each of the eight heads are the least that a split can be.
    assert (made.sizes["num_merges"] > 0) == (rows >= 64)


def test_more_workspace_never_makes_it_slower():
    estimates = [
        decode(3, 20000, float_workspace_bytes=partial_bytes(rows)).sizes["makespan_kv_tiles"]
        for rows in (0, 192, 384, 800, 1600)
    ]
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] < estimates[0] / 5


@pytest.mark.parametrize(("size", "chunk"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_fixed_split_is_kept_for_every_request(size, chunk):
    made = checked([3, 70, 1], [5000, 40, 1024], fixed_split_size=size, causal=True)
    assert set(made.requests["chunk_keys"].tolist()) == {chunk}
    assert all(merge["num_chunks"] <= -(-5000 // chunk) for merge in made.merges)


def test_fixed_split_that_does_not_fit_says_what_it_needs():
    case = ragged([1], [6400], fixed_split_size=64, float_workspace_bytes=1000)
    needed = partial_bytes(100 * 4)
    said = f"float_workspace_buffer has 1000 bytes.* {needed} bytes for partial results of 400 rows"
    with pytest.raises(ValueError, match=said):
        planner.plan(**case)
    check(plan(**case | {"float_workspace_bytes": needed}))
    with pytest.raises(ValueError, match="float_workspace_buffer"):
        planner.plan(**case | {"float_workspace_bytes": needed - 1})


def pieces_of(made, request):
    """Returns a request's chunks, whose partial rows are counted from those of its tile."""
    first_row = {
        (int(m["row_begin"]), int(m["kv_head"])): int(m["first_row"])
        for m in made.merges
        if m["request"] == request
    }
    pieces = set()
    for item in made.items[made.items["request"] == request]:
        row, head = int(item["row_begin"]), int(item["kv_head"])
        partial = int(item["partial_row"])
        place = "final" if partial == FINAL else partial - first_row[row, head]
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


FIXED, DISABLED = {"fixed_split_size": 256}, {"disable_split_kv": True}


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "options", "expected"),
    [
        ([1] * 8, [4000] * 8, {}, "decode"),
        ([16] * 8, [4000] * 8, {}, "decode"),
        ([17] * 8, [4000] * 8, {}, "prefill"),
        ([1] * 60 + [100], [4000] * 61, {}, "decode"),
        ([1] * 2 + [4000], [4000] * 3, {}, "prefill"),
        ([], [], {}, "prefill"),
        ([1] * 8, [4000] * 8, FIXED, "decode"),
        ([1, 16, 0] * 8, [4000] * 24, DISABLED, "decode"),
        ([1] * 60 + [17], [4000] * 61, FIXED, "prefill"),
        ([1] * 60 + [17], [4000] * 61, DISABLED, "prefill"),
        ([17] + [1] * 60, [0] + [4000] * 60, DISABLED, "prefill"),
        ([0] * 8, [4000] * 8, {"graph_max_rows": 8}, "decode"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 8 * 17}, "prefill"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 16} | FIXED, "decode"),
        ([1] * 8, [4000] * 8, {"graph_max_rows": 17} | FIXED, "prefill"),
    ],
)
def test_tile_class(qo_lens, kv_lens, options, expected):
    assert planner.tile_class(**ragged(qo_lens, kv_lens, **GQA, **options)) == expected


@pytest.mark.parametrize(
    ("qo_lens", "options", "expected"),
    [
        ([1] * 8, {}, "decode"),
        ([2] * 8, {}, "decode"),
        ([4] * 8, {}, "decode"),
        ([5] * 8, {}, "prefill"),
        ([1] * 60 + [10], {}, "decode"),
        ([1] * 2 + [4000], {}, "prefill"),
        ([1] * 8, {"graph_max_rows": 16}, "decode"),
        ([1] * 8, {"graph_max_rows": 32}, "decode"),
        ([1] * 8, {"graph_max_rows": 33}, "prefill"),
        ([1] * 8, FIXED, "prefill"),
        ([1] * 8, DISABLED, "prefill"),
        ([1] * 8, {"graph_max_rows": 1} | DISABLED, "prefill"),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "bfloat16"])
def test_short_tiles_with_bits_of_their_own(qo_lens, options, expected, kv_dtype):
    """sm90 has tiles of 16 rows, but not where a request's bits are the same in any batch. Over 16
    bits they take 8 rows of every request."""
    case = ragged(qo_lens, [4000] * len(qo_lens), **GQA, family="sm90", **options)
    rows = 4 * max(*qo_lens, options.get("graph_max_rows", 0) // len(qo_lens))
    if kv_dtype == "bfloat16" and rows > 8:
        expected = "prefill"
    assert planner.tile_class(**case, kv_dtype=getattr(_core.DType, kv_dtype)) == expected


# --- partial rows ------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "kv_len", "size", "tile_m", "rows"),
    [(256, 16384, 2048, 64, 65536), (256, 16384, 2048, 128, 65536), (256, 256, 64, 128, 32768)],
)
def test_decode_partials_take_their_rows_alone(batch, kv_len, size, tile_m, rows):
    """Requests of four live rows a tile have as many partial rows, however tall the tile."""
    case = ragged([1] * batch, [kv_len] * batch, **GQA, fixed_split_size=size, tile_m=tile_m)
    made = plan(**case)
    assert made.sizes["num_partial_rows"] == rows == batch * 8 * 4 * kv_len // size
    assert made.layout["float_bytes"] == partial_bytes(rows) < 34.2e6


@pytest.mark.parametrize("family", ["cpu", "sm80", "sm90"])
@pytest.mark.parametrize("group", [1, 3, 4, 128, 131])
def test_mixed_requests_take_the_rows_that_they_have(group, family):
    """Decode, append and prefill together: the last tile of each has what its request has left."""
    qo_lens, kv_lens = [1, 70, 0, 129, 1, 3], [700, 300, 50, 129, 64, 0]
    heads = {"num_qo_heads": 2 * group, "num_kv_heads": 2, "family": family, "tile_m": 128}
    made = checked(qo_lens, kv_lens, **heads, causal=True, fixed_split_size=64)
    rows = [made.live_rows(item) for item in made.items if item["partial_row"] != FINAL]
    assert made.sizes["num_partial_rows"] == sum(rows)
    assert min(group, rows_per_tile(made.case)) in rows
    if group != 128:  # there every token fills a tile
        assert sum(rows) < len(rows) * rows_per_tile(made.case)


def test_a_head_follows_the_head_before_it():
    made = checked([3], [640], num_qo_heads=6, num_kv_heads=2, fixed_split_size=64)
    places = {(int(i["kv_head"]), int(i["chunk"])): int(i["partial_row"]) for i in made.items}
    assert places == {(h, c): (h * 10 + c) * 9 for h in range(2) for c in range(10)}
