"""Operators' orders over a server's model, without sockets: bytes move, and others keep theirs."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from kvcore.admin import commands as o
from kvcore.admin.audit import AuditLog
from kvcore.admin.jobs import SILENT_S
from kvcore.errors import CapacityError, ConfigError, KVCoreError, TierUnavailable, UnsupportedError
from kvcore.manager import HOST
from kvcore.model.keys import KeyChain, pack_tokens
from kvcore.model.shape import BlockShape
from kvcore.server import messages as m
from kvcore.server.model_cache import ModelCache
from kvcore.server.runtime_dir import RuntimeDir
from kvcore.testing.waiting import PATIENCE_S, until
from kvcore.transfer.graph import OpReport
from kvcore_devtools.server_fixture import settings, words
from support.clock import Clock

SHAPE = BlockShape(2, 2, 8, 16, "float32")
BLOCK = SHAPE.nbytes
WHO = "uid 1000 pid 42"
SESSION = 5
Open = Callable[..., ModelCache]


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def opened(folder: Path, tmp_path: Path, audit: Path) -> Iterator[Open]:
    """Opens one model's space, with two tenants, one after the other over the same disk."""
    made: list[tuple[ModelCache, RuntimeDir, AuditLog]] = []

    def close() -> None:
        space, held, log = made.pop()
        space.check_integrity()
        space.close()
        held.close()
        log.close()

    def begin(host: str = "64KiB", quota: dict[str, str] | None = None, **disk: Any) -> ModelCache:
        if made:
            close()
        tenants = {"ann": {"salt": "a", "quota": quota or {}}, "bob": {"salt": "b"}}
        at = {"path": str(tmp_path / "disk"), "capacity": "1MiB"} | disk
        config = settings(folder, host={"capacity": host}, disk=at, tenants=tenants)
        held, log = RuntimeDir(folder), AuditLog(str(audit))
        space = ModelCache(config, m.Model.of(SHAPE, b"fingerprint"), held, "arena-1", log)
        made.append((space, held, log))
        return space

    yield begin
    if made:
        close()


def chain(space: ModelCache, tenant: str, tokens: Sequence[int]) -> list[bytes]:
    return KeyChain(space.admin.tenants.spaces(tenant)[0], 16).extend(tokens)


def ticking(space: ModelCache, what: Callable[[], Any]) -> None:
    def tick() -> Any:
        space.tick()
        return what()

    until(tick)


