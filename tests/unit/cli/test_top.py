"""`kvcore top`: what an endpoint says, as a picture; anything else is one clear line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvcore.cli.app import app
from kvcore.cli.top import Sample, frame, parse
from kvcore.errors import UnsupportedError

PAGE = """\
# TYPE kvcore_tier_used_bytes gauge
kvcore_tier_used_bytes{engine="0",tier="host"} 1048576
kvcore_tier_used_bytes{engine="1",tier="host"} 1048576
kvcore_tier_capacity_bytes{tier="host"} 8388608
# TYPE kvcore_hits_total counter
kvcore_hits_total{engine="0"} 30
# TYPE kvcore_misses_total counter
kvcore_misses_total{reason="not_cached"} 8
kvcore_misses_total{reason="planned"} 2
# TYPE kvcore_transfer_bytes_total counter
kvcore_transfer_bytes_total{path="h2d"} 10485760
kvcore_queue_depth{path="h2d"} 3
# TYPE kvcore_transfer_seconds histogram
kvcore_transfer_seconds_bucket{path="h2d",le="+Inf"} 8
kvcore_transfer_seconds_count{path="h2d"} 8
kvcore_transfer_seconds_sum{path="h2d"} 2.5
# TYPE kvcore_expected_ttft_seconds_total counter
kvcore_expected_ttft_seconds_total{way="load"} 10
kvcore_expected_ttft_seconds_total{way="recompute"} 40
vllm_other 1
"""


def drawn(now: Sample, before: Sample | None = None) -> list[list[str]]:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(frame(now, before))
    return [line.split() for line in captured.get().splitlines() if line.strip()]


def test_the_picture_is_of_the_numbers() -> None:
    lines = drawn(parse(PAGE, 1.0))
    assert ["host", "2MiB", "8MiB", "25%"] in lines
    assert ["hit", "30", "75.0%"] in lines
    assert ["not_cached", "8", "20.0%"] in lines
    assert ["h2d", "10MiB", "4MiB", "3"] in lines, "10 MiB in 2.5 s of operations"
    assert ["TTFT", "saved", "30.0", "s", "75.0%"] in lines


def test_bandwidth_is_between_two_samples() -> None:
    later = parse(PAGE.replace("10485760", "14680064"), 3.0)
    assert ["h2d", "14MiB", "2MiB", "5.6MiB", "3"] in drawn(later, parse(PAGE, 1.0))
    assert ["h2d", "10MiB", "0B", "4MiB", "3"] in drawn(parse(PAGE, 5.0), later), "restarted"


def test_nothing_is_said_to_be_saved_where_nothing_was_estimated() -> None:
    lines = drawn(parse(PAGE.replace('way="recompute"} 40', 'way="recompute"} 0'), 1.0))
    assert not any(line[:2] == ["TTFT", "saved"] for line in lines)


@settings(max_examples=50)
@given(st.one_of(st.text(max_size=200), st.text(max_size=40).map(lambda text: PAGE + text)))
def test_any_text_is_a_sample_or_an_error(text: str) -> None:
    try:
        drawn(parse(text, 1.0))
    except UnsupportedError as error:
        assert str(error)  # noqa: PT017 - either is right


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_once_prints_one_picture(endpoint: str) -> None:
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    result = runner.invoke(app, ["top", "--once", "--url", endpoint])
    assert result.exit_code == 0, result.output
    assert "25%" in result.stdout
    nobody = runner.invoke(app, ["top", "--once", "--url", "http://127.0.0.1:1/metrics"])
    assert (nobody.exit_code, nobody.stdout) == (2, "")
    assert "--url" in nobody.stderr
