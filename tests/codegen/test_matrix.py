"""Every view of cpp/variants says the same, and contradictions in its files are refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import generate
import pytest
import spec
from processes import finished, output_of

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"\b(?:cpu|sm\d+)_(?:b?f\d+|e\dm\d)(?:_kve\dm\d)?_d\d+\w*")

DEFAULTS = {
    **{"tile_class": "prefill", "logits": "plain", "position": "none", "mask": "bounds"},
    **{"load": "direct", "segments": "one", "sparsity": "dense"},
}


@pytest.fixture
def run_generate(capsys):
    """Runs the command line in this process, which reads the matrix once."""

    def run(*arguments: object) -> str:
        assert generate.main([str(word) for word in arguments]) == 0
        return capsys.readouterr().out

    return run


def test_ids_are_unique_and_spell_their_variant(matrix):
    ids = [variant.id for variant in matrix.variants]
    assert len(ids) == len(set(ids))
    for variant in matrix.variants:
        assert ID.fullmatch(variant.id), variant.id
        kv = variant.values["kv_dtype"]
        assert variant.id.split("_") == [
            variant.family,
            variant.q_dtype,
            *([] if kv == "same" else [f"kv{kv}"]),
            f"d{variant.head_dim}",
            *(
                variant.values[axis]
                for axis, default in DEFAULTS.items()
                if variant.values[axis] != default
            ),
        ]
        head_dims = variant.head_dim.split("x")
        assert [variant.head_dim_qk, variant.head_dim_vo] == [int(head_dims[i]) for i in (0, -1)]


@pytest.mark.parametrize(
    ("preset", "archs", "expected"),
    [
        ("full", "", {"cpu": "", "sm80": "", "sm90": ""}),
        ("dev", "80;90a", {"cpu": "", "sm80": "80", "sm90": "90a"}),
        ("ci", "80;90+PTX", {"cpu": "", "sm80": "80,90+PTX", "sm90": "90a"}),
        ("full", "80;100+PTX", {"cpu": "", "sm80": "80,100+PTX"}),
    ],
)
def test_every_view_lists_the_same_variants(run_generate, preset, archs, expected, tmp_path):
    """sm_90a code runs on no other GPU, so it is compiled where 90 is asked for, and for that."""
    options = ("--preset", preset, "--archs", archs)
    listed = [line.split("\t") for line in run_generate("--list", *options).splitlines()]
    assert {family: its_archs for family, its_archs, _, _ in listed} == expected
    assert all(name.startswith(f"{family}/") for family, _, name, _ in listed)
    run_generate("--write", tmp_path, *options)
    defined, called = set(), set()
    for path in tmp_path.glob("*/*.c*"):
        text = path.read_text()
        defined |= set(re.findall(r"^struct (\w+) \{", text, flags=re.MULTILINE))
        if path.name == "library.cpp":
            called |= set(re.findall(r"^ +preflash_entry_(\w+)\(\),", text, flags=re.MULTILINE))
            if path.parent.name != "cpu":
                codes = expected[path.parent.name].replace(",", ";")
                assert f'.architectures = "{codes}"' in text
    document = json.loads((tmp_path / "variants.json").read_text())
    assert document["preset"] == preset
    assert document["architectures"] == [arch for arch in archs.split(";") if arch]
    assert {row["family"] for row in document["variants"]} == set(expected)
    in_json = {row["id"] for row in document["variants"]}
    assert {name for *_, ids in listed for name in ids.split(",")} == in_json
    assert defined == called == in_json
    # Messages know the whole matrix, whatever is compiled.
    assert "Family::kSm90" in (tmp_path / "matrix.cpp").read_text()


def test_written_sources_are_of_the_last_preset(run_generate, matrix, tmp_path):
    """Files of another preset are removed; those written already are not touched."""
    run_generate("--write", tmp_path, "--preset", "full")
    run_generate("--write", tmp_path, "--preset", "ci")
    wanted = {source.name for source in generate.sources(matrix.select("ci"))}
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*.c*")}
    assert written - wanted == {f"{family}/library.cpp" for family in ("cpu", "sm80", "sm90")}
    assert wanted <= written
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    run_generate("--write", tmp_path, "--preset", "ci")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}


def test_short_tiles(matrix):
    """The planner's choice under a fixed split, in validate.cpp, rests on equal tiles of keys where
    a short request has the same bits in both classes, and on 64 rows (short_rows) fitting either.
    Other short tiles have short_rows."""
    keys, families = {}, set()
    for v in matrix.variants:
        short = v.tile_class == "decode"
        if v.family_facts.short_tiles != "same_bits":
            assert not short or v.tile.m == v.family_facts.short_rows, v.id
        elif v.tile_class != "compact":
            kernel = tuple(value for axis, value in v.values.items() if axis != "tile_class")
            assert v.tile.m >= 64, v.id
            assert keys.setdefault(kernel, v.tile.n) == v.tile.n, v.id
            families |= {v.family} if short else set()
    assert families == {"sm80"}


def test_presets_grow_into_full(matrix):
    ci, dev, full = ({v.id for v in matrix.select(name)} for name in ("ci", "dev", "full"))
    assert full == {variant.id for variant in matrix.variants}
    assert ci < full
    assert dev < full
    for v in matrix.variants:
        together = v.family == "cpu" or v.logits + v.position == "softcapalibi"
        assert v.options_at_run_time == together, v.id


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (generate.DOCS, generate.docs_text),
        (generate.STUB, lambda matrix: generate.stub_text(matrix.vocabulary, spec.load_options())),
    ],
    ids=["docs", "stub"],
)
def test_checked_in_texts_are_those_of_the_toml(matrix, path, text):
    expected = "regenerate: python cmake/codegen/generate.py --refresh"
    assert path.read_text() == text(matrix), expected
    assert {v.id for v in matrix.variants} == set(ID.findall(generate.docs_text(matrix)))


# By file: text in it, other text, and a part of the refusal.
BAD_EDITS = {
    "forward.toml": [
        ('reason = "', 'reason = "" # "', "no reason"),
        ('q_dtype = "f32"', 'q_dtype = "f64"', "f64"),
        ('tile_class = "decode"', 'tile_shape = "decode"', "tile_shape"),
        ('type = "Mask"', 'type = "Masks"', "Masks"),
        ('default = "bounds"', 'default = "band"', "band"),
        ('match = "covers"', 'match = "roughly"', "roughly"),
        ('title = "q dtype"', 'name_of_it = "q dtype"', "name_of_it"),
        ('operands = "computed"', 'operands = "imagined"', "imagined"),
        ('options = "run_time"', 'options = "some_time"', "some_time"),
        ('options = "run_time"', "", "0 rows of .*options"),
        ('beside = ["none", "single"]', 'beside = ["none", "pair"]', "pair"),
        ('beside = ["none", "single"]', "", "beside"),
        ('["logits", "position"]', '["logits", "load"]', "list of axes"),
        ('load = "direct"\nbeside', "beside", "2 rows of .*options"),
        ('[[options]]\nfamily = "sm80"', '[[options]]\nfamily = "cpu"', "rows of"),
        ('default = "plain"\n', "", "needs a default"),
        ('schedule = "persistent"', 'schedule = "forever"', "forever"),
        ('compiled_for = "90a"', "", "go together"),
        ('preference = ["sm90", ', "preference = [", "each family"),
        ("decode = { cpp", "short = { cpp", "decode"),
        ('["f16", "bf16"', '["f16", "f16", "bf16"', "twice"),
        ("head_dim_step = 64", "head_dim_step = 128", '"64".* is no multiple'),
    ],
    "tiles.toml": [
        ('head_dim = "64"', 'head_dim = "128"', "rows match"),
        ('why = "', 'because = "', "because"),
    ],
    "presets.toml": [
        ('q_dtype = "f16", head_dim = "64"', 'head_dim = "65"', "65"),
        ('"sm90", q_dtype = "bf16"', '"sm90", q_dtype = "f32"', "matches no"),
        ('"cpu", others = "any"', '"cpu", others = "some"', "some"),
        ('covers = ["q_dtype"', 'covers = ["dtype"', "'dtype', which is no axis"),
        ('["192x128", "256"]', '["256"]', "lacks .*192x128"),
    ],
    "options.toml": [
        ('"single"]', '"singel"]', "keyword_of of .*'singel' is unknown"),
        ('field = "soft_cap"', 'field = "cap"', "field of logits_soft_cap: 'cap' is unknown"),
        ('alias_of = "head_dim"', 'alias_of = "dim"',
         "alias_of of head_dim_qk: 'dim' is unknown"),
        ('type.use_fp16_qk', "type.fp16_qk", "cascade_plan.*'fp16_qk_reduction' is unknown"),
        ('"last_page_len", "num_qo', '"indptr", "num_qo',
         "decode_plan. has an option twice"),
        ('"max_item_len_ptr", "seq_lens"', '"max_item_len_ptr", "sequence"',
         "newer of .call.paged_plan.: 'sequence' is unknown"),
        ("check = ", "checked_by = ", "checked_by"),
        ('memory = "rows"', 'memory = "lines"', "lines"),
        ('device = "any"', 'device = "gpu"', "gpu"),
        ("written = true", "is_written = true", "is_written"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [(name, *row) for name, rows in BAD_EDITS.items() for row in rows],
)
def test_contradictions_are_refused(edited, name, old, new, message):
    with pytest.raises(spec.SpecError, match=message) as refused:
        edited(name, old, new)
    assert name in str(refused.value)


HEAD_DIMS = 'values = ["64", "128", "192x128", "256", "512"]'


@pytest.mark.parametrize(
    ("size", "missing"),
    [
        ("192", [
            ("forward.toml", "sm80", "[[options]]"),
            *itertools.product(["tiles.toml"], ["sm80", "sm90"], ['"prefill"', '"decode"']),
            *itertools.product(["presets.toml"], ["sm80", "sm90"], ["[ci] lacks"]),
        ]),
        # 96 columns of 16 bits are no whole blocks of 128 bytes: no tile is missing.
        ("96", [("forward.toml", family, "is no multiple") for family in ("sm80", "sm90")]),
    ],
)  # fmt: skip
def test_the_generator_prints_a_line_for_each_row_that_a_new_head_dim_lacks(
    tmp_path, size, missing
):
    for folder in ("cmake/codegen", "cpp/variants"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    table = tmp_path / "cpp" / "variants" / "forward.toml"
    grown = HEAD_DIMS.replace('"256"', f'"{size}", "256"')
    table.write_text(table.read_text().replace(HEAD_DIMS, grown))
    done = finished(sys.executable, "-B", tmp_path / "cmake/codegen/generate.py", "--list")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert all(f'head_dim = "{size}"' in line for line in lines)
    files = [line.removeprefix("generate.py: ").partition(": ")[0] for line in lines]
    assert set(files) == {file for file, *_ in missing}
    for row in missing:
        assert any(all(part in line for part in row) for line in lines), row


def test_one_error_lists_every_row_that_cannot_be_read(tmp_path):
    """The rows are not compared before all of them can be read."""
    for path in spec.VARIANTS_DIR.glob("*.toml"):
        text = path.read_text().replace('q_dtype = "f32"\n', 'q_dtype = "f33"\n')
        text = text.replace("m = 16\nn = 128\nstages = 3\n", "m = 16\nn = 128\n")
        (tmp_path / path.name).write_text(text.replace('"cpu", others', '"gpu", others'))
    with pytest.raises(spec.SpecError) as refused:
        spec.load_matrix(tmp_path)
    files = [line.partition(".toml:")[0] for line in str(refused.value).splitlines()]
    assert files == ["forward", "tiles", "presets", "presets"]


def test_an_exclusion_takes_out_exactly_what_it_matches(edited, matrix):
    row = (
        '[[exclude]]\nfamily = "sm80"\nhead_dim = ["256", "128"]\nq_dtype = "f16"\n'
        'logits = "softcap"\nload = "direct"\nreason = "a test leaves this out"\n\n'
    )
    shrunk = edited("forward.toml", "[[exclude]]\nfamily", f"{row}[[exclude]]\nfamily")
    ids, before = ({v.id for v in m.variants} for m in (shrunk, matrix))
    sizes, tiles = (128, 256), ("", "_decode")
    assert before - ids == {
        *(f"sm80_f16_d{d}{tile}_softcap_alibi_custom" for d in sizes for tile in tiles),
        *(f"sm80_f16_d{d}_softcap" for d in sizes),
    }
    # The options that are left are together in another kernel.
    assert ids - before == {f"sm80_f16_d{d}{tile}_alibi_custom" for d in sizes for tile in tiles}


# One edit of forward.toml adds an axis, before any kernel implements its value.
NEW_AXIS = """
[types.Skip]
about = "Which tiles are left out."
[types.Skip.values]
none = { cpp = "kNone", about = "none" }
sparse = { cpp = "kSparse", about = "those of little weight" }

