"""Time to first token of real vLLM: cold, its own prefix cache, kvcore's host and disk tiers.

    python -m benchmarks.vllm_ttft [--tokens 512 4096] [--prompts 5] [--peer-python PYTHON]

`benchmarks._ttft` says what is measured and how. ``--peer-python`` names the interpreter of an
environment with LMCache's multiprocess server. LMCache is then measured too.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._ttft import Contest, measure, parse, parser
from kvcore.harness.engine_process import EngineProcess

LMCACHE_START_S = 60.0
LMCACHE_ENV = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


class VLLMContest(Contest):
    """vLLM, and LMCache as a peer."""

    engine = "vllm"

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.engine_args: dict[str, Any] = {
            "max_model_len": max(2048, self.longest + 512),
            "dtype": options.dtype,
            "max_num_seqs": 8,
        }
        self.gigabytes = 1 + 2 * options.prompts * sum(options.tokens) * 46_080 // (1 << 30)
        """About twice what all prompts need with SmolLM2 in float32. The engine has as much."""
        self.env = {"VLLM_CPU_KVCACHE_SPACE": str(self.gigabytes)}

    def forget(self, process: EngineProcess) -> None:
        process.reset_prefix_cache()

    def compare_peers(self) -> None:
        if not self.options.peer_python:
            return
        with _lmcache(self, self.options.peer_python) as process:
            self.ask(process, "lmcache miss")
            time.sleep(2)
            process.reset_prefix_cache()
            self.ask(process, "lmcache hit")


@contextmanager
def _lmcache(contest: VLLMContest, python: Path) -> Iterator[EngineProcess]:
    """Run vLLM with LMCache's multiprocess connector, and LMCache's server beside it."""
    port, http = _free_port(), _free_port()
    command = [
        str(python.parent / "lmcache"), "server", "--port", str(port), "--http-port", str(http),
        "--l1-size-gb", str(contest.gigabytes), "--no-l1-use-lazy", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "auto",
    ]  # fmt: skip
    server = subprocess.Popen(
        command,
        env={**os.environ, **LMCACHE_ENV},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(http)
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }
        with contest.running(
            None, env=LMCACHE_ENV, python=python, kv_transfer_config=transfer
        ) as process:
            yield process
    finally:
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    limit = time.monotonic() + LMCACHE_START_S
    while time.monotonic() < limit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise SystemExit(f"LMCache's server did not listen on {port} within {LMCACHE_START_S:.0f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--peer-python", type=Path)
    measure(VLLMContest(parse(made, arguments)))


if __name__ == "__main__":
    main()
