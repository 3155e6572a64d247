"""Imports of optional client libraries, with a hint about what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcore.errors import UnsupportedError

__all__ = ["client_module"]


def client_module(name: str, package: str = "") -> Any:
    """Import a store's client library.

    Raises UnsupportedError, which names the package to install, if the import fails.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name.partition(".")[0]
        raise UnsupportedError(f"{error}: this store needs `pip install {package}`") from error
