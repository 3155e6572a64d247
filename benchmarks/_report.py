"""The report that every benchmark writes; `kvcore bench` writes the same."""

from kvcore.cli.report import Plot, Report, Row, machine

__all__ = ["Plot", "Report", "Row", "machine"]
