"""What else a real vLLM does with requests: adapters, speculation, events, faults, its server."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import zmq
from PIL import Image

from kvcore.harness.compare import (
    ANSWER,
    SETTLE_S,
    SPACE,
    Reference,
    answers,
    assert_same_answers,
    counted,
    settle_and_empty,
)
from kvcore.harness.compare import small_engine as engine
from kvcore.harness.engine_process import EngineProcess, Generation
from kvcore.harness.models import tiny_lora, tiny_vision_model
from kvcore.harness.prompts import windows
from kvcore.testing.faults import Fault, Rule, Seam, write_rules
from kvcore.testing.faults.plugin import FAULTY_MEMORY, write_plugin
from kvcore.testing.faults.process import FaultControl, write_injector
from kvcore_devtools.servers import free_port
from support.front_door import metric, post, served

pytestmark = pytest.mark.engine

IMAGE = 49153  # IMAGE_TOKEN of tiny_vision_model: SmolLM2's vocabulary, and the second one added
BLOCK_NBYTES = 4 * 2 * 2 * 64 * 16 * 4
SEES = {"skip_tokenizer_init": False}  # pictures need the model's processor
HOST_ONLY = {"host": {"capacity": "256MiB"}}
LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def documents(model: Path) -> list[list[int]]:
    return windows(model, 10, 300, 900, seed=21)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    with engine(model, None, enable_prefix_caching=False) as process:
        yield Reference(process)


# -- loads that are slow, fail or never end -------------------------------------------------------


class Shelf(NamedTuple):
    """An engine with host memory for a few prompts only. The rest lies in a tier that misbehaves as
    it is told. Each test has a salt of its own."""

    process: EngineProcess
    rules: Path

    def ask(
        self, documents: Sequence[Sequence[int]], salt: str, batch: int = 1
    ) -> list[Generation]:
        return answers(self.process, documents, batch=batch, cache_salt=salt)

    @contextmanager
    def broken(self, *rules: Rule) -> Iterator[None]:
        """The tier has these faults in the block."""
        write_rules(self.rules, *rules)
        try:
            yield
        finally:
            write_rules(self.rules)

    def failures(self) -> float:
        return counted(self.process, "kvcore_failures_total")

    def hits(self) -> float:
        """Tokens that lookups found in the tier."""
        return counted(self.process, "kvcore_lookup_tokens_total", result="hit", tier="shelf")

    def comes_back(self, documents: Sequence[Sequence[int]], salt: str) -> None:
        """Ask until the tier serves again. AssertionError if it never does."""
        limit = time.monotonic() + SETTLE_S
        while not any("shelf" in answer.tiers for answer in self.ask(documents, salt)):
            assert time.monotonic() < limit, "the tier is not used again"
            settle_and_empty(self.process)


@contextmanager
def shelved(model: Path, folder: Path, **kvcore: Any) -> Iterator[Shelf]:
    """An engine with such a tier. Circuit breakers pause for a fraction of a second."""
    rules = folder / "rules"
    write_rules(rules)
    config = {
        "host": {"capacity": "12MiB"},
        "tiers": {
            "shelf": {
                "plugin": FAULTY_MEMORY,
                "capacity": "512MiB",
                "options": {"rules": str(rules)},
            }
        },
        "transfer": {"load_deadline_s": 2.0},
        **kvcore,
    }
    hastens = write_injector(folder / "injector").folder
    found = [write_plugin(folder / "plugin"), hastens, os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(map(str, found))}
    with engine(model, config, path) as process:
        yield Shelf(process, rules)


@pytest.fixture(scope="module")
def shelf(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with shelved(model, tmp_path_factory.mktemp("shelf")) as made:
        yield made


def slow(seconds: float) -> Rule:
    return Rule(Fault.LATENCY, Seam.TIER_READ, seconds=seconds)


@pytest.mark.exhaustive
def test_aborts_while_loads_are_under_way(
    reference: Reference, documents: list[list[int]], shelf: Shelf
) -> None:
    """Each load takes a good part of a second; requests go away at all points of it."""
    process, salt = shelf.process, "aborts"
    before = shelf.hits()
    with shelf.broken(slow(0.15)):
        assert_same_answers(shelf.ask(documents, salt), reference(documents))
        picks = random.Random(4)
        for _ in range(3):
            settle_and_empty(process)
            running = {
                name: process.submit(document, 32, request_id=name, cache_salt=salt)
                for name, document in zip(_names(picks), documents, strict=False)
            }
            for name in picks.sample(list(running), len(running) * 2 // 3):
                time.sleep(picks.uniform(0, 0.1))
                process.abort(name)
            for future in running.values():
                future.result(120)
        settle_and_empty(process)
        got = shelf.ask(documents, salt, batch=4)
        assert_same_answers(got, reference(documents))
        assert sum(answer.tiers.get("shelf", 0) for answer in got) > 0
        assert shelf.hits() > before


def _names(picks: random.Random) -> Iterator[str]:
    while True:
        yield f"{picks.getrandbits(60):x}"


def test_blocks_that_cannot_be_read_are_computed_again(
    reference: Reference, documents: list[list[int]], shelf: Shelf
) -> None:
    before = shelf.failures(), shelf.hits()
    with shelf.broken(Rule(Fault.ERROR, Seam.TIER_READ, rate=1 / 7)):
        for batch in (1, 4, 8):
            assert_same_answers(shelf.ask(documents, "errors", batch), reference(documents))
            settle_and_empty(shelf.process)
    assert shelf.failures() > before[0]
    assert shelf.hits() > before[1]
    shelf.comes_back(documents, "errors")


@pytest.mark.exhaustive
def test_a_slow_tier_is_left_alone_once_its_rates_are_known(
    reference: Reference, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    """Prefill of the tiny model takes milliseconds; every read of the shelf half a second."""
    with (
        shelved(model, tmp_path, planner={"enabled": True}) as shelf,
        shelf.broken(slow(0.5)),
    ):
        for _ in range(3):
            assert_same_answers(shelf.ask(documents, "slow"), reference(documents))
            settle_and_empty(shelf.process)
        assert counted(shelf.process, "kvcore_misses_total", reason="planned") > 0
        assert shelf.hits() > 0


DIES = tuple(Rule(Fault.ERROR, seam, skip=40) for seam in (Seam.TIER_READ, Seam.TIER_WRITE))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(DIES, id="dies", marks=pytest.mark.exhaustive),
        pytest.param((slow(6.0),), id="hangs"),
    ],
)
def test_a_dead_tier_costs_time_not_answers(
    reference: Reference,
    documents: list[list[int]],
    fault: tuple[Rule, ...],
    shelf: Shelf,
) -> None:
    before, salt = shelf.failures(), f"{len(fault)} faults"
    with shelf.broken(*fault):
        for _ in range(3):
            assert_same_answers(shelf.ask(documents, salt, batch=8), reference(documents))
            settle_and_empty(shelf.process)
    assert shelf.failures() > before
    shelf.comes_back(documents, salt)


# -- what the engine does with a request ----------------------------------------------------------


def test_lora_keeps_its_kv_to_itself(
    model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    weights = [tiny_lora(tmp_path / name, model, seed=i) for i, name in enumerate("ab")]
    choices: list[Path | None] = [None, *weights]
    asked = documents[:5]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engine(model, None, enable_prefix_caching=False, **lora) as process:
        expected = {w: answers(process, asked, lora=w) for w in choices}
    kinds = {str([answer.token_ids for answer in expected[w]]) for w in choices}
    assert len(kinds) == len(choices), "the weights change no answer"
    with engine(model, HOST_ONLY, **lora) as process:
        for w in choices:
            cold = answers(process, asked, lora=w)
            assert_same_answers(cold, expected[w])
            assert sum(answer.reused_tokens for answer in cold) == 0, "KV of other weights"
            settle_and_empty(process)
        for w in choices:
            warm = answers(process, asked, lora=w)
            assert_same_answers(warm, expected[w])
            assert all(answer.reused_tokens > 64 for answer in warm)


class Guessing(NamedTuple):
    process: EngineProcess
    control: FaultControl


@contextmanager
def guessing(model: Path, folder: Path, layerwise: bool) -> Iterator[Guessing]:
    """An engine that guesses tokens, with faults where they are asked for."""
    control = write_injector(folder)
    path = os.pathsep.join([str(control.folder), os.environ.get("PYTHONPATH", "")])
    config = {**HOST_ONLY, "vllm": {"layerwise": layerwise}}
    with engine(model, config, {"PYTHONPATH": path}, speculative_config=LOOKUP) as process:
        yield Guessing(process, control)


@pytest.fixture(scope="module")
def lookup(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guessing]:
    with guessing(model, tmp_path_factory.mktemp("lookup"), layerwise=True) as made:
        yield made


@pytest.mark.exhaustive
def test_speculation_by_lookup_is_left_correct(
    model: Path,
) -> None:
    """Tokens that were guessed and not accepted must not be stored as if they were."""
    asked = windows(model, 16, 300, 900, seed=21)[:8]
    with engine(model, None, enable_prefix_caching=False) as process:
        long = Reference(process, max_tokens=80)
        expected = long(asked)
        follow = [[*d, *a.token_ids] for d, a in zip(asked, expected, strict=True)]
        after = long(follow)
    with engine(model, HOST_ONLY, speculative_config=LOOKUP) as process:
        assert_same_answers(answers(process, asked, batch=4, max_tokens=80), expected)
        settle_and_empty(process)
        assert_same_answers(answers(process, asked, batch=4, max_tokens=80), expected)
        settle_and_empty(process)
        got = answers(process, follow, batch=4, max_tokens=80)
        assert_same_answers(got, after)
        assert all(g.reused_tokens > len(d) for g, d in zip(got, asked, strict=True)), (
            "the answers' KV was not reused"
        )
        drafted = counted(process, "vllm:spec_decode_num_draft_tokens_total")
        accepted = counted(process, "vllm:spec_decode_num_accepted_tokens_total")
        assert drafted > accepted, "nothing was guessed wrongly: this shows nothing"


@pytest.mark.exhaustive
def test_a_load_that_fails_under_speculation_is_computed(
    reference: Reference, documents: list[list[int]], lookup: Guessing
) -> None:
    """With speculation vLLM ends a step for the connector after it has asked which loads failed.

    It does not overlap steps then, so the load is part of a step.
    """
    fails_and_is_computed(lookup, reference, documents[:2])


@pytest.mark.exhaustive
def test_a_load_that_fails_before_the_first_layer_under_speculation_is_computed(
    reference: Reference, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    with guessing(model, tmp_path / "plugin", layerwise=False) as made:
        fails_and_is_computed(made, reference, documents[:2])


def fails_and_is_computed(made: Guessing, reference: Reference, asked: list[list[int]]) -> None:
    process, control = made
    ask = partial(answers, process, asked, batch=2, cache_salt="fails")
    fails = Rule(Fault.ERROR, Seam.LOAD)
    assert_same_answers(ask(), reference(asked))
    settle_and_empty(process)
    with control.inject(fails):
        assert_same_answers(ask(), reference(asked))
        assert control.state().strikes(fails)
    settle_and_empty(process)
    warm = ask()
    assert_same_answers(warm, reference(asked))
    assert all(answer.reused_tokens for answer in warm), "what was computed instead was saved"


def test_pictures_are_part_of_a_prompt(tmp_path: Path) -> None:
    """The same tokens around another picture are another prompt."""
    eyes = tiny_vision_model()
    text = [token for token in windows(eyes, 1, 300, 300, seed=5)[0] if token < 49152]
    prompt = [*text[:100], IMAGE, *text[100:]]
    with engine(eyes, HOST_ONLY, **SEES) as process:
        expected = pictures_that_matter(process, prompt, tmp_path)
        settle_and_empty(process)
        for image, right in expected:
            got = answers(process, [prompt], image=image)
            assert_same_answers(got, right)
            assert got[0].reused_tokens < 102, "the KV of another picture"
            settle_and_empty(process)
        for image, right in expected:
            got = answers(process, [prompt], image=image)
            assert_same_answers(got, right)
            assert got[0].reused_tokens > 280
            settle_and_empty(process)


def pictures_that_matter(
    process: EngineProcess, prompt: Sequence[int], folder: Path
) -> list[tuple[Path, list[Generation]]]:
    """Return three pictures, each with an answer of its own, for which no KV is loaded.

    Which ones these are depends on the machine: to a random model, two can look so alike that its
    sums on one machine give them the same tokens.
    """
    found: dict[tuple[int, ...], tuple[Path, list[Generation]]] = {}
    for seed in range(12):
        image = picture(folder / f"{seed}.png", seed)
        answer = answers(process, [prompt], image=image, cache_salt=str(seed))
        assert answer[0].cached_tokens == 0
        found.setdefault(tuple(answer[0].token_ids), (image, answer))
        if len(found) == 3:
            return [*found.values()]
    raise AssertionError(f"12 pictures have {len(found)} answers: they change nothing")


def picture(path: Path, seed: int) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


# -- who listens ----------------------------------------------------------------------------------


LISTEN_S = 60.0


class Listener:
    """The blocks that kvcore's events say are in each medium."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.held: dict[tuple[str, str], set[bytes]] = {}
        self.orphans = 0
        self.stored = 0

    def join(self, process: EngineProcess, model: Path) -> None:
        """Have the engine tell something until it is heard, then forget it all on both sides."""
        for seed in range(100, 160):
            answers(process, windows(model, 1, 70, 70, seed=seed))
            self._take_some(500)
            if self.stored:
                break
        settle_and_empty(process)
        process.reset_prefix_cache(connector=True)
        answers(process, windows(model, 1, 70, 70, seed=99))  # a step that publishes it
        self.take(lambda: sum(map(len, self.held.values())) < 16)
        self.orphans = 0

    def take(self, wanted: Callable[[], bool]) -> None:
        """Hear until it is so; AssertionError where it does not come to that."""
        limit = time.monotonic() + LISTEN_S
        while not wanted():
            assert time.monotonic() < limit, {at: len(keys) for at, keys in self.held.items()}
            self._take_some(100)

    def _take_some(self, milliseconds: int) -> None:
        while self._socket.poll(milliseconds):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event.get("ownership"):
                    self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        held = self.held.setdefault((event["medium"], event["ownership"]), set())
        if event["type"] == "BlockRemoved":
            held.difference_update(event["block_hashes"])
            return
        parent = event["parent_block_hash"]
        self.orphans += parent is not None and parent not in held
        self.stored += len(event["block_hashes"])
        held.update(event["block_hashes"])

    def close(self) -> None:
        self._socket.close(0)


