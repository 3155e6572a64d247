"""Quality that a blend loses against a full prefill, by task, selector and ratio.

    python -m benchmarks.fusion_quality [--prompts 24] [--first 0] [--tasks "one fact" running]
        [--methods key question*key ...] [--ratios 0 .05 .1 .15 .3 .5 1] [--decode] [--out results]

SmolLM2-135M in float32 through `kvcore.fusion.reference`. This measures quality only, no speed.
Every prompt's full prefill and its chunks' KV are computed once and serve all methods.

The next-token distributions after the prompt and along the true answer (the fact, or 32 tokens of
the real continuation) are scored: mean KL to the full prefill in nats, and how often the most
likely token is the same. With ``--decode`` the answer is decoded too, and scored by exact match and
F1 (facts) or Rouge-L (running text), beside the full prefill's. ``random`` is the control.

Figures are appended to ``<out>/fusion_quality.jsonl`` at once, and a run continues from the lines
that it finds, so a long measurement can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import controls
from benchmarks._fusion_methods import Corrected, SecondLook
from benchmarks._fusion_tasks import TASKS, WHOLE, Prompt, f1, rouge_l
from benchmarks._report import Report, Row
from kvcore.fusion import select
from kvcore.fusion.plan import Cached, ChunkKV, Fresh, Prefix, PromptPlan, PromptSegment
from kvcore.fusion.reference import BlendContext, Blended, Blender, Decoder, precompute, prefill
from kvcore.fusion.reference import question_mass as look
from kvcore.fusion.rope import rope_of
from kvcore.fusion.rows import LOOK_ROWS
from kvcore.harness.models import smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0)
BARS = {
    ("one fact", 0.15): 0.15,
    ("two facts", 0.15): 0.065,
    ("running", 0.15): 0.030,
    ("one fact", 0.3): 0.10,
    ("two facts", 0.3): 0.035,
    ("running", 0.3): 0.015,
}
COLUMNS = [
    "task", "method", "ratio", "rows", "n", "KL", "bar (KL)", "top-1", "EM", "full EM", "F1",
    "full F1", "Rouge-L", "full Rouge-L",
]  # fmt: skip


def busiest_head(probabilities: Tensor) -> Tensor:
    """Pool for `look`: the maximum over heads and rows."""
    return probabilities.amax(dim=(0, 1))


def squared(probabilities: Tensor) -> Tensor:
    """Pool for `look`: squared, so that sharp looks count more than broad ones."""
    return probabilities.square().amax(dim=1).sum(dim=0)


@dataclass(frozen=True)
class Method:
    """A way to choose rows, and the other settings of a blend."""

    selector: select.Selector
    spread: float = 0.0
    full_layers: int = 2
    behind: bool = False
    pool: Callable[[Tensor], Tensor] = select.attention_mass
    kind: type[Blender] = field(default=Blender)
    look_rows: int = LOOK_ROWS

    def budget(self, ratio: float) -> select.Ratio:
        return select.Ratio(ratio, self.spread, self.full_layers)


ASKED = select.QuestionDeviation()


def in_runs(reach: int, **other: Any) -> Method:
    return Method(select.Smoothed(ASKED, reach), **{"spread": 0.5, "pool": squared, **other})


METHODS = {
    "random": Method(controls.RandomRows()),
    "heads": Method(controls.ChunkHeads()),
    "key": Method(select.KeyDeviation()),
    "value": Method(select.ValueDeviation()),
    "key+value": Method(select.KeyValueDeviation()),
    "key, gradual": Method(select.KeyDeviation(), spread=0.5),
    "question": Method(select.QuestionAttention()),
    "question*key": Method(ASKED),
    "question*key, gradual": Method(ASKED, spread=0.5),
    "question*key, gradual to 0": Method(ASKED, spread=1.0),
    "question*key^1, gradual": Method(select.QuestionDeviation(power=1.0), spread=0.5),
    "question*key^3, gradual": Method(select.QuestionDeviation(power=3.0), spread=0.5),
    "question*key, gradual, 3 full": Method(ASKED, spread=0.5, full_layers=3),
    "question*key, gradual, 4 full": Method(ASKED, spread=0.5, full_layers=4),
    "busiest head*key, gradual": Method(ASKED, spread=0.5, pool=busiest_head),
    "squared look*key, gradual": Method(ASKED, spread=0.5, pool=squared),
    "heads, question*key, gradual": Method(controls.HeadsToo(ASKED), spread=0.5),
    "heads*4, question*key, gradual": Method(controls.HeadsToo(ASKED, heads=4), spread=0.5),
    "runs of question*key, gradual": Method(select.Smoothed(ASKED), spread=0.5),
    "runs (2) of question*key, gradual": Method(select.Smoothed(ASKED, reach=2), spread=0.5),
    "runs of squared look*key, gradual": in_runs(1),
    "runs (2) of squared look*key, gradual": in_runs(2),
    "runs (3) of squared look*key, gradual": in_runs(3),
    "runs (4) of squared look*key, gradual": in_runs(4),
    "runs (2), spread .25": in_runs(2, spread=0.25),
    "runs (2), spread .75": in_runs(2, spread=0.75),
    "runs (2), all fresh rows look": in_runs(2, look_rows=1 << 20),
    "runs (2), 256 rows look": in_runs(2, look_rows=256),
    "runs (2), 64 rows look": in_runs(2, look_rows=64),
    "runs (2), 32 rows look": in_runs(2, look_rows=32),
    "runs (2), 3 full": in_runs(2, full_layers=3),
    "runs (2), behind the lead": in_runs(2, behind=True),
    "runs (2), behind the lead, spread .75": in_runs(2, behind=True, spread=0.75),
    "runs (4), behind the lead": in_runs(4, behind=True),
    "runs (8) of squared look*key, gradual": in_runs(8),
    "key, behind the lead": Method(select.KeyDeviation(), behind=True),
    "question*key, gradual, behind the lead": Method(ASKED, spread=0.5, behind=True),
    "question*key, gradual, corrected": Method(ASKED, spread=0.5, kind=Corrected),
    "question*key, gradual, second look": Method(ASKED, spread=0.5, kind=SecondLook),
}
LEADING = "Here is a note.\n\n"
"""Text behind which chunks are precomputed if a method wants one and the prompt has no lead."""


class Case:
    """One prompt and everything that methods share. Chunks are computed when first needed."""

    def __init__(self, decoder: Decoder, ropes: Sequence[Any], tokenizer: Any, prompt: Prompt):
        self.decoder, self.ropes, self.tokenizer, self.prompt = decoder, ropes, tokenizer, prompt
        context, hidden = prefill(decoder, prompt.tokens)
        self.lead = self._lead(context)
        self.expected = self.answer_logits(context, hidden[-1:])
        self.full = context, decoder.logits(hidden[-1:])[0]
        self._chunks: dict[bool, list[ChunkKV]] = {}
        self._blenders: dict[tuple[bool, type[Blender]], Blender] = {}
        self._looks: dict[tuple[bool, Any], Tensor] = {}

    def _lead(self, context: BlendContext) -> ChunkKV:
        n = len(self.prompt.lead)
        layers = tuple(type(kv)(kv.keys[:n], kv.values[:n]) for kv in context.layers)
        return ChunkKV(self.prompt.lead, layers)

    def chunks(self, behind: bool) -> list[ChunkKV]:
        if behind not in self._chunks:
            lead = list(self.prompt.lead) or self.tokenizer(LEADING)["input_ids"]
            self._chunks[behind] = [
                precompute(self.decoder, chunk, lead if behind else ())
                for chunk in self.prompt.chunks
            ]
        return self._chunks[behind]

    def blender(self, method: Method) -> Blender:
        key = method.behind, method.kind
        if key not in self._blenders:
            self._blenders.clear()  # keep one placed cache at a time, about 70 MB
            plan = PromptPlan([Prefix(self.lead), *self._segments(method.behind)])
            self._blenders[key] = method.kind(self.decoder, plan, self.ropes)
        return self._blenders[key]

    def _segments(self, behind: bool) -> list[PromptSegment]:
        """Return the prompt behind its lead, as `kvcore.connector.fusion_scheduler` has it."""
        first, *others = self.chunks(behind)
        found: list[PromptSegment] = [Cached(first)]
        if behind and not self.prompt.lead and 0 not in self.prompt.uncached:
            found = [Fresh(first.tokens[:1]), Cached(first.part(1, len(first.tokens)))]
        found += [Cached(chunk) for chunk in others]
        ahead = len(found) - len(self.prompt.chunks)
        for index in self.prompt.uncached:
            found[ahead + index] = Fresh(self.prompt.chunks[index])
        asked = self.prompt.question
        while isinstance(found[-1], Fresh):  # what follows the last chunk is the question
            asked = found.pop().tokens + asked
        return [*found, Fresh(asked)]

    def blend(self, method: Method, ratio: float) -> Blended:
        blender, key = self.blender(method), (method.behind, method.pool, method.look_rows)
        if method.selector.needs_question and ratio and key not in self._looks:
            self._looks[key] = look(blender, method.pool, method.look_rows)
        return blender.blend(method.selector, method.budget(ratio), self._looks.get(key))

    def answer_logits(self, context: BlendContext, last: Tensor) -> Tensor:
        """Return logits after the prompt and along the true answer: [answer tokens, vocabulary]."""
        tail = context.copy().append(self.prompt.gold[:-1])
        return self.decoder.logits(torch.cat([last, tail]))

    def scores(self, got: Tensor) -> dict[str, float]:
        p, q = self.expected.double().log_softmax(-1), got.double().log_softmax(-1)
        same = self.expected.argmax(-1) == got.argmax(-1)
        return {
            "KL": float((p.exp() * (p - q)).sum(-1).mean()),
            "top-1": float(same.double().mean()),
        }

    def answered(self, context: BlendContext, logits: Tensor) -> dict[str, float]:
        """Return exact match and F1, or Rouge-L, of the greedy answer."""
        gold = self.tokenizer.decode(list(self.prompt.gold)).split()
        tokens = context.copy().greedy(logits, len(self.prompt.gold))
        answer = self.tokenizer.decode(tokens).split()
        if not self.prompt.is_fact:
            return {"Rouge-L": rouge_l(answer, gold)}
        return {"EM": float(answer == gold), "F1": f1(answer, gold)}


def measured(case: Case, method: Method, ratio: float, decode: bool) -> dict[str, float]:
    blended = case.blend(method, ratio)
    found = {"rows": blended.share}
    found |= case.scores(case.answer_logits(blended.context, blended.hidden[-1:]))
    return found | (case.answered(blended.context, blended.logits) if decode else {})


class Log:
    """Figures by task, prompt, method and ratio, in a file to which rows are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        self._have = {self._key(row) for row in self.rows}

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return row["task"], row["prompt"], row["method"], row["ratio"], row["decoded"]

    def has(self, row: Row) -> bool:
        return self._key(row) in self._have

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._have.add(self._key(row))
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def wanted(options: argparse.Namespace, task: str, prompt: int, log: Log) -> Iterator[Row]:
    """Yield what is still to be measured on one prompt. Methods that share a cache are adjacent."""
    names = sorted(options.methods, key=lambda n: (METHODS[n].behind, METHODS[n].kind.__name__))
    for name in names:
        for ratio in options.ratios:
            row = {
                "task": task,
                "prompt": prompt,
                "method": name,
                "ratio": ratio,
                "decoded": options.decode,
            }
            if not log.has(row):
                yield row


