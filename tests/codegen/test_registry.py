"""The registry finds the kernel that serves a request, or says why none does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from preflash import _core
from preflash.cli.machine import long_name
from processes import output_of, python

BASE = {
    "family": _core.Family.cpu,
    "q_dtype": _core.DType.float16,
    "kv_dtype": _core.DType.float16,
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "tile_class": _core.TileClass.prefill,
    "logits": _core.Logits.plain,
    "position": _core.Position.none,
    "mask": _core.Mask.bounds,
    "load": _core.Load.direct,
    "segments": _core.Segments.one,
    "sparsity": _core.Sparsity.dense,
}


def variant(**changes) -> _core.Variant:
    """Returns a variant with other values, which may be given by their names."""
    values = {
        name: getattr(type(BASE[name]), value) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    return _core.Variant(**BASE | values)


def of_fields(fields, names=tuple(BASE)) -> _core.Variant:
    """Returns the variant with some fields of a compiled kernel, or of a row of the matrix."""
    dtypes = {name: long_name(fields[name]) for name in ("q_dtype", "kv_dtype")}
    return variant(**{name: fields[name] for name in names} | dtypes)


def dims(qk: int, vo: int | None = None) -> dict[str, int]:
    return {"head_dim_qk": qk, "head_dim_vo": vo or qk}


BF16, F32 = ({"q_dtype": name, "kv_dtype": name} for name in ("bfloat16", "float32"))
CAP, ALIBI, CUSTOM = {"logits": "softcap"}, {"position": "alibi"}, {"mask": "custom"}
ROPE, SKIPPING, DECODE = {"position": "rope"}, {"sparsity": "skipping"}, {"tile_class": "decode"}
E4M3, E5M2 = ({"kv_dtype": f"float8_{name}"} for name in ("e4m3fn", "e5m2"))
ALL_E4M3 = E4M3 | {"q_dtype": "float8_e4m3fn"}
D64, D96, D256, D512, MLA = dims(64), dims(96), dims(256), dims(512), dims(192, 128)
NO_KERNEL = dims(520)


@pytest.fixture
def sm80_ids() -> set[str]:
    ids = {kernel["id"] for kernel in _core.kernels() if kernel["family"] == "sm80"}
    if not ids:
        pytest.skip("built without kernel libraries (PREFLASH_CUDA=OFF)")
    return ids


def test_compiled_kernels_are_found_by_their_fields():
    for kernel in _core.kernels():
        compiled = of_fields(kernel)
        assert compiled.id == repr(compiled) == _core.find_id(compiled) == kernel["id"]


def test_variants_are_values():
    one, same, other = variant(), variant(), variant(mask="custom")
    assert one == same
    assert one != other
    assert len({one, same, other}) == 2
    assert variant(**E4M3, **DECODE).id == "cpu_f16_kve4m3_d128_decode"


# A value of each option, and another one.
OPTIONS = {
    "num_qo_heads": (4, 8), "num_kv_heads": (2, 4),
    "head_dim_qk": (128, 64), "head_dim_vo": (64, 128),
    "q_dtype": (_core.DType.float16, _core.DType.float32),
    "kv_dtype": (_core.DType.bfloat16, _core.DType.float16),
    "o_dtype": (_core.DType.float32, _core.DType.bfloat16),
    "causal": (True, False), "window_left": (7, -1),
    "mask": (_core.Mask.bounds, _core.Mask.custom),
    "position": (_core.Position.none, _core.Position.alibi),
    "rope_scale": (1.0, 8.0), "rope_theta": (1e4, 5e5), "soft_cap": (0.5, 0.0),
    "fixed_split_size": (128, 0), "disable_split": (False, True),
}  # fmt: skip
SOME = {name: value for name, (value, _) in OPTIONS.items()}


def test_options_are_values():
    one = _core.AttentionOptions(**SOME)
    for name, (value, other_value) in OPTIONS.items():
        other = one.replace(**{name: other_value})
        assert (getattr(one, name), getattr(other, name)) == (value, other_value)
        assert (other == one, hash(other) == hash(one)) == (False, False)
        again = other.replace(**{name: value})
        assert (again, hash(again)) == (one, hash(one))
        with pytest.raises(AttributeError):
            setattr(one, name, other_value)
    for changes, says in (
        ({"causal": False, "custom_mask": True}, "custom_mask"),
        ({"window_left": "wide"}, "window_left cannot be 'wide'"),
        ({"mask": _core.DType.float16}, "mask cannot be"),
    ):
        with pytest.raises(TypeError, match=says):
            one.replace(**changes)


def test_options_decide_the_variant():
    """The sentence of a miss says what was looked for."""
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype", "o_dtype"), _core.DType.float16)
    plain = _core.AttentionOptions(**SOME | {"soft_cap": 0.0} | dtypes | NO_KERNEL)
    for options, changes in (
        ({}, {}),
        ({"soft_cap": 30.0}, CAP),
        ({"soft_cap": 1e-6}, CAP),
        ({"position": _core.Position.alibi}, ALIBI),
        ({"position": _core.Position.rope}, ROPE),
        ({"mask": _core.Mask.custom}, CUSTOM),
    ):
        unserved = plain.replace(**options)
        wanted = variant(**NO_KERNEL, **changes)
        assert _core.find_error(_core.Family.cpu, unserved) == _core.find_error(wanted)
        assert _core.find_error(_core.Family.cpu, unserved.replace(**D512)) is None


def test_what_auto_tries():
    for capability, backends in {
        0: ["cpu"],
        80: ["fa2"],
        89: ["fa2"],
        90: ["fa3", "fa2"],
        100: ["fa2"],
        75: ["fa3", "fa2"],  # none runs there: their refusals say so
    }.items():
        families = _core.families_for(capability)
        assert [_core.traits_of(family).backend for family in families] == backends


# Kernels, each with requests that it serves; None: no kernel does.
ON_BOTH = {
    "f16_d128": ({},),
    "f16_d128_softcap": (CAP,),
    "f16_d128_alibi": (ALIBI,),
    "f16_d128_custom": (CUSTOM,),
    "f16_d128_softcap_alibi_custom": (
        CAP | ALIBI, CAP | CUSTOM, ALIBI | CUSTOM, CAP | ALIBI | CUSTOM,
    ),
    "f16_d128_skipping": (SKIPPING,),
    None: (SKIPPING | CAP,),
}  # fmt: skip
ON_CPU = {
    # One kernel serves every head_dim and tile class.
    "f16_d512": (
        CAP | ALIBI | CUSTOM,
        ROPE | SKIPPING,
        *(
            CUSTOM | tile | dims(*sizes)
            for tile in ({}, DECODE)
            for sizes in ((8,), (96,), (192, 128), (256,), (264, 512))
        ),
    )
}
ON_SM80 = {
    "bf16_d128": (BF16,),
    "f16_d128_decode": (DECODE,),
    "f16_d128_decode_softcap_alibi_custom": (DECODE | CAP, DECODE | ALIBI, DECODE | CUSTOM),
    # No short tiles there: the tall ones have each option alone.
    "f16_d512_softcap": (DECODE | CAP | D512,),
    "f16_d512_softcap_alibi_custom": (DECODE | CAP | ALIBI | D512,),
    # Each kernel that converts on load has every option at run time.
    "f16_d128_softcap_alibi_custom_converted": (E4M3, ALL_E4M3),
    **{
        f"bf16_d128{name}_softcap_alibi_custom_converted": [
            BF16 | tile | changes
            for changes in (ROPE | CUSTOM | CAP, E4M3, E5M2 | ALIBI, E5M2 | ROPE | dims(96, 80))
        ]
        for tile, name in (({}, ""), (DECODE, "_decode"))
    },
}
ON_SM90 = {
    # Keys of 8 bits become float16, whatever the queries are. No short tiles for rotated keys.
    "f16_d128_converted": (
        E4M3, BF16 | E4M3, BF16 | E5M2, BF16 | E5M2 | ROPE, E5M2 | ROPE, DECODE | ROPE,
        DECODE | ROPE | E4M3, ALL_E4M3 | ROPE,
    ),
    "f16_d64_converted": (DECODE | ROPE | E5M2 | D64,),
    "bf16_d256_converted": (DECODE | ROPE | BF16 | D256,),
    "f16_d128_softcap_alibi_converted": (E4M3 | CAP, ROPE | CAP, ALL_E4M3 | CAP),
    "f16_d256_softcap_alibi_converted": (E4M3 | ALIBI | D256,),
    "f16_d128_softcap_alibi_custom_converted": (
        E4M3 | CUSTOM, ROPE | CUSTOM | DECODE, ALL_E4M3 | CUSTOM,
    ),
    # No tall tiles of 192x128 convert on load: those of 256 serve it.
    "f16_d256_converted": (E4M3 | MLA, ALL_E4M3 | D256),
    "f16_d192x128_decode_converted": (E4M3 | MLA | DECODE,),
    "f16_d64_decode_converted": (E5M2 | D64 | DECODE,),
    "f16_d128_decode_converted": (
        E4M3 | DECODE, BF16 | E4M3 | DECODE, BF16 | E5M2 | D96 | DECODE, ALL_E4M3 | DECODE,
    ),
    "f16_d256_decode_converted": (BF16 | E4M3 | D256 | DECODE,),
    "f16_d128_decode_softcap_alibi_converted": (E4M3 | DECODE | ALIBI,),
    # Queries of 8 bits: products of 8 bits in the plain case up to head_dim 128.
    "e4m3_d128": (ALL_E4M3, ALL_E4M3 | D96),
    "e4m3_d64": (ALL_E4M3 | D64,),
    # Short tiles over 16 bits in the plain case alone.
    "f16_d128_softcap": (DECODE | CAP,),
    "f16_d128_softcap_alibi_custom": (DECODE | CAP | ALIBI,),
    "bf16_d128_decode": (BF16 | DECODE, BF16 | DECODE | D96),
    "bf16_d64_decode": (BF16 | DECODE | D64,),
    "bf16_d128_alibi": (BF16 | DECODE | ALIBI,),
    "bf16_d128_custom": (BF16 | DECODE | CUSTOM,),
    "bf16_d192x128": (BF16 | DECODE | MLA,),
    "bf16_d256": (BF16 | DECODE | D256,),
}  # fmt: skip
SERVED = [
    ("cpu", ON_CPU),
    *((family, ON_BOTH) for family in ("sm80", "sm90")),
    ("sm80", ON_SM80),
    ("sm90", ON_SM90),
]


@pytest.mark.parametrize(
    ("family", "kernel", "requests"),
    [(family, *row) for family, kernels in SERVED for row in kernels.items()],
)
def test_the_kernel_of_the_whole_matrix(family, kernel, requests):
    """The choice does not depend on what is compiled; the CPU backend is always whole."""
    for changes in requests:
        wanted = variant(family=family, **changes)
        found = _core.find_in_matrix(wanted)
        assert (found and found.id) == (kernel and f"{family}_{kernel}"), changes
        if family == "cpu":
            assert _core.find_id(wanted) == found.id
            assert _core.find_error(wanted) is None


def test_sm80_takes_the_smallest_size_that_covers(sm80_ids):
    sizes = {
        kernel["id"]: (kernel["head_dim_qk"], kernel["head_dim_vo"])
        for kernel in _core.kernels()
        if kernel["id"] in sm80_ids
        and (kernel["q_dtype"], kernel["logits"], kernel["mask"]) == ("bf16", "plain", "bounds")
    }
    for head_dims in [(d, d) for d in range(8, 257, 8)] + [(192, 128)]:
        found = sizes[_core.find_id(variant(family="sm80", **BF16, **dims(*head_dims)))]
        covering = [size for size in sizes.values() if all(map(int.__ge__, size, head_dims))]
        assert found in covering
        assert sum(found) == min(map(sum, covering))


def test_one_launch_of_two_segments_has_the_mask_of_the_first(sm80_ids):
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype", "o_dtype"), _core.DType.bfloat16)
    plain = _core.AttentionOptions(**SOME | {"soft_cap": 0.0} | dtypes | dims(128))
    masked = plain.replace(mask=_core.Mask.custom)
    for mask, first in (("bounds", plain), ("custom", masked)):
        if _core.find_id(variant(family="sm80", **BF16, mask=mask, segments="two")) is None:
            pytest.skip("not in this preset")
        assert _core.find_joint_error(_core.Family.sm80, first, plain) is None
        sentence = _core.find_joint_error(_core.Family.sm80, first, masked)
        assert sentence.endswith('two plans, one for each; backend "cpu" (tensors on the CPU).')


OF_CPU = ["Compiled for it", "logits any, position any, mask any"]
MISSES = [
    (NO_KERNEL, [*OF_CPU, 'backend "cpu"', "head_dim 520", "the same with head_dim 512"]),
    (NO_KERNEL | {"segments": "two"}, [*OF_CPU, "the same with head_dim 512"]),
    ({"kv_dtype": "float32"},
     [*OF_CPU, "kv dtype float32", "the same with", "kv dtype float16 or"]),
    ({"q_dtype": "float8_e5m2", "kv_dtype": "float8_e5m2"},
     [*OF_CPU, "q dtype float8_e5m2", "float16/bfloat16/float32"]),
    # Misses are told in the dtypes of the tensors.
    *(
        ({"family": family} | NO_KERNEL | changes, names)
        for family in ("sm80", "sm90")
        for changes, names in [
            ({}, ["kv dtype float16", "position none", "load direct"]),
            (ROPE, ["position rope", "load converted"]),
            (E5M2, ["kv dtype float8_e5m2", "load converted"]),
            (ALL_E4M3 | ALIBI, ["q dtype float8_e4m3fn", "position alibi", "load converted"]),
            # No kernel makes one dtype of these.
            ({"kv_dtype": "bfloat16"}, ["kv dtype bfloat16", "load direct"]),
            ({"q_dtype": "float8_e4m3fn"}, ["q dtype float8_e4m3fn", "load direct"]),
            (CAP | {"segments": "two"} | dims(128),
             ["segments two", "logits softcap", 'backend "cpu"']),
            (F32 | dims(128), ["q dtype float32", 'backend "cpu" (tensors on the CPU)']),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "names"), MISSES)
def test_a_miss_names_the_request_what_is_compiled_and_a_way_out(changes, names):
    wanted = variant(**changes)
    assert _core.find_id(wanted) is None
    sentence = _core.find_error(wanted)
    assert [name for name in names if name not in sentence] == []
    if _core.find_in_matrix(wanted) is None:
        assert "PREFLASH_PRESET" not in sentence


def test_an_absent_family_says_which_library_is_missing():
    if any(kernel["family"] == "sm90" for kernel in _core.kernels()):
        pytest.skip("sm90 kernels are here")
    sentence = _core.find_error(variant(family="sm90"))
    for part in (
        'backend "fa3"',
        "libpreflash_kernels_sm90.so does not exist",
        'backend "cpu" (tensors on the CPU)',
        "PREFLASH_CUDA=ON and 90 among PREFLASH_ARCHS",
    ):
        assert part in sentence
    no_build_serves = _core.find_error(variant(family="sm90", **F32))
    assert "PREFLASH_ARCHS" not in no_build_serves


def test_a_variant_outside_the_preset_points_to_the_full_one(sm80_ids, matrix):
    absent = [v for v in matrix.select("full", ["sm80"]) if v.id not in sm80_ids]
    if not absent:
        pytest.skip("the full preset is built: nothing of the matrix is missing")
    names = ("family", "head_dim_qk", "head_dim_vo", "tile_class", "logits", "mask")
    misses = [w for v in absent if _core.find_id(w := of_fields(v.fields, names)) is None]
    assert misses
    assert all("PREFLASH_PRESET=full" in _core.find_error(wanted) for wanted in misses)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("version", [1, 10**6])
def test_a_library_of_another_build_is_refused(version, tmp_path):
    source, library = tmp_path / "table.c", tmp_path / "libpreflash_kernels_common.so"
    table = f"int table[64] = {{{version}}};"
    source.write_text(f"{table} int* preflash_device_services(void) {{ return table; }}")
    output_of("cc", "-shared", "-fPIC", source, "-o", library)
    code = "import sys; from preflash import _core; _core.set_library_dir(sys.argv[1])"
    printed = python(f"{code}; print(_core.cuda_error())", tmp_path)
    assert f"{library} has kernel ABI {version}, this module needs" in printed


def test_the_library_directory_is_fixed_once_used():
    _core.kernels()
    _core.set_library_dir(str(Path(_core.__file__).parent / "lib"))  # as it is
    with pytest.raises(Exception, match="before the first plan"):
        _core.set_library_dir("/nonexistent")
