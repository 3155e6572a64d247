"""The engines of the demo of routers, and the routers in front of them: each is a process.

Each answers at an address of its own, and writes a log into the folder of the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvcore.errors import TransferError, UnsupportedError
from kvcore.events import Subscriber
from kvcore.events.zmq_bus import ZmqSource
from kvcore.explain.file import read_records
from kvcore_devtools.servers import free_port

ROOT = Path(__file__).resolve().parent.parent
ROUTERS_PYTHON = ROOT / ".venvs" / "routers" / "bin" / "python"
SGLANG_PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"

MODEL = "demo"
"""The name under which both engines serve the model."""
TIER = "shared"
BLOCK = 16
ANSWER = 8
LONGEST = 2048
START_S = 300.0
"""Seconds that an engine may take to start on a busy machine."""
WAIT_S = 120.0


# -- engines --------------------------------------------------------------------------------------


class Engine:
    """An engine's own HTTP server, started by `kvcore serve`."""

    def __init__(self, name: str, model: Path, store: str, folder: Path, results: Path) -> None:
        """Start it. Does not wait until it is ready."""
        self.name = name
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self._records = folder / f"explain-{name}"
        self._log = results / f"router-{name}.log"
        config = folder / f"{name}.toml"
        config.write_text(_config(store, self._records, self.events, self.replay))
        python = Path(sys.executable) if name == "vllm" else SGLANG_PYTHON
        if not python.exists():
            raise UnsupportedError(f"no {python}: run tools/env.py {name}")
        options, env = _OPTIONS[name]
        command = [str(python.with_name("kvcore")), "serve", "--engine", name, str(model)]
        listen = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-c", str(config), "--", *listen, *options.split()],
                env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.held = Subscriber(ZmqSource(self.events, self.replay))

    def wait_ready(self) -> None:
        """Block until the server is healthy. Raises TransferError with the end of its log."""
        limit = time.monotonic() + START_S
        while not _healthy(self.address):
            if self._process.poll() is not None or time.monotonic() > limit:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise TransferError(f"{self.name} does not start: {tail}")
            time.sleep(0.5)

    def kill(self) -> None:
        """End the engine with all its processes, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def record_of(self, request: str) -> dict[str, Any] | None:
        """Return kvcore's record of a request that has ended here."""
        if not self._records.is_dir():
            return None
        return next((r for r in read_records(self._records) if request in r["request"]), None)

    def blocks(self) -> tuple[int, int]:
        """Return how many blocks the events so far tell of host memory, and of the shared tier."""
        while self.held.poll(0.05):
            pass
        tiers = self.held.tiers()
        return len(tiers.get("CPU", ())), len(tiers.get("STORAGE", ()))


def _config(store: str, records: Path, events: str, replay: str) -> str:
    """Return kvcore's settings as TOML."""
    return f"""
[host]
capacity = "512MiB"
[block]
tokens = {BLOCK}
[tiers.{TIER}]
plugin = "redis"
capacity = "512MiB"
options = {{ url = "{store}", lookup_s = 10.0, timeout_s = 10.0 }}
[events]
format = "vllm"
token_ids = true
endpoint = "@{events}"
replay_endpoint = "{replay}"
[explain]
path = "{records}"
[sglang]
prefetch = "wait"
"""


