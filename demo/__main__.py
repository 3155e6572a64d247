"""`python -m demo`: the same prompts through a real engine, with and without kvcore."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from demo.conversations import Conversations
from demo.phases import OWN, Answer, Demo, Settings
from demo.report import plot, rows, save_json, table
from kvcore.errors import KVCoreError, UnsupportedError
from kvcore.harness.compare import ENGINES
from kvcore.harness.models import smollm2, token_nbytes


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Return 0 if every answer equals the engine's own, else 1.

    A failure that kvcore reports is printed and returns 1, too.
    """
    options = _parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=130)
    options.results.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="kvcore-demo-", dir=options.disk) as disk:
            return _run(options, console, Path(disk))
    except KVCoreError as error:
        console.print(f"[red]{type(error).__name__}:[/red] {error}", highlight=False)
        return 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    add = parser.add_argument
    add("--model", default=None, help="a folder or a hub name; by default SmolLM2-135M-Instruct")
    add("--engine", default="vllm", choices=ENGINES, help="must be installed here (vllm)")
    add("--dtype", default=None, help="by default the engine's choice, on a CPU float32")
    add("--users", type=int, default=3, help="users, each with a document of their own (3)")
    add("--turns", type=int, default=2, help="questions a user asks (2)")
    add("--tokens", type=int, default=None, help="length of a document (4096; slow CPUs: 2048)")
    add("--answer-tokens", type=int, default=16, help="length of an answer (16)")
    add("--results", type=Path, default=Path("results"), help="for table, plot and logs (results)")
    add("--disk", type=Path, default=None, help="folder for the disk tier (results)")
    add("--no-kvcore", action="store_true", help="run only the reference, the engine alone")
    options = parser.parse_args(arguments)
    for name in ("users", "turns", "tokens", "answer_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    options.disk = options.disk or options.results
    options.tokens = options.tokens or (2048 if _is_slow() else 4096)
    return options


def _is_slow() -> bool:
    """Return True on an x86 CPU without AVX-512, where 4096 tokens take half a minute."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return not _has_gpu() and "avx2" in processor and "avx512" not in processor


def _has_gpu() -> bool:
    """Return True if an NVIDIA driver is running. Does not import torch."""
    return Path("/proc/driver/nvidia/version").exists()


def _run(options: argparse.Namespace, console: Console, disk: Path) -> int:
    began = time.monotonic()
    with console.status("Getting the model (dequantised on first use, then cached)"):
        model = options.model or smollm2()
    with console.status("Reading the tokenizer"):
        settings, tokenizer = _settle(options, model, disk)
    console.print(
        f"[bold]{Path(model).name}[/bold]: {settings.users} users, {settings.turns} turns, "
        f"documents of {options.tokens} tokens; "
        f"{settings.working_set / 2**20:.0f} MiB of KV in all",
        highlight=False,
    )
    conversations = Conversations(tokenizer, settings.users, options.tokens)
    with _Screen(console) as screen:
        demo = Demo(settings, conversations, screen.starting, screen.answered)
        demo.run(with_kvcore=not options.no_kvcore)
    return _report(options, console, demo, time.monotonic() - began)


def _settle(options: argparse.Namespace, model: Path | str, disk: Path) -> tuple[Settings, Any]:
    from transformers import AutoConfig, AutoTokenizer

    hf_config = AutoConfig.from_pretrained(model).get_text_config()
    longest = options.tokens + 128 + options.turns * (options.answer_tokens + 64)
    limit = getattr(hf_config, "max_position_embeddings", longest)
    if longest > limit:
        raise UnsupportedError(
            f"conversations of up to {longest} tokens, but {Path(model).name} takes {limit}: "
            f"lower --tokens, --turns or --answer-tokens"
        )
    dtype = options.dtype or _dtype()
    settings = Settings(
        model=model,
        engine=options.engine,
        users=options.users,
        turns=options.turns,
        answer_tokens=options.answer_tokens,
        dtype=dtype,
        max_model_len=longest,
        kv_bytes_per_token=token_nbytes(model, dtype),
        results=options.results,
        disk=disk,
    )
    return settings, AutoTokenizer.from_pretrained(model)


def _dtype() -> str:
    """Return the dtype: the engine's choice on a GPU, float32 on a CPU.

    In bfloat16 an engine's answers depend on how a prompt was split into batches. Its own prefix
    cache can then change tokens, and comparing tokens would compare rounding. On a CPU without
    bfloat16 instructions, float32 is also several times faster.
    """
    return "auto" if _has_gpu() else "float32"


class _Screen:
    """Progress bars: one for each phase, from the start of its engine to its last answer."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", justify="left"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}", style="dim"),
            console=console,
        )
        self._task: TaskID | None = None
        self._left = 0

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def starting(self, phase: str, requests: int) -> None:
        if not self._progress.console.is_terminal:  # bars then appear at the end
            print(f"{phase} ...", flush=True)
        self._task = self._progress.add_task(phase, total=None, last="starting the engine")
        self._left = requests

    def answered(self, answer: Answer) -> None:
        assert self._task is not None, "an answer belongs to a phase that has started"
        name = f"user {answer.user + 1} turn {answer.turn + 1}: {answer.ttft_s * 1000:.0f} ms"
        self._progress.update(self._task, total=self._left, advance=1, last=name)


def _report(options: argparse.Namespace, console: Console, demo: Demo, took_s: float) -> int:
    lines = rows(demo.answers)
    engine = demo.engine_info
    title = (
        f"{Path(demo.settings.model).name} on {engine['engine']} {engine['version']} "
        f"({engine['device']}, {os.cpu_count()} CPUs), documents of {options.tokens} tokens"
    )
    console.print(table(title, lines))
    plot(options.results / "demo.png", title, lines)
    save_json(options.results / "demo.json", demo, lines)
    different = [each for each in demo.answers if not each.equal and each.phase != OWN]
    console.print(
        f"{took_s:.0f} s in all; {options.results}/demo.json, demo.png, engine-*.log",
        highlight=False,
    )
    if different:
        console.print(
            f"[red]{len(different)} of {len(demo.answers)} answers differ from the engine's own[/]"
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
