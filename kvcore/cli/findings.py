"""What `kvcore doctor` found: one line about one thing."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Finding", "Level"]


class Level(str, Enum):
    """How bad a finding is."""

    GOOD = "good"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """What was looked at, what is there, and what to change."""

    about: str
    level: Level
    found: str
    change: str = ""
