"""Imports of optional client libraries, with a hint at what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvcore.errors import UnsupportedError

__all__ = ["client_module"]


def client_module(name: str, package: str = "") -> Any:
    """A store's client. Raises UnsupportedError, naming the package, where it cannot be used."""
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name.partition(".")[0]
        raise UnsupportedError(f"{error}: this store needs `pip install {package}`") from error
