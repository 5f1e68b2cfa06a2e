"""preflash.h keeps the ABI that abi_1.txt records: functions, values of enums, layouts of structs.

A line that goes or changes breaks programs compiled earlier. Such a change raises
PREFLASH_ABI_VERSION, and its interface is recorded in abi_<version>.txt. A function, a value or a
member that is appended adds lines to the recorded file:

    python tests/c/test_abi.py > tests/c/abi_1.txt
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from processes import output_of

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "include" / "preflash" / "preflash.h"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def interface(header: str) -> list[str]:
    """Returns a line for each function, enum value and struct member that a header declares.

    The C compiler computes values, offsets and sizes in bytes. Structs that begin with their size
    may grow, so only the size of a struct without such a member is a line.
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.S)
    lines = [" ".join(function.split()) for function in re.findall(r"PREFLASH_API ([^;#]*);", text)]
    prints = []
    for enum, body in re.findall(r"typedef enum (\w+) \{(.*?)\}", text, re.S):
        for name in re.findall(r"(\w+)[^,]*,?", body):
            prints.append(f'printf("{enum} {name} = %d\\n", (int){name});')
    for struct, body in re.findall(r"typedef struct (\w+) \{(.*?)\}", text, re.S):
        members = re.findall(r"(\w[\w *]*[ *])(\w+);", body)
        assert len(members) == body.count(";"), f"a member of {struct} is not <type> <name>;"
        for kind, name in members:
            values = f"offsetof({struct}, {name}), sizeof((({struct}*)0)->{name})"
            line = f"{struct}: {kind.strip()} {name} at %zu, %zu bytes"
            prints.append(f'printf("{line}\\n", {values});')
        if ("size_t ", "size") not in members:
            prints.append(f'printf("{struct}: %zu bytes\\n", sizeof({struct}));')
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "preflash.h").write_text(header)
        main = "\n".join(["int main(void) {", *prints, "}\n"])
        (folder / "abi.c").write_text(f'#include "preflash.h"\n#include <stdio.h>\n{main}')
        output_of("cc", "-std=c11", "abi.c", "-o", "abi", cwd=folder)
        return lines + output_of(folder / "abi").splitlines()


def recorded(header: str) -> list[str]:
    (version,) = re.findall(r"#define PREFLASH_ABI_VERSION (\d+)", header)
    return Path(__file__).with_name(f"abi_{version}.txt").read_text().splitlines()


def broken(header: str) -> list[str]:
    kept = set(interface(header))
    return [line for line in recorded(header) if line not in kept]


def test_the_header_keeps_its_abi_and_the_record_is_whole():
    header = HEADER.read_text()
    assert broken(header) == [], "raise PREFLASH_ABI_VERSION, or undo the change"
    added = set(interface(header)) - set(recorded(header))
    assert sorted(added) == [], "append these lines to the recorded file"


DESTROY = "PREFLASH_API void preflash_plan_destroy(preflash_plan* plan);"
QO, KV = "  int32_t num_qo_heads;", "  int32_t num_kv_heads;"
# Text of the header, other text, and a part of the line that is not kept.
CHANGES = [
    (DESTROY, "", "void preflash_plan_destroy("),
    ("_plan_create(int device,", "_plan_create(int64_t device,", "_plan_create(int device,"),
    (f"{QO}\n{KV}", f"{KV}\n{QO}", "num_kv_heads at 12, 4 bytes"),
    ("  float soft_cap;", "  int32_t soft_cap;", "float soft_cap at 48, 4 bytes"),
    ("  int64_t num_tokens;", "  int64_t num_tokens;\n  int64_t added;", "tensor: 48 bytes"),
    ("PREFLASH_BFLOAT16 = 2", "PREFLASH_BFLOAT16 = 7", "PREFLASH_BFLOAT16 = 2"),
    # What is appended breaks nothing.
    ("  int32_t reserved;", "  int32_t reserved;\n  int64_t added;", None),
    ("FLOAT8_E5M2 = 4", "FLOAT8_E5M2 = 4, PREFLASH_ADDED = 5", None),
    (DESTROY, f"{DESTROY}\nPREFLASH_API int preflash_added(void);", None),
]


@pytest.mark.parametrize(("before", "after", "line"), CHANGES)
def test_breaks_are_found(before, after, line):
    header = HEADER.read_text()
    assert header.count(before) == 1
    found = broken(header.replace(before, after))
    assert any(line in one for one in found) if line else found == []


if __name__ == "__main__":
    print("\n".join(interface(HEADER.read_text())))
