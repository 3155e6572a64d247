"""SGLang's leader and worker, without the engine: what was computed comes back."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvcore.connector.worker import ATTEMPTS  # noqa: E402
from kvcore.errors import UnsupportedError  # noqa: E402
from kvcore.index.slots import SlotRun  # noqa: E402
from kvcore.telemetry.metrics import Data  # noqa: E402
from kvcore.transfer.graph import TransferGraph  # noqa: E402
from kvcore_sglang.describe import _check_components  # noqa: E402  (needs torch)
from kvcore_sglang.fusion_scheduler import Asking  # noqa: E402
from kvcore_sglang.layout import read_pool  # noqa: E402
from kvcore_sglang.messages import Order  # noqa: E402
from support.pairs import paired  # noqa: E402
from support.sglang import (  # noqa: E402
    DIM,
    HEADS,
    LAYERS,
    POOLS,
    SETTINGS,
    MHATokenToKVPool,
    SGLangRig,
    text,
)


@pytest.mark.parametrize(
    ("kind", "page", "block", "layerwise"),
    paired(POOLS, [1, 16, 64], [8, 16, 64], [True, False]),
)
def test_what_was_computed_comes_back(
    rigs: list[SGLangRig], kind: str, page: int, block: int, layerwise: bool
) -> None:
    settings = {**SETTINGS, "block": {"tokens": block}, "sglang": {"layerwise": layerwise}}
    rig = SGLangRig(POOLS[kind](page), page, settings)
    rigs.append(rig)
    for seed, length in enumerate([300, 64, 77, 512]):
        tokens = text(length, seed)
        assert rig.lookup("before", tokens) == 0
        assert rig.keep(tokens)
        assert not rig.keep(tokens), "saved twice"
        whole = length // page * page // block * block // page * page
        for device in {0, 128 // page * page, 64}:
            wanted = whole - device
            gain = rig.lookup(f"r{seed}-{device}", tokens, device)
            assert gain == (wanted if wanted >= max(64, page) else 0)
            if gain:
                assert rig.load(f"r{seed}-{device}", tokens, device, gain)


@pytest.mark.parametrize("page", [1, 16])
def test_a_prefix_is_found_and_a_like_text_is_not(rigs: list[SGLangRig], page: int) -> None:
    rig = SGLangRig(MHATokenToKVPool(page), page, SETTINGS)
    rigs.append(rig)
    tokens = text(400, 1)
    rig.keep(tokens)
    branch = [*tokens[:200], *text(200, 2)]
    gain = rig.lookup("branch", branch)
    assert gain == 192
    assert rig.load("branch", branch, 0, gain)
    assert rig.lookup("other", tokens[1:]) == 0
    other = rig.leader.namespaces.of("", "tenant")
    assert rig.leader.lookup("tenant", np.array(tokens), 0, other) == 0


def test_a_name_that_comes_again_with_another_prompt_finds_that_prompts_kv(
    rigs: list[SGLangRig],
) -> None:
    """Clients choose requests' names: as long a prompt under a name is not the same prompt."""
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    first, second = text(320, 20), text(320, 21)
    assert rig.lookup("job", first) == 0
    rig.keep(first)
    assert rig.lookup("job", second) == 0, "the first prompt's KV was found for the second"
    rig.keep(second)
    gain = rig.lookup("job", second)
    assert gain == 320
    assert rig.load("job", second, 0, gain)


def test_a_request_that_was_answered_in_part_is_known_until_it_is_loaded(
    rigs: list[SGLangRig],
) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(320, 22)
    rig.keep(tokens)
    assert not rig.leader.is_resumed("unknown")
    for resumed in (True, False):
        gain = rig.leader.lookup("r", np.array(tokens), 0, rig.namespace, resumed=resumed)
        assert rig.leader.is_resumed("r") is resumed
    assert rig.load("r", tokens, 0, gain)
    assert not rig.leader.is_resumed("r")


def test_what_another_host_put_into_a_store_is_found(rigs: list[SGLangRig]) -> None:
    options = {"name": uuid.uuid4().hex, "lookup_s": 60}
    far = {"plugin": "memory-store", "capacity": "4MiB", "options": options}
    waits = {"prefetch": "wait", "prefetch_timeout_s": 60}
    tokens = text(500, 4)
    one, other = (
        SGLangRig(
            MHATokenToKVPool(page), page, {**SETTINGS, "tiers": {"far": far}, "sglang": waits}
        )
        for page in (16, 1)
    )
    rigs.extend([one, other])
    one.keep(tokens)
    gain = other.lookup("there", tokens)
    assert gain == 496
    assert other.load("there", tokens, 0, gain)
    assert other.leader.state["requests"]["there"] == {"far": 496}


