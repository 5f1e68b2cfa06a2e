"""find(): which kernel serves a request, and the sentence when none does."""

from __future__ import annotations

import pytest
from preflash import _core
from preflash._check.outputs import DEFAULT_OUTPUTS
from preflash._plan import pipeline
from preflash.testing import Case, build, runner

BASE = {
    "family": "cpu",
    "q_dtype": "float16",
    "kv_dtype": "float16",
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "tile_class": "prefill",
    "logits": "plain",
    "position": "none",
    "mask": "bounds",
    "load": "direct",
    "segments": "one",
    "sparsity": "dense",
}
ENUMS = {
    "family": _core.Family,
    "q_dtype": _core.DType,
    "kv_dtype": _core.DType,
    "tile_class": _core.TileClass,
    "logits": _core.Logits,
    "position": _core.Position,
    "mask": _core.Mask,
    "load": _core.Load,
    "segments": _core.Segments,
    "sparsity": _core.Sparsity,
}


def variant(**changes) -> _core.Variant:
    fields = {**BASE, **changes}
    values = {
        name: getattr(ENUMS[name], value) if name in ENUMS else value
        for name, value in fields.items()
    }
    return _core.Variant(**values)


def compiled_ids(family: str) -> set[str]:
    return {kernel["id"] for kernel in _core.kernels() if kernel["family"] == family}


@pytest.fixture
def sm80_ids() -> set[str]:
    ids = compiled_ids("sm80")
    if not ids:
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    return ids


@pytest.mark.parametrize("head_dims", [(8, 8), (96, 96), (192, 128), (256, 256), (264, 512)])
@pytest.mark.parametrize("tile_class", ["prefill", "decode"])
def test_one_cpu_kernel_serves_every_head_dim_and_tile_class(head_dims, tile_class):
    wanted = variant(
        head_dim_qk=head_dims[0], head_dim_vo=head_dims[1], tile_class=tile_class, mask="custom"
    )
    assert _core.find_id(wanted) == "cpu_f16_d512"
    assert _core.find_error(wanted) is None


def covering(ids: set[str], head_dim_qk: int, head_dim_vo: int) -> int:
    """qk + vo of the smallest compiled bfloat16 kernel that covers the sizes; 0 without one."""
    sizes = [
        kernel["head_dim_qk"] + kernel["head_dim_vo"]
        for kernel in _core.kernels()
        if kernel["id"] in ids
        and (kernel["q_dtype"], kernel["logits"], kernel["mask"]) == ("bf16", "plain", "bounds")
        and kernel["head_dim_qk"] >= head_dim_qk
        and kernel["head_dim_vo"] >= head_dim_vo
    ]
    return min(sizes, default=0)


@pytest.mark.parametrize("head_dims", [(d, d) for d in range(8, 257, 8)] + [(192, 128)])
def test_sm80_takes_the_smallest_size_that_covers(sm80_ids, head_dims):
    wanted = variant(
        family="sm80",
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        head_dim_qk=head_dims[0],
        head_dim_vo=head_dims[1],
    )
    found = {kernel["id"]: kernel for kernel in _core.kernels()}[_core.find_id(wanted)]
    assert found["head_dim_qk"] >= head_dims[0]
    assert found["head_dim_vo"] >= head_dims[1]
    assert found["head_dim_qk"] + found["head_dim_vo"] == covering(sm80_ids, *head_dims)
    assert (found["q_dtype"], found["logits"], found["mask"]) == ("bf16", "plain", "bounds")


@pytest.mark.parametrize("tile_class", ["prefill", "decode"])
def test_the_wanted_tile_class_is_taken_where_compiled(sm80_ids, tile_class):
    wanted = variant(family="sm80", q_dtype="bfloat16", kv_dtype="bfloat16", tile_class=tile_class)
    assert _core.find_id(wanted) == wanted.id


@pytest.mark.parametrize("kernel", _core.kernels(), ids=lambda kernel: kernel["id"])
def test_ids_in_cpp_are_those_of_the_generator(kernel):
    names = {
        "f16": "float16",
        "bf16": "bfloat16",
        "f32": "float32",
        "e4m3": "float8_e4m3fn",
        "e5m2": "float8_e5m2",
    }
    dtypes = {name: names[kernel[name]] for name in ("q_dtype", "kv_dtype")}
    compiled = variant(**{name: kernel[name] for name in BASE} | dtypes)
    assert compiled.id == repr(compiled) == kernel["id"]
    assert _core.find_id(compiled) == kernel["id"]


