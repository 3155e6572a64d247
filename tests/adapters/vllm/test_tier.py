"""kvcore below vLLM's own offloading: vLLM's manager, its rows and its keys, without an engine."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcore.connector.guard import covers
from kvcore.errors import ConfigError, TierError, TierUnavailable
from kvcore.runtime.page_jobs import PageJobs
from kvcore.telemetry.metrics import PAGE_SPECS
from kvcore_vllm.tier import KVCoreTier
from support.vllm_configs import config, having, set_to

LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
PAGE = 16 * 2 * 2 * 64 * 4
"""Bytes of one layer's page: tokens, K and V, heads, dim, float32."""


def groups_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(LAYERS, specs, strict=True)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def full(kind: Any = FullAttentionSpec, **given: Any) -> Any:
    plain = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return kind(**plain | given)


PLAIN = groups_of(full(), full())


class _Scheduler(OffloadingConnectorScheduler):
    """The part of vLLM's scheduler side that makes the tiers."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        self.manager = spec.get_manager()


class Rig:
    """vLLM's manager over kvcore's tier, with rows that the test fills."""

    def __init__(
        self,
        options: dict[str, Any],
        vllm_config: Any = None,
        groups: KVCacheConfig = PLAIN,
        rows: int = 6,
    ) -> None:
        made = config() if vllm_config is None else vllm_config
        tier = {"type": "KVCoreTier", "module_path": "kvcore_vllm.tier", **options}
        made.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=uuid.uuid4().hex,
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": rows * 2 * PAGE,
                "secondary_tiers": [tier],
            },
        )
        spec = TieringOffloadingSpec(build_offloading_config(made, groups))
        self.manager: Any = _Scheduler(spec, made, groups).manager
        [self.tier] = self.manager.secondary_tiers
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def settle(self) -> None:
        until = time.monotonic() + 30
        while self.manager.has_pending_work():
            assert time.monotonic() < until, "jobs that never end"
            self.step()
            time.sleep(0.001)

    def store(self, numbers: Sequence[int], request: ReqContext | None = None) -> None:
        """Have vLLM store chunks, whose rows have the content of their number."""
        context = request or self.request()
        keys = keys_of(numbers)
        plan = self.manager.prepare_store(keys, context)
        for key, row in zip(plan.keys_to_store, plan.store_spec.block_ids, strict=True):
            self.rows[row] = content(numbers[keys.index(key)], self.rows.shape[1])
        if plan.keys_to_store:
            self.manager.complete_store(plan.keys_to_store, context)
        self.settle()
        if request is None:
            self.manager.on_request_finished(context)

    def found(self, numbers: Sequence[int]) -> list[int]:
        """Have vLLM look chunks up until it knows; return those found, after checking the rows."""
        context, keys, until = self.request(), keys_of(numbers), time.monotonic() + 30
        pending = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        while any(got in pending for got in [self.manager.lookup(k, context) for k in keys]):
            assert time.monotonic() < until, "a request that waits for ever"
            self.step()
            time.sleep(0.001)
        hits = [self.manager.lookup(key, context) is LookupResult.HIT for key in keys]
        there = [number for number, hit in zip(numbers, hits, strict=True) if hit]
        if there:
            plan = self.manager.prepare_load(keys_of(there), context)
            for number, row in zip(there, plan.block_ids, strict=True):
                assert (self.rows[row] == content(number, self.rows.shape[1])).all()
            self.manager.complete_load(keys_of(there), context)
        self.manager.on_request_finished(context)
        return there

    def forget(self) -> None:
        """Empty vLLM's own rows, without telling the tier."""
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


def keys_of(numbers: Sequence[int]) -> list[Any]:
    return [make_offload_key(bytes([number]) * 32, number % 2) for number in numbers]


def content(number: int, nbytes: int) -> Any:
    return np.random.default_rng(number).integers(0, 127, nbytes, dtype=np.int8)


Opens = Callable[..., Rig]


@pytest.fixture
def opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Opens]:
    """Opens rigs over one folder. No thread of kvcore and no mapping is left."""
    made: list[Rig] = []
    before = set(threading.enumerate())

    def open_(options: dict[str, Any] | None = None, **given: Any) -> Rig:
        disk = {"disk": {"path": str(tmp_path / "kv"), "capacity": "4MiB"}}
        made.append(Rig({**disk, **(options or {})}, **given))
        return made[-1]

    yield open_
    for rig in made:
        if hasattr(rig, "rows"):
            rig.close()
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("kvcore-")] == []
    assert "Failed to close mmap_obj" not in caplog.text


