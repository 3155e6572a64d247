"""A serving engine in a child process, driven call by call.

    with EngineProcess(model, kvcore={"host": {"capacity": "1GiB"}}) as engine:
        [cold] = engine.generate([prompt], max_tokens=8)
        engine.reset_prefix_cache()
        [warm] = engine.generate([prompt], max_tokens=8)
    assert warm.token_ids == cold.token_ids

The demo, the engine tests and the benchmarks all use it. It knows no engine: each adapter has a
module ``kvcore_<engine>.testing.driver``, which runs as the child and answers the calls listed in
`serve`. Parent and child exchange JSON, one object per line, over a socket of their own. The
engine's output goes to a log file.

    parent                                         child (python -m kvcore_vllm.testing.driver FD)
      start  {model, kvcore, engine arguments} ──▶   builds the engine
      ◀── ready                                      (about 35 s for vLLM on a small CPU)
      generate {id, prompt, ...}               ──▶   any number at once
      ◀── result or error, by id
      socket closed                            ──▶   shuts the engine down and ends

The child leads a process group. `kill` ends the group at once, as a crash would; `close` asks the
engine to shut down and waits. If the parent dies, its socket closes and the child ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from kvcore._util.threads import GuardedThread
from kvcore.errors import KVCoreError, UnsupportedError
from kvcore.harness import engine_forks

__all__ = [
    "EngineDied",
    "EngineFailed",
    "EngineProcess",
    "Generation",
    "run_program",
    "sample_name",
    "serve",
]

START_TIMEOUT_S = 900.0
CALL_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 300.0
"""Seconds. An idle machine needs a tenth; the rest is for a busy or suspended one."""


_DRIVERS = {"reference": "kvcore.testing.engine.driver"}
"""Modules of drivers that are in no adapter's package."""


class EngineFailed(KVCoreError):
    """The engine answered a call with an error. The message is the engine's own."""


class EngineDied(KVCoreError):
    """The engine's process ended before it answered. The message ends with the tail of its log."""


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    Times are wall-clock seconds from the call to the first and to the last token, measured next to
    the engine's own client. `cached_tokens` is the engine's count of prompt tokens that it did not
    compute, from its own cache and kvcore together. `kvcore` is kvcore's report on the request,
    with ``reused_tokens`` and ``tiers`` (tokens by tier); it is empty without kvcore.

    `sources` counts the cached tokens by where the engine held them; it is empty if the engine does
    not report that. `likeliest` has the most likely first tokens, each with its log-probability.
    """

    request_id: str
    token_ids: list[int]
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    finish_reason: str | None
    kvcore: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    likeliest: list[tuple[int, float]] = field(default_factory=list)

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens that kvcore provided."""
        return int(self.kvcore.get("reused_tokens", 0))

    @property
    def tiers(self) -> dict[str, int]:
        """Number of reused tokens by tier."""
        return dict(self.kvcore.get("tiers", {}))


