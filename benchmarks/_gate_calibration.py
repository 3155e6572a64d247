"""Evaluation of logged blends: which observable predicts the loss, and what a bound costs.

No model is run here. A row is one line of the log of `benchmarks.fusion_gate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks._report import Report, Row
from kvcore.fusion.gate import Gate, GateAction, Observed
from kvcore.fusion.select import Ratio

__all__ = ["Played", "bounds", "observables", "play"]

LAYERS, FULL_LAYERS, SPREAD = 30, 2, 0.5
DEPTHS = (4, 8, 15, 28)


# --- statistics -------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> Any:
    """Return the ranks [n]. Equal values share their mean rank."""
    array = np.asarray(values, dtype=float)
    return np.array([(array < one).sum() + (array == one).sum() / 2 for one in array])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN if a side is constant or has under 3 values."""
    a, b = ranks(one), ranks(other)
    if len(a) < 3 or not a.std() or not b.std():
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def told_apart(values: Sequence[float], lost: Sequence[bool]) -> float:
    """Return how often a blend that lost its answer scores above one that did not (ROC area)."""
    bad = [value for value, is_lost in zip(values, lost, strict=True) if is_lost]
    good = [value for value, is_lost in zip(values, lost, strict=True) if not is_lost]
    if not bad or not good:
        return math.nan
    return fmean((x > y) + (x == y) / 2 for x in bad for y in good)


def loss(row: Row) -> float:
    """Return the loss of exact match or Rouge-L against the full prefill.

    It is negative if the blend did better.
    """
    name = "EM" if "EM" in row else "Rouge-L"
    return float(row[f"full {name}"] - row[name])


# --- observables ------------------------------------------------------------------------------


def off(row: Row, layer: int) -> float:
    """Return the deviation of V of the recomputed rows, as `kvcore.fusion.gate` defines it."""
    return float(row["v"][layer - 1])


def seen(row: Row) -> dict[str, float]:
    """Return every candidate observable of one blend; larger is worse."""
    found = {name: row[name] for name in row if name.startswith(("left", "rel", "moved"))}
    found |= {"entropy": row["entropy"], "-margin": -row["margin"]}
    for name in ("k", "v", "mk", "mv", "qk", "qv"):
        found[f"{name}, mean"] = fmean(row[name])
        found |= {f"{name}, layer {layer}": row[name][layer - 1] for layer in DEPTHS}
    for layer in DEPTHS:
        found[f"v x (1 - ratio), layer {layer}"] = off(row, layer) * (1 - row["ratio"])
        for name in ("k", "v"):
            grown = row[name][layer - 1] / row[f"{name}1"][layer - 1]
            found[f"rel {name} x growth, layer {layer}"] = row[f"rel {name}"] * grown
    return found


def observables(rows: Sequence[Row]) -> Report:
    """Return a report with one line for each observable, the best first.

    ``KL, all`` is the rank correlation over all blends. ``KL, alike`` is the mean of the
    correlations within one task at one ratio, where an observable gains nothing from the ratio.
    ``lost`` is how often a blend that lost a fact of the full prefill scores above one that did
    not.
    """
    columns = ["observable", "KL, all", "KL, alike", "lost"]
    report = Report("fusion_gate_observables", columns, baseline="full prefill of the same prompt")
    shown, kl = [seen(row) for row in rows], [row["KL"] for row in rows]
    facts = [i for i, row in enumerate(rows) if "EM" in row]
    groups: dict[tuple[str, float], list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault((row["task"], row["ratio"]), []).append(i)
    lines = []
    for name in shown[0]:
        x = [one[name] for one in shown]
        alike = [rank_correlation([x[i] for i in g], [kl[i] for i in g]) for g in groups.values()]
        lost = told_apart([x[i] for i in facts], [loss(rows[i]) > 0 for i in facts])
        alike = [one for one in alike if not math.isnan(one)]
        within = fmean(alike) if alike else math.nan
        lines.append(dict(zip(columns, (name, rank_correlation(x, kl), within, lost), strict=True)))
    for line in sorted(lines, key=lambda line: -line["KL, alike"]):
        report.add(**line)
    return report


# --- what a bound would have done -------------------------------------------------------------


class Played(NamedTuple):
    """One prompt under a gate. ``share`` of all rows computed includes abandoned walks."""

    share: float
    lost: float
    ratio: float


def play(blends: dict[float, Row], gate: Gate) -> Played:
    """Return what the gate would have done with a prompt whose blends at every ratio are logged.

    An abandoned walk costs the rows that it computed; its full layers serve the next walk.
    """
    ratio, given_up, layer = min(blends), 0.0, gate.layer(LAYERS, FULL_LAYERS)
    while True:
        row = blends[ratio]
        verdict = gate.judge(Observed(layer, ratio, off(row, layer)))
        if verdict.action is GateAction.GO_ON:
            return Played(row["rows"] + given_up, loss(row), ratio)
        given_up += _so_far(row, layer)
        if verdict.action is GateAction.FULL:
            return Played(1.0 + given_up, 0.0, 1.0)
        ratio = verdict.ratio


def _so_far(row: Row, layer: int) -> float:
    """Return the rows computed after the full layers, up to and with ``layer``, as a share."""
    budget = Ratio(row["ratio"], SPREAD)
    shares = [budget.share(one, LAYERS) for one in range(FULL_LAYERS, LAYERS)]
    behind = row["rows"] - FULL_LAYERS / LAYERS
    return float(behind * sum(shares[: layer + 1 - FULL_LAYERS]) / sum(shares))


def prompts(rows: Iterable[Row]) -> dict[tuple[str, int], dict[float, Row]]:
    """Return the blends of each prompt by ratio, for prompts that have all ratios."""
    found: dict[tuple[str, int], dict[float, Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["prompt"]), {})[row["ratio"]] = row
    most = max(map(len, found.values()), default=0)
    return {key: blends for key, blends in found.items() if len(blends) == most}


def bounds(rows: Sequence[Row], tried: Sequence[float], depth: float) -> Report:
    """Return a report with one line for each task and bound.

    It says what the bound loses, what share of rows is computed, and how often all of them are.
    """
    columns = ["task", "bound", "n", "lost", "rows", "in full"]
    report = Report(
        "fusion_gate_bounds",
        columns,
        baseline="full prefill of the same prompt",
        notes={"depth": depth},
    )
    cases = prompts(rows)
    for task in sorted({task for task, _ in cases}):
        for bound in tried:
            gate = Gate(bound, depth=depth)
            done = [play(blends, gate) for (own, _), blends in cases.items() if own == task]
            report.add(
                task=task,
                bound=bound,
                n=len(done),
                lost=fmean(one.lost for one in done),
                rows=fmean(one.share for one in done),
                **{"in full": fmean(one.ratio == 1 for one in done)},
            )
    return report
