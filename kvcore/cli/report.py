"""The result of a benchmark: a table on the terminal, a JSON file and an optional plot.

report = Report("copies", ["layout", "GB/s", "ratio"], baseline="libc memcpy, one thread")
report.add(**{"layout": "vec", "GB/s": 7.9, "ratio": 0.82})
report.finish(plot=draw)
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvcore.cli.tables import print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Plot", "Report", "Row", "machine"]

Row = Mapping[str, Any]
Plot = Callable[["Figure", Sequence[Row]], None]
"""Draws all rows on an empty figure. It creates the axes; the report adds a title and saves it."""


def machine() -> dict[str, Any]:
    """Return what measurements depend on: CPU model, available cores, memory and system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or "unknown"


def _command() -> str:
    """Return the command line, with the script's name without its folder."""
    module = sys.modules["__main__"].__spec__
    script = f"-m {module.name}" if module else Path(sys.argv[0]).name
    return f"python {script} {shlex.join(sys.argv[1:])}".rstrip()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "-" if value is None else str(value)


class Report:
    """The rows of one benchmark. Not thread-safe.

    ``columns`` are the keys of the rows in order, with units in their names. ``baseline`` describes
    what the numbers are compared with. ``notes`` (settings, sizes) are copied into the JSON.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        baseline: str,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.columns = tuple(columns)
        self.baseline = baseline
        self.notes = dict(notes or {})
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Add a row of JSON values. Missing columns become None; unknown ones raise ValueError."""
        unknown = sorted(set(row) - set(self.columns))
        if unknown:
            raise ValueError(
                f"given columns {unknown} for report {self.name!r}; it has {self.columns}"
            )
        self.rows.append({column: row.get(column) for column in self.columns})

    def finish(self, out_dir: Path = Path("results"), plot: Plot | None = None) -> Path:
        """Print the table and write ``<name>.json``, and ``<name>.png`` if there is a ``plot``.

        Files of an earlier run are replaced. Returns the path of the JSON file.
        """
        out_dir.mkdir(parents=True, exist_ok=True)
        self._print()
        path = out_dir / f"{self.name}.json"
        path.write_text(json.dumps(self._document(), indent=1) + "\n")
        if plot is not None:
            self._draw(out_dir / f"{self.name}.png", plot)
        return path

    def _document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "command": _command(),
            "baseline": self.baseline,
            "notes": self.notes,
            "columns": self.columns,
            "rows": self.rows,
        }

    def _print(self) -> None:
        table = Table(title=self.name, caption=f"baseline: {self.baseline}")
        for column in self.columns:
            numbers = all(isinstance(row[column], (int, float, type(None))) for row in self.rows)
            table.add_column(column, justify="right" if numbers else "left")
        for row in self.rows:
            table.add_row(*(_cell(row[column]) for column in self.columns))
        print_table(table)

    def _draw(self, path: Path, plot: Plot) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            print(f"no {path.name}: matplotlib is not installed (pip install 'kvcore[bench]')")
            return
        figure = Figure(figsize=(9, 5), layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure, self.rows)
        figure.suptitle(f"{self.name}, against {self.baseline}", fontsize="medium")
        figure.savefig(path, dpi=130)
