"""Real vLLM: what it says of a request, in the answer and to `kvcore explain`, is what happened.

One engine for all of it: a host tier of 1024 tokens, a quarter of it for staging, and a shelf below
it of 3072.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvcore.cli.app import app
from kvcore.harness.compare import SETTLE_S, answers, counted, settle_and_empty
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_model
from kvcore.harness.prompts import windows
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import FAULTY_DISK, write_plugin

collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

pytestmark = pytest.mark.engine

BLOCK_NBYTES = 4 * 2 * 2 * 64 * 16 * 4
HOST_BLOCKS, SHELF_BLOCKS = 64, 192
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """Takes in what an engine exports over OTLP/HTTP."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        took = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = collector.ExportTraceServiceRequest()
                told.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in told.resource_spans:
                    for scope in resource.scope_spans:
                        took.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class Served(NamedTuple):
    process: EngineProcess
    records: Path
    rules: Path
    spans: Spans
    documents: list[list[int]]
    model: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_plugin(tmp_path_factory.mktemp("explain"))
    rules, records, spans = folder / "rules", folder / "records", Spans()
    write_rules(rules)
    model = tiny_model("llama", layers=4, heads=4, kv_heads=2, head_dim=64)
    kvcore = {
        "host": {"capacity": HOST_BLOCKS * BLOCK_NBYTES, "policy": "lru"},  # what goes is known
        "tiers": {
            "shelf": {
                "plugin": FAULTY_DISK,
                "policy": "lru",
                "capacity": SHELF_BLOCKS * BLOCK_NBYTES,
                "options": {"rules": str(rules), "path": str(folder / "kv")},
            }
        },
        "transfer": {"load_deadline_s": 300},
        "explain": {"path": str(records), "spans": True},
        "clients": {"report": "explain"},  # for requests without a salt too
        "tenants": {
            "quiet": {"salt": "quiet-1", "report": "off", "promises": False},
            "brief": {"salt": "brief-1", "report": "tokens"},
        },
    }
    env = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    try:
        with engine(model, kvcore, env, otlp_traces_endpoint=spans.url) as process:
            yield Served(process, records, rules, spans, windows(model, 9, 600, 600, seed=5), model)
    finally:
        spans.close()


def ask(served: Served, prompt: list[int], **options: Any) -> Generation:
    """One answer, with its saves published and vLLM's own cache empty."""
    [answer] = answers(served.process, [prompt], **options)
    settle_and_empty(served.process)
    return answer


