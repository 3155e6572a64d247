"""Folders whose location depends on settings and defaults."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.config.schema_server import ServerConfig

__all__ = ["folder_of"]


def folder_of(config: ServerConfig) -> Path:
    """Return the server's folder in memory: the configured one, or the user's default."""
    return config.folder or Path(f"/dev/shm/kvcore-{os.getuid()}")