def run(options: argparse.Namespace, log: Log) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    decoder = Decoder(model)
    settings = model.config.to_dict()
    ropes = [rope_of(settings, layer) for layer in range(decoder.layers)]
    for prompt in range(options.first, options.first + options.prompts):
        for task in options.tasks:
            todo = list(wanted(options, task, prompt, log))
            if not todo:
                continue
            start = time.perf_counter()
            case = Case(decoder, ropes, tokenizer, TASKS[task](tokenizer, prompt))
            whole = case.answered(*case.full) if options.decode else {}
            for row in todo:
                found = measured(case, METHODS[row["method"]], row["ratio"], options.decode)
                log.add({**row, **found, **{f"full {name}": whole[name] for name in whole}})
            print(
                f"{task} {prompt}: {len(todo)} in {time.perf_counter() - start:.0f} s", flush=True
            )


def summary(rows: Iterable[Row], options: argparse.Namespace) -> Report:
    report = Report(
        "fusion_quality",
        COLUMNS,
        baseline="full prefill of the same prompt; random is the control",
        notes={"model": "SmolLM2-135M-Instruct, float32", "first prompt": options.first},
    )
    prompts = range(options.first, options.first + options.prompts)
    groups: dict[tuple[str, str, float], dict[int, Row]] = {}
    for row in rows:
        key = row["task"], row["method"], row["ratio"]
        chosen = key[0] in options.tasks and key[1] in options.methods and key[2] in options.ratios
        if chosen and row["prompt"] in prompts:
            best = groups.setdefault(key, {})
            best[row["prompt"]] = {**best.get(row["prompt"], {}), **row}
    for (task, method, ratio), found in sorted(groups.items()):
        means = {
            name: fmean(row[name] for row in found.values())
            for name in COLUMNS
            if all(isinstance(row.get(name), float) for row in found.values())
        }
        fixed = {"task": task, "method": method, "ratio": ratio, "n": len(found)}
        report.add(**{**means, **fixed, "bar (KL)": BARS.get((task, ratio))})
    return report


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [row for row in rows if (row["task"], row["method"]) == (task, method)]
            axes.plot(
                [row["rows"] for row in points],
                [max(row["KL"], 1e-4) for row in points],
                marker="o",
                label=method,
            )
        axes.set_yscale("log")
        axes.set_title(task)
        axes.set_xlabel("share of rows computed, over all layers")
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("KL to full prefill, nats")
    figure.axes[-1].legend(fontsize="x-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(WHOLE))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    log = Log(options.out / "fusion_quality.jsonl")
    run(options, log)
    summary(log.rows, options).finish(options.out, draw)


if __name__ == "__main__":
    main()
