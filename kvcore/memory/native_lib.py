"""Loads the compiled library ``_copy.so``, which copies and sums blocks in C."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvcore.errors import UnsupportedError

__all__ = ["load_library", "prepare_library"]

LIBRARY = Path(__file__).parent / "copy" / "_copy.so"
_ABI = 3
"""Version of the structures that ``_copy.c`` reads."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the compiled library; UnsupportedError if it is not built or has another version."""
    return prepare_library(LIBRARY)


def prepare_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and check its version; raises as ``load_library`` does."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(
            f"the native copies are not built ({error}): install a C compiler and run "
            "`python -m kvcore.memory.copy.build_native`; "
            "torch copies in their place, several times slower"
        ) from error
    if not hasattr(library, "kvcore_copy_abi") or library.kvcore_copy_abi() != _ABI:
        raise UnsupportedError(
            f"{path.name} is of another version: run `python -m kvcore.memory.copy.build_native`"
        )
    library.kvcore_copy.argtypes = [ctypes.c_void_p]
    library.kvcore_copy.restype = None
    library.kvcore_sum.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.kvcore_sum.restype = ctypes.c_uint64
    return library
