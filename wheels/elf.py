"""What a shared library asks the loader for, read from the file itself (no binutils needed)."""

from __future__ import annotations

import struct
from pathlib import Path

_DT_NEEDED = 1
_DT_STRTAB = 5
_PT_LOAD = 1
_PT_DYNAMIC = 2


def needed(path: Path) -> list[str]:
    """The libraries that `path` NEEDs, as `readelf -d` lists them.

    Raises:
        ValueError: the file is not a 64-bit little-endian ELF file with a dynamic section.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
    segments = _segments(data)
    dynamic = [segment for segment in segments if segment.kind == _PT_DYNAMIC]
    if not dynamic:
        raise ValueError(f"{path}: no dynamic section")
    entries = _dynamic_entries(data, dynamic[0])
    tables = [value for tag, value in entries if tag == _DT_STRTAB]
    strings = _file_offset(segments, tables[0])
    return [_string(data, strings + value) for tag, value in entries if tag == _DT_NEEDED]


class _Segment:
    """One program header."""

    def __init__(self, data: bytes, offset: int) -> None:
        self.kind, _, self.offset, self.address, _, self.size = struct.unpack_from(
            "<IIQQQQ", data, offset
        )


def _segments(data: bytes) -> list[_Segment]:
    (table,) = struct.unpack_from("<Q", data, 32)
    entry_size, count = struct.unpack_from("<HH", data, 54)
    return [_Segment(data, table + i * entry_size) for i in range(count)]


def _dynamic_entries(data: bytes, segment: _Segment) -> list[tuple[int, int]]:
    end = segment.offset + segment.size
    return [struct.unpack_from("<QQ", data, at) for at in range(segment.offset, end, 16)]


def _file_offset(segments: list[_Segment], address: int) -> int:
    for segment in segments:
        inside = segment.address <= address < segment.address + segment.size
        if segment.kind == _PT_LOAD and inside:
            return segment.offset + address - segment.address
    raise ValueError(f"address {address:#x} lies in no loaded segment")


def _string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()
