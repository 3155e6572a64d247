"""What a connector's own calls cost in a step of vLLM: kvcore, LMCache, vLLM's OffloadingConnector.

    python -m benchmarks.step_cost [--running 1 64 256] [--rounds 5] [--peer-python PYTHON]

Every contender has an engine of its own (`benchmarks._step_engine`): vLLM's real scheduler, pages
and model runner's calls, without a model. Half of the requests are hits of 512 tokens in host
memory, which is full. All make the same number of steps and the same tokens; the engines take
turns, round by round. Measured is the time inside the connector's calls, in the scheduler
("leader") and around the forward ("worker"), by the clock and on a core. The second leaves out
other work on the machine, and waiting.

``--peer-python`` names the interpreter of an environment with LMCache beside vLLM's packages.
LMCache is measured in its default, which does not store generated tokens, and with those.
OffloadingConnector's default is the same. Their copies, which need a GPU, are made on the CPU
(`benchmarks._step_peers`) and are part of their workers' time. A page has 1 KiB for a token.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks._report import Report
from kvcore.harness.models import tiny_model

HOST_BYTES, TOKEN_BYTES = 512 << 20, 1024
BAR_MS, BAR_RATIO = 2.0, 0.6
PEERS = "benchmarks._step_peers"


def _kvcore(**settings: Any) -> dict[str, Any]:
    extra = {"host": {"capacity": HOST_BYTES}, **settings}
    return {"kv_connector": "KVCoreConnector", "kv_connector_extra_config": extra}


def _offloading(**settings: Any) -> dict[str, Any]:
    spec = {"spec_name": "TorchSpec", "spec_module_path": PEERS, "cpu_bytes_to_use": HOST_BYTES}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {**spec, **settings},
    }


def _lmcache(**settings: Any) -> dict[str, Any]:
    extra = {"lmcache.max_local_cpu_size": HOST_BYTES / (1 << 30), **settings}
    return {
        "kv_connector": "LMCacheOnCPU",
        "kv_connector_module_path": PEERS,
        "kv_connector_extra_config": extra,
    }


CONTENDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kvcore": ("all tokens", _kvcore()),
    "kvcore, prompts": ("prompts", _kvcore(vllm={"save_decode": False})),
    "LMCache, all tokens": ("all tokens", _lmcache(**{"lmcache.save_decode_cache": True})),
    "LMCache": ("prompts", _lmcache()),
    "OffloadingConnector, all tokens": ("all tokens", _offloading(offload_prompt_only=False)),
    "OffloadingConnector": ("prompts", _offloading()),
}
"""What each contender stores, and its settings. Names without more are the defaults."""


class Engine:
    """The child process of one contender."""

    def __init__(self, name: str, python: Path, log: Path) -> None:
        mine, its = socket.socketpair()
        self._log = log
        with log.open("w") as output, its:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks._step_engine", str(its.fileno())],
                pass_fds=[its.fileno()],
                stdout=output,
                stderr=output,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"},
            )
        self._talk = mine.makefile("rw")
        self._name = name

    def call(self, call: str, **arguments: Any) -> Any:
        """Have the engine carry out a call, and return its answer."""
        print(json.dumps({"call": call, **arguments}), file=self._talk, flush=True)
        answer = self._talk.readline()
        if not answer:
            end = "\n".join(self._log.read_text().splitlines()[-20:])
            raise SystemExit(f"{self._name}: the engine ended:\n{end}")
        return json.loads(answer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._talk.close()
        self._process.kill()
        self._process.wait()


def _spent(step: Mapping[str, Any], half: str, which: int) -> float:
    """Return the milliseconds of one half in a step: 0 by the clock, 1 on a core."""
    return sum(call[which] for call in step[half].values()) / 1e6


def summary(round_: Mapping[str, Any], kind: str) -> dict[str, float]:
    """Return the milliseconds of a round's steps of one kind: medians, and the 90th percentile."""
    steps = [step for step in round_["steps"] if step["kind"] == kind]
    both = [[_spent(s, "leader", i) + _spent(s, "worker", i) for s in steps] for i in (0, 1)]
    return {
        "leader": median(_spent(s, "leader", 1) for s in steps),
        "worker": median(_spent(s, "worker", 1) for s in steps),
        "core": median(both[1]),
        "mean": sum(both[1]) / len(steps),
        "core_p90": sorted(both[1])[len(steps) * 9 // 10],
        "clock": median(both[0]),
    }


def _report(rounds: Mapping[tuple[str, int], list[dict[str, Any]]]) -> Report:
    """Make the table: medians over rounds, and of the ratios to peers within a round."""
    report = Report(
        "step_cost",
        [
            "contender",
            "stores",
            "running",
            "step",
            "leader_ms",
            "worker_ms",
            "both_ms",
            "mean_ms",
            "p90_ms",
            "clock_ms",
            "to_lmcache",
            "to_default",
            "to_offloading",
        ],
        baseline="the same of LMCache and OffloadingConnector that store as much, and of LMCache's "
        "default (to_default), in the same round; milliseconds on a core, but clock_ms",
    )
    for (name, running), made in rounds.items():
        stores, suffix = CONTENDERS[name][0], ", all tokens"
        twin = suffix if stores == "all tokens" else ""
        for kind in ("decode", "prefill"):
            mine = [summary(round_, kind) for round_ in made]
            peers = {
                "to_lmcache": f"LMCache{twin}",
                "to_default": "LMCache",
                "to_offloading": f"OffloadingConnector{twin}",
            }
            ratios = {
                column: median(
                    ours["mean"] / summary(theirs, kind)["mean"]
                    for ours, theirs in zip(mine, rounds[peer, running], strict=True)
                )
                for column, peer in peers.items()
                if (peer, running) in rounds
            }
            middle = {key: median(found[key] for found in mine) for key in mine[0]}
            report.add(
                contender=name,
                stores=stores,
                running=running,
                step=kind,
                leader_ms=round(middle["leader"], 3),
                worker_ms=round(middle["worker"], 3),
                both_ms=round(middle["core"], 3),
                mean_ms=round(middle["mean"], 3),
                p90_ms=round(middle["core_p90"], 3),
                clock_ms=round(middle["clock"], 3),
                **{column: round(ratio, 2) for column, ratio in ratios.items()},
            )
    return report


def _chosen(options: argparse.Namespace) -> list[str]:
    return [
        name
        for name in CONTENDERS
        if (options.peer_python or "LMCache" not in name)
        and (not options.only or name in options.only)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=64, help="decoding steps of a round")
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--forward-ms", type=float, default=5.0)
    made.add_argument("--peer-python", type=Path)
    made.add_argument("--only", nargs="+", choices=list(CONTENDERS))
    made.add_argument("--out", type=Path, default=Path("results"))
    options = made.parse_args(arguments)
    model = tiny_model(layers=options.layers, heads=2, kv_heads=1, head_dim=32, vocabulary=None)
    most = max(options.running)
    rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcore-bench-")))
        engines: dict[str, Engine] = {}
        for name in _chosen(options):
            python = options.peer_python if "LMCache" in name else Path(sys.executable)
            engines[name] = stack.enter_context(Engine(name, python, logs / f"{len(engines)}.log"))
            engines[name].call(
                "start",
                model=str(model),
                transfer=CONTENDERS[name][1],
                running=most,
                memory_gb=1,
                forward_s=options.forward_ms / 1e3,
            )
            engines[name].call("fill", running=most, tokens=HOST_BYTES // TOKEN_BYTES)
            print(f"{name}: ready", flush=True)
        for seed in range(options.rounds):
            for running in options.running:
                for name, engine in engines.items():
                    made_round = engine.call(
                        "round", running=running, steps=options.steps, seed=seed * 1000 + running
                    )
                    rounds.setdefault((name, running), []).append(made_round)
                    decode = summary(made_round, "decode")
                    print(
                        f"{name:>32} {running:>4}: {decode['mean']:.3f} ms on a core, "
                        f"{made_round['reused']} tokens reused",
                        flush=True,
                    )
    report = _report(rounds)
    for (name, running), found in rounds.items():
        if running == most and name.startswith("kvcore"):
            ms = median(summary(round_, "decode")["mean"] for round_ in found)
            print(f"{name}, {running} running: {ms:.2f} ms a decoding step (bar {BAR_MS} ms)")
    print(f"bar: at most {BAR_RATIO} of LMCache's")
    report.finish(options.out)


if __name__ == "__main__":
    main()
