"""What prints the tables of the commands."""

from __future__ import annotations

from rich.console import Console, RenderableType

__all__ = ["WIDTH", "print_table"]

WIDTH = 160
"""Columns of output that goes to a file or a pipe."""

_UNKNOWN = 80
"""Columns that rich takes where it cannot know: too few for a table of numbers, which it cuts."""


def print_table(*tables: RenderableType) -> None:
    """Print tables to the standard output, each on lines of its own.

    They are as wide as the terminal, or as the variable COLUMNS says.
    """
    console = Console()
    if not console.is_terminal and console.width == _UNKNOWN:
        console.width = WIDTH
    console.print(*tables, sep="\n")
