"""`kvcore warm`: from files to progress bars; the work is done in `kvcore.cli.warm`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcore.cli import serve, warm
from kvcore.config import Config
from kvcore.errors import ConfigError

__all__ = ["Target", "run"]


class Target(NamedTuple):
    """The engine that is to compute: a running one, or one to start."""

    url: str | None
    model: str | None
    engine: str | None
    api_key: str | None


def run(
    files: Sequence[Path], target: Target, config: Config, longest: int, console: Console
) -> None:
    """Warm every file and say what it took."""
    texts = warm.read_texts(files)
    with _client(target, config) as client:
        found = list(warm.chunks(client, texts, longest))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("warming", total=len(found))

            def done(chunk: warm.Chunk, reused: int) -> None:
                progress.update(bar, advance=1, description=chunk.name)

            computed = warm.warm(client, found, config.fusion.behind, done)
    total = sum(len(chunk.tokens) for chunk in found)
    console.print(
        f"{len(found)} chunks of {total} tokens; {computed} computed, the rest was stored already",
        highlight=False,
    )


@contextlib.contextmanager
def _client(target: Target, config: Config) -> Iterator[warm.Client]:
    if target.url is not None:
        yield warm.Client(target.url, target.model, target.api_key)
        return
    if target.model is None:
        raise ConfigError("given neither --url nor --model: name a running engine, or a model")
    command = serve.command(target.model, config, target.engine, [])
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-warm-") as folder,
        warm.running(command, Path(folder) / "engine.log") as address,
    ):
        yield warm.Client(address, target.model, target.api_key)
