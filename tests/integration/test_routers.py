"""Routers from the package index, on kvcore's events and in front of two engines.

They need .venvs/routers: python3 -m tools.env_routers.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("rich")

from demo.fleet import BLOCK, MODEL, ROUTERS_PYTHON, Dynamo, HttpRouter, start_routers
from kvcore.config import load_config
from kvcore.events.open import RunningPublisher, open_events
from kvcore.index import BlockIndex, Event, TierSpec
from kvcore.model.keys import ROOT_PARENT, pack_tokens
from kvcore.telemetry.metrics import Metrics
from kvcore.testing.waiting import until
from kvcore_devtools.servers import free_port

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        not ROUTERS_PYTHON.exists(), reason="no .venvs/routers: python3 -m tools.env_routers"
    ),
]

ROOT = Path(__file__).parents[2]
PROMPT = list(range(1000, 1000 + 8 * BLOCK + 3))
"""Eight whole blocks, and three tokens."""


def encode(text: str) -> list[int]:
    """Tokens as text are numbers with spaces between them."""
    return [int(word) for word in text.split()]


class Engine:
    """What a router sees of an engine: HTTP as vLLM's, and a publisher of events."""

    def __init__(self, format: str = "vllm", **events: Any) -> None:
        self.asked = 0
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer({"data": [{"id": MODEL, "object": "model", "root": MODEL}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/completions/render":
                    self.answer([{"token_ids": encode(body["prompt"])}])
                    return
                engine.asked += 1
                choice = {"index": 0, "text": "so", "finish_reason": "length", "logprobs": None}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                self.answer(
                    {
                        "id": "cmpl-1",
                        "object": "text_completion",
                        "created": 1,
                        "model": MODEL,
                        "choices": [choice],
                        "usage": usage,
                    }
                )

            def answer(self, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        settings = {
            "endpoint": f"@{self.events}",
            "replay_endpoint": self.replay,
            "format": format,
            "token_ids": True,
            "publisher": "thread",
            "interval_s": 0.005,
            "heartbeat_s": 0.1,
            **events,
        }
        config = load_config(None, {"events": settings, "block": {"tokens": BLOCK}}, {})
        made = open_events(config, BlockIndex([TierSpec("host", 4096)]), Metrics())
        assert made is not None
        self._publisher: RunningPublisher = made

    def save(self, tokens: Sequence[int], tier: str = "host") -> tuple[bytes, ...]:
        """Tell that the whole blocks of a prompt are stored, and return their keys."""
        count = len(tokens) // BLOCK
        keys = tuple(os.urandom(16) for _ in range(count))
        self._publisher.feed.publish_tokens(keys, pack_tokens(tokens[: count * BLOCK]))
        self._publisher.feed.note(Event(True, tier, keys, ROOT_PARENT))
        return keys

    def evict(self, keys: tuple[bytes, ...], tier: str = "host") -> None:
        self._publisher.feed.note(Event(False, tier, keys))

    def close(self) -> None:
        self._publisher.close()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def engines() -> Iterator[Callable[..., list[Engine]]]:
    made: list[Engine] = []

    def start(**options: Any) -> list[Engine]:
        made.extend(Engine(**options) for _ in range(2))
        return made

    yield start
    for engine in made:
        engine.close()


def found(router: Dynamo, worker: int) -> Callable[[], int]:
    """Return what gives the tokens that Dynamo finds, if it selects this engine."""

    def tokens() -> int:
        chosen = router.call({"token_ids": PROMPT, "selection_id": (name := uuid.uuid4().hex)})
        router.call({"done": name})
        return chosen["overlap"]["longest_matched"] if chosen["worker_id"] == worker else 0

    return tokens


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_dynamo_finds_the_engine_that_holds_a_prompt(
    engines: Callable[..., list[Engine]], tmp_path: Path, holder: int, tier: str
) -> None:
    pair = engines()
    with closing(Dynamo(pair, encode, tmp_path / "log")) as router:  # type: ignore[arg-type]
        keys = pair[holder].save(PROMPT, tier)
        tokens = found(router, holder)
        until(lambda: tokens() == 8 * BLOCK, "it does not find the prompt", seconds=30)
        pair[holder].evict(keys[5:], tier)
        until(lambda: tokens() == 5 * BLOCK, "it finds what was evicted", seconds=30)


def test_dynamo_that_starts_late_is_told_everything(
    engines: Callable[..., list[Engine]], tmp_path: Path
) -> None:
    """Also what the publisher no longer keeps as batches; and it hears what comes after."""
    pair = engines(history_max="64KiB")
    kept = pair[1].save(PROMPT)
    for number in range(60):
        pair[1].save([100_000 + number] * 64 * BLOCK)
    with closing(Dynamo(pair, encode, tmp_path / "log")) as router:  # type: ignore[arg-type]
        tokens = found(router, 1)
        until(lambda: tokens() == 8 * BLOCK, "it does not find the prompt", seconds=30)
        pair[1].evict(kept[5:])
        until(lambda: tokens() == 5 * BLOCK, "it has stopped to listen", seconds=30)


def test_dynamo_reads_nothing_in_kvcore_s_own_format(
    engines: Callable[..., list[Engine]], tmp_path: Path
) -> None:
    """Why there is another one. If this fails, docs/events.md can say so."""
    pair = engines(format="kvcore")
    log = tmp_path / "log"
    with closing(Dynamo(pair, encode, log)) as router:  # type: ignore[arg-type]
        pair[1].save(PROMPT)
        until(lambda: "Failed to decode" in log.read_text(), "it reads it", seconds=30)
        assert found(router, 1)() == 0


def test_vllm_s_router_finds_the_engine_that_holds_a_prompt(
    engines: Callable[..., list[Engine]], tmp_path: Path
) -> None:
    pair = engines()
    routers = start_routers(pair, encode, tmp_path)  # type: ignore[arg-type]
    next(routers).close()
    router = next(routers)
    assert isinstance(router, HttpRouter)
    prompts = [PROMPT, PROMPT[::-1]]
    with closing(router):
        for engine, prompt in zip(pair, prompts, strict=True):
            engine.save(prompt)

        def right() -> bool:
            for engine, prompt in zip(pair, prompts, strict=True):
                before = engine.asked
                for _ in range(4):
                    router.ask(" ".join(map(str, prompt)))
                if engine.asked != before + 4:
                    return False
            return True

        until(right, "it asks the other engine", seconds=30)


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["vllm", "sglang"])
def test_the_demo(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-m", "demo.router", "--kill", victim, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
