"""The harness's cases on the real TensorRT-LLM, for whoever has a GPU.

    python adapters/trtllm/verify_on_gpu.py MODEL [--tp 2] [--only NAME] [--json FILE]

Each case asks an engine without kvcore and one with it for greedy answers to the same prompts,
twice, with everything pushed out of the engine's own cache in between, and compares tokens. A case
passes when they are equal and kvcore loaded what it had kept, or nothing where nothing may be
found. Nothing is timed. Written for 1.2 and 1.3; it has not been run on either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONNECTOR = {
    "connector_module": "kvcore_trtllm.connector",
    "connector_scheduler_class": "KVCoreScheduler",
    "connector_worker_class": "KVCoreWorker",
}
VARIABLE = "TRTLLM_KVCORE_CONFIG"
CACHE_TOKENS = 16384
"""Size of the engine's own cache: small enough to be filled with other things."""

TEXT = (
    "A lighthouse keeper writes down every ship that passes: its name, its flag, the hour and the "
    "weather. On the {} day of the month the fog is thick and the horn sounds every minute. "
)


@dataclass(frozen=True)
class Case:
    """One comparison. ``options`` are the engine's, ``kvcore`` settings beyond host and disk.

    ``finds`` tells whether the second round must find what the first has kept. With a ``ratio`` the
    prompts are made of texts that are held: the first round blends them, the second asks exactly.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    kvcore: dict[str, Any] = field(default_factory=dict)
    prompts: int = 4
    salts: tuple[str | None, str | None] = (None, None)
    restart: bool = False
    finds: bool = True
    ratio: float | None = None

    @property
    def first(self) -> int:
        """The first round whose answers must be equal: those of a share are only close."""
        return int(self.ratio is not None and self.ratio < 1)

    @property
    def sign(self) -> str:
        """What the log says where something was found."""
        return "load request=" if self.ratio is None else "blend request="


FUSION = {"fusion": {"enabled": True, "min_tokens": 64}}

CASES = (
    Case("hit in host memory"),
    Case("overlap off", {"disable_overlap_scheduler": True}),
    Case("no CUDA graphs, layer by layer", {"cuda_graph_config": None}),
    Case("chunked prefill", {"enable_chunked_prefill": True, "max_num_tokens": 256}),
    Case("parked loads", kvcore={"transfer": {"sync_load_max": 0}}),
    Case("eviction", {"kv_cache_config": {"max_tokens": 4096}}, prompts=12),
    Case("blocks unlike pages", kvcore={"block": {"tokens": 64}}),
    Case("hit on disk after a restart", kvcore={"trtllm": {"stage_wait_s": 30}}, restart=True),
    Case("tenants kept apart", salts=("a", "b"), finds=False),
    Case("FlashInfer", {"attn_backend": "FLASHINFER"}),
    Case("vanilla attention", {"attn_backend": "VANILLA", "cuda_graph_config": None}),
    Case("fusion, everything recomputed", kvcore=FUSION, ratio=1.0),
    Case(
        "fusion, chunked prefill",
        {"enable_chunked_prefill": True, "max_num_tokens": 256},
        kvcore=FUSION,
        ratio=1.0,
    ),
    Case("fusion with FlashInfer", {"attn_backend": "FLASHINFER"}, kvcore=FUSION, ratio=1.0),
    Case("fusion, exact afterwards", kvcore=FUSION, ratio=0.15),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a case. ``detail`` is empty when it passed."""

    case: str
    passed: bool
    detail: str = ""


