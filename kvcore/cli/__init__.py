"""The ``kvcore`` command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the console script. Exits the process."""
    from kvcore.cli.app import app

    app(prog_name="kvcore")