# -- the interface ------------------------------------------------------------------------------


def test_every_method_of_vllms_interface_is_covered() -> None:
    """Also one that a later version adds, if kvcore defines it."""
    members = inspect.getmembers(SecondaryTierManager, inspect.isroutine)
    names = [name for name, _ in members if name[0] != "_"]
    assert SecondaryTierManager.__abstractmethods__ <= set(names)
    assert KVCoreTier.__abstractmethods__ == frozenset()
    assert [name for name in names if not covers(KVCoreTier, name)] == []


def test_chunks_come_back_after_a_restart(opened: Opens) -> None:
    rig = opened()
    assert rig.found([1, 2]) == []
    rig.store([1, 2, 3])
    rig.forget()
    assert rig.found([1, 9, 3]) == [1, 3]
    rig.close()
    again = opened()
    assert again.found([1, 2, 3, 4]) == [1, 2, 3]
    stats = again.tier.get_stats().reduce()
    assert stats["kvcore_pages_held"] == 3
    assert stats["kvcore_pages_loaded_total"] == 3
    assert stats["kvcore_pages_aside"] == 0
    assert "kvcore_pages_loaded_total" not in again.tier.get_stats().reduce()


def test_more_chunks_than_rows_and_more_than_the_disk_has_room_for(
    opened: Opens, tmp_path: Path
) -> None:
    rig = opened({"disk": {"path": str(tmp_path / "kv"), "capacity": "1MiB"}})
    for number in range(40):
        rig.store([number])
    found = [number for number in range(40) if rig.found([number])]
    assert found
    assert found == list(range(40 - len(found), 40)), "the oldest are evicted"
    used = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert used <= 1 << 20


