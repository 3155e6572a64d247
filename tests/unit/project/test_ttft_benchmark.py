"""The benchmarks of time to first token, with engines that only remember.

`tests/engines/test_sglang_ttft.py` runs one with real engines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _ttft, sglang_ttft, vllm_ttft
from kvcore.harness.engine_process import Generation
from kvcore.memory.arena import PREFAULTED


class Remembering:
    """An engine with a cache of so many tokens, kvcore's host memory, and a folder as its disk.

    A hit in its own cache takes 1 s, in host memory 2, on disk 3, a miss 10.
    """

    made: list[Remembering]
    logs: Path
    folders: dict[str, set[tuple[int, ...]]]

    def __init__(
        self, model: object, *, engine: str, kvcore: Any, python: Any, env: Any, **args: Any
    ) -> None:
        self.engine, self.kvcore, self.env, self.args = engine, kvcore, env, args
        self.own: list[tuple[int, ...]] = []
        self.host: set[tuple[int, ...]] = set()
        folder = (kvcore or {}).get("disk", {}).get("path") or env.get(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
        )
        self.folder = Path(folder) if folder else None
        self.disk = self.folders.setdefault(str(folder), set()) if folder else set()
        self.log = self.logs / f"{len(self.made)}.log"
        host = (kvcore or {}).get("host", {})
        whole = host.get("prefault", 0) == host.get("capacity")
        self.log.write_text(PREFAULTED % (1, 0.1) if whole else "")
        self.made.append(self)

    def __enter__(self) -> Remembering:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def reset_prefix_cache(self, timeout_s: float = 30.0) -> None:
        self.own.clear()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
        return [self._answer(tuple(prompt)) for prompt in prompts]

    def _answer(self, prompt: tuple[int, ...]) -> Generation:
        places = {"device": self.own, "host": self.host, "disk": self.disk}
        where = next((name for name, held in places.items() if prompt in held), None)
        self.own = [other for other in self.own if other != prompt] + [prompt]
        while sum(map(len, self.own)) > self.args.get("max_total_tokens", 1 << 30):
            del self.own[0]
        if self.folder:
            self.host.add(prompt)
            self.disk.add(prompt)
            (self.folder / f"{len(self.disk)}.bin").touch()
        cached = len(prompt) - 1 if where else 0
        seconds = {"device": 1.0, "host": 2.0, "disk": 3.0, None: 10.0}[where]
        sources = {where: cached} if where else {}
        return Generation(
            "request", [sum(prompt) % 97], "", len(prompt), cached, seconds, seconds + 1, "length",
            sources=sources,
        )  # fmt: skip


@pytest.fixture
def engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> list[Remembering]:
    Remembering.made, Remembering.folders = [], {}
    Remembering.logs = tmp_path_factory.mktemp("logs")
    for module in (_ttft, vllm_ttft, sglang_ttft):
        monkeypatch.setattr(module, "EngineProcess", Remembering)
    for module in (_ttft, sglang_ttft):
        monkeypatch.setattr(module, "windows", _windows)
    monkeypatch.setattr(_ttft, "_tiny", lambda: Path("tiny"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(sglang_ttft, "FILES_SETTLED_S", 0.0)
    monkeypatch.setattr(sglang_ttft, "_drop_page_cache", lambda process: None)
    monkeypatch.setattr(_ttft, "_plot", lambda figure, rows: None)
    return Remembering.made


def _windows(model: object, count: int, least: int, most: int, seed: int) -> list[list[int]]:
    return [[seed * 100_000 + i * 1000 + token for token in range(most)] for i in range(count)]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return found


HITS = {
    "cold": (10.0, ""),
    "own cache": (1.0, "device"),
    "kvcore miss": (10.0, ""),
    "kvcore host": (2.0, "host"),
    "kvcore disk": (3.0, "disk"),
}
PEER_HITS = {
    "hicache miss": (10.0, ""),
    "hicache host": (2.0, "host"),
    "hicache file": (3.0, "disk"),
}


@pytest.mark.parametrize(
    ("bench", "hits", "costs"),
    [(vllm_ttft, HITS, [1.0, 1.0]), (sglang_ttft, {**HITS, **PEER_HITS}, [1.0, 1.0, 2.0])],
)
def test_each_contender_is_asked_when_its_tier_has_the_answer(
    engines: list[Remembering],
    tmp_path: Path,
    bench: Any,
    hits: dict[str, tuple[float, str]],
    costs: list[float],
) -> None:
    bench.main(["--dry-run", "--out", str(tmp_path)])
    [name] = {made.engine for made in engines}
    found = rows(tmp_path, f"{name}_ttft")
    assert {row["contender"]: (row["ttft_s"], row["cached_in"]) for row in found} == hits
    assert not any(row["answers_differ"] for row in found)
    assert [row["ratio"] for row in rows(tmp_path, f"{name}_cost")] == costs


def test_bars_are_ratios_and_say_whether_they_are_kept(
    engines: list[Remembering], tmp_path: Path
) -> None:
    sglang_ttft.main(["--dry-run", "--out", str(tmp_path)])
    assert [(row["ratio"], row["kept"]) for row in rows(tmp_path, "sglang_bars")] == [
        (1.0, True),  # a miss
        (2.0, False),  # host, of the radix hit
        (1.0, True),  # host, of HiCache's
        (1.0, False),  # disk, of HiCache's: it is to be 1.5 times as fast
    ]


def test_block_tokens_and_dtype_reach_the_engine(
    engines: list[Remembering], tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path)]
    vllm_ttft.main(["--dry-run", "--only", "tiers", "--block-tokens", "32", *out])
    assert [made.kvcore["block"] for made in engines if made.kvcore] == [{"tokens": 32}] * 2
    assert {made.args["dtype"] for made in engines} == {"float32"}


def test_prompts_that_the_crowding_prompt_would_not_drive_out_are_refused(
    engines: list[Remembering], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="at least 1024"):
        sglang_ttft.main(["--dry-run", "--page-size", "256", "--out", str(tmp_path)])
