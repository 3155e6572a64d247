"""Fusion behind a server: a chunk that one engine computed another blends, and approximate KV never
becomes exact in either."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from kvcore.config import Config
from kvcore.fusion.options import FusionOptions
from kvcore.fusion.segments import Segments
from kvcore.model.keys import KEY_BYTES, KeyChain, Namespace
from kvcore.server import messages as m
from kvcore.server.segments import LEAD_TOKENS, RemoteSegments, learn, search
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import RunningServer, blocking_requests, serve, settings, words

Start = Callable[[Config], RunningServer]
FUSION = {"fusion": {"enabled": True}}
CHUNKS = [words(seed, 96) for seed in range(2)]
PROMPT = words(9, 20) + CHUNKS[0] + words(10, 12) + CHUNKS[1] + words(11, 9)
ANSWER = 6


def blend(engine: Any, ratio: float) -> tuple[list[int], dict[str, int]]:
    """The answer with fusion, and what was reused; the engine's own cache is empty before."""
    engine.forget()
    request = engine.submit(PROMPT, ANSWER, fusion=FusionOptions(ratio=ratio))
    engine.run()
    engine.settle()
    return request.answer, request.reused


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_chunk_that_one_engine_computed_is_blended_by_the_other(
    start: Start, engine: Any, plain: Any, folder: Path, ranks: tuple[int, int]
) -> None:
    config = settings(folder, **FUSION)
    server = start(config)
    first, second = (engine(config, ranks=count) for count in ranks)
    for chunk in CHUNKS:
        serve(first, chunk)
    until(lambda: server.idle)
    answer, reused = blend(second, 1.0)
    assert answer == plain(PROMPT), "every row is computed: it is the exact answer"
    assert reused["blend"] >= 180
    answer, reused = blend(second, 0.0)
    assert answer != plain(PROMPT), "no row is computed: the chunks are the other engine's"
    assert reused["blend"] >= 180
    exact, reused = serve(first, PROMPT)
    assert exact == plain(PROMPT)
    assert sum(reused.values()) <= 16, "nobody takes the blend's KV for exact"
    assert serve(second, PROMPT)[0] == plain(PROMPT)