def test_variants_are_values():
    one, same, other = variant(), variant(), variant(mask="custom")
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2
    assert variant(kv_dtype="float8_e4m3fn", tile_class="decode").id == "cpu_f16_kve4m3_d128_decode"


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"soft_cap": 30.0}, {"logits": "softcap"}),
        ({"position": _core.Position.alibi}, {"position": "alibi"}),
        ({"position": _core.Position.rope}, {"position": "rope"}),
        ({"mask": _core.Mask.custom}, {"mask": "custom"}),
    ],
)
def test_options_decide_the_variant(options, changes):
    """head_dim 520 is served by none, so that the sentence tells what was looked for."""
    unserved = attention_options(head_dim_qk=520, head_dim_vo=520, **options)
    wanted = variant(head_dim_qk=520, head_dim_vo=520, **changes)
    assert _core.find_error(_core.Family.cpu, unserved) == _core.find_error(wanted)
    served = unserved.replace(head_dim_qk=512, head_dim_vo=512)
    assert _core.find_error(_core.Family.cpu, served) is None


OPTIONS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 128,
    "head_dim_vo": 64,
    "q_dtype": _core.DType.float16,
    "kv_dtype": _core.DType.bfloat16,
    "o_dtype": _core.DType.float32,
    "causal": True,
    "window_left": 7,
    "mask": _core.Mask.bounds,
    "position": _core.Position.none,
    "rope_scale": 1.0,
    "rope_theta": 1e4,
    "soft_cap": 0.5,
    "fixed_split_size": 128,
    "disable_split": False,
}
OTHER_OPTIONS = {
    "num_qo_heads": 8,
    "num_kv_heads": 4,
    "head_dim_qk": 64,
    "head_dim_vo": 128,
    "q_dtype": _core.DType.float32,
    "kv_dtype": _core.DType.float16,
    "o_dtype": _core.DType.bfloat16,
    "causal": False,
    "window_left": -1,
    "mask": _core.Mask.custom,
    "position": _core.Position.alibi,
    "rope_scale": 8.0,
    "rope_theta": 5e5,
    "soft_cap": 0.0,
    "fixed_split_size": 0,
    "disable_split": True,
}


def attention_options(**changes) -> _core.AttentionOptions:
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype", "o_dtype"), _core.DType.float16)
    return _core.AttentionOptions(**{**OPTIONS, "soft_cap": 0.0, **dtypes, **changes})


def test_options_are_values():
    one = _core.AttentionOptions(**OPTIONS)
    assert one == _core.AttentionOptions(**OPTIONS)
    assert hash(one) == hash(_core.AttentionOptions(**OPTIONS))
    assert one != OPTIONS
    for name, value in OTHER_OPTIONS.items():
        assert getattr(one, name) == OPTIONS[name]
        other = one.replace(**{name: value})
        assert getattr(other, name) == value
        assert other != one
        assert hash(other) != hash(one)
        assert other.replace(**{name: OPTIONS[name]}) == one
        with pytest.raises(AttributeError):
            setattr(one, name, value)
    assert one == _core.AttentionOptions(**OPTIONS)
    assert one.replace(**OTHER_OPTIONS) == _core.AttentionOptions(**OTHER_OPTIONS)


def test_options_that_are_none_of_them():
    one = _core.AttentionOptions(**OPTIONS)
    with pytest.raises(TypeError, match="custom_mask"):
        one.replace(causal=False, custom_mask=True)
    with pytest.raises(TypeError, match="window_left cannot be 'wide'"):
        one.replace(window_left="wide")
    with pytest.raises(TypeError, match="mask cannot be"):
        one.replace(mask=_core.DType.float16)


@pytest.mark.parametrize(
    ("capability", "backends"),
    [
        (0, ["cpu"]),
        (80, ["fa2"]),
        (89, ["fa2"]),
        (90, ["fa3", "fa2"]),
        (100, ["fa2"]),
        (75, ["fa3", "fa2"]),  # none runs there: their refusals say so
    ],
)
def test_what_auto_tries(capability, backends):
    families = _core.families_for(capability)
    assert [_core.traits_of(family).backend for family in families] == backends


def test_a_missing_tile_class_is_served_by_the_other():
    """The cpu family has no decode tiles: a preference, not a condition."""
    assert _core.find_id(variant(tile_class="decode")) == "cpu_f16_d512"


