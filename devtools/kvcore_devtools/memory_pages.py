"""What the kernel says about memory: how much of it is there, and on huge pages."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from kvcore.memory.hugepages import PAGE

__all__ = ["huge_nbytes", "resident_nbytes"]

_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE = re.compile(r"(?:AnonHugePages|ShmemPmdMapped): +(\d+)")
"""The huge pages of a mapping, in KiB: of a process's own memory, and of a file in memory."""


def huge_nbytes(memory: memoryview) -> int:
    """Return the bytes of the mapping on huge pages now. Untouched memory is on none."""
    at, found, inside = _address(memory), 0, False
    for line in _SMAPS.read_text().splitlines():
        if mapping := _MAPPING.match(line):
            inside = int(mapping[1], 16) <= at < int(mapping[2], 16)
        elif inside and (counted := _HUGE.match(line)):
            found += int(counted[1]) << 10
    return found


def resident_nbytes(memory: memoryview) -> int:
    """Return the bytes that the kernel has provided so far; 0 if it does not say."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    pages = ctypes.create_string_buffer(-(-memory.nbytes // PAGE))
    if mincore(_address(memory), memory.nbytes, pages):
        return 0
    return sum(page & 1 for page in pages.raw) * PAGE


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
