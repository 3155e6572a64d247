"""What can be observed of a blend while it runs: the candidates for a quality gate.

dK and dV are fresh minus cached K and V of a row.

When rows are chosen, of the rows left behind:
    left ...    their share of all candidates' sum of: the selector's score, |dK|^2 (``k``),
                |dV|^2 (``v``), |dK|^2 / |K|^2 weighted by the question's look (``mk``), and the
                look itself (``mass``)
    rel ...     the same deviations as a share of all candidates' |K|^2 or |V|^2, or of the look

At every layer from 1 on, of the chunks' rows computed there:
    k, v        |dK|^2 / |K|^2, and the same of V
    mk, mv      both, weighted by the question's look
    k1, v1      what ``k`` and ``v`` of the same rows were at layer 1

At every layer from 1 on, of the question's rows:
    qk, qv      how far their K and V are from those of the look over pure reuse

At the end: ``moved``, the KL of the next token against pure reuse; ``entropy`` and ``margin`` of
the next token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion_quality import METHODS, Case
from kvcore.fusion.reference import Blended, Decoder, Projected
from kvcore.fusion.reference import question_mass as look
from kvcore.fusion.select import Candidates, deviation

__all__ = ["METHOD", "Tap", "Witness"]

METHOD = "runs (2) of squared look*key, gradual"


class Tap(Decoder):
    """A decoder that records each layer's rows with their K and V, and the last output."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.seen: dict[int, tuple[Tensor, Projected]] = {}
        self.last = torch.empty(0)

    def project(self, layer: int, hidden: Tensor, positions: Tensor) -> Projected:
        new = super().project(layer, hidden, positions)
        self.seen[layer] = positions, new
        return new

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        self.last = super().finish(layer, hidden, attended)
        return self.last

    def take(self) -> dict[int, tuple[Tensor, Projected]]:
        seen, self.seen = self.seen, {}
        return seen


def share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum() / whole.sum().clamp_min(1e-30))


def size(heads: Tensor) -> Tensor:
    return deviation(heads, torch.zeros_like(heads))


class Witness:
    """The observer of one prompt: the look over pure reuse, then each blend beside it."""

    def __init__(self, case: Case, tap: Tap) -> None:
        self.case, self.tap, self.method = case, tap, METHODS[METHOD]
        self.blender = case.blender(self.method)
        tap.take()
        self.mass = look(self.blender, self.method.pool)
        case._looks[(self.method.behind, self.method.pool)] = self.mass
        self.reused = tap.take()
        self.reused_logits = tap.logits(tap.last[-1:])[0].double().log_softmax(-1)

    def blend(self, ratio: float) -> tuple[Blended, dict[str, Any]]:
        self.tap.take()
        blended = self.case.blend(self.method, ratio)
        seen = self.tap.take()
        noted: dict[str, Any] = self.left(seen, blended.computed[2])
        noted |= self.layers(seen) | self.asked(seen)
        log = blended.logits.double().log_softmax(-1)
        top = log.topk(2).values
        noted["moved"] = float((log.exp() * (log - self.reused_logits)).sum())
        noted["moved top-1"] = float(log.argmax() != self.reused_logits.argmax())
        noted["entropy"] = float(-(log.exp() * log).sum())
        noted["margin"] = float(top[0] - top[1])
        return blended, noted

    def left(self, seen: dict[int, tuple[Tensor, Projected]], kept: Tensor) -> dict[str, float]:
        rows, new = seen[1]
        chosen = torch.isin(rows, self.blender.chunks)
        rows = rows[chosen]
        gone = ~torch.isin(rows, kept)
        placed = self.blender.placed[1]
        shown = Candidates(
            1, rows, new.keys[chosen], new.values[chosen], placed.keys[rows], placed.values[rows],
            self.blender.offsets[rows], self.mass[rows],
        )  # fmt: skip
        k, v, mass = shown.key_deviation, shown.value_deviation, self.mass[rows]
        ksize, vsize = size(shown.keys), size(shown.values)
        score = self.method.selector.score(shown)
        return {
            "left score": share(score[gone], score),
            "left k": share(k[gone], k),
            "left v": share(v[gone], v),
            "left mk": share((mass * k / ksize)[gone], mass * k / ksize),
            "left mass": share(mass[gone], mass),
            "rel k": share(k[gone], ksize),
            "rel v": share(v[gone], vsize),
            "rel mk": share((mass * k / ksize)[gone], mass),
            "rel mv": share((mass * v / vsize)[gone], mass),
            "rel mk all": share((mass * k / ksize)[gone], self.mass),
            "rel mv all": share((mass * v / vsize)[gone], self.mass),
        }

    def layers(self, seen: dict[int, tuple[Tensor, Projected]]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in ("k", "v", "mk", "mv", "k1", "v1")}
        first_rows, first = seen[1]
        for layer in range(1, len(seen)):
            rows, new = seen[layer]
            chosen = torch.isin(rows, self.blender.chunks)
            rows = rows[chosen]
            placed, mass = self.blender.placed[layer], self.mass[rows]
            k, ksize = deviation(new.keys[chosen], placed.keys[rows]), size(new.keys[chosen])
            v, vsize = deviation(new.values[chosen], placed.values[rows]), size(new.values[chosen])
            same = torch.isin(first_rows, rows)
            was = self.blender.placed[1]
            found["k"].append(share(k, ksize))
            found["v"].append(share(v, vsize))
            found["mk"].append(share(mass * k / ksize, mass))
            found["mv"].append(share(mass * v / vsize, mass))
            found["k1"].append(
                share(deviation(first.keys[same], was.keys[rows]), size(first.keys[same]))
            )
            found["v1"].append(
                share(deviation(first.values[same], was.values[rows]), size(first.values[same]))
            )
        return found

    def asked(self, seen: dict[int, tuple[Tensor, Projected]]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"qk": [], "qv": []}
        question = self.blender.plan.question
        for layer in range(1, len(seen)):
            (rows, new), (rows0, new0) = seen[layer], self.reused[layer]
            now, then = torch.isin(rows, question), torch.isin(rows0, question)
            k, v = new.keys[now], new.values[now]
            found["qk"].append(share(deviation(k, new0.keys[then]), size(k)))
            found["qv"].append(share(deviation(v, new0.values[then]), size(v)))
        return found