MISSES = [
    # What is changed in the request, what the sentence must name.
    (
        {"head_dim_qk": 520, "head_dim_vo": 520},
        ['backend "cpu"', "head_dim 520", "the same with head_dim 512"],
    ),
    ({"kv_dtype": "float32"}, ["kv dtype float32", "the same with", "kv dtype float16 or"]),
    (
        {"q_dtype": "float8_e5m2", "kv_dtype": "float8_e5m2"},
        ["q dtype float8_e5m2", "float16/bfloat16/float32"],
    ),
]


@pytest.mark.parametrize(("changes", "names"), MISSES)
def test_a_miss_names_what_was_asked_what_is_compiled_and_a_way_out(changes, names):
    wanted = variant(**changes)
    assert _core.find_id(wanted) is None
    sentence = _core.find_error(wanted)
    assert "Compiled for it" in sentence
    assert "logits any, position any, mask any" in sentence  # of the CPU, which has all at run time
    for name in names:
        assert name in sentence


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tile_class": "prefill"}, "sm90_bf16_d128"),
        ({}, "sm90_bf16_d128_decode"),
        ({"position": "alibi"}, "sm90_bf16_d128_alibi"),
        ({"mask": "custom"}, "sm90_bf16_d128_custom"),
        ({"head_dim_qk": 192, "head_dim_vo": 128}, "sm90_bf16_d192x128"),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, "sm90_bf16_d256"),
    ],
)
def test_sm90_has_short_tiles_over_16_bits_for_the_plain_case(options, expected):
    if not compiled_ids("sm90"):
        pytest.skip("built without sm90 kernels")
    wanted = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16", "tile_class": "decode"} | options
    assert _core.find_id(variant(family="sm90", **wanted)) == expected


SHORT_ON_SM90 = {"family": "sm90", "tile_class": "decode", "kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_sm90_has_short_tiles_for_keys_that_widen(q_dtype):
    if not compiled_ids("sm90"):
        pytest.skip("built without sm90 kernels")
    wanted = variant(**SHORT_ON_SM90, q_dtype=q_dtype)
    assert _core.find_id(wanted) == "sm90_f16_d128_decode_converted"


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float16"])
def test_sm90_has_no_short_tiles_for_keys_that_rope_rotates(kv_dtype):
    if not compiled_ids("sm90"):
        pytest.skip("built without sm90 kernels")
    wanted = variant(**SHORT_ON_SM90 | {"kv_dtype": kv_dtype}, q_dtype="float16", position="rope")
    assert _core.find_id(wanted) == "sm90_f16_d128_converted"


def test_sm90_has_custom_masks():
    if not compiled_ids("sm90"):
        pytest.skip("built without sm90 kernels")
    wanted = variant(family="sm90", q_dtype="bfloat16", kv_dtype="bfloat16", mask="custom")
    assert _core.find_id(wanted) == "sm90_bf16_d128_custom"


def test_an_absent_family_says_which_library_is_missing():
    if compiled_ids("sm90"):
        pytest.skip("sm90 kernels are here")
    sentence = _core.find_error(variant(family="sm90"))
    assert 'backend "fa3"' in sentence
    assert "libpreflash_kernels_sm90.so does not exist" in sentence
    assert 'backend "cpu" (tensors on the CPU)' in sentence
    assert "PREFLASH_CUDA=ON and 90 among PREFLASH_ARCHS" in sentence
    # No build would serve this one.
    float32 = variant(family="sm90", q_dtype="float32", kv_dtype="float32")
    assert "PREFLASH_ARCHS" not in _core.find_error(float32)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["kv dtype float16", "position none", "load direct"]),
        ({"position": "rope"}, ["position rope", "load converted"]),
        ({"kv_dtype": "float8_e5m2"}, ["kv dtype float8_e5m2", "load converted"]),
        (
            {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "position": "alibi"},
            ["q dtype float8_e4m3fn", "position alibi", "load converted"],
        ),
        # Nothing makes one dtype of these.
        ({"kv_dtype": "bfloat16"}, ["kv dtype bfloat16", "load direct"]),
        ({"q_dtype": "float8_e4m3fn"}, ["q dtype float8_e4m3fn", "load direct"]),
    ],
)
def test_a_miss_is_told_in_the_dtypes_of_the_tensors(family, changes, names):
    """head_dim 520 is served by none, whatever is compiled."""
    sentence = _core.find_error(variant(family=family, head_dim_qk=520, head_dim_vo=520, **changes))
    for name in names:
        assert name in sentence


