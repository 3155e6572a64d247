"""`kvcore warm`: have an engine compute texts once, so that fusion can reuse them as chunks.

The engine serves OpenAI's API and vLLM's ``/tokenize``. Each chunk is one request for one token,
computed exactly (without fusion), behind the tokens of ``fusion.behind``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcore.cli import serve
from kvcore.cli.options import Assignments, ConfigFile, load
from kvcore.config import Config, engine_environment
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.plugins import ServeCommand

__all__ = ["Chunk", "Client", "chunks", "read_texts", "running", "warm"]

REQUEST_S = 600.0
START_S = 900.0
STOP_S = 60.0


class Chunk(NamedTuple):
    """A text, or a piece of one, as token ids."""

    name: str
    tokens: list[int]


def read_texts(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (name, text) of each UTF-8 file. Raises ConfigError for a file that is not text."""
    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as text: {error}") from error
        if text.strip():
            found.append((str(file), text))
    if not found:
        raise ConfigError("given no text: name files that have some")
    return found


class Client:
    """A client of a running engine.

    Every call blocks. UnsupportedError carries an answer that is not the expected one.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens at its start."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._ask("/tokenize", body)["tokens"]
        return tokens

    def prefill(self, tokens: Sequence[int]) -> int:
        """Have the engine compute and store these tokens. Returns how many kvcore already had."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"kvcore": {"report": True, "fusion": {"enabled": False}}},
        }
        answer = self._ask("/v1/completions", body)
        record = (answer.get("kv_transfer_params") or {}).get("kvcore") or {}
        return int(record.get("reused_tokens", 0))

    def _first_model(self) -> str:
        models = self._ask("/v1/models", None).get("data") or []
        if not models:
            raise UnsupportedError(f"{self.url} serves no model: name one with --model")
        return str(models[0]["id"])

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise UnsupportedError(f"{self.url}{path}: {error.code} {said}") from error
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"{self.url}{path}: {error}; is the engine there?") from error
        return found


def chunks(client: Client, texts: Sequence[tuple[str, str]], longest: int) -> Iterator[Chunk]:
    """Yield texts as chunks. A text longer than ``longest`` tokens is cut into pieces."""
    for name, text in texts:
        tokens = client.tokenize(text)
        for start in range(0, len(tokens), longest):
            piece = f"{name}[{start}:]" if len(tokens) > longest else name
            yield Chunk(piece, tokens[start : start + longest])


def warm(
    client: Client,
    found: Sequence[Chunk],
    behind: Sequence[int],
    done: Callable[[Chunk, int], object],
) -> int:
    """Compute and store every chunk, calling ``done(chunk, reused)``. Returns tokens computed."""
    computed = 0
    for chunk in found:
        reused = client.prefill([*behind, *chunk.tokens])
        computed += max(len(behind) + len(chunk.tokens) - reused, 0)
        done(chunk, reused)
    return computed


@contextlib.contextmanager
def running(command: ServeCommand, log: Path) -> Iterator[str]:
    """Run an engine for the length of the block, and yield its address once it answers.

    Raises UnsupportedError with the end of its log if it does not start.
    """
    port = _free_port()
    argv = [*command.argv, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env=engine_environment(command.env),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _when_up(process, f"http://127.0.0.1:{port}", log)
        process.terminate()  # saves in flight are finished
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _when_up(process: subprocess.Popen[bytes], address: str, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return address
        if process.poll() is not None:
            break
        time.sleep(0.5)
    tail = log.read_text(errors="replace")[-2000:]
    raise UnsupportedError(f"the engine did not come up; the end of {log}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- the command --------------------------------------------------------------------------------


class Target(NamedTuple):
    """The engine that computes: a running one (``url``), or one to start."""

    url: str | None
    model: str | None
    engine: str | None
    api_key: str | None


def run(
    files: Sequence[Path], target: Target, config: Config, longest: int, console: Console
) -> None:
    """Warm every file, show the progress and print the totals."""
    texts = read_texts(files)
    with _client(target, config) as client:
        found = list(chunks(client, texts, longest))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("warming", total=len(found))

            def done(chunk: Chunk, reused: int) -> None:
                progress.update(bar, advance=1, description=chunk.name)

            computed = warm(client, found, config.fusion.behind, done)
    total = sum(len(chunk.tokens) for chunk in found)
    console.print(
        f"{len(found)} chunks of {total} tokens; {computed} computed, the rest was stored already",
        highlight=False,
    )


@contextlib.contextmanager
def _client(target: Target, config: Config) -> Iterator[Client]:
    if target.url is not None:
        yield Client(target.url, target.model, target.api_key)
        return
    if target.model is None:
        raise ConfigError("given neither --url nor --model: name a running engine, or a model")
    command = serve.command(target.model, config, target.engine, [])
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-warm-") as folder,
        running(command, Path(folder) / "engine.log") as address,
    ):
        yield Client(address, target.model, target.api_key)


def warm_chunks(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files. Each becomes one chunk.")],
    url: Annotated[str | None, typer.Option("--url", help="Address of a running engine.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model. Default with --url: the engine's first.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Engine to start if --url is not given.")
    ] = None,
    longest: Annotated[
        int,
        typer.Option(
            "--chunk-tokens", min=16, help="Longest chunk. Longer texts are cut into pieces."
        ),
    ] = 4096,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="OPENAI_API_KEY", help="API key for the engine."),
    ] = None,
    file: ConfigFile = None,
    assignments: Assignments = None,
) -> None:
    """Compute texts once, so that fusion can reuse them in any prompt.

    With --url, the engine that serves there computes them. Otherwise an engine is started for this
    command, and the KV outlives it only in a tier that does, such as disk.
    """
    effective = load(file, assignments)
    target = Target(url, model, engine, api_key)
    run(files, target, effective, longest, Console())