def told(served: Served, answer: Generation) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a client was told, and what `kvcore explain` says of the same request."""
    client = answer.kvcore["explain"]
    limit = time.monotonic() + SETTLE_S
    while True:
        command = ["explain", client["request"], "--path", str(served.records), "--json"]
        result = CliRunner().invoke(app, command)
        if result.exit_code == 0:
            break
        assert time.monotonic() < limit, result.output
        time.sleep(0.05)
    [record] = json.loads(result.stdout)
    del record["at"]
    without = {name for name in record if name not in ("misses", "plan", "otherwise")}
    assert client.keys() == {*without, "misses"}, "rates depend on what others do"
    assert {name: client[name] for name in without} == {name: record[name] for name in without}
    assert record["loaded"] == answer.tiers
    assert sum(record["loaded"].values()) == answer.reused_tokens
    assert record["outcome"] == "length"
    assert record["tokens"] == answer.prompt_tokens
    return client, record


def causes(record: dict[str, Any]) -> list[str]:
    return [miss["cause"] for miss in record["misses"]]


@pytest.mark.exhaustive
def test_each_way_a_request_can_go(served: Served) -> None:
    first, *others, last = served.documents

    cold = ask(served, first)
    client, record = told(served, cold)
    assert causes(client) == ["not held"]
    assert causes(record) == ["never seen"]
    assert "nothing was found to load" in record["otherwise"]["unknown"]

    warm = ask(served, first)
    client, record = told(served, warm)
    assert warm.token_ids == cold.token_ids
    assert record["matched"] == [{"tier": "host", "tokens": [0, 592]}]
    assert record["loaded"] == {"host": 592}
    assert causes(client) == causes(record) == []
    assert {"lookup", "rest"} <= set(record["ms"])

    stranger = ask(served, first, cache_salt="another tenant")
    client, record = told(served, stranger)
    assert causes(client) == ["not held"], "it was told of another tenant"
    assert record["misses"] == [{"cause": "other namespace", "differed": ["cache_salt"]}]

    short = ask(served, first[:40])
    client, record = told(served, short)
    assert causes(client)[-1] == causes(record)[-1] == "too short"

    for other in others:
        ask(served, other)
    target = others[-3]
    right = ask(served, last)  # new, so that nothing it is compared with was loaded
    assert causes(told(served, right)[1]) == ["never seen"]
    write_rules(served.rules, Rule(Fault.ERROR, Seam.FILE_READ))
    try:
        failed = ask(served, target)
    finally:
        write_rules(served.rules)
    client, record = told(served, failed)
    assert failed.reused_tokens == 0
    assert record["failures"] >= 1
    assert "failed" in causes(client)
    assert "failed" in causes(record)

    evicted = ask(served, first)
    client, record = told(served, evicted)
    assert evicted.token_ids == cold.token_ids
    [miss] = record["misses"]
    assert (miss["cause"], miss["tier"]) == ("evicted", "shelf")
    assert miss["seconds_ago"] > 0
    assert client["misses"] == [{"cause": "not held"}], "it was told of others' load"


def test_a_tenant_is_told_what_its_settings_allow(served: Served) -> None:
    """The other requests of this module are of no named tenant, and are told everything."""
    document = served.documents[1]
    for salt, keys in (("quiet-1", set()), ("brief-1", {"reused_tokens", "tiers"})):
        ask(served, document, cache_salt=salt)
        again = ask(served, document, cache_salt=salt)
        assert set(again.kvcore) == keys
        assert again.reused_tokens == (0 if salt == "quiet-1" else 592), "it was told nothing"
    assert "explain" in ask(served, document, cache_salt="of no named tenant").kvcore


def test_estimates_are_made_once_all_was_measured(served: Served) -> None:
    document = served.documents[1]
    for _ in range(5):
        answer = ask(served, document)
    _, record = told(served, answer)
    assert record["loaded"] == {"host": 592}
    assert record["otherwise"]["unknown"] == []
    assert record["otherwise"]["recompute_ms"] > 0
    assert record["otherwise"]["load_all_ms"] >= record["otherwise"]["loading_ms"] > 0


def test_spans_are_exported_in_the_trace_of_the_request(served: Served) -> None:
    own = {"cache_salt": "spans"}
    ask(served, served.documents[0], **own)
    answer = ask(served, served.documents[0], traceparent=f"00-{TRACE}-{SPAN}-01", **own)
    name = answer.kvcore["explain"]["request"]
    limit = time.monotonic() + SETTLE_S
    while True:
        ours = [span for span in served.spans.seen if span.trace_id.hex() == TRACE]
        roots = [span for span in ours if span.name == "kvcore"]
        if roots and any(not span.name.startswith("kvcore") for span in ours):
            break
        assert time.monotonic() < limit, [span.name for span in served.spans.seen]
        time.sleep(0.05)
    [root] = roots
    assert root.parent_span_id.hex() == SPAN
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["kvcore.request"].string_value == name
    steps = [span for span in ours if span.parent_span_id == root.span_id]
    assert {"kvcore.lookup", "kvcore.rest"} <= {span.name for span in steps}
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in steps)


def test_a_request_says_what_kvcore_may_do_with_it(served: Served) -> None:
    """It is followed, answered, recorded and counted; what cannot be read is neither loaded nor
    saved."""
    controls = "kvcore_request_controls_total"
    document = windows(served.model, 1, 600, 600, seed=55)[0]

    def stored(salt: str, asked: Any) -> tuple[int, Any]:
        """How much is found of a text that was asked once, and what its client was told."""
        first = ask(served, document, cache_salt=salt, asked=asked)
        told(served, first)
        again = ask(served, document, cache_salt=salt)
        assert again.token_ids == first.token_ids
        return again.reused_tokens, first.kvcore.get("asked")

    assert stored("s-all", {"save": True}) == (592, None)
    assert stored("s-none", {"save": False}) == (0, {"save": False})
    assert stored("s-some", {"save_tokens": 333}) == (320, {"save_tokens": 333})

    computed = ask(served, document, cache_salt="s-all", asked={"load": False})
    client, record = told(served, computed)
    assert computed.reused_tokens == 0
    [matched] = record["matched"]
    assert matched["tokens"] == [0, 592], "it could have loaded"
    assert causes(client) == causes(record) == ["the request asked for no load"]
    assert client["asked"] == record["asked"] == {"load": False}
    warm = ask(served, document, cache_salt="s-all")
    assert (warm.reused_tokens, warm.token_ids) == (592, computed.token_ids)

    wrong = ask(served, document, cache_salt="s-all", asked={"load": "never"})
    client, record = told(served, wrong)
    assert (wrong.reused_tokens, wrong.token_ids) == (0, warm.token_ids)
    assert causes(record) == ["the request's options could not be read"]
    assert "kvcore.load is 'never'" in wrong.kvcore["asked"]["error"]
    found, said = stored("s-wrong", {"save": "no"})
    assert found == 0
    assert "kvcore.save is 'no'" in said["error"]

    quiet = ask(served, document, cache_salt="quiet-1", asked={"save": False})
    assert quiet.kvcore == {"asked": {"save": False}}, "no report, but its own wish"
    for option, outcome in (
        ("load", "followed"),
        ("save", "followed"),
        ("save_tokens", "followed"),
        ("load", "unreadable"),
        ("save", "unreadable"),
    ):
        assert counted(served.process, controls, option=option, outcome=outcome) >= 1, option
    assert counted(served.process, "kvcore_misses_total", reason="asked") == 1
    assert counted(served.process, "kvcore_misses_total", reason="unreadable") == 2
