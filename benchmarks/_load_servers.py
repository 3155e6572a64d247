"""The contenders of `benchmarks.load`: real engines behind HTTP, each with its processes.

Contender ── what vLLM is told, and what runs beside it
    │ running()
    ▼
Engine ── ready · ask · counters · memory · reset        every process ends with the block
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.harness.models import token_nbytes
from kvcore.memory.arena import PREFAULTED
from kvcore_devtools.servers import free_port

ROOT = Path(__file__).resolve().parent.parent
SERVED = "load"
"""The name under which every engine serves the model."""
START_S = 300.0
STOP_S = 60.0
FULL = "full_attention"
"""The kind, in a model's config, of a layer that keeps KV of all tokens."""
NOT_BUILT = "ops_left_out ops=native"
"""What kvcore's log says where its copies in C are missing: its copies are then slower."""
ANSWER_S = 300.0
SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
ENV = {
    "PYTHONHASHSEED": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # it serves /reset_prefix_cache
}


class Sizes(NamedTuple):
    """The caches of every contender, and what one engine takes at once."""

    model: Path
    device_tokens: int
    host_tokens: int
    max_tokens: int
    """The longest prompt with its answer."""
    at_once: int
    """Requests that an engine runs at the same time."""
    dtype: str = "float32"
    arguments: tuple[str, ...] = ()
    """What else ``vllm serve`` is told for this model."""

    @property
    def host_nbytes(self) -> int:
        """The bytes of host memory, in whole MiB."""
        return self._nbytes(self.host_tokens)

    @property
    def device_nbytes(self) -> int:
        return self._nbytes(self.device_tokens)

    def _nbytes(self, tokens: int) -> int:
        """Return the bytes of so many tokens in the layers that keep all of them."""
        kinds = json.loads((self.model / "config.json").read_text()).get("layer_types") or [FULL]
        nbytes = tokens * token_nbytes(self.model, self.dtype) * kinds.count(FULL) // len(kinds)
        return -(-nbytes >> 20) << 20


class Tokens(NamedTuple):
    """Tokens of prompts, from the engine's counters."""

    asked: int
    computed: int
    local: int
    external: int

    def since(self, before: Tokens) -> Tokens:
        """Return what was added after ``before`` was taken."""
        return Tokens(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True)