def test_what_is_found_outlives_the_server_as_its_disk_does(
    start: Start, engine: Any, plain: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    disk = {"path": str(tmp_path / "disk"), "capacity": "16MiB"}
    config = settings(folder, disk=disk, **FUSION)
    server = start(config)
    first = engine(config)
    for chunk in CHUNKS:
        serve(first, chunk)
    until(lambda: server.idle)
    server.close()
    server = start(config)
    answer, reused = blend(engine(config), 1.0)
    assert answer == plain(PROMPT)
    assert reused["blend"] >= 180


def test_what_is_cleared_is_found_no_more(
    start: Start, engine: Any, plain: Any, folder: Path
) -> None:
    config = settings(folder, **FUSION)
    server = start(config)
    first, second = engine(config), engine(config)
    for chunk in CHUNKS:
        serve(first, chunk)
    until(lambda: server.idle)
    second.leader.clear()
    assert blend(first, 0.0) == (plain(PROMPT), {})


def test_a_server_that_keeps_no_tokens_is_named_once(
    start: Start, engine: Any, plain: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(settings(folder))
    serving = engine(settings(folder, **FUSION))
    for chunk in CHUNKS:
        serve(serving, chunk)
    until(lambda: server.idle)
    assert blend(serving, 0.0) == (plain(PROMPT), {})
    assert caplog.text.count("set fusion.enabled for the server too") == 1


def test_marked_chunks_are_matched_without_tokens(start: Start, engine: Any, folder: Path) -> None:
    server = start(settings(folder))
    serving = engine(settings(folder, **FUSION))
    serve(serving, CHUNKS[0])
    until(lambda: server.idle)
    wishes = FusionOptions(ratio=0.0, chunks=((20, 116),))
    request = serving.submit(PROMPT, ANSWER, fusion=wishes)
    serving.run()
    assert request.reused["blend"] >= 90


def test_a_chunk_costs_few_questions(start: Start, engine: Any, plain: Any, folder: Path) -> None:
    """Each is a trip to the server and back in the scheduler's time."""
    config = settings(folder, **FUSION)
    server = start(config)
    serving = engine(config)
    for chunk in CHUNKS:
        serve(serving, chunk)
    until(lambda: server.idle)
    asked = blocking_requests(serving.leader.manager.keeper)
    request = serving.submit(PROMPT, 1, fusion=FusionOptions(ratio=0.0))
    serving.run()
    assert request.reused["blend"] >= 180
    trails = [each for each in asked if isinstance(each, m.PathRequest)]
    assert len(trails) <= 2 * len(CHUNKS), "whether it is held, and the chain of its last block"
    matches = [each for each in asked if isinstance(each, m.MatchRequest)]
    assert len(matches) <= 2 + 3 * len(CHUNKS), [type(each).__name__ for each in asked]


def test_a_server_that_dies_between_finding_and_loading_costs_a_blend(
    start: Start, engine: Any, plain: Any, folder: Path
) -> None:
    config = settings(folder, server={"deadline_s": 1.0}, **FUSION)
    server = start(config)
    serving = engine(config)
    for chunk in CHUNKS:
        serve(serving, chunk)
    until(lambda: server.idle)
    chunks = serving.leader._fusion.chunks
    plan = chunks.in_host

    def then_the_end(*given: Any) -> Any:
        found = plan(*given)
        server.close()
        return found

    chunks.in_host = then_the_end
    answer, _ = blend(serving, 1.0)
    assert answer == plain(PROMPT)


# -- the same as segments of one's own --------------------------------------------------------

SPACE = Namespace("model")
TEXT = [words(seed, 700) for seed in range(2)]


class _Line:
    """A keeper whose questions are answered at once, after a trip through bytes."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._refs = itertools.count(1)
        self.member = SimpleNamespace(number=7, welcome=SimpleNamespace(keeps_tokens=True))
        self.link = self

    def ref(self) -> int:
        return next(self._refs)

    def tell(self, request: m.LearnTokens) -> None:
        told = m.decode_request(m.frames(request))
        assert isinstance(told, m.LearnTokens)
        learn(self._segments, told)

    def ask(self, request: m.SearchRequest, kind: type) -> Any:
        asked = m.decode_request(m.frames(request))
        assert isinstance(asked, m.SearchRequest)
        return m.decode_reply(m.frames(search(self._segments, asked, lambda key: True)))


def grown(segments: Any, prompt: Sequence[int], stops: Sequence[int]) -> None:
    """Learn a prompt piece by piece, as an engine that decodes does."""
    chain = KeyChain(SPACE, 16)
    chain.extend(prompt)
    before = 0
    for stop in sorted(stops):
        segments.add(SPACE.digest, chain.keys[:stop], before, prompt[: stop * 16])
        before = stop


@given(
    st.lists(st.integers(1, 43), min_size=1, max_size=6),
    st.integers(0, 600),
    st.integers(64, 300),
    st.integers(0, 40),
)
@budget(max_examples=60)
def test_a_servers_segments_find_what_ones_own_do(
    stops: list[int], begin: int, length: int, lead: int
) -> None:
    own, served = (Segments(16, min_tokens=64) for _ in range(2))
    remote = RemoteSegments(_Line(served), 16)  # type: ignore[arg-type]
    for segments in (own, remote):
        for text in TEXT:
            grown(segments, text, stops)
    served.check_integrity()
    prompt = words(5, lead) + TEXT[0][begin : begin + length] + words(6, 3)
    everything: Callable[[bytes], bool] = lambda key: True  # noqa: E731
    for start in (0, 5):
        found = remote.find(SPACE.digest, prompt, everything, start)
        assert found == own.find(SPACE.digest, prompt, everything, start)


def test_little_of_a_long_prompt_is_sent_for_a_block_more() -> None:
    sent: list[m.LearnTokens] = []
    line = _Line(Segments(16))
    line.tell = sent.append  # type: ignore[method-assign, assignment]
    remote = RemoteSegments(line, 16)  # type: ignore[arg-type]
    keys = [bytes([i % 256, i // 256]) * (KEY_BYTES // 2) for i in range(1000)]
    remote.add(b"n" * KEY_BYTES, keys, 999, list(range(16_000)))
    [told] = sent
    assert (told.first, told.start) == (999 - LEAD_TOKENS // 16, LEAD_TOKENS // 16)
    assert len(told.tokens) == 4 * (LEAD_TOKENS + 16)
