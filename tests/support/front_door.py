"""An engine's own HTTP server, started by the command that a user would type."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_S = 240


@contextlib.contextmanager
def served(command: Sequence[str], port: int, log: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Run a server that listens on ``port``, and give its address once it is healthy.

    At the end it is interrupted, as from a terminal, and must end by itself. Raises AssertionError
    with the tail of its log if it ends before it is healthy.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        limit = time.monotonic() + START_S
        while not _healthy(address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < limit, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
        process.send_signal(signal.SIGINT)
        process.wait(90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _healthy(address: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
        return True
    return False


def post(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that a POST is answered with, None if the answer is something else."""
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(
        address + path, data, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        is_json = answer.headers.get_content_type() == "application/json"
        content = answer.read()
    return json.loads(content) if is_json and content else None


def get(address: str, path: str) -> str:
    """Return the text that a GET is answered with."""
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        return str(answer.read().decode())


def metric(address: str, name: str) -> float:
    """Return the sum of a metric's samples at ``/metrics``."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)