class Contender:
    """An engine with one cache. ``beside`` starts what runs beside it, in a folder of its own."""

    name: str
    transfer: Callable[[Sizes, Path], dict[str, Any] | None]
    """What the engine is told of the cache."""
    beside: Callable[[ExitStack, Sizes, Path, Path | None], Process | None] | None = None
    prefaults: bool = False
    """True if kvcore has host memory here, whose pre-faulting ends before the load begins."""
    peer: bool = False
    """True if it runs with the Python of the peer's environment."""

    def command(self, python: str, sizes: Sizes, folder: Path, port: int) -> list[str]:
        """Return the engine's command line."""
        command = [
            python, "-m", "vllm.entrypoints.cli.main", "serve", str(sizes.model),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED,
            "--dtype", sizes.dtype, "--seed", "0", "--enforce-eager",
            "--max-model-len", str(sizes.max_tokens),
            "--max-num-seqs", str(sizes.at_once), "--max-num-batched-tokens", "2048",
            "--kv-cache-memory-bytes", str(sizes.device_nbytes),
            "--disable-uvicorn-access-log", *sizes.arguments,
        ]  # fmt: skip
        transfer = self.transfer(sizes, folder)
        return command + (
            [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """Return what is added to the environment."""
        return ENV

    def engine(self, port: int, processes: Sequence[Process], sizes: Sizes) -> Engine:
        """Return the engine that its processes serve at a port. It may not be ready."""
        return Engine(port, processes)


class Process:
    """A process with a log, in a session of its own."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] = ENV) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
        """Block until ``ready``. Raises SystemExit with the log's end if that never comes."""
        limit = time.monotonic() + limit_s
        while not ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"{what} does not come; {self.log} ends:\n{tail}")
            time.sleep(0.2)

    def says(self, line: str) -> bool:
        return line in self.log.read_text(errors="replace")

    def stop(self) -> None:
        """End the process and its children: asked first, then killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Engine:
    """A running engine. This one is ``vllm serve``."""

    def __init__(self, port: int, processes: Sequence[Process]) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._processes = processes

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
        except OSError:
            return False
        return True

    def ask(self, prompt: Sequence[int], tokens: int) -> str:
        """Return the greedy answer to a prompt of token ids."""
        body = {
            "model": SERVED, "prompt": [*prompt], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        return str(self._call("/v1/completions", body)["choices"][0]["text"])

    def reset(self) -> None:
        """Empty the engine's own cache, and nothing else. Waits for saves that read its pages."""
        limit = time.monotonic() + STOP_S
        while not self._call("/reset_prefix_cache", {})["success"]:
            if time.monotonic() > limit:
                raise SystemExit(f"the engine's pages are still in use after {STOP_S:.0f} s")
            time.sleep(0.2)

    def tokens(self) -> Tokens:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=ANSWER_S) as answer:
            return tokens_of(answer.read().decode())

    def memory_nbytes(self) -> int:
        """Return the memory of all processes. What several of them share counts once."""
        return sum(held_nbytes(process.session) for process in self._processes)

    def says(self, line: str) -> bool:
        return any(process.says(line) for process in self._processes)

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return dict(json.load(answer))


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``added``, and the sources of this checkout."""
    adapters = [ROOT / "adapters" / name for name in ("vllm", "sglang")]
    folders = [ROOT, ROOT / "kernels", *adapters, ROOT / "devtools"]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    given = {**os.environ, **added, "PYTHONPATH": os.pathsep.join(path)}
    # By default vLLM computes on fewer cores without a connector than with one.
    given.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    given.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would be taken instead of the bytes
    return given


@contextmanager
def running(
    contender: Contender, sizes: Sizes, folder: Path, logs: Path, peer: Path | None
) -> Iterator[Engine]:
    """Run a contender that is ready. ``folder`` is for its files, and empty."""
    with ExitStack() as stack:
        processes = []
        if contender.beside is not None:
            beside = contender.beside(stack, sizes, folder, peer)
            processes += [beside] if beside is not None else []
        port = free_port()
        python = str(peer) if contender.peer else sys.executable
        command = contender.command(python, sizes, folder, port)
        log = logs / f"load-{contender.name}.log"
        process = Process(command, log, contender.environment(folder))
        stack.callback(process.stop)
        processes.append(process)
        engine = contender.engine(port, processes, sizes)
        process.wait_until(engine.ready, f"the engine of {contender.name}")
        if contender.prefaults:
            line = PREFAULTED.split("%", 1)[0]
            process.wait_until(lambda: engine.says(line), "memory")
        yield engine


# -- what each contender is ------------------------------------------------------------------------


def _alone(sizes: Sizes, folder: Path) -> None:
    return None


def _offloading(
    tiers: Callable[[Path], list[dict[str, Any]]],
) -> Callable[[Sizes, Path], dict[str, Any]]:
    """Return the config of vLLM's own offloading, with the copies for a CPU that the tests have."""

    def transfer(sizes: Sizes, folder: Path) -> dict[str, Any]:
        extra = {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "kvcore_devtools.vllm_offloading",
            "cpu_bytes_to_use": sizes.host_nbytes,
            "secondary_tiers": tiers(folder),
        }
        return _transfer("OffloadingConnector", extra)

    return transfer


def _transfer(connector: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)
    }  # fmt: skip


def _disk(folder: Path) -> dict[str, Any]:
    return {"path": str(folder / "disk"), "capacity": "16GiB"}


def _kvcore(sizes: Sizes, folder: Path) -> dict[str, Any]:
    host = {"capacity": sizes.host_nbytes, "prefault": sizes.host_nbytes}
    return _transfer("KVCoreConnector", {"host": host})


def _kvcore_fusion(sizes: Sizes, folder: Path) -> dict[str, Any]:
    transfer = _kvcore(sizes, folder)
    transfer["kv_connector_extra_config"]["fusion"] = {"enabled": True}
    return transfer


def _kvcore_fusion_disk(sizes: Sizes, folder: Path) -> dict[str, Any]:
    transfer = _kvcore_disk(sizes, folder)
    transfer["kv_connector_extra_config"]["fusion"] = {"enabled": True}
    return transfer


def _kvcore_disk(sizes: Sizes, folder: Path) -> dict[str, Any]:
    host = {"capacity": sizes.host_nbytes, "prefault": sizes.host_nbytes}
    return _transfer("KVCoreConnector", {"host": host, "disk": _disk(folder)})