def test_what_left_host_memory_since_the_lookup_is_refused(rigs: list[SGLangRig]) -> None:
    settings = {"host": {"capacity": "320KiB", "huge_pages": False}}
    rig = SGLangRig(MHATokenToKVPool(1), 1, settings)
    rigs.append(rig)
    tokens = text(400, 5)
    rig.keep(tokens)
    gain = rig.lookup("late", tokens)
    assert gain > 0
    for seed in range(10, 30):
        rig.keep(text(400, seed))
    assert not rig.load("late", tokens, 0, gain)
    assert rig.leader.load("unknown", rig.slots(64)).empty
    assert rig.leader.manager.in_flight == 0


def test_a_load_that_is_dropped_leaves_nothing(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(400, 6)
    rig.keep(tokens)
    gain = rig.lookup("gone", tokens)
    order = rig.leader.load("gone", rig.slots(gain))
    assert order.graphs
    rig.leader.drop("gone", order)
    assert rig.leader.manager.in_flight == 0
    rig.leader.check_integrity()
    assert "gone" not in rig.leader.state["requests"]
    assert not rig.leader._loading
    misses = rig.leader.metrics.snapshot()["kvcore_misses_total"]
    assert misses["load_failed"] == 1, "its tokens were not reused"


def test_no_more_requests_are_remembered_than_a_few(
    rigs: list[SGLangRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that runs for months names new ones all the time."""
    monkeypatch.setattr("kvcore_sglang.leader.ASKED_KEPT", 3)
    monkeypatch.setattr("kvcore_sglang.leader.SERVED_KEPT", 3)
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(320, 23)
    rig.keep(tokens)
    names = [f"r{number}" for number in range(8)]
    for name in names:
        assert rig.load(name, tokens, 0, rig.lookup(name, tokens))
    assert list(rig.leader.state["requests"]) == names[-3:]
    for name in names:
        assert rig.lookup(name, tokens) == 320
    loaded = [name for name in names if rig.load(name, tokens, 0, 320)]
    assert loaded == names[-3:], "the other lookups are forgotten"
    rig.leader.refuse(names)
    refused = [name for name in names if not rig.lookup(name, tokens)]
    assert refused == names[-3:]


def test_what_clients_reused_is_shown_only_if_the_setting_says_so(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "sglang": {"list_requests": False}})
    rigs.append(rig)
    tokens = text(320, 24)
    rig.keep(tokens)
    assert rig.load("private", tokens, 0, rig.lookup("private", tokens))
    assert set(rig.leader.state) == {"aside", "in_flight", "metrics"}
    assert "private" not in str(rig.leader.state)


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_told_what_was_counted_until_that_fails(
    rigs: list[SGLangRig], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr("kvcore_sglang.leader.PUBLISH_S", 0.0)
    told: list[float] = []

    def publish(counted: Data) -> None:
        told.append(sum(counted.get("kvcore_misses_total", {}).values()))
        if fails:
            raise OSError("injected")

    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS, publish=publish)
    rigs.append(rig)
    for number in range(3):
        assert rig.lookup(f"unknown {number}", text(320, 30 + number)) == 0
    rig.leader.done_offers()  # any call of the engine's tells what the one before counted
    assert len(told) == 1 if fails else sum(told) == 3
    assert sum(rig.leader.metrics.snapshot()["kvcore_misses_total"].values()) == 3
    assert not rig.leader.disabled


@pytest.mark.parametrize("failures", [1, ATTEMPTS - 1, ATTEMPTS])
def test_a_copy_that_fails_is_tried_again(
    rigs: list[SGLangRig], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "sglang": {"layerwise": False}})
    rigs.append(rig)
    tokens = text(400, 7)
    rig.keep(tokens)
    ops, left = rig.engine.ops, [failures]
    copy = ops.copy_blocks

    def failing(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("injected")
        copy(*args, **kwargs)

    monkeypatch.setattr(type(ops), "copy_blocks", lambda self, *a, **k: failing(*a, **k))
    if failures < ATTEMPTS:
        assert rig.load("retried", tokens, 0, rig.lookup("retried", tokens))
        return
    gain = rig.lookup("failed", tokens)
    [graph] = rig.leader.load("failed", rig.slots(gain)).graphs
    rig.worker.start_loads([graph])
    assert not rig.worker.finish([graph.graph_id])
    rig.leader.refuse(["failed"])
    rig.settle()
    assert rig.lookup("failed", tokens) == 0, "it would fail for ever"
    rig.leader.ended("failed", "done")
    assert rig.lookup("failed", tokens) == gain, "another request of that name"
    assert rig.lookup("another", tokens) == gain


def test_everything_is_forgotten_for_good(rigs: list[SGLangRig], tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "disk": disk})
    rigs.append(rig)
    tokens = text(400, 8)
    rig.keep(tokens)
    old = rig.namespace
    rig.leader.clear()
    assert rig.lookup("forgotten", tokens) == 0
    rig.namespace = rig.leader.namespaces.of("", None)
    assert rig.namespace.digest != old.digest, "what comes now must not be found after a restart"
    rig.keep(tokens)
    assert rig.lookup("new", tokens) == 400


def test_new_weights_find_nothing_of_old_ones(rigs: list[SGLangRig], tmp_path: Path) -> None:
    """Nor does a request that was looked up before. The tiers keep what they have."""
    disk = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "disk": disk})
    rigs.append(rig)
    tokens = text(400, 9)
    rig.keep(tokens)
    held = rig.leader.manager.index.num_used("host")
    gain = rig.lookup("waits", tokens)
    rig.leader.renew()
    assert not rig.load("waits", tokens, 0, gain)
    rig.namespace = rig.leader.namespaces.of("", None)
    assert rig.lookup("waits", tokens) == 0
    assert rig.leader.manager.index.num_used("host") == held > 0
    rig.keep(tokens)
    assert rig.lookup("new", tokens) == 400


def test_offers_end_in_order_and_only_with_their_copies(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(1), 1, SETTINGS)
    rigs.append(rig)
    tokens = text(320, 9)
    slots = rig.slots(320)
    rig.compute(tokens, slots)
    first, second = rig.leader.offer(), rig.leader.offer()
    assert rig.leader.done_offers() == 0, "its insert has not ended"
    order = rig.leader.inserted(np.array(tokens), rig.namespace, slots, [first, second])
    assert rig.leader.done_offers() == 0, "its save has not started"
    rig.leader.check_integrity()
    rig.worker.carry_out(order)
    rig.settle()
    assert rig.leader.done_offers() == 2


def test_orders_survive_the_line() -> None:
    from kvcore_sglang import messages

    graph = TransferGraph(1, 1, b"n" * 16, b"p" * 16, (b"k" * 16,), (3,), (-1,), (), ())  # type: ignore[arg-type]
    order = Order({"disk": {"a": 1}}, [("disk", [SlotRun(1, 3)])], [7], now=True, graphs=[graph])
    assert messages.ORDERS.decode(messages.ORDERS.encode(order)) == order
    assert not order.empty
    assert Order().empty


# --- pools that are not served -------------------------------------------------------------------


def pool(**changes: Any) -> Any:
    made = MHATokenToKVPool(16)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (SimpleNamespace(), "of type SimpleNamespace"),
        (pool(kv_cache_layout="hnd"), "laid out as 'hnd'"),
        (pool(dtype=torch.float8_e4m3fn, store_dtype=torch.uint8), "its scales"),
        (pool(use_dsa=True), "sparse"),
        (pool(k_buffer=[], v_buffer=[]), "without a KV cache"),
        (pool(k_buffer=[torch.zeros(30, HEADS, DIM)] * LAYERS), "whole pages of 16"),
        (pool(dtype=torch.bfloat16, store_dtype=torch.bfloat16), "expects bfloat16"),
    ],
)
def test_a_pool_that_cannot_be_copied_is_named(made: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_pool(made, 16)


def test_k_and_v_of_unlike_width(rigs: list[SGLangRig]) -> None:
    rig = SGLangRig(MHATokenToKVPool(16, v_dim=8), 16, SETTINGS)
    rigs.append(rig)
    tokens = text(300, 11)
    rig.keep(tokens)
    assert rig.load("wide", tokens, 0, rig.lookup("wide", tokens))


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("fail", [False, True])
def test_chunks_land_behind_an_exact_prefix(
    rigs: list[SGLangRig], monkeypatch: pytest.MonkeyPatch, page: int, fail: bool
) -> None:
    """The prefix and the chunks go to the request's slots, each with the KV it was stored with; a
    chunk that fails to land is told."""
    rig = SGLangRig(MHATokenToKVPool(page), page, {**SETTINGS, "fusion": {"enabled": True}})
    rigs.append(rig)
    opening, *chunks = (text(256, seed) for seed in (1, 2, 3))
    for stored in (opening, *chunks):
        assert rig.keep(stored)
    prompt = [*opening, *text(30, 4), *chunks[1][5:205], *text(7, 5), *chunks[0], *text(9, 6)]
    asking = Asking(np.array(prompt))
    gain = rig.leader.lookup("one", np.array(prompt[:-1]), 64, rig.namespace, asking)
    stop = 64 + gain
    assert stop % page == 0
    assert stop > len(prompt) - 9 - page
    slots = rig.slots(gain)
    order = rig.leader.load("one", slots)
    [graph], [blend] = order.graphs, order.blends
    assert (blend.exact, blend.stop, len(blend.chunks)) == (256, stop, 2)
    if fail:
        submit = rig.engine.submit

        def failing(graph: TransferGraph, *more: Any, **named: Any) -> Any:
            if graph.graph_id in {chunk.graph.graph_id for chunk in blend.chunks}:
                monkeypatch.setattr(
                    type(rig.engine.ops), "copy_blocks", lambda *a, **k: 1 / 0, raising=True
                )
            return submit(graph, *more, **named)

        monkeypatch.setattr(rig.engine, "submit", failing)
    whole = np.concatenate([np.zeros(64, dtype=np.int64), slots])
    blend.pages = (whole[::page] // page).tolist()
    rig.worker.start_loads([graph])
    assert rig.worker.finish([graph.graph_id])
    rig.check(prompt, 64, slots[: 256 - 64], 0)
    assert rig.worker.blend(order.blends, lambda layer: None) is not fail
    rig.settle()
    assert ("error" in rig.leader.state["fusion"]["one"]) is fail
    assert rig.leader.manager.in_flight == 0
    if fail:
        return
    for chunk, source in zip(blend.chunks, (chunks[1], chunks[0]), strict=True):
        here = prompt[chunk.position : chunk.position + chunk.length]
        start = chunk.position - chunk.distance
        assert here == source[start : start + chunk.length]
        for i in range(2 * LAYERS):
            there = whole[chunk.position :][: chunk.length]
            got = rig.pool.buffers[i][torch.from_numpy(there)]
            assert torch.equal(got, rig.expected(source, i)[start : start + chunk.length])


@pytest.mark.parametrize("other", ["SWA", "MAMBA"])
def test_a_model_with_a_pool_beside_its_kv_is_not_served(other: str) -> None:
    full, more = SimpleNamespace(name="FULL"), SimpleNamespace(name=other)
    _check_components([full])
    with pytest.raises(UnsupportedError, match=f"FULL, {other} components"):
        _check_components([full, more])


def test_a_name_that_comes_again_with_other_wishes_gets_those(rigs: list[SGLangRig]) -> None:
    """Who asks for exact KV is not blended because the one before him of that name wished it: that
    one was looked up, and gone before it was loaded."""
    rig = SGLangRig(MHATokenToKVPool(1), 1, {**SETTINGS, "fusion": {"enabled": True}})
    rigs.append(rig)
    opening, chunk = text(256, 1), text(256, 2)
    for stored in (opening, chunk):
        assert rig.keep(stored)
    prompt = [*opening, *text(30, 4), *chunk, *text(9, 6)]
    tokens = np.array(prompt[:-1])

    def gain(**wishes: Any) -> int:
        asking = Asking(np.array(prompt), wishes or None)
        return rig.leader.lookup("job", tokens, 0, rig.namespace, asking)

    assert gain() > 256
    assert gain(fusion={"enabled": False}) == 256
    order = rig.leader.load("job", rig.slots(256))
    assert not order.blends
    rig.leader.drop("job", order)
    assert gain(fusion={"enabled": False}) == 256
    assert gain() > 256