def test_events_tell_what_each_tier_holds(
    model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    kvcore = {
        "host": {"capacity": "12MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"},
        "vllm": {"keep_on_reset": False},
    }
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with engine(model, kvcore, kv_events_config=events) as process:
        process.wait_ready()
        listener = Listener(endpoint)
        listener.join(process, model)
        answers(process, documents)
        answers(process, documents[:1])
        settle_and_empty(process)
        last = windows(model, 1, 70, 70, seed=77)
        answers(process, last)  # a step that publishes the last ones

        def agrees(medium: str, tier: str) -> bool:
            used = counted(process, "kvcore_tier_used_bytes", tier=tier)
            return len(listener.held.get((medium, tier), ())) * BLOCK_NBYTES == used

        def all_told() -> bool:
            if agrees("CPU", "host") and agrees("STORAGE", "disk"):
                return True
            answers(process, last)  # an idle engine does not wait for a disk that stands still
            return False

        listener.take(all_told)
        assert listener.stored > len(listener.held["CPU", "host"]), "nothing was evicted"
        assert listener.orphans == 0
        process.reset_prefix_cache(connector=True)
        answers(process, windows(model, 1, 70, 70, seed=78))
        listener.take(lambda: sum(map(len, listener.held.values())) < 16)  # the reset
        listener.close()


def test_a_reset_is_for_this_engine_and_for_good(
    reference: Reference, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    """Weights may have been changed in place. This engine finds nothing of before. One that starts
    from the files again finds what they computed, and nothing that was kept since."""
    kvcore = {
        "host": {"capacity": "256MiB"},
        "disk": {"path": str(tmp_path / "kv"), "capacity": "256MiB"},
    }
    before, since = documents[:2], documents[2:4]
    with engine(model, kvcore) as process:
        assert_same_answers(answers(process, before), reference(before))
        time.sleep(0.5)
        process.reset_prefix_cache(connector=True)
        forgotten = answers(process, [*before, *since])
        assert_same_answers(forgotten, reference([*before, *since]))
        assert sum(answer.reused_tokens for answer in forgotten) == 0
        settle_and_empty(process)
        again = answers(process, since)
        assert_same_answers(again, reference(since))
        assert all(answer.reused_tokens > 64 for answer in again), "this engine keeps nothing more"
    with engine(model, kvcore) as process:
        got = answers(process, [*since, *before])
        assert_same_answers(got, reference([*since, *before]))
        assert [answer.reused_tokens > 0 for answer in got] == [False, False, True, True]


# -- as a user starts it --------------------------------------------------------------------------

SETTINGS = ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager"]


@pytest.mark.exhaustive
def test_as_a_user_serves_it(
    reference: Reference, model: Path, documents: list[list[int]], tmp_path: Path
) -> None:
    """`kvcore serve` runs `vllm serve`, which test_vllm_readme.py runs by README.md's own lines."""
    port, log, file = free_port(), tmp_path / "log", tmp_path / "kvcore.toml"
    file.write_text(
        f'engine = "vllm"\n[host]\ncapacity = "256MiB"\n[disk]\npath = "{tmp_path}/kv"\n'
    )
    command = [str(Path(sys.executable).with_name("kvcore")), "serve", str(model), "-c", str(file)]
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    env = {**SPACE, "VLLM_SERVER_DEV_MODE": "1"}
    asked = documents[:3]
    with served([*command, "--", *listen, *SETTINGS], port, log, env) as address:
        for turn in range(2):
            for document, right in zip(asked, reference(asked), strict=True):
                body = {
                    "model": str(model),
                    "prompt": document,
                    "max_tokens": ANSWER,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
                answer = post(address, "/v1/completions", body)
                assert answer["choices"][0]["token_ids"] == right.token_ids
            time.sleep(0.5)
            post(address, "/reset_prefix_cache")
            if turn == 0:
                assert metric(address, "kvcore_hits_total") == 0
        assert metric(address, "kvcore_hits_total") == len(asked)
        # before it is stopped: vLLM's front end may log a traceback of its own then
        assert "Traceback" not in log.read_text()