[axes.skip]
type = "Skip"
default = "none"
about = "the tiles left out"

"""


def test_an_added_axis_renames_no_kernel(edited, matrix, tmp_path):
    first = "[[exclude]]\nfamily"
    row = f'{first} = ["cpu", "sm90"]\nskip = "sparse"\nreason = "a test has it on sm80 alone"\n\n'
    grown = edited("forward.toml", first, f"{NEW_AXIS}{row}{first}")
    before = [v.id for v in matrix.variants]
    assert [v.id for v in grown.variants if v.skip == "none"] == before
    added = {v.id for v in grown.variants} - set(before)
    assert added == {f"{name}_sparse" for name in before if name.startswith("sm80")}
    # Presets take the default of an axis that they do not name; those that take all take it.
    assert "sm80_bf16_d256_sparse" not in {v.id for v in grown.select("ci")}
    assert added <= {v.id for v in grown.select("full")}
    header = generate.vocabulary_text(grown.vocabulary)
    assert "  kSparse,  // those of little weight" in header
    assert "Skip skip = Skip::kNone;" in header
    assert '"skip"' in generate.matrix_text(grown)
    assert "sparse: Skip" in generate.stub_text(grown.vocabulary, spec.load_options())
    assert "`sparse`" in generate.docs_text(grown)
    vocabulary = tmp_path / "preflash" / "vocabulary.h"
    vocabulary.parent.mkdir()
    vocabulary.write_text(header)
    (tmp_path / "matrix.cpp").write_text(generate.matrix_text(grown))
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler built this package"
    includes = [f"-I{path}" for path in (tmp_path, ROOT / "cpp" / "include", ROOT / "cpp")]
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *includes]
    output_of(compiler, *flags, tmp_path / "matrix.cpp")
