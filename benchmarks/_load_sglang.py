"""The contenders of `benchmarks.load` on SGLang: alone, with HiCache, and with kvcore.

They run on a CPU with `benchmarks._sglang_server`, all with attention that computes only the rows
that were not found. With pages of 16 tokens, all find what vLLM's contenders find.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._load_servers import (
    ALONE,
    ANSWER_S,
    ENV,
    ROOT,
    SAMPLE,
    SERVED,
    Contender,
    Engine,
    Process,
    Sizes,
    Tokens,
)
from kvcore.harness.prompts import words

PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"
PAGE = 16
FLAG = "--unified-cache-external-linker"
FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""The variable that names the folder of HiCache's files."""
CROWD = range(1000, 40_000)


class SGLang(Engine):
    """A running ``sglang.launch_server``."""

    def __init__(self, port: int, processes: Sequence[Process], sizes: Sizes) -> None:
        super().__init__(port, processes)
        self._sizes = sizes
        self._crowds = 0

    def reset(self) -> None:
        """Push all out of the engine's own cache: a flush would empty HiCache's memory too."""
        length = self._sizes.max_tokens // 2
        for _ in range(self._sizes.device_tokens // length + 2):
            self._crowds += 1
            self.ask(words(9000 + self._crowds, length, CROWD), 1)

    def tokens(self) -> Tokens:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=ANSWER_S) as answer:
            return tokens_of(answer.read().decode())


@dataclass(frozen=True)
class OnSGLang(Contender):
    """SGLang with one cache. ``transfer`` has its further arguments and their values."""

    def command(self, python: str, sizes: Sizes, folder: Path, port: int) -> list[str]:
        command = [
            str(PYTHON), "-m", "benchmarks._sglang_server", "--model-path", str(sizes.model),
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED,
            "--dtype", sizes.dtype, "--random-seed", "0", "--device", "cpu",
            "--attention-backend", "kvcore_rows", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup",
            "--context-length", str(sizes.max_tokens), "--page-size", str(PAGE),
            "--max-running-requests", str(sizes.at_once), "--chunked-prefill-size", "2048",
            "--max-total-tokens", str(sizes.device_tokens // PAGE * PAGE),
            "--enable-metrics", "--enable-cache-report", "--sleep-on-idle", *sizes.arguments,
        ]  # fmt: skip
        for name, value in (self.transfer(sizes, folder) or {}).items():
            command += [name] if value is None else [name, str(value)]
        return command

    def environment(self, folder: Path) -> dict[str, str]:
        cores = str(len(os.sched_getaffinity(0)))
        here = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": cores,
            FILES: str(folder / "files"),
        }
        return {**ENV, **here}

    def engine(self, port: int, processes: Sequence[Process], sizes: Sizes) -> Engine:
        return SGLang(port, processes, sizes)


Arguments = dict[str, Any]


def _hicache(files: bool) -> Callable[[Sizes, Path], Arguments]:
    def arguments(sizes: Sizes, folder: Path) -> Arguments:
        made: Arguments = {
            "--enable-hierarchical-cache": None,
            "--hicache-ratio": round(sizes.host_tokens / sizes.device_tokens, 3),
            "--hicache-io-backend": "direct",
            "--hicache-mem-layout": "layer_first",
        }
        if files:
            made["--hicache-storage-backend"] = "file"
        return made

    return arguments


def _kvcore(disk: bool, *, planner: bool = False) -> Callable[[Sizes, Path], Arguments]:
    def arguments(sizes: Sizes, folder: Path) -> Arguments:
        size = sizes.host_nbytes
        extra: dict[str, Any] = {"host": {"capacity": size, "prefault": size}}
        if disk:
            extra["disk"] = {"path": str(folder / "disk"), "capacity": "16GiB"}
        if planner:
            extra["planner"] = {"enabled": True}
        linker = {
            "linker": "KVCoreLinker",
            "linker_module_path": "kvcore_sglang.linker",
            "linker_extra_config": extra,
        }
        return {
            f"--enable{FLAG[1:]}": None,
            f"{FLAG}-backend": "dynamic",
            f"{FLAG}-config": json.dumps(linker),
        }

    return arguments


CONTENDERS = {
    made.name: made
    for made in (
        OnSGLang(ALONE, lambda sizes, folder: None),
        OnSGLang("hicache", _hicache(False)),
        OnSGLang("hicache-file", _hicache(True)),
        OnSGLang("kvcore", _kvcore(False), prefaults=True),
        OnSGLang("kvcore-disk", _kvcore(True), prefaults=True),
        OnSGLang("kvcore-planned", _kvcore(True, planner=True), prefaults=True),
    )
}


def tokens_of(text: str) -> Tokens:
    """Return the prompts' tokens from SGLang's ``/metrics``, of requests that have ended."""
    asked = local = cached = 0.0
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None:
            continue
        if found["name"] == "sglang:prompt_tokens_total":
            asked += float(found["value"])
        elif found["name"] == "sglang:cached_tokens_total":
            source = re.search(r'cache_source="(\w+)"', found["labels"] or "")
            if source is not None and source[1] in ("device", "total"):
                local += float(found["value"])
            cached += float(found["value"])
    return Tokens(int(asked), int(asked - cached), int(local), int(cached - local))