def prompts(count: int) -> list[str]:
    """Texts of some 1000 tokens that begin alike in pairs."""
    days = ["first", "second", "third", "fourth", "fifth", "sixth"]
    return [
        "".join(TEXT.format(days[(number // 2 + i) % 6]) for i in range(24)) + f"Line {number}:"
        for number in range(count)
    ]


def texts(count: int) -> list[str]:
    """Texts of some 300 tokens that begin differently: the chunks of a fusion case."""
    return [f"Log of ship {number}. {prompts(number + 1)[-1][:1200]}" for number in range(count)]


# -- one engine, in a process of its own -----------------------------------------------------


def ask(order: dict[str, Any]) -> dict[str, Any]:
    """Run one engine as ``order`` says and return its answers, one list a round (a salt each).

    Called in a fresh process. Between rounds the engine's own cache is filled with other things.
    """
    from tensorrt_llm import LLM, SamplingParams

    options = {**order["options"]}
    cache = {"enable_block_reuse": True, "enable_partial_reuse": False, "max_tokens": CACHE_TOKENS}
    options["kv_cache_config"] = {**cache, **options.get("kv_cache_config", {})}
    if order["kvcore"] is not None:
        options["kv_connector_config"] = CONNECTOR
    engine = LLM(model=order["model"], tensor_parallel_size=order["tp"], **_typed(options))
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    if order["ratio"] is not None:
        answers = _blend(engine, order, sampling)
        engine.shutdown()
        return {"answers": answers}
    answers = []
    for number, salt in enumerate(order["salts"]):
        extra = {} if salt is None else {"cache_salt": salt}
        outputs = engine.generate(order["prompts"], sampling, **extra)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        if number + 1 < len(order["salts"]):
            _flush(engine, sampling)
    engine.shutdown()
    return {"answers": answers}


def _blend(engine: Any, order: dict[str, Any], sampling: Any) -> list[list[list[int]]]:
    """Hold the chunks, then ask prompts made of them twice: blended, and exactly."""
    from kvcore_trtllm.salt import fusion_salt

    def read(text: str) -> list[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    chunks = [read(text) for text in texts(4)]
    for chunk in chunks:
        engine.generate([chunk], sampling)
    _flush(engine, sampling)
    rounds: list[list[list[int]]] = []
    for blends in (True, False):
        answers = []
        for number in range(len(chunks)):
            a, b = chunks[number], chunks[number - 1]
            lead, question = read(f"Harbour book, page {number}: "), read(" In short, it was")
            prompt = [*lead, *a, *b, *question]
            starts = (len(lead), len(lead) + len(a), len(lead) + len(a) + len(b))
            spans = [(starts[0], starts[1]), (starts[1], starts[2])]
            extra = {}
            if blends and order["kvcore"] is not None:
                extra = {"cache_salt": fusion_salt(ratio=order["ratio"], chunks=spans)}
            [output] = engine.generate([prompt], sampling, **extra)
            answers.append(list(output.outputs[0].token_ids))
        rounds.append(answers)
    return rounds


def _flush(engine: Any, sampling: Any) -> None:
    """Push everything out of the engine's own cache, by asking for other things."""
    filler = [f"{number} " * 500 for number in range(100, 100 + CACHE_TOKENS // 250)]
    engine.generate(filler, sampling)


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    from tensorrt_llm.llmapi import KvCacheConfig, KvCacheConnectorConfig

    types = {"kv_cache_config": KvCacheConfig, "kv_connector_config": KvCacheConnectorConfig}
    return {
        name: types[name](**value) if name in types else value for name, value in options.items()
    }


# -- cases -----------------------------------------------------------------------------------


def run(case: Case, model: str, tp: int, scratch: Path, process: Callable[..., Any]) -> Outcome:
    """One case. ``process`` runs `ask` elsewhere and gives its result and its log."""
    settings = {
        "host": {"capacity": "4GiB"},
        "disk": {"path": str(scratch / "kv"), "capacity": "8GiB"} if case.restart else {},
        "log": {"level": "debug"},
        **case.kvcore,
    }
    order = {
        "model": model,
        "tp": tp,
        "options": case.options,
        "prompts": prompts(case.prompts),
        "salts": case.salts[:1] if case.restart else case.salts,
        "ratio": case.ratio,
    }
    expected, _ = process({**order, "kvcore": None})
    found, log = process({**order, "kvcore": settings})
    if case.restart:
        again, log = process({**order, "kvcore": settings})
        found = {"answers": [*found["answers"], *again["answers"]]}
        expected = {"answers": expected["answers"] * 2}
    wrong = [
        f"round {number}: {sum(a != b for a, b in zip(got, want, strict=True))} answers differ"
        for number, (got, want) in enumerate(
            zip(found["answers"], expected["answers"], strict=True)
        )
        if got != want and number >= case.first
    ]
    if bool(loads := log.count(case.sign)) != case.finds:
        wrong.append(f"{loads} found, expected {'some' if case.finds else 'none'}")
    if "stands aside" in log:
        wrong.append(next(line for line in log.splitlines() if "stands aside" in line))
    return Outcome(case.name, not wrong, "; ".join(wrong))


def _in_a_process(order: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """`ask` in a fresh interpreter, so that engines do not share a device's memory."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "order.json").write_text(json.dumps(order))
        env = {**os.environ, VARIABLE: json.dumps(order["kvcore"] or {})}
        done = subprocess.run(
            [sys.executable, __file__, "--ask", str(place)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        log = done.stdout + done.stderr
        if done.returncode:
            raise RuntimeError(f"the engine ended with {done.returncode}:\n{log[-4000:]}")
        return json.loads((place / "answer.json").read_text()), log


def _answer(folder: Path) -> int:
    order = json.loads((folder / "order.json").read_text())
    (folder / "answer.json").write_text(json.dumps(ask(order)))
    return 0


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as text."""
    width = max(len(outcome.case) for outcome in outcomes)
    words = {True: "pass", False: "FAIL"}
    lines = (f"{o.case:<{width}}  {words[o.passed]}  {o.detail}".rstrip() for o in outcomes)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; return 0 if all passed, 1 if one failed, 2 without an engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or name of the model")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--only", help="run the cases whose name has this in it")
    parser.add_argument("--json", type=Path, help="write the outcomes there too")
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.ask:
        return _answer(given.ask)
    if not given.model:
        parser.error("give a model")
    try:
        import tensorrt_llm
    except ImportError as error:
        print(f"TensorRT-LLM cannot be imported here: {error}", file=sys.stderr)
        return 2
    print(f"TensorRT-LLM {tensorrt_llm.__version__}, {given.model}, tp={given.tp}")
    outcomes = []
    for case in (case for case in CASES if (given.only or "") in case.name):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                outcome = run(case, given.model, given.tp, Path(scratch), _in_a_process)
            except RuntimeError as error:
                outcome = Outcome(case.name, False, str(error))
        outcomes.append(outcome)
        print(table([outcome]), flush=True)
    print("\n" + table(outcomes))
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
