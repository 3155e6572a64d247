"""What prints the tables of the commands."""

from __future__ import annotations

import os

from rich.console import Console, RenderableType

__all__ = ["WIDTH", "print_table"]

WIDTH = 160
"""Columns of output that goes to a file or a pipe. rich takes 80, and cuts numbers in wide tables.
"""


def print_table(*tables: RenderableType) -> None:
    """Print tables to the standard output, each on lines of its own.

    They are as wide as the terminal, or as COLUMNS says.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, WIDTH)
    console.print(*tables, sep="\n")
