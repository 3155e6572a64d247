"""The table, the plot and the JSON file of a run of the demo."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from demo.phases import COLD, DISK, FILL, FIRST, HOST, OWN, PRESSURE, Answer, Demo

SAYS = {
    COLD: "engine alone, computes everything",
    OWN: "engine alone, same prompt again",
    FIRST: "kvcore, first time",
    HOST: "kvcore, engine's cache emptied",
    DISK: "kvcore, engine restarted",
    FILL: "kvcore, small tiers, filled once",
    PRESSURE: "kvcore, small tiers, asked again",
}


@dataclass(frozen=True)
class Row:
    """The requests of one phase, turn or user, summarised by medians."""

    label: str
    answers: Sequence[Answer]
    cold: dict[tuple[int, int], float]

    @property
    def ttft_s(self) -> float:
        return median(answer.ttft_s for answer in self.answers)

    @property
    def speed_up(self) -> float:
        """Median over requests of the ratio of the prompt's cold time to this request's time."""
        return median(self.cold[each.user, each.turn] / each.ttft_s for each in self.answers)

    @property
    def tiers(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for answer in self.answers:
            for tier, tokens in answer.tiers.items():
                total[tier] = total.get(tier, 0) + tokens
        return total

    @property
    def answered_by(self) -> str:
        """The tiers that tokens came from, largest first; else the engine's cache, or neither."""
        prompt = sum(answer.prompt_tokens for answer in self.answers)
        shares = sorted(self.tiers.items(), key=lambda item: -item[1])
        if shares:
            return ", ".join(f"{tier} {tokens / prompt:.0%}" for tier, tokens in shares if tokens)
        cached = sum(answer.cached_tokens for answer in self.answers)
        return f"engine {cached / prompt:.0%}" if cached else "recomputed"

    @property
    def reused(self) -> str:
        reused = median(max(each.reused_tokens, each.cached_tokens) for each in self.answers)
        return f"{reused:.0f} of {median(each.prompt_tokens for each in self.answers):.0f}"

    @property
    def equal(self) -> int:
        return sum(answer.equal for answer in self.answers)

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "requests": len(self.answers),
            "ttft_s": round(self.ttft_s, 4),
            "speed_up": round(self.speed_up, 2),
            "tiers": self.tiers,
            "reused": self.reused,
            "equal": self.equal,
        }


def rows(answers: Sequence[Answer]) -> list[Row]:
    """Return one row for each phase; for "first time" one a turn, for "pressure" one a user."""
    cold = {(each.user, each.turn): each.ttft_s for each in answers if each.phase == COLD}
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        label = SAYS[answer.phase]
        if answer.phase == FIRST:
            label += f", turn {answer.turn + 1}"
        elif answer.phase == PRESSURE:
            label += f", user {answer.user + 1}"
        groups.setdefault(label, []).append(answer)
    return [Row(label, group, cold) for label, group in groups.items()]


def table(title: str, lines: Sequence[Row]) -> Table:
    """Return the table for the terminal. TTFT is in milliseconds."""
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for heading in ("TTFT, ms", "faster than cold", "prompt tokens not computed"):
        result.add_column(heading, justify="right")
    result.add_column("answered by")
    result.add_column("same tokens", justify="right")
    for row in lines:
        wrong = row.equal < len(row.answers)
        result.add_row(
            row.label,
            f"{row.ttft_s * 1000:.0f}",
            f"{row.speed_up:.1f}x",
            row.reused,
            row.answered_by,
            f"{row.equal}/{len(row.answers)}",
            style="red" if wrong else None,
        )
    return result


def plot(path: Path, title: str, lines: Sequence[Row]) -> None:
    """Plot medians as bars on a logarithmic axis, and single requests as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(lines) + 1.5))
    for place, row in enumerate(reversed(lines)):
        by_kvcore = any(row.tiers.values())
        axes.barh(place, row.ttft_s, color="#2a7f62" if by_kvcore else "#b0b0b0", height=0.6)
        times = [answer.ttft_s for answer in row.answers]
        axes.plot(times, [place] * len(times), ".", color="black", markersize=4, alpha=0.6)
        axes.annotate(
            f"{row.ttft_s * 1000:.0f} ms, {row.speed_up:.1f}x",
            (max(times), place),
            textcoords="offset points",
            xytext=(8, -3),
            fontsize=8,
        )
    axes.set_yticks(range(len(lines)), [row.label for row in reversed(lines)], fontsize=9)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_xlabel("time to first token, s (bar: median, dots: requests; green: KV from kvcore)")
    axes.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def save_json(path: Path, demo: Demo, lines: Sequence[Row]) -> None:
    """Write all measurements, and the machine and settings that they were taken with."""
    settings = demo.settings
    content = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "engine": demo.engine_info,
        "model": Path(settings.model).name,
        "users": settings.users,
        "turns": settings.turns,
        "answer_tokens": settings.answer_tokens,
        "working_set_bytes": settings.working_set,
        "summary": [row.as_json() for row in lines],
        "requests": [answer.as_json() for answer in demo.answers],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