CAP, ALIBI, CUSTOM = {"logits": "softcap"}, {"position": "alibi"}, {"mask": "custom"}
DECODE = {"tile_class": "decode"}
E4M3 = {"kv_dtype": "float8_e4m3fn"}
ALL_E4M3 = E4M3 | {"q_dtype": "float8_e4m3fn"}
D64, D96, D256, D512 = ({"head_dim_qk": d, "head_dim_vo": d} for d in (64, 96, 256, 512))
MLA = {"head_dim_qk": 192, "head_dim_vo": 128}


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, ""),
        (CAP, "_softcap"),
        (ALIBI, "_alibi"),
        (CUSTOM, "_custom"),
        (CAP | ALIBI, "_softcap_alibi_custom"),
        (CAP | CUSTOM, "_softcap_alibi_custom"),
        (ALIBI | CUSTOM, "_softcap_alibi_custom"),
        (CAP | ALIBI | CUSTOM, "_softcap_alibi_custom"),
        ({"sparsity": "skipping"}, "_skipping"),
        ({"sparsity": "skipping"} | CAP, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_two_options_are_served_at_run_time(family, changes, kernel):
    """In the whole matrix, whatever is compiled here."""
    found = _core.find_in_matrix(variant(family=family, **changes))
    assert (found and found.id) == (kernel if kernel is None else f"{family}_f16_d128{kernel}")


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        (DECODE | CAP, "sm80_f16_d128_decode_softcap_alibi_custom"),
        (DECODE | ALIBI, "sm80_f16_d128_decode_softcap_alibi_custom"),
        (DECODE | CUSTOM, "sm80_f16_d128_decode_softcap_alibi_custom"),
        (DECODE, "sm80_f16_d128_decode"),
        # No short tiles there: the tall ones have each option alone.
        (DECODE | CAP | D512, "sm80_f16_d512_softcap"),
        (DECODE | CAP | ALIBI | D512, "sm80_f16_d512_softcap_alibi_custom"),
        (E4M3, "sm80_f16_d128_softcap_alibi_custom_converted"),
        ({"family": "sm90"} | E4M3, "sm90_f16_d128_converted"),
        ({"family": "sm90"} | E4M3 | CAP, "sm90_f16_d128_softcap_alibi_converted"),
        ({"family": "sm90"} | E4M3 | ALIBI | D256, "sm90_f16_d256_softcap_alibi_converted"),
        ({"family": "sm90"} | E4M3 | CUSTOM, "sm90_f16_d128_softcap_alibi_custom_converted"),
        # No tall tiles of 192x128 convert on load: those of 256 serve it.
        ({"family": "sm90"} | E4M3 | MLA, "sm90_f16_d256_converted"),
        ({"family": "sm90"} | E4M3 | MLA | DECODE, "sm90_f16_d192x128_decode_converted"),
        (
            {"family": "sm90", "position": "rope"} | CUSTOM | DECODE,
            "sm90_f16_d128_softcap_alibi_custom_converted",
        ),
        ({"family": "sm90"} | E4M3 | DECODE, "sm90_f16_d128_decode_converted"),
        # Queries of 8 bits: products of 8 bits in the plain case up to head_dim 128.
        ({"family": "sm90"} | ALL_E4M3, "sm90_e4m3_d128"),
        ({"family": "sm90"} | ALL_E4M3 | D96, "sm90_e4m3_d128"),
        ({"family": "sm90"} | ALL_E4M3 | D64, "sm90_e4m3_d64"),
        ({"family": "sm90"} | ALL_E4M3 | D256, "sm90_f16_d256_converted"),
        ({"family": "sm90"} | ALL_E4M3 | DECODE, "sm90_f16_d128_decode_converted"),
        ({"family": "sm90"} | ALL_E4M3 | CAP, "sm90_f16_d128_softcap_alibi_converted"),
        ({"family": "sm90"} | ALL_E4M3 | CUSTOM, "sm90_f16_d128_softcap_alibi_custom_converted"),
        ({"family": "sm90", "position": "rope"} | ALL_E4M3, "sm90_f16_d128_converted"),
        (ALL_E4M3, "sm80_f16_d128_softcap_alibi_custom_converted"),
        (
            {"family": "sm90"} | E4M3 | DECODE | ALIBI,
            "sm90_f16_d128_decode_softcap_alibi_converted",
        ),
        ({"family": "sm90"} | DECODE | CAP, "sm90_f16_d128_softcap"),
        ({"family": "sm90"} | DECODE | CAP | ALIBI, "sm90_f16_d128_softcap_alibi_custom"),
        ({"family": "sm90", "position": "rope"} | CAP, "sm90_f16_d128_softcap_alibi_converted"),
        ({"family": "cpu"} | CAP | ALIBI | CUSTOM, "cpu_f16_d512"),
        ({"family": "cpu", "position": "rope", "sparsity": "skipping"}, "cpu_f16_d512"),
    ],
    ids=str,
)
def test_which_kernel_has_options_at_run_time(changes, kernel):
    found = _core.find_in_matrix(variant(**{"family": "sm80"} | changes))
    assert (found and found.id) == kernel


