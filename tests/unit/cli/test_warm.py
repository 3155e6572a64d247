"""`kvcore warm` against a server that answers as an engine does."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcore.cli import warm
from kvcore.cli.app import app
from kvcore.errors import UnsupportedError
from kvcore.plugins import ServeCommand

runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


class Engine(BaseHTTPRequestHandler):
    """A word is a token; what was asked before counts as reused."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        if self.path == "/tokenize":
            self._answer({"tokens": [len(word) for word in body["prompt"].split()]})
        elif server.broken:
            self.send_error(500, "out of memory")
        else:
            known = body["prompt"] in [asked["prompt"] for asked in server.asked]
            server.asked.append(body)
            reused = len(body["prompt"]) if known else 0
            self._answer({"kv_transfer_params": {"kvcore": {"reused_tokens": reused}}})

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    server.asked, server.broken = [], False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url(engine: Any) -> str:
    return f"http://127.0.0.1:{engine.server_address[1]}"


def test_texts_are_asked_for_once_each_and_cut(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("a bb ccc " * 10)
    (tmp_path / "b.md").write_text("dddd " * 5)
    (tmp_path / "empty.md").write_text(" \n")
    args = ["warm", *map(str, sorted(tmp_path.iterdir())), "--url", url(engine)]
    args += ["--chunk-tokens", "16", "--set", "fusion.behind=[7, 7]"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    texts = [[1, 2, 3] * 10, [4] * 5]
    pieces = [texts[0][:16], texts[0][16:], texts[1]]
    assert [asked["prompt"] for asked in engine.asked] == [[7, 7, *piece] for piece in pieces]
    assert all(asked["max_tokens"] == 1 for asked in engine.asked)
    wishes = [asked["kv_transfer_params"]["kvcore"]["fusion"] for asked in engine.asked]
    assert wishes == [{"enabled": False}] * 3
    assert "3 chunks of 35 tokens; 41 computed" in result.output
    again = runner.invoke(app, args)
    assert "3 chunks of 35 tokens; 0 computed" in again.output


def test_what_goes_wrong_is_one_clear_line(engine: Any, tmp_path: Path) -> None:
    text, binary = tmp_path / "a.md", tmp_path / "b.bin"
    text.write_text("a b c")
    binary.write_bytes(b"\xff\xfe\xfa")
    engine.broken = True
    for args, words in [
        ([str(binary), "--url", url(engine)], "cannot be read as text"),
        ([str(tmp_path / "none.md"), "--url", url(engine)], "cannot be read"),
        ([str(text), "--url", url(engine)], "500"),
        ([str(text), "--url", "http://127.0.0.1:9"], "is the engine there?"),
        ([str(text)], "neither --url nor --model"),
    ]:
        result = runner.invoke(app, ["warm", *args])
        assert result.exit_code == 2, result.output
        assert words in result.stderr, result.stderr
        assert "Traceback" not in result.stderr


def test_an_engine_is_started_and_stopped(tmp_path: Path) -> None:
    """Here the engine is Python's own web server, which answers any path with a page or a 404."""
    serve = ServeCommand([sys.executable, "-c", SERVER], {})
    with warm.running(serve, tmp_path / "log") as address:
        assert warm.Client(address).model == "toy"
    with pytest.raises(UnsupportedError, match="is the engine there"):
        warm.Client(address)


def test_an_engine_that_does_not_come_up(tmp_path: Path) -> None:
    serve = ServeCommand([sys.executable, "-c", "raise SystemExit('no such model')"], {})
    with (
        pytest.raises(UnsupportedError, match="no such model"),
        warm.running(serve, tmp_path / "log"),
    ):
        raise AssertionError("it came up")


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"data": [{"id": "toy"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
