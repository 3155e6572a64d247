"""Folders that settings name, or leave to kvcore."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.config.schema import ServerConfig

__all__ = ["folder_of"]


def folder_of(config: ServerConfig) -> Path:
    return config.folder or Path(f"/dev/shm/kvcore-{os.getuid()}")