class EngineProcess:
    """One engine in a child process. Methods may be called from several threads.

    Args:
        model: a folder in Hugging Face's format, or a name that the engine knows.
        engine: the adapter that drives it. ``vllm`` stands for the module
            ``kvcore_vllm.testing.driver``, ``reference`` for kvcore's own reference engine.
        kvcore: kvcore's config as in the engine's JSON arguments. None leaves kvcore out.
        python: interpreter of the environment that has the engine; by default this one.
        log: file for the engine's output; by default a temporary file, which `close` removes.
        env: environment variables to add for the child. PYTHONPATH goes before the child's own.
        within: command that runs the child's command line, for example on another host
            (`kvcore_devtools.hosts.Host.command`). It must exec the child, and keep its open files.
        forked: True to let the child be a fork of a process that has imported the engine
            (`kvcore.harness.engine_forks`), for tests that start many engines on a CPU. Ignored if
            there is a GPU, and with ``within``.
        engine_args: the engine's own arguments, by their names in its Python API.

    The constructor starts the child and returns at once. With ``forked``, it returns when the
    engine has been imported. `wait_ready` and the first call block until the engine is ready.
    """

    living: ClassVar[weakref.WeakSet[EngineProcess]] = weakref.WeakSet()
    """Those of this process that were not closed."""

    def __init__(
        self,
        model: str | Path,
        *,
        engine: str = "vllm",
        kvcore: Mapping[str, Any] | None = None,
        python: Path | None = None,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
        forked: bool = False,
        **engine_args: Any,
    ) -> None:
        self._own_log = log is None
        self.log = log or _temporary_log(engine)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._closing = False
        self._socket, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | engine_forks.Child
        module = _driver(engine)
        command = [str(python or sys.executable), "-m", module, str(theirs.fileno())]
        given = dict(env or {})
        try:
            with theirs:
                if forked and not within and engine_forks.possible():
                    path = given.pop("PYTHONPATH", "")
                    self._process = engine_forks.fork(
                        module,
                        model,
                        python=command[0],
                        env=_environment(engine, Path(command[0]), given),
                        path=path,
                        log=self.log,
                        connection=theirs,
                        timeout_s=START_TIMEOUT_S,
                    )
                else:
                    environment = _environment(engine, Path(command[0]), given)
                    self._process = _run([*within, *command], theirs, environment, self.log)
        except BaseException:
            self._let_go()
            raise
        self._reader = GuardedThread("engine-replies", self._read, self._fail_pending)
        self._reader.start()
        self._ready = self._start(model, kvcore, engine_args)
        self.living.add(self)

    def _start(
        self, model: str | Path, kvcore: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> Future[Any]:
        settings = None if kvcore is None else dict(kvcore)
        return self._send("start", model=str(model), kvcore=settings, **engine_args)

    def __enter__(self) -> EngineProcess:
        self.wait_ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Block until the engine accepts requests. Return its description, such as its version.

        Raises:
            EngineDied: the engine did not start. The message ends with the tail of its log.
            EngineFailed: the engine rejected its arguments.
        """
        return dict(self._wait(self._ready, timeout_s))

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its process group."""
        return self._process.pid

    def generate(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int = 16, **options: Any
    ) -> list[Generation]:
        """Answer `prompts` greedily, all at once, and return results in order. See `submit`."""
        futures = [self.submit(prompt, max_tokens, **options) for prompt in prompts]
        return [self._wait(future, CALL_TIMEOUT_S) for future in futures]

    def submit(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 16,
        *,
        request_id: str | None = None,
        abort_after: int | None = None,
        ignore_eos: bool = True,
        cache_salt: str | None = None,
        logprobs: bool = False,
        likeliest: int = 0,
        lora: Path | None = None,
        image: Path | None = None,
        image_uuid: str | None = None,
        fusion: dict[str, Any] | None = None,
        promise: dict[str, Any] | None = None,
        traceparent: str | None = None,
        asked: Any = None,
    ) -> Future[Generation]:
        """Start one greedy request and return at once.

        Args:
            prompt: text, or token ids.
            request_id: the request's name for `abort`; made up if not given.
            abort_after: number of tokens after which to abort the request (0: at once).
            ignore_eos: True to answer exactly `max_tokens` tokens.
            cache_salt: requests with different salts share no KV.
            logprobs: True to return the log-probability of each token. vLLM's CPU build compiles
                code for the first such request, so its times mean nothing.
            likeliest: number of tokens, the most likely ones in place of the answer's first, to
                return with their log-probabilities. vLLM gives as many as its ``max_logprobs``.
            lora: folder of the LoRA weights to apply.
            image: picture for the prompt, if the model takes one.
            image_uuid: what the client calls the picture (vLLM only).
            fusion: fusion options of the request (`kvcore.fusion.options`).
            promise: what a prefill engine returned for the prompt's KV (vLLM and the reference
                engine only).
            traceparent: the W3C trace of the request, for an engine that traces.
            asked: what the request asks of kvcore's loads and saves (`kvcore.connector.control`).
        """
        self.wait_ready()
        call = self._send(
            "generate",
            prompt=prompt if isinstance(prompt, str) else [int(token) for token in prompt],
            max_tokens=max_tokens,
            request_id=request_id,
            abort_after=abort_after,
            ignore_eos=ignore_eos,
            cache_salt=cache_salt,
            logprobs=logprobs,
            lora=str(lora) if lora else None,
            image=str(image) if image else None,
            fusion=fusion,
            **({} if promise is None else {"promise": promise}),
            **({} if image_uuid is None else {"image_uuid": image_uuid}),
            **({"likeliest": likeliest} if likeliest else {}),
            **({} if asked is None else {"asked": asked}),
            traceparent=traceparent,
        )
        return _then(call, lambda reply: Generation(**reply))

    def abort(self, request_id: str) -> None:
        """Abort a running request. Its future returns the tokens so far."""
        self._call("abort", request_id=request_id)

    def reset_prefix_cache(self, *, connector: bool = False, timeout_s: float = 30.0) -> None:
        """Empty the engine's own prefix cache, and with `connector` also kvcore's tiers.

        Blocks until it is empty. Pages are released only once their saves have ended.

        Raises:
            EngineFailed: pages were still in use after `timeout_s` seconds.
        """
        self._call("reset_prefix_cache", connector=connector, timeout_s=timeout_s)

    def settle(self, timeout_s: float = 200.0) -> None:
        """Block until all saves are published, as far as the engine can tell.

        Raises:
            EngineFailed: saves were still in flight after `timeout_s` seconds.
        """
        self._call("settle", timeout_s=timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return the engine's Prometheus samples by name with labels, ``name{a="b"}``."""
        return dict(self._call("metrics"))

    def stop(self) -> None:
        """Shut the engine down as `close` does, but keep the child for `restart`.

        Raises:
            EngineFailed: this engine's driver does not support it.
        """
        self._call("stop")

    def restart(
        self, model: str | Path, *, kvcore: Mapping[str, Any] | None = None, **engine_args: Any
    ) -> None:
        """Start an engine in the child of a stopped one, and return at once.

        The child has its modules imported already, and keeps its environment.
        """
        self._ready = self._start(model, kvcore, engine_args)

    def kill(self) -> None:
        """End the child and its descendants with SIGKILL, as in a crash, and wait for it."""
        self._closing = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._end(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Shut the engine down and wait, so that saves in flight are finished.

        Raises:
            EngineDied: it did not end in time and was killed, or it ended with an error.
        """
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._died(f"did not shut down within {CLOSE_TIMEOUT_S:.0f} s") from None
        problem = self._died(f"ended with exit code {code}") if code else None
        self._end(CLOSE_TIMEOUT_S)
        if problem:
            raise problem

    # --- calls ----------------------------------------------------------------------------------

    def _call(self, name: str, **arguments: Any) -> Any:
        self.wait_ready()
        return self._wait(self._send(name, **arguments), CALL_TIMEOUT_S)

    def _send(self, name: str, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._pending[number] = future
            line = json.dumps({"id": number, "call": name, "arguments": arguments})
            try:
                self._socket.sendall(line.encode() + b"\n")
            except OSError:
                self._pending.pop(number, None)
                future.set_exception(self._died("is gone"))
        return future

    def _wait(self, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except FutureTimeout as error:
            if future.done():
                raise
            raise self._died(f"did not answer within {timeout_s:.0f} s") from error

    def _read(self) -> None:
        """Resolve the future of each reply. When the child has ended, fail those that are left."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as replies:
            for line in replies:
                reply = json.loads(line)
                with self._lock:
                    future = self._pending.pop(reply["id"])
                if "error" in reply:
                    future.set_exception(EngineFailed(reply["error"]))
                else:
                    future.set_result(reply["result"])
        self._fail_pending()

    def _fail_pending(self, error: BaseException | None = None) -> None:
        with self._lock:
            orphans, self._pending = list(self._pending.values()), {}
        for future in orphans:
            what = "ended before it answered" if error is None else f"is not heard: {error!r}"
            future.set_exception(self._died(what))

    def _died(self, what: str) -> EngineDied:
        return EngineDied(
            f"the engine (process {self.pid}) {what}; its log ends:\n{_tail(self.log)}"
        )

    def _end(self, timeout_s: float) -> None:
        """Reap the child, end its descendants, and close socket and log."""
        self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()
        self._reader.join(timeout_s)
        self._let_go()

    def _let_go(self) -> None:
        self.living.discard(self)
        self._socket.close()
        if self._own_log:
            self.log.unlink(missing_ok=True)


async def serve(descriptor: int, handlers: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Answer the parent's calls until it closes the socket. The child runs this.

    Each line starts a task of its own, so calls overlap. A handler's result is sent back as JSON.
    Its exception is sent back as text, and raised in the parent as `EngineFailed`.

    Args:
        descriptor: the socket's file descriptor, from the command line.
        handlers: handlers by call name. Each takes the call's arguments by name. A driver has
            ``start``, ``generate``, ``abort``, ``reset_prefix_cache``, ``settle`` and ``metrics``,
            as in `EngineProcess`, and ``stop`` if it can start a second engine.
    """
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 26)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["result"] = await handlers[request["call"]](**request["arguments"])
        except Exception as error:  # noqa: BLE001  # the parent raises it
            traceback.print_exc()
            reply["error"] = f"{request['call']}: {type(error).__name__}: {error}"
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()

    while line := await reader.readline():
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """Return the key of a Prometheus sample in `EngineProcess.metrics`: ``name{a="b"}``."""
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def _then(first: Future[Any], change: Callable[[Any], Any]) -> Future[Any]:
    """Return a future of ``change(result of first)``. It fails if ``first`` fails."""
    second: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            second.set_exception(error)
        else:
            second.set_result(change(done.result()))

    first.add_done_callback(settle)
    return second


def _run(
    command: Sequence[str], theirs: socket.socket, env: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start the child as a process that imports everything itself."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=env,
            start_new_session=True,
        )


def run_program(
    engine: str,
    model: str | Path,
    program: Path,
    *arguments: object,
    path: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
) -> str:
    """Run a Python program in a process that has imported an engine; return what it prints.

    ``path`` has folders from which it imports first, ``env`` environment variables to add, and
    ``model`` says what the engine imports. Blocks until the program ends. Where engines cannot be
    forks (`kvcore.harness.engine_forks`), the program imports the engine itself.

    Raises:
        EngineDied: it ended with an error, or not within ``timeout_s`` seconds, and was killed.
    """
    command = [str(program), *map(str, arguments)]
    before = os.pathsep.join(map(str, path))
    log = _temporary_log(engine)
    ours, theirs = socket.socketpair()
    process: subprocess.Popen[bytes] | engine_forks.Child
    try:
        with ours, theirs:
            if engine_forks.possible():
                process = engine_forks.fork(
                    _driver(engine),
                    model,
                    python=sys.executable,
                    env=_environment(engine, Path(sys.executable), env or {}),
                    path=before,
                    log=log,
                    connection=theirs,
                    timeout_s=START_TIMEOUT_S,
                    program=command,
                )
            else:
                given = {**(env or {}), "PYTHONPATH": before}
                environment = _environment(engine, Path(sys.executable), given)
                process = _run([sys.executable, *command], theirs, environment, log)
        problem = ""
        try:
            if code := process.wait(timeout_s):
                problem = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"did not end within {timeout_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):  # with what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(CLOSE_TIMEOUT_S)
        if problem:
            raise EngineDied(f"{program.name} {problem}; its output ends:\n{_tail(log)}")
        return log.read_text(errors="replace")
    finally:
        log.unlink(missing_ok=True)


def _tail(log: Path) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    except OSError:
        return "(the log is gone)"


def _driver(engine: str) -> str:
    """Return the name of an engine's driver module."""
    return _DRIVERS.get(engine, f"kvcore_{engine}.testing.driver")


def _temporary_log(engine: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f"kvcore-{engine}-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _environment(engine: str, python: Path, added: Mapping[str, str]) -> dict[str, str]:
    """Return the child's environment: this process's, with ``added``.

    If ``tools/env.py`` has compiled torch's extensions for ``python``, the child loads those.
    """
    path = filter(None, [added.get("PYTHONPATH"), _python_path(engine)])
    folder = python.absolute().parents[1] / "var" / "torch_extensions"
    compiled = {"TORCH_EXTENSIONS_DIR": str(folder)} if folder.is_dir() else {}
    return {**os.environ, **compiled, **added, "PYTHONPATH": os.pathsep.join(path)}


def _python_path(engine: str) -> str:
    """Return the child's PYTHONPATH: this process's, plus the source folders of a checkout."""
    root = Path(__file__).resolve().parents[2]
    sources = root / "adapters" / engine
    packaged = engine in _DRIVERS or importlib.util.find_spec(f"kvcore_{engine}") is not None
    if not sources.is_dir() and not packaged:
        raise UnsupportedError(
            f"engine {engine!r} has no adapter: install the package kvcore_{engine}"
        )
    if engine in _DRIVERS:
        parts = [str(root)]
    else:
        parts = [str(root), str(sources)] if sources.is_dir() else []
    return os.pathsep.join([*parts, *filter(None, [os.environ.get("PYTHONPATH")])])