def _kvcore_planned(sizes: Sizes, folder: Path) -> dict[str, Any]:
    transfer = _kvcore_disk(sizes, folder)
    transfer["kv_connector_extra_config"]["planner"] = {"enabled": True}
    return transfer


def _kvcore_served(sizes: Sizes, folder: Path) -> dict[str, Any]:
    server = {"address": "local", "folder": str(folder / "server")}
    return _transfer("KVCoreConnector", {"server": server})


def _kvcore_server(disk: bool) -> Callable[[ExitStack, Sizes, Path, Path | None], Process]:
    """Return what starts kvcore's server, with host memory and perhaps a disk."""

    def beside(stack: ExitStack, sizes: Sizes, folder: Path, peer: Path | None) -> Process:
        size = sizes.host_nbytes
        settings: dict[str, object] = {
            "host.capacity": size,
            "host.prefault": size,
            "server.folder": folder / "server",
        }
        if disk:
            settings |= {f"disk.{name}": value for name, value in _disk(folder).items()}
        code = "from kvcore.cli import main; main()"
        command = [sys.executable, "-c", code, "server"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        process = Process(command, folder / "server.log")
        stack.callback(process.stop)
        process.wait_until(lambda: process.says("listens on"), "kvcore's server")
        return process

    return beside


LMCACHE_PORT = "lmcache-port"


def _lmcache(sizes: Sizes, folder: Path) -> dict[str, Any]:
    extra = {
        "lmcache.mp.host": "tcp://localhost",
        "lmcache.mp.port": int((folder / LMCACHE_PORT).read_text()),
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",
    }
    return _transfer("LMCacheMPConnector", extra)


def _lmcache_server(stack: ExitStack, sizes: Sizes, folder: Path, peer: Path | None) -> Process:
    assert peer is not None
    port = free_port(2)
    (folder / LMCACHE_PORT).write_text(str(port))
    command = [
        str(peer.parent / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(port + 1),
        "--l1-size-gb", f"{sizes.host_nbytes / (1 << 30):.3f}", "--no-l1-use-lazy",
        "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
    ]  # fmt: skip
    process = Process(command, folder / "lmcache.log")
    stack.callback(process.stop)
    process.wait_until(lambda: _listens(port + 1), "LMCache's server")
    return process


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _no_tiers(folder: Path) -> list[dict[str, Any]]:
    return []


def _fs(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "fs", "root_dir": str(folder / "fs")}]


def _kvcore_tier(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "KVCoreTier", "module_path": "kvcore_vllm.tier", "disk": _disk(folder)}]


ALONE = "alone"
CONTENDERS = {
    made.name: made
    for made in (
        Contender(ALONE, _alone),
        Contender("offloading", _offloading(_no_tiers)),
        Contender("offloading-fs", _offloading(_fs)),
        Contender("lmcache", _lmcache, _lmcache_server, peer=True),
        Contender("kvcore", _kvcore, prefaults=True),
        Contender("kvcore-disk", _kvcore_disk, prefaults=True),
        Contender("kvcore-fusion", _kvcore_fusion, prefaults=True),
        Contender("kvcore-fusion-disk", _kvcore_fusion_disk, prefaults=True),
        Contender("kvcore-planned", _kvcore_planned, prefaults=True),
        Contender("kvcore-server", _kvcore_served, _kvcore_server(False), prefaults=True),
        Contender("kvcore-server-disk", _kvcore_served, _kvcore_server(True), prefaults=True),
        Contender("kvcore-tier", _offloading(_kvcore_tier)),
    )
}


# -- reading ---------------------------------------------------------------------------------------


def tokens_of(text: str) -> Tokens:
    """Return the prompts' tokens from vLLM's ``/metrics``, over all of its engines."""
    sources: dict[str, float] = {}
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None or found["name"] != "vllm:prompt_tokens_by_source_total":
            continue
        source = re.search(r'source="(\w+)"', found["labels"] or "")
        if source is not None:
            sources[source[1]] = sources.get(source[1], 0.0) + float(found["value"])
    counted = [
        int(sources.get(name, 0))
        for name in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ]
    return Tokens(sum(counted), *counted)


def held_nbytes(session: int, proc: Path = Path("/proc")) -> int:
    """Return the memory of a session's processes, each shared page divided among its users."""
    total = 0
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces. After it: state, parent, group, session.
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session:
                total += _pss_nbytes((folder / "smaps_rollup").read_text())
    return total


def _pss_nbytes(rollup: str) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(found[1]) << 10 if found else 0
