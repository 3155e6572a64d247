"""Models with resume points on vLLM: kvcore beside vLLM's own offloading and the engine alone.

    python -m benchmarks.vllm_states [--prompts 6] [--tokens 2000] [--rounds 2] [--interval 0]

The models are random ones of LFM2's, Qwen3-Next's and gpt-oss's kind. Of the last, whose windows
are of 128 tokens, kvcore with dense windows is measured too. vLLM's connector has no copies for a
CPU: those are the tests' (`kvcore_devtools.vllm_offloading`), its scheduler and rows are its own.
All engines are up, and each prompt is asked of one after the other, in an order that turns round.

"miss" is a prompt that nobody has seen. "hit" is the same one after the engine's own cache was
emptied. "parted" shares its first three quarters with a prompt that was seen, and "parted again"
parts there as well. With ``--interval`` all engines keep states or windows every so many tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._report import Report
from kvcore.harness.compare import SMALL, counted
from kvcore.harness.engine_process import EngineProcess
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import words

VOCABULARY = 512
ALONE, OFFLOADING, KVCORE = "alone", "vLLM's offloading", "kvcore"
DENSE = "kvcore, dense windows"
KINDS: dict[str, dict[str, Any]] = {
    # vLLM's CPU kernel rotates a part of LFM2's heads, by positions that depend on the chunk.
    "lfm2": {"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    # Its CPU build forgets a block size that it chose itself, and then keeps few states.
    "qwen3_next": {"dtype": "bfloat16", "block_size": 384},
    "gpt_oss": {},
}
HOST_BYTES = 512 << 20


def model_of(kind: str) -> Path:
    return tiny_model(
        kind, layers=12, heads=8, kv_heads=4, head_dim=64, sliding_window=128,
        vocabulary=VOCABULARY, mlp_width=1024,
    )  # fmt: skip


@contextmanager
def contenders(kind: str, tokens: int, interval: int) -> Iterator[dict[str, EngineProcess]]:
    """All engines, warmed up."""
    args = {**SMALL, **KINDS[kind], "max_model_len": tokens + 512}
    args["kv_cache_memory_bytes"] = HOST_BYTES
    args["prefix_cache_retention_interval"] = interval
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "kvcore_devtools.vllm_offloading",
            "cpu_bytes_to_use": HOST_BYTES,
        },
    }
    host = {"host": {"capacity": HOST_BYTES, "prefault": HOST_BYTES}}
    makes: dict[str, dict[str, Any]] = {
        ALONE: {"kvcore": None},
        OFFLOADING: {"kvcore": None, "kv_transfer_config": offloading},
        KVCORE: {"kvcore": host},
    }
    if kind == "gpt_oss":
        makes[DENSE] = {"kvcore": {**host, "vllm": {"windows": "dense"}}}
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                EngineProcess(model_of(kind), engine="vllm", **{**args, **more})
            )
            for name, more in makes.items()
        }
        for process in made.values():
            for _ in range(2):
                process.generate([words(999, tokens, range(1, VOCABULARY - 8))], 4)
                process.settle(30)
                process.reset_prefix_cache()
        yield made


class Times:
    """What each contender took for each kind of request, and what it brought back."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.cached: dict[tuple[str, str], int] = {}
        self.differ: dict[tuple[str, str], int] = {}

    def ask(self, made: dict[str, EngineProcess], what: str, turn: int, prompt: list[int]) -> None:
        """Ask all of them, beginning with another one each time."""
        names = [*made][turn % len(made) :] + [*made][: turn % len(made)]
        answers = {}
        for name in names:
            [answers[name]] = made[name].generate([prompt], 8)
        for name, answer in answers.items():
            self.seconds.setdefault((name, what), []).append(answer.ttft_s)
            at = name, what
            self.cached[at] = self.cached.get(at, 0) + answer.cached_tokens
            wrong = answer.token_ids != answers[ALONE].token_ids
            self.differ[at] = self.differ.get(at, 0) + wrong
        for process in made.values():  # vLLM's connector stores in the next step what is complete
            process.generate([prompt[:40]], 2)
            process.settle(30)
            process.reset_prefix_cache()


def measure(kind: str, options: argparse.Namespace, report: Report) -> None:
    times, ids = Times(), range(1, VOCABULARY - 8)
    with contenders(kind, options.tokens, options.interval) as made:
        before = saved(made)
        for turn in range(options.prompts):
            prompt = words(turn, options.tokens, ids)
            times.ask(made, "miss", turn, prompt)
            if not turn:
                after = saved(made)
            for again in range(options.rounds):
                times.ask(made, "hit", turn + again, prompt)
        for turn, number in product(range(options.prompts), (1, 2)):
            shared = words(turn, options.tokens, ids)[: 3 * options.tokens // 4]
            rest = words(1000 * number + turn, options.tokens - len(shared), ids)
            what = "parted" if number == 1 else "parted again"
            times.ask(made, what, turn, [*shared, *rest])
    for (name, what), seconds in times.seconds.items():
        report.add(
            model=kind,
            request=what,
            contender=name,
            ttft_s=round(median(seconds), 4),
            to_alone=round(median(seconds) / median(times.seconds[ALONE, what]), 3),
            cached_tokens=round(times.cached[name, what] / len(seconds)),
            answers_differ=times.differ[name, what],
        )
    for name, nbytes in after.items():
        report.notes[f"bytes saved of the first prompt, {kind}, {name}"] = nbytes - before[name]


def saved(made: dict[str, EngineProcess]) -> dict[str, float]:
    """Return the bytes that kvcore has copied off the pages, by contender."""
    return {
        name: counted(process, "kvcore_transfer_bytes_total", path="d2h")
        for name, process in made.items()
        if name in (KVCORE, DENSE)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2, help="hits of each prompt")
    parser.add_argument("--interval", type=int, default=0, help="vLLM's retention interval")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    report = Report(
        "vllm_states",
        ["model", "request", "contender", "ttft_s", "to_alone", "cached_tokens", "answers_differ"],
        baseline="the same vLLM without a connector, in turns with the others",
        notes={"tokens": options.tokens, "prompts": options.prompts, "interval": options.interval},
    )
    for kind in options.models:
        measure(kind, options, report)
    report.finish(options.out)


if __name__ == "__main__":
    main()