@pytest.mark.parametrize("tile_class", ["prefill", "decode"])
@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rope"},
        {"position": "rope", "mask": "custom", "logits": "softcap"},
        {"kv_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float8_e5m2", "position": "alibi"},
        {"kv_dtype": "float8_e5m2", "position": "rope", "head_dim_qk": 96, "head_dim_vo": 80},
    ],
    ids=str,
)
def test_one_sm80_kernel_converts_with_whatever_options(sm80_ids, changes, tile_class):
    wanted = variant(
        **{**BASE, "family": "sm80", "q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
        | {"tile_class": tile_class}
        | changes
    )
    decode = "" if tile_class == "prefill" else "_decode"
    kernel = f"sm80_bf16_d128{decode}_softcap_alibi_custom_converted"
    if kernel not in sm80_ids:
        pytest.skip(f"{kernel} is not compiled in this build")
    assert _core.find_id(wanted) == kernel


def test_sm80_makes_float16_of_8_bit_queries(sm80_ids):
    eight = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
    kernel = "sm80_f16_d128_softcap_alibi_custom_converted"
    if kernel not in sm80_ids:
        pytest.skip(f"{kernel} is not compiled in this build")
    assert _core.find_id(variant(family="sm80", **eight)) == kernel


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("position", ["none", "rope"])
def test_sm90_makes_float16_of_8_bit_keys_whatever_the_queries(q_dtype, kv_dtype, position):
    if "sm90_f16_d128_converted" not in compiled_ids("sm90"):
        pytest.skip("sm90_f16_d128_converted is not compiled in this build")
    wanted = variant(family="sm90", q_dtype=q_dtype, kv_dtype=kv_dtype, position=position)
    assert _core.find_id(wanted) == "sm90_f16_d128_converted"


def test_what_is_multiplied_as_stored_is_not_converted(sm80_ids):
    """A kernel with every option serves no launch that one without serves as well."""
    direct = variant(family="sm80", q_dtype="bfloat16", kv_dtype="bfloat16")
    assert _core.find_id(direct) == "sm80_bf16_d128"


def test_float32_on_a_gpu_points_to_the_cpu(sm80_ids):
    sentence = _core.find_error(variant(family="sm80", q_dtype="float32", kv_dtype="float32"))
    assert "q dtype float32" in sentence
    assert 'What would work: backend "cpu" (tensors on the CPU).' in sentence


def test_a_variant_outside_the_preset_points_to_the_full_one(sm80_ids, matrix):
    absent = [v for v in matrix.select("full", ["sm80"]) if v.id not in sm80_ids]
    if not absent:
        pytest.skip("the full preset is built: nothing of the matrix is missing")
    dtypes = {"f16": "float16", "bf16": "bfloat16"}
    misses = 0
    for row in absent:
        wanted = variant(
            family="sm80",
            q_dtype=dtypes[row.q_dtype],
            kv_dtype=dtypes[row.kv_dtype],
            head_dim_qk=row.head_dim_qk,
            head_dim_vo=row.head_dim_vo,
            tile_class=row.tile_class,
            logits=row.logits,
            mask=row.mask,
        )
        if _core.find_id(wanted) is None:
            misses += 1
            assert "PREFLASH_PRESET=full" in _core.find_error(wanted)
    assert misses > 0


def test_the_library_directory_is_fixed_once_used():
    _core.kernels()
    with pytest.raises(Exception, match="before the first plan"):
        _core.set_library_dir("/nonexistent")


def test_a_plan_that_was_not_uploaded_cannot_be_launched():
    inputs = build(Case("never uploaded", (3,), (5,), 4, 2, 64))
    wrapper = runner.make_wrapper(inputs.case, backend="cpu")
    runner.plan(wrapper, inputs)
    workspace, request = wrapper._plan.workspace, wrapper._plan.request
    variant = pipeline.plan(workspace, "cpu", request)
    variant.allocate_in(workspace)
    with pytest.raises(RuntimeError, match="without a plan"):
        variant(inputs.q, (inputs.k, inputs.v), request.scales, DEFAULT_OUTPUTS, None)
