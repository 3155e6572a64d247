"""What a blend can observe of its own errors, and what a gate on that would be worth.

    python -m benchmarks.fusion_gate [--prompts 8] [--first 0] [--tasks "one fact" running]
        [--ratios .15 .3 .5] [--bounds 1 .14 .1] [--depth .25] [--out results]

SmolLM2-135M in float32 through `kvcore.fusion.reference`, with the prompts of
`benchmarks.fusion_quality`. Each line of ``<out>/fusion_gate.jsonl`` is one blend: its loss against
the full prefill of the same prompt (KL, exact match, F1, Rouge-L), and what could be observed while
it ran (`benchmarks._gate_observables`). A run continues from the lines that it finds, so a long
measurement can be made in pieces. ``--prompts 0`` only evaluates these lines: which observable
predicts the loss, and what `kvcore.fusion.gate` would have lost and computed with each bound
(`benchmarks._gate_calibration`).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._fusion_tasks import TASKS, WHOLE
from benchmarks._gate_calibration import bounds, observables
from benchmarks._gate_observables import METHOD, Tap, Witness
from benchmarks.fusion_quality import Case, Log
from kvcore.fusion.reference import Blended
from kvcore.fusion.rope import rope_of
from kvcore.harness.models import smollm2

RATIOS = (0.15, 0.3, 0.5)
BOUNDS = (1.0, 0.16, 0.14, 0.13, 0.12, 0.11, 0.1, 0.09, 0.08)


def outcome(case: Case, blended: Blended) -> dict[str, float]:
    found = {"rows": blended.share}
    found |= case.scores(case.answer_logits(blended.context, blended.hidden[-1:]))
    return found | case.answered(blended.context, blended.logits)


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run(options: argparse.Namespace, log: Log) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    tap = Tap(model)
    settings = model.config.to_dict()
    ropes = [rope_of(settings, layer) for layer in range(tap.layers)]
    for prompt in range(options.first, options.first + options.prompts):
        for task in options.tasks:
            keys = [
                {"task": task, "prompt": prompt, "method": METHOD, "ratio": r, "decoded": True}
                for r in options.ratios
            ]
            todo = [key for key in keys if not log.has(key)]
            if not todo:
                continue
            start = time.perf_counter()
            case = Case(tap, ropes, tokenizer, TASKS[task](tokenizer, prompt))
            whole = case.answered(*case.full)
            witness = Witness(case, tap)
            for key in todo:
                blended, noted = witness.blend(key["ratio"])
                found = outcome(case, blended) | {f"full {name}": whole[name] for name in whole}
                log.add({**key, **rounded(found), **rounded(noted)})
            print(f"{task} {prompt}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(WHOLE))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--bounds", nargs="+", type=float, default=list(BOUNDS))
    parser.add_argument("--depth", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    log = Log(options.out / "fusion_gate.jsonl")
    if options.prompts:
        run(options, log)
    observables(log.rows).finish(options.out)
    bounds(log.rows, options.bounds, options.depth).finish(options.out)


if __name__ == "__main__":
    main()