def save(space: ModelCache, tenant: str, tokens: Sequence[int]) -> list[bytes]:
    """What a session does: a block's bytes are its key, over and over."""
    keys = chain(space, tenant, tokens)
    digest = space.admin.tenants.spaces(tenant)[0].digest
    graph = space.save(m.SaveRequest(1, SESSION, m.join(keys), digest), 1).graph
    if graph is not None:
        for key, slot in zip(graph.keys, graph.host_slots, strict=True):
            for buffer in space._transport.worker.arena.slot_buffers(slot):
                buffer[:] = (key * (len(buffer) // 16 + 1))[: len(buffer)]
        space.ops_ended(SESSION, [OpReport(graph.graph_id, op.op_id) for op in graph.ops])
    ticking(space, lambda: not space.background)
    return keys


def assert_in_host(space: ModelCache, keys: Sequence[bytes]) -> None:
    """Every block is in host memory, and its bytes are its own."""
    slots = space.manager.index.slots(HOST, keys, 0, len(keys))
    for key, slot in zip(keys, slots.tolist(), strict=True):
        for buffer in space._transport.worker.arena.slot_buffers(slot):
            assert bytes(buffer[:32]) == key * 2, "other bytes"


def order(space: ModelCache, wanted: Any) -> dict[str, Any]:
    """What comes of an order. Raises what it is refused with."""
    told: list[Any] = []
    space.admin.begin(wanted, WHO, told.append)
    ticking(space, lambda: told)
    [answer] = told
    if isinstance(answer, KVCoreError):
        raise answer
    found: dict[str, Any] = answer
    return found


def depths(space: ModelCache, keys: Sequence[bytes]) -> tuple[int, ...]:
    return space.manager.index.match(keys).depths


def lines(audit: Path) -> list[dict[str, Any]]:
    """How orders ended."""
    found = [json.loads(line) for line in audit.read_text().splitlines()]
    return [line for line in found if line["state"] != "begun"]


def test_prefetch_brings_a_tenants_bytes_from_disk_and_nobody_elses(
    opened: Open, audit: Path
) -> None:
    space = opened()
    ann, bob = save(space, "ann", words(1, 80)), save(space, "bob", words(2, 80))
    space.manager.index.evictions.evict(HOST, 100)
    told = order(space, o.PrefetchBlocks(o.BlockFilter(tenant="ann")))
    assert told == {"blocks": 5, "bytes": 5 * BLOCK, "prompts": 1, "kept": 0, "failed": 0}
    assert (depths(space, ann), depths(space, bob)) == ((5, 5), (0, 5))
    assert_in_host(space, ann)
    assert order(space, o.PrefetchBlocks(o.BlockFilter(tenant="ann")))["blocks"] == 0
    [first, _] = lines(audit)
    assert first.pop("at").endswith("Z")
    assert first == {"who": WHO, "order": "prefetch", "state": "done", "tenant": "ann"} | told


def test_a_prompt_moves_to_disk_and_back_and_is_gone_where_it_was(opened: Open) -> None:
    """With a disk that takes nothing by itself."""
    space = opened(write="selective", admit_after=255)
    prompt = words(1, 80)
    ann = save(space, "ann", prompt)
    longer = save(space, "ann", [*prompt[:48], *words(3, 48)])
    where = o.BlockFilter(salt="a", tokens=pack_tokens(prompt), tier=HOST)
    told = order(space, o.MoveBlocks(where, "disk"))
    assert (told["blocks"], told["kept"], told["failed"]) == (5, 3, 0)
    assert (depths(space, ann), depths(space, longer)) == ((3, 5), (6, 3)), "3 are both prompts'"
    for keys in (ann, longer):
        assert_in_host(space, keys[: depths(space, keys)[0]])
    back = order(space, o.MoveBlocks(o.BlockFilter(tier="disk"), HOST))
    assert (back["blocks"], back["kept"]) == (2, 0)
    assert (depths(space, ann), depths(space, longer)) == ((5, 0), (6, 0))
    assert_in_host(space, ann)
    assert depths(opened(), ann) == (0, 0), "a restart found what was moved away"


def test_a_move_that_the_disk_has_no_room_for_leaves_all_where_it_was(opened: Open) -> None:
    space = opened(write="selective", admit_after=255)
    order(space, o.SetQuota("ann", "disk", str(2 * BLOCK)))
    ann = save(space, "ann", words(1, 80))
    told = order(space, o.MoveBlocks(o.BlockFilter(tenant="ann", tier=HOST), "disk"))
    assert (told["blocks"], told["kept"], told["failed"]) == (2, 5, 1)
    assert depths(space, ann) == (5, 2)


def test_clearing_one_tenant_leaves_the_others_hits(opened: Open, audit: Path) -> None:
    space = opened()
    ann, bob = save(space, "ann", words(1, 80)), save(space, "bob", words(1, 80))
    assert order(space, o.ClearBlocks(o.BlockFilter(tenant="ann")))["blocks"] == 10
    assert (depths(space, ann), depths(space, bob)) == ((0, 0), (5, 5))
    again = opened()
    assert (depths(again, ann), depths(again, bob)) == ((0, 0), (0, 5)), "after a restart"
    assert [line["order"] for line in lines(audit)] == ["clear"]


def test_a_prompt_is_cleared_with_what_stands_on_it_but_not_what_it_shares(opened: Open) -> None:
    space = opened()
    prompt = words(1, 64)
    shared = save(space, "ann", [*prompt[:32], *words(2, 32)])
    keys = save(space, "ann", prompt)
    answered = save(space, "ann", [*prompt, *words(3, 16)])
    order(space, o.PinBlocks(o.BlockFilter(tenant="ann")))
    where = o.BlockFilter(tenant="ann", tokens=pack_tokens(prompt), tier=HOST)
    assert order(space, o.ClearBlocks(where))["blocks"] == 3
    assert [depths(space, k)[0] for k in (keys, answered, shared)] == [2, 2, 4]
    where = o.BlockFilter(prefix=shared[1][:8])
    assert order(space, o.ClearBlocks(where))["blocks"] == 3 + 6
    assert depths(space, shared) == (1, 1)


def test_slots_of_cleared_pinned_blocks_come_back(opened: Open) -> None:
    space = opened()
    save(space, "ann", words(1, 80))
    order(space, o.PinBlocks(o.BlockFilter(tenant="ann")))
    space.clear(None)
    ticking(space, lambda: not space.manager.index.num_used(HOST))
    assert order(space, o.ListBlocks())["pins"] == 0


def test_a_pin_survives_pressure_until_it_is_undone(opened: Open) -> None:
    space = opened(host="24KiB")
    ann = save(space, "ann", words(1, 48))
    assert order(space, o.PinBlocks(o.BlockFilter(tenant="ann", tier=HOST))) == {
        "blocks": 3, "bytes": 3 * BLOCK, "prompts": 1,
    }  # fmt: skip
    for seed in range(2, 8):
        save(space, "bob", words(seed, 64))
    assert depths(space, ann)[0] == 3
    [prompt] = order(space, o.ListBlocks(o.BlockFilter(tenant="ann"), prompts=True))["prompts"]
    assert prompt["pinned"] == [HOST]
    assert order(space, o.UnpinBlocks(o.BlockFilter(tenant="bob")))["prompts"] == 0
    assert order(space, o.UnpinBlocks(o.BlockFilter(tenant="ann")))["prompts"] == 1
    for seed in range(8, 12):
        save(space, "bob", words(seed, 64))
    assert depths(space, ann)[0] == 0


def test_a_pin_with_a_time_to_live_ends_by_itself(opened: Open, audit: Path) -> None:
    space, clock = opened(host="24KiB"), Clock()
    space.admin._clock, space.admin._swept = clock, clock.now
    ann, bob = save(space, "ann", words(1, 48)), save(space, "bob", words(9, 16))
    where, other = (o.BlockFilter(tenant=name, tier=HOST) for name in ("ann", "bob"))

    def listed() -> dict[str, Any]:
        told = order(space, o.ListBlocks(o.BlockFilter(tenant="ann"), prompts=True))
        [prompt] = told["prompts"]
        return {"pins": told["pins"], "pinned": prompt["pinned"], "left": prompt["left_s"]}

    told = order(space, o.PinBlocks(where, ttl_s=60.0))
    assert told == {"blocks": 3, "bytes": 3 * BLOCK, "prompts": 1, "ttl_s": 60.0}
    order(space, o.PinBlocks(other))
    assert listed() == {"pins": 2, "pinned": [HOST], "left": {HOST: 60.0}}
    clock.now += 59.5
    assert listed() == {"pins": 2, "pinned": [HOST], "left": {HOST: 0.5}}
    for seed in range(2, 8):
        save(space, "bob", words(seed, 32))
    assert depths(space, ann)[0] == 3, "evicted before its time"
    assert order(space, o.PinBlocks(where, ttl_s=100.0))["prompts"] == 0, "no new pin"
    clock.now += 99.0
    assert listed()["left"] == {HOST: 1.0}, "the time was not set anew"
    clock.now += 1.0
    space.tick()
    for seed in range(10, 16):
        save(space, "bob", words(seed, 32))
    assert depths(space, ann)[0] == 0, "pinned beyond its time"
    assert depths(space, bob)[0] == 1, "a pin without an end has ended"
    assert order(space, o.ListBlocks())["pins"] == 1
    [first, *_] = lines(audit)
    assert (first["order"], first["ttl_s"]) == ("pin", 60.0)


def test_a_listing_shows_no_pin_whose_time_is_over(opened: Open) -> None:
    """Also where nothing has happened since: an idle engine takes no step."""
    space, clock = opened(), Clock()
    space.admin._clock, space.admin._swept = clock, clock.now
    save(space, "ann", words(1, 48))
    order(space, o.PinBlocks(o.BlockFilter(tier=HOST), ttl_s=1e-3))
    clock.now += 1e-3
    told: list[Any] = []
    space.admin.begin(o.ListBlocks(prompts=True), WHO, told.append)
    assert told[0]["pins"] == 0
    assert [prompt["pinned"] for prompt in told[0]["prompts"]] == [[]]


def test_a_pin_again_without_a_time_has_no_end(opened: Open) -> None:
    space, clock = opened(), Clock()
    space.admin._clock, space.admin._swept = clock, clock.now
    save(space, "ann", words(1, 48))
    order(space, o.PinBlocks(o.BlockFilter(tier=HOST), ttl_s=5.0))
    order(space, o.PinBlocks(o.BlockFilter(tier=HOST)))
    clock.now += 1e9
    space.tick()
    assert order(space, o.ListBlocks())["pins"] == 1


def test_quotas_of_settings_and_of_orders_hold(opened: Open, audit: Path) -> None:
    space = opened(quota={"host": str(3 * BLOCK), "disk": "10%"})
    bob = save(space, "bob", words(1, 64))
    first = save(space, "ann", words(2, 32))
    second = save(space, "ann", words(3, 48))
    assert (depths(space, first), depths(space, second)) == ((0, 2), (3, 3))
    told = order(space, o.SetQuota("ann", HOST, str(BLOCK)))
    assert told["evicted"] == 2
    shares = {(q["tenant"], q["tier"]): (q["blocks"], q["quota"]) for q in told["quotas"]}
    assert shares["ann", HOST] == (1, BLOCK)
    assert shares["bob", HOST] == (4, None)
    assert shares["ann", "disk"] == (5, space.used["disk"][1] // 10 * BLOCK)
    order(space, o.SetQuota("ann", HOST, None))
    assert (
        len(save(space, "ann", words(4, 80))) == depths(space, chain(space, "ann", words(4, 80)))[0]
    )
    order(space, o.SetQuota("eve", HOST, "0", salt="c"))
    assert depths(space, save(space, "eve", words(5, 32)))[0] == 0
    assert depths(space, bob)[0] == 4
    assert [line["quota"] for line in lines(audit)] == [str(BLOCK), None, "0"]
    assert "salt" not in audit.read_text()


def test_a_list_tells_whose_blocks_are_where(opened: Open) -> None:
    space = opened()
    ann = save(space, "ann", words(1, 80))
    save(space, "bob", words(2, 32))
    told = order(space, o.ListBlocks(prompts=True))
    rows = {(row["tenant"], row["tier"]): row["blocks"] for row in told["rows"]}
    assert rows == {("ann", HOST): 5, ("ann", "disk"): 5, ("bob", HOST): 2, ("bob", "disk"): 2}
    [mine] = [prompt for prompt in told["prompts"] if prompt["tenant"] == "ann"]
    assert (mine["key"], mine["tiers"]) == (ann[-1].hex(), {HOST: 5, "disk": 5})
    short = order(space, o.ListBlocks(o.BlockFilter(tier=HOST), limit=1))
    assert ([row["tenant"] for row in short["rows"]], short["more"]) == (["ann"], 1)
    namespace = bytes.fromhex(mine["namespace"])
    only = order(
        space, o.ListBlocks(o.BlockFilter(namespace=namespace, prefix=ann[2]), prompts=True)
    )
    assert [prompt["blocks"] for prompt in only["prompts"]] == [3]


@pytest.mark.parametrize(
    ("wanted", "kind", "why"),
    [
        (o.ClearBlocks(o.BlockFilter(tenant="nobody")), ConfigError, "there are: ann, bob"),
        (o.ClearBlocks(o.BlockFilter(tier="tape")), ConfigError, "there are host, disk"),
        (o.PinBlocks(o.BlockFilter(tenant="ann", salt="a")), ConfigError, "one of them"),
        (o.PinBlocks(o.BlockFilter(tokens=b"1234")), ConfigError, "1 tokens"),
        (o.PinBlocks(o.BlockFilter(tokens=bytes(64), prefix=b"x")), ConfigError, "tokens with"),
        (o.MoveBlocks(o.BlockFilter(), "disk"), ConfigError, "from every tier"),
        (o.MoveBlocks(o.BlockFilter(tier=HOST), HOST), ConfigError, "two of the tiers"),
        (o.PrefetchBlocks(o.BlockFilter(tier=HOST)), ConfigError, "which is where prefetches go"),
        (o.SetQuota("ann", "tape", "1GiB"), ConfigError, "no tier 'tape'"),
        (o.SetQuota("ann", HOST, "much"), ConfigError, "given 'much'"),
        (o.SetQuota("ann", HOST, "1B"), ConfigError, "less than a block"),
        (o.SetQuota("ann", HOST, "101%"), ConfigError, "up to 100%"),
        (o.SetQuota("eve", HOST, "1GiB"), ConfigError, "no tenant 'eve'"),
        (o.SetQuota("eve", HOST, "1GiB", salt="a"), ConfigError, "have one salt"),
        (o.SetQuota("ann", HOST, "1GiB", salt="c"), ConfigError, "another salt"),
        (o.SetQuota("e v e", HOST, "1GiB", salt="c"), ConfigError, "tenant name"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    opened: Open, audit: Path, wanted: Any, kind: type[Exception], why: str
) -> None:
    space = opened()
    keys = save(space, "ann", words(1, 48))
    with pytest.raises(kind, match=why):
        order(space, wanted)
    assert depths(space, keys) == (3, 3)
    assert [(line["who"], line["state"]) for line in lines(audit)] == [(WHO, "refused")]


def test_one_job_at_a_time_and_an_unfinished_one_is_told(opened: Open, audit: Path) -> None:
    space = opened()
    save(space, "ann", words(1, 48))
    space.manager.index.evictions.evict(HOST, 100)
    told: list[Any] = []
    space.admin.begin(o.PrefetchBlocks(o.BlockFilter()), WHO, told.append)
    with pytest.raises(CapacityError, match="is under way"):
        order_now(space, o.PrefetchBlocks(o.BlockFilter()))
    space.admin.close()
    [answer] = told
    assert isinstance(answer, UnsupportedError)
    assert [line["state"] for line in lines(audit)] == ["refused", "abandoned"]


def order_now(space: ModelCache, wanted: Any) -> None:
    told: list[Any] = []
    space.admin.begin(wanted, WHO, told.append)
    if isinstance(told[0], KVCoreError):
        raise told[0]


def test_a_job_waits_while_the_manager_is_full(opened: Open) -> None:
    space = opened(quota=None)
    keys = save(space, "ann", words(1, 80))
    space.manager.index.evictions.evict(HOST, 100)
    told: list[Any] = []
    space.manager.flights._max_in_flight = 0
    space.admin.begin(o.PrefetchBlocks(o.BlockFilter(tenant="ann")), WHO, told.append)
    for _ in range(3):
        space.tick()
    assert not told, "it is not over"
    space.manager.flights._max_in_flight = 256
    ticking(space, lambda: told)
    assert (told[0]["blocks"], told[0]["failed"]) == (len(keys), 0)
    assert_in_host(space, keys)


class Hanging:
    """A disk whose writes, or reads, stand still until they are let go. Time is the test's own."""

    def __init__(self, space: ModelCache, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = space._transport.worker.tiers["disk"]
        move = getattr(disk, call)
        self.begun, self.go_on, self.clock = threading.Event(), threading.Event(), Clock(0.0)

        def hang(requests: Any) -> Any:
            self.begun.set()
            assert self.go_on.wait(PATIENCE_S)
            return move(requests)

        monkeypatch.setattr(disk, call, hang)
        monkeypatch.setattr(space.admin._jobs, "_clock", self.clock)


@pytest.mark.parametrize(
    ("wanted", "call"),
    [
        (o.MoveBlocks(o.BlockFilter(tenant="ann", tier=HOST), "disk"), "write"),
        (o.PrefetchBlocks(o.BlockFilter(tenant="ann")), "read"),
    ],
    ids=["move", "prefetch"],
)
def test_a_tier_that_hangs_is_told_and_holds_up_no_later_order(
    opened: Open, audit: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any, call: str
) -> None:
    space = opened(write="selective", admit_after=255)
    ann, bob = save(space, "ann", words(1, 80)), save(space, "bob", words(2, 80))
    if call == "read":
        order(space, o.MoveBlocks(o.BlockFilter(tenant="ann", tier=HOST), "disk"))
    hanging = Hanging(space, call, monkeypatch)
    told: list[Any] = []
    space.admin.begin(wanted, WHO, told.append)
    ticking(space, hanging.begun.is_set)
    hanging.clock.now += SILENT_S - 1
    space.tick()
    assert not told, "a slow tier is waited for"
    hanging.clock.now += 2
    space.tick()
    [why] = told
    assert isinstance(why, TierUnavailable)
    assert "no transfer of it has ended in 120 s" in str(why)
    assert lines(audit)[-1]["state"] == "abandoned"
    told = order(space, o.PrefetchBlocks(o.BlockFilter(tenant="bob")))
    assert told["failed"] == 0, "another may begin"
    hanging.go_on.set()
    ticking(space, lambda: not space.background)
    if call == "write":
        assert depths(space, ann) == (5, 4), "the op that had begun came, and the other was dropped"
    assert depths(space, bob)[0] == 5
    assert order(space, wanted)["failed"] == 0


def test_a_move_to_a_tier_that_is_left_alone_is_answered(opened: Open) -> None:
    space = opened(write="selective", admit_after=255)
    ann = save(space, "ann", words(1, 80))
    breaker = space.manager.tiers.breakers.writes["disk"]
    for _ in range(3):
        breaker.failed()
    told = order(space, o.MoveBlocks(o.BlockFilter(tenant="ann", tier=HOST), "disk"))
    assert (told["blocks"], told["kept"], told["failed"]) == (0, 5, 1)
    assert depths(space, ann) == (5, 0)


def test_metrics_have_a_series_a_tenant_and_count_orders(opened: Open) -> None:
    space = opened(quota={"host": str(3 * BLOCK)})
    save(space, "ann", words(1, 48))
    ticking(space, lambda: space._metrics.snapshot().get("kvcore_tenant_used_bytes"))
    with pytest.raises(ConfigError, match="nothing is held of tenant 'bob', among 1 namespaces"):
        order(space, o.ClearBlocks(o.BlockFilter(tenant="bob")))
    data = space.take_metrics()
    assert data["kvcore_tenant_quota_bytes"]["ann|host"] == {"arena-1": 3 * BLOCK}
    assert data["kvcore_control_orders_total"] == {"clear|refused": 1}
    assert data["kvcore_transfer_bytes_total"]["h2disk"] == 3 * BLOCK


def test_the_audit_log_is_its_users_alone_and_appended_to(audit: Path, tmp_path: Path) -> None:
    for who in ("one", "two"):
        log = AuditLog(str(audit))
        log.begin(who, "clear", blocks=1)
        log.end(who, "clear", "done", blocks=1)
        log.close()
    assert [line["who"] for line in lines(audit)] == ["one", "two"]
    assert audit.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    with other.open("wb"), pytest.raises(TierUnavailable, match="nothing is done"):
        log.begin("late", "clear")  # ``other`` has the number that was given back
    assert other.read_bytes() == b""
    assert len(lines(audit)) == 2
    os.symlink(audit, tmp_path / "link")
    with pytest.raises(ConfigError, match=r"control\.audit"):
        AuditLog(str(tmp_path / "link"))
