"""A result of `make gpu` as Markdown, and the table of docs/gpu.md.

python -m tools.gpu.page results/gpu-DATE.json    show this result in docs/gpu.md from now on
python -m tools.gpu.page                          write the table again from docs/gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.metadata import ROOT
from tools.gpu.record import FAILED, FIGURE, LEFT_OUT, PASSED

__all__ = ["DATA", "PAGE", "between", "markdown", "merged"]

PAGE, DATA = ROOT / "docs" / "gpu.md", ROOT / "docs" / "gpu.json"
_BEGIN, _END = (
    "<!-- latest run: begin (`python -m tools.gpu.page`) -->",
    "<!-- latest run: end -->",
)


def markdown(result: Mapping[str, Any]) -> str:
    """Return a table of the parts, a table of figures with their bars, and what was left out."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    machine, parts = result["machine"], result["parts"]
    yield from _heading(result["date"], machine)
    yield ""
    yield "| part | state | seconds | what ran, and what was wrong |"
    yield "|---|---|---|---|"
    for part in parts:
        yield _row(part["name"], part["state"], f"{part['seconds']:.0f}", _ran(part))
    figures = [(p["name"], f) for p in parts for f in p["found"] if f["kind"] == FIGURE]
    if figures:
        yield from ("", "| part | figure | value | bar | met |", "|---|---|---|---|---|")
        for name, figure in figures:
            yield _row(name, figure["what"], _value(figure), figure["bar"] or "", _met(figure))
    skipped = [(p["name"], f) for p in parts for f in p["found"] if f["kind"] == LEFT_OUT]
    if skipped:
        yield from ("", "| part | left out | why |", "|---|---|---|")
        for name, line in skipped:
            yield _row(name, line["what"], line["detail"])


def _heading(date: str, machine: Mapping[str, Any]) -> Iterator[str]:
    versions = machine.get("versions") or {}
    with_version = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if machine.get("gpu"):
        driver = (machine.get("nvidia_smi") or "").splitlines()
        device = f"{machine['gpu']}, {machine['gpu_memory_gib']:g} GiB, CUDA {machine['cuda']}" + (
            f" (nvidia-smi: {driver[0]})" if driver else ""
        )
    else:
        device = f"**no GPU**: {machine.get('why_no_gpu')}"
    changed = machine.get("changed_files")
    yield f"- date: {date}"
    yield f"- device: {device}"
    yield f"- host: {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('system')}"
    yield f"- versions: Python {machine.get('python')}, {with_version}"
    commit = machine.get("commit") or "unknown"
    yield f"- commit: {commit}" + (f", with {changed} changed files" if changed else "")


def _ran(part: Mapping[str, Any]) -> str:
    """Return what a part checked, or why it failed."""
    said = [
        f"{line['what']}: {line['detail']}" if line["detail"] else line["what"]
        for line in part["found"]
        if line["kind"] == PASSED
    ]
    if part["state"] == FAILED:
        last = f" (last line: {part['tail'][-1]})" if part["tail"] else ""
        said.insert(0, f"**{part['why']}**{last}")
    if part["state"] == LEFT_OUT:
        said.append("nothing of it ran")
    return "; ".join(said)


def _met(figure: Mapping[str, Any]) -> str:
    if figure["met"] is None:
        return ""
    return "yes" if figure["met"] else "**no**"


def _value(figure: Mapping[str, Any]) -> str:
    value = figure["value"]
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {figure['unit']}".rstrip()


def _row(*cells: str) -> str:
    """Return a row of a table. What would end a cell or a line is replaced."""
    cleaned = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(cleaned)} |"


def between(page: str, table: str) -> str:
    """Return the page with ``table`` between its two marks. Raises ValueError without them."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n\n{table}\n{_END}{after}"


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one result with all parts; of a part that ran twice, the later run."""
    parts = {part["name"]: part for result in results for part in result["parts"]}
    return {**results[-1], "parts": list(parts.values())}


def main(arguments: Sequence[str]) -> int:
    """Write docs/gpu.md from docs/gpu.json, or from the files given, which are copied there."""
    if arguments:
        given = merged([json.loads(Path(path).read_text()) for path in arguments])
        DATA.write_text(json.dumps(given, indent=1) + "\n")
    result = json.loads(DATA.read_text())
    PAGE.write_text(between(PAGE.read_text(), markdown(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
