"""What every benchmark ends with; it lives beside `kvcore bench`, which ends with the same."""

from kvcore.cli.report import Plot, Report, Row, machine

__all__ = ["Plot", "Report", "Row", "machine"]