def test_corrupt_and_missing_chunks_are_not_found(opened: Opens, tmp_path: Path) -> None:
    rig = opened()
    rig.store([1, 2, 3])
    rig.close()
    [data] = (tmp_path / "kv").rglob("shard-0.data")
    whole = bytearray(data.read_bytes())
    at = whole.index(content(2, 4096).tobytes())
    whole[at + 5] ^= 1
    data.write_bytes(whole)
    again = opened()
    assert again.found([1, 2, 3]) == [1, 3]
    assert again.tier.get_stats().reduce()["kvcore_pages_corrupt_total"] == 1
    again.close()
    data.write_bytes(whole[: len(whole) // 3])
    shortened = opened()
    assert set(shortened.found([1, 2, 3])) < {1, 3}


def test_a_store_that_others_share_is_asked(opened: Opens, request: Any) -> None:
    table = {"plugin": "memory-store", "options": {"name": request.node.name}}
    shared = {"disk": {}, "tiers": {"shared": table}}
    first, second = opened(shared), opened(shared)
    first.store([1, 2])
    assert second.found([1, 2, 3]) == [1, 2]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a tier that is a running server, with a disk below it."""
    pytest.importorskip("zmq")
    from kvcore_devtools.server_fixture import server_process

    folder = tmp_path / "server"
    given = [
        "server.address=local",
        f"server.folder={folder}",
        "host.capacity=8MiB",
        "host.huge_pages=false",
        f"disk.path={tmp_path / 'kv'}",
        "disk.capacity=16MiB",
    ]
    with server_process(*given) as process:
        server = {"address": "local", "folder": str(folder), "deadline_s": 1.0}
        yield {"disk": {}, "server": server, "process": process}


@pytest.mark.slow
def test_engines_share_a_server(opened: Opens, served: dict[str, Any]) -> None:
    process = served.pop("process")
    first, second = opened(served), opened(served)
    assert first.found([1, 2]) == []
    first.store([1, 2, 3])
    assert second.found([1, 9, 3]) == [1, 3]
    first.close()
    third = opened(served)
    assert third.found([1, 2, 3, 4]) == [1, 2, 3]
    stats = third.tier.get_stats().reduce()
    assert stats["kvcore_pages_loaded_total"] == 3
    assert stats["kvcore_pages_aside"] == 0
    other = opened(served, vllm_config=having(set_to("model_config.dtype", torch.bfloat16)))
    assert other.found([1, 2, 3]) == []
    third.manager.reset_cache()
    assert third.found([1, 2, 3]) == [], "the weights may be others"
    second.forget()
    assert second.found([1, 2, 3]) == [1, 2, 3]
    second.forget()
    process.kill()
    process.wait()
    assert second.found([1, 2, 3]) == []
    second.store([5])


def test_a_server_beside_another_tier_is_refused(opened: Opens, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"given server\.address and disk"):
        opened({"server": {"address": "local", "folder": str(tmp_path / "server")}})


# -- what makes other bytes -----------------------------------------------------------------------


def test_what_makes_other_rows_finds_nothing(opened: Opens) -> None:
    rig = opened()
    rig.store([1])
    rig.close()
    others: list[dict[str, Any]] = [
        {"vllm_config": having(set_to("model_config.dtype", torch.bfloat16))},
        {"vllm_config": having(set_to("model_config.hf_text_config.rope_theta", 7.0))},
        {"vllm_config": having(set_to("parallel_config.tensor_parallel_size", 2))},
        {"vllm_config": having(set_to("cache_config.prefix_caching_hash_algo", "sha256_cbor"))},
        {"vllm_config": having(set_to("mamba_config.enable_stochastic_rounding", True))},
        {"groups": groups_of(full(), full(SlidingWindowSpec, sliding_window=32))},
        {"groups": groups_of(full(head_size=32, num_kv_heads=4), full())},
        {"options": {"namespace": {"secret": "another secret of 32 bytes here."}}},
    ]
    for other in others:
        found = opened(**other)
        assert found.found([1]) == [], other
        found.store([1])
        found.close()
    assert opened().found([1]) == [1]


def test_other_tokens_in_a_rank_s_part_of_a_row_find_nothing(opened: Opens) -> None:
    def divided(interleave: int) -> Rig:
        made = having(set_to("parallel_config.decode_context_parallel_size", 2))
        made.parallel_config.cp_kv_cache_interleave_size = interleave
        return opened(vllm_config=made)

    rig = divided(4)
    rig.store([1])
    rig.close()
    assert divided(8).found([1]) == []
    assert divided(4).found([1]) == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm.__version__", "9.9"),
        ("kvcore_vllm.tier_identity.device_kind", lambda: ["cuda", "9.0"]),
    ],
)
def test_a_newer_vllm_and_another_device_find_nothing(
    opened: Opens, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    rig = opened()
    rig.store([1])
    rig.close()
    monkeypatch.setattr(name, value)
    assert opened().found([1]) == []


@cache
def state_groups() -> KVCacheConfig:
    state = MambaSpec(block_size=16, shapes=((8, 16),), dtypes=(torch.float32,))
    return groups_of(state, state)


def test_a_model_that_keeps_only_states_is_kept(opened: Opens) -> None:
    rig = opened(groups=state_groups())
    rig.store([1, 2])
    rig.close()
    assert opened(groups=state_groups()).found([1, 2]) == [1, 2]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("lora_config", object(), "LoRA"),
        ("model_config.multimodal_config", object(), "takes media"),
        ("cache_config.prefix_caching_hash_algo", "xxhash", "made on purpose"),
    ],
)
def test_what_keys_do_not_tell_apart_leaves_the_tier_empty(
    opened: Opens, caplog: pytest.LogCaptureFixture, path: str, value: Any, reason: str
) -> None:
    rig = opened(vllm_config=having(set_to(path, value)))
    rig.store([1])
    rig.forget()
    assert rig.found([1]) == []
    assert rig.tier.get_stats().reduce() == {"kvcore_pages_aside": 1}
    [line] = [each for each in caplog.records if each.name == "kvcore.vllm.tier"]
    assert reason in line.getMessage()
    assert "vLLM's offloading works without it" in line.getMessage()


def test_wrong_settings_end_the_start(opened: Opens) -> None:
    for options, said in (
        ({"dsik": {}}, "dsik"),
        ({"disk": {}}, "supported is exactly one"),
        ({"locality": "NEAR"}, "locality"),
    ):
        with pytest.raises(ConfigError, match=said):
            opened(options)


def test_settings_without_a_use_are_named(opened: Opens, caplog: pytest.LogCaptureFixture) -> None:
    rig = opened({"host": {"capacity": "1GiB"}, "locality": "LOCAL"})
    assert "are ignored: host.capacity" in caplog.text
    assert rig.tier.locality.value == "LOCAL"


def test_a_folder_that_cannot_be_used_leaves_the_tier_empty(
    opened: Opens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("a file")
    rig = opened()
    rig.store([1])
    assert "vLLM's offloading works without it" in caplog.text


# -- weights that change in place -----------------------------------------------------------------


def test_after_a_reset_nothing_of_before_is_found_or_stored(opened: Opens) -> None:
    rig = opened()
    rig.store([1])
    running = rig.request()
    rig.manager.reset_cache()
    rig.store([2], running)
    rig.forget()
    assert rig.found([1, 2]) == [], "the second is of a request that began before"
    rig.store([1, 3])
    rig.forget()
    assert rig.found([1, 3]) == [1, 3]
    rig.close()
    again = opened()
    assert again.found([1, 3]) == [1], "that of the files' weights"


def test_a_reset_can_be_told_to_change_nothing_or_to_erase(opened: Opens) -> None:
    rig = opened({"namespace": {"weights_change": "never"}})
    rig.store([1])
    rig.manager.reset_cache()
    assert rig.found([1]) == [1]
    rig.close()
    rig = opened({"namespace": {"weights_change": "never"}, "vllm": {"keep_on_reset": False}})
    assert rig.found([1]) == [1]
    rig.manager.reset_cache()
    assert rig.found([1]) == []
    rig.close()
    assert opened().found([1]) == []


def test_weights_that_may_change_at_any_time_are_this_engines(
    opened: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        rig = opened({"namespace": {"weights_change": "any_time"}})
        assert rig.found([1]) == []
        rig.store([1])
        rig.forget()
        assert rig.found([1]) == [1]
        rig.close()
    assert "not found after a restart" in caplog.text


# -- errors of kvcore -----------------------------------------------------------------------------


INSIDE = {
    "lookup": "find",
    "touch": "use",
    "submit_store": "store",
    "submit_load": "load",
    "get_finished_jobs": "take_ended",
    "drain_jobs": "drain",
    "get_stats": "counts",
    "shutdown": "close",
}


@pytest.mark.parametrize("method", [*INSIDE, "on_new_request", "on_request_finished"])
def test_an_error_ends_kvcore_and_not_vllm(
    opened: Opens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    """vLLM's manager goes on: no job stays open, no request waits."""

    def boom(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    rig = opened()
    rig.store([1, 2])
    rig.forget()
    with monkeypatch.context() as patch:
        if method in INSIDE:
            patch.setattr(PageJobs, INSIDE[method], boom)
        else:
            patch.setattr(rig.tier, "_running", None)
        assert set(rig.found([1])) <= {1}
        rig.store([3])
        rig.manager.touch(keys_of([1]), rig.request())
        rig.manager.get_stats()
        rig.manager.reset_cache()
        assert rig.found([2]) == []
        rig.store([4])
        assert rig.found([4]) == [4], "vLLM's own rows"
        rig.forget()
        if method == "shutdown":
            jobs = rig.tier._jobs
            rig.close()
    if method == "shutdown":
        jobs.close()
    else:
        assert rig.found([4]) == []
        rig.close()
    lines = [each for each in caplog.records if each.levelno >= logging.ERROR]
    own = [each.getMessage() for each in lines if each.name == "kvcore.vllm.tier"]
    assert len(own) == 1
    assert "kvcore stands aside until the engine restarts" in own[0]


def test_a_start_that_fails_leaves_the_tier_empty(
    opened: Opens, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def boom(*_: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("kvcore_vllm.tier.rows_identity", boom)
    rig = opened()
    rig.store([1])
    rig.forget()
    assert rig.found([1]) == []
    assert "a mistake of ours" in caplog.text


@pytest.mark.parametrize("error", [TierUnavailable("no disk"), RuntimeError("a mistake")])
def test_a_medium_that_fails_costs_hits_only(
    opened: Opens, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rig = opened()
    rig.store([1, 2])
    rig.forget()

    def fails(*_: Any) -> list[TierError | None]:
        raise error

    tier = rig.tier._jobs._pages._tier
    with monkeypatch.context() as patch:
        patch.setattr(tier, "read", fails)
        patch.setattr(tier, "write", fails)
        for number in (1, 2, 1, 2):
            assert rig.found([number]) == []
            rig.store([number + 10])
        rig.forget()
        assert rig.found([11]) == []


def test_what_is_counted_is_what_vllm_was_told(opened: Opens) -> None:
    defined = KVCoreTier.build_metric_definitions({})
    assert set(defined) == {spec.name for spec in PAGE_SPECS}
    rig = opened()
    rig.store([1])
    for name in rig.tier.get_stats().reduce():
        assert name in defined
