"""What the demo of routers calls wrong, and whom it asks for what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("zmq")

from demo import fleet
from demo import router as demo
from demo.fleet import BLOCK, TIER, Completion
from demo.router import FIRST, KILLED, PLANTED, SECOND, Answer, Demo, problems, table
from kvcore.errors import TransferError

TOKENS = 40 * BLOCK
ONE = Answer("reads", FIRST, "", "vllm", TOKENS, {}, "a")
AFTER = replace(ONE, step=KILLED, holder="vllm", engine="sglang", loaded={TIER: 600}, expected="a")
GOOD = [
    ONE,
    replace(ONE, step=SECOND, holder="vllm"),
    replace(ONE, step=PLANTED, holder="sglang", engine="sglang"),
    AFTER,
    replace(AFTER, router="reads none"),
]


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert problems(GOOD, "sglang") == []
    made = table("title", GOOD, {"reads": "1.2"})
    assert made.row_count == 2
    assert list(made.columns[0].cells) == ["reads 1.2", "reads none "]
    assert list(made.columns[2].cells) == ["1 of 1 to the holder", "reads none"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(GOOD[1], engine="sglang"), "vllm holds it, and sglang was asked"),
        (replace(GOOD[2], engine="vllm"), "sglang holds it, and vllm was asked"),
        (replace(AFTER, engine="vllm"), "vllm answered"),
        (replace(AFTER, loaded={"host": 600}), "{'host': 600} were loaded"),
        (replace(AFTER, loaded={}), "{} were loaded"),
        (replace(AFTER, text="b"), "'b', but before it was 'a'"),
    ],
)
def test_what_is_wrong_is_named(wrong: Answer, said: str) -> None:
    [line] = problems([*GOOD, wrong], "sglang")
    assert said in line


# -- the steps, with engines that compute nothing -------------------------------------------------


class FakeEngine:
    """It has every prompt stored at once, in host memory and in the tier."""

    def __init__(self, name: str) -> None:
        self.address = name
        self.records: dict[str, dict[str, Any]] = {}
        self.stored = 0
        self.tells = True

    def answer(self, prompt: str) -> Completion:
        name = f"{self.address}-{len(self.records)}"
        self.records[name] = {"request": f"cmpl-{name}-0", "tokens": TOKENS, "loaded": {}}
        self.stored += TOKENS // BLOCK
        return Completion(name, f"[{len(prompt)}]")

    def record_of(self, request: str) -> dict[str, Any] | None:
        return self.records.get(request)

    def blocks(self) -> tuple[int, int]:
        return self.stored, self.stored if self.tells else 0


class FakeRouter:
    """It sends every request to one engine."""

    def __init__(self, name: str, engine: FakeEngine) -> None:
        self.name = name
        self.engine = engine
        self.reads_events = True

    def ask(self, prompt: str) -> Completion:
        return self.engine.answer(prompt)

    def close(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEngine]:
    made = {name: FakeEngine(name) for name in ("vllm", "sglang")}
    monkeypatch.setattr(demo, "complete", lambda address, prompt: made[address].answer(prompt))
    monkeypatch.setattr(demo, "HEAR_S", 0.0)
    for module in (demo, fleet):
        monkeypatch.setattr(module, "WAIT_S", 0.3)
    return made


def documents() -> Iterator[str]:
    for number in range(100):
        yield f"document {number} "


def a_demo(engines: dict[str, FakeEngine], *routers: FakeRouter) -> Demo:
    return Demo(engines, list(routers), documents(), "vllm")  # type: ignore[arg-type]


def test_a_router_s_own_conversation_is_kept_for_the_kill(engines: dict[str, FakeEngine]) -> None:
    router = FakeRouter("one", engines["vllm"])
    steps = a_demo(engines, router)
    answers = list(steps.turns(router))
    assert [answer.step for answer in answers] == [FIRST, FIRST, SECOND, SECOND]
    assert [answer.holder for answer in answers] == ["", "", "vllm", "vllm"]
    kept = steps.kept["one"]
    assert kept.text.startswith("document 0")
    steps.ensure_kept()
    assert steps.kept["one"] is kept
    router.engine = engines["sglang"]
    after = steps.killed(router)
    assert (after.holder, after.engine, after.expected) == ("vllm", "sglang", answers[2].text)
    assert after.text == after.expected, "the very turn that the engine has answered is asked"


def test_one_that_sends_the_victim_nothing_gets_a_conversation_there(
    engines: dict[str, FakeEngine],
) -> None:
    router = FakeRouter("one", engines["sglang"])
    steps = a_demo(engines, router)
    list(steps.turns(router))
    assert steps.kept == {}
    asked = len(engines["vllm"].records)
    steps.ensure_kept()
    assert len(engines["vllm"].records) == asked + 2, "both turns"
    assert steps.kept["one"].holder == "vllm"
    assert steps.survivor == "sglang"


def test_a_router_is_asked_what_each_engine_alone_has_seen(engines: dict[str, FakeEngine]) -> None:
    router = FakeRouter("one", engines["sglang"])
    answers = list(a_demo(engines, router).planted(router))
    assert [(answer.holder, answer.engine) for answer in answers] == [
        ("vllm", "sglang"),
        ("sglang", "sglang"),
    ]


def test_events_that_do_not_come_are_named(engines: dict[str, FakeEngine]) -> None:
    engines["vllm"].tells = False
    router = FakeRouter("one", engines["vllm"])
    with pytest.raises(TransferError, match="the events of vllm do not tell of 72 blocks"):
        list(a_demo(engines, router).turns(router))