_OPTIONS: Mapping[str, tuple[str, dict[str, str]]] = {
    # vLLM's router has an engine turn text into tokens, which --enable-scale-out allows.
    "vllm": (
        f"--dtype float32 --max-model-len {LONGEST} --enforce-eager --enable-scale-out",
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
    "sglang": (
        f"--dtype float32 --context-length {LONGEST} --max-total-tokens {8 * LONGEST} "
        "--device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--grammar-backend none --disable-cuda-graph --skip-server-warmup",
        {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    ),
}
"""Arguments and variables with which each engine serves a tiny model on a CPU."""


def _healthy(address: str) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
        return True
    return False


def _call(url: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON that a POST is answered with. Raises OSError, also for an error status."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


class Completion(NamedTuple):
    """An engine's answer, with the id under which kvcore records the request."""

    id: str
    text: str


def complete(address: str, prompt: str) -> Completion:
    """Return a completion. Raises OSError if nobody answers, or with an error."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    told = _call(f"{address}/v1/completions", body)
    return Completion(told["id"], told["choices"][0]["text"])


# -- routers --------------------------------------------------------------------------------------


class Router(Protocol):
    """A way to an engine. ``reads_events`` says if it follows kvcore's events."""

    name: str
    reads_events: bool

    def ask(self, prompt: str) -> Completion:
        """Return an engine's answer. Raises OSError as `complete` does."""

    def close(self) -> None: ...


class HttpRouter:
    """A router that forwards requests itself."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        self.name = name
        self.reads_events = "kv_aware" in command
        self._address = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        limit = time.monotonic() + WAIT_S
        while not _healthy(self._address):
            if self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                tail = log.read_text(errors="replace")[-2000:]
                raise TransferError(f"{name} does not start: {tail}")
            time.sleep(0.2)

    def add(self, addresses: Sequence[str]) -> None:
        """Add engines by the router's API, with the model's name. Closes the router if that fails.

        SGLang's router does not ask a vLLM for it, and would have the engine serve another model.
        """
        try:
            for address in addresses:
                _call(f"{self._address}/workers", {"url": address, "model_id": MODEL})
            what = f"{self.name} does not take the engines"
            wait_for(lambda: self._taken() == len(addresses), what)
        except BaseException:
            self.close()
            raise

    def _taken(self) -> int:
        with urllib.request.urlopen(f"{self._address}/workers", timeout=WAIT_S) as answer:
            workers = json.load(answer)["workers"]
        return sum(worker["is_healthy"] for worker in workers)

    def ask(self, prompt: str) -> Completion:
        return complete(self._address, prompt)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Dynamo:
    """Dynamo's router selects an engine, and this class forwards the request.

    It forgets an engine that does not answer, as whoever uses the service has to.
    """

    name = "ai-dynamo-runtime"
    reads_events = True

    def __init__(self, engines: Sequence[Engine], encode: Callable[[str], list[int]], log: Path):
        self._encode = encode
        self._lock = threading.Lock()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(ROUTERS_PYTHON), str(ROOT / "demo" / "dynamo_selector.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.call(
            {
                "workers": [
                    {
                        "worker_id": number,
                        "endpoint": engine.address,
                        "events": engine.events,
                        "replay": engine.replay,
                        "block": BLOCK,
                    }
                    for number, engine in enumerate(engines)
                ]
            }
        )

    def ask(self, prompt: str) -> Completion:
        name = uuid.uuid4().hex
        chosen = self.call({"token_ids": self._encode(prompt), "selection_id": name})
        try:
            done = complete(chosen["endpoint"], prompt)
        except OSError:
            self.call({"gone": chosen["worker_id"]})
            raise
        self.call({"done": name})
        return done

    def call(self, request: dict[str, Any]) -> Any:
        """Send a line to `demo.dynamo_selector`, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise TransferError("Dynamo's router has ended: see router-ai-dynamo-runtime.log")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def start_routers(
    engines: Sequence[Engine], encode: Callable[[str], list[int]], results: Path
) -> Iterator[Router]:
    """Yield the routers, one after another, each in front of all engines."""
    if not ROUTERS_PYTHON.exists():
        raise UnsupportedError(f"no {ROUTERS_PYTHON}: run python3 -m tools.env_routers")
    yield Dynamo(engines, encode, results / "router-ai-dynamo-runtime.log")
    addresses = [engine.address for engine in engines]
    python = str(ROUTERS_PYTHON)
    for name in ("vllm-router", "sglang-router"):
        port = free_port(2)
        module = f"{name.replace('-', '_')}.launch_router"
        command = [python, "-m", module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
        if name == "vllm-router":
            command += ["--policy", "kv_aware", "--worker-startup-check-interval", "1"]
            command += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", MODEL]
            for engine in engines:
                command += ["--kv-event-source", f"{engine.address}={engine.events}"]
                command += ["--kv-event-replay-source", f"{engine.address}={engine.replay}"]
            command += ["--worker-urls", *addresses]
        else:
            command += ["--policy", "cache_aware"]
        router = HttpRouter(name, command, port, results / f"router-{name}.log")
        if name == "sglang-router":
            router.add(addresses)
        yield router


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """Return what ``look`` finds. Raises TransferError if it finds nothing in `WAIT_S`."""
    limit = time.monotonic() + WAIT_S
    while not (found := look()):
        if time.monotonic() > limit:
            raise TransferError(f"{what} in {WAIT_S:.0f} s")
        time.sleep(0.1)
    return found
