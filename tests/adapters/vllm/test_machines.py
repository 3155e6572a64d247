"""Ranks on several machines: what they must have in common, what they tell, and what is off there.

The engine itself, on two hosts: tests/integration/hosts/test_vllm_machines.py.
"""

from __future__ import annotations

import pickle
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import kvcore_vllm.connector
from kvcore.config import Config, load_config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.harness.models import tiny_model
from kvcore.plugins import PluginManager, TierPlugin
from kvcore.tiers.disk.store import lock_store
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.handshake import Told
from kvcore_vllm.machines import HeldDisks, Terms, check_terms, machines, terms_of, usable
from kvcore_vllm.messages import KVCoreMetadata, StepPlan
from support.vllm_leader import MODEL

STORE = {"plugin": "memory-store", "capacity": "1MiB", "options": {"name": "here"}}
SETTINGS: dict[str, Any] = {"host": {"capacity": "1MiB"}, "tiers": {"far": STORE}}


@cache
def vllm_config() -> Any:
    model = tiny_model("llama", layers=2, heads=4, kv_heads=2, head_dim=64)
    return EngineArgs(str(model), dtype="float32", enforce_eager=True).create_engine_config()


def over(count: int, settings: dict[str, Any] | None = None, **parallel: Any) -> Any:
    """vLLM's config of two ranks on so many machines."""
    made = copy(vllm_config())
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="KVCoreConnector",
        kv_role="kv_both",
        kv_connector_extra_config=SETTINGS if settings is None else settings,
    )
    made.parallel_config = copy(made.parallel_config)
    parallel = {"nnodes": count, "tensor_parallel_size": 2, "world_size": 2, **parallel}
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


def config(**tables: Any) -> Config:
    return load_config(None, {**SETTINGS, **tables})


# -- what is off --------------------------------------------------------------------------------


def test_a_replica_of_data_parallelism_has_its_own_machines() -> None:
    assert machines(over(1)) == 1
    assert machines(over(2)) == 2
    apart = {"data_parallel_size": 2, "data_parallel_size_local": 1}
    assert machines(over(2, **apart)) == 1
    assert machines(over(4, **apart)) == 2


def test_a_plugins_own_disk_is_off_with_one_line_and_other_tiers_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = TierPlugin("shelf", "disk", lambda context: None)  # type: ignore[arg-type, return-value]
    find = PluginManager.tier
    monkeypatch.setattr(
        PluginManager, "tier", lambda self, name: shelf if name == "shelf" else find(self, name)
    )
    cold = {"plugin": "disk", "capacity": "1MiB", "options": {"path": "/kv/cold"}}
    tiers = {"far": STORE, "cold": cold, "books": {"plugin": "shelf"}}
    given = config(disk={"path": "/kv/disk"}, tiers=tiers)
    one, several = over(1), over(2)
    caplog.clear()
    assert usable(given, one, tell=True) is given
    assert not caplog.records
    found = usable(given, several, tell=True)
    assert found.tiers == {name: given.tiers[name] for name in ("far", "cold")}
    assert (found.host, found.disk) == (given.host, given.disk)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("the tier books is off: ")
    assert usable(given, several, tell=False) == found, "leader and ranks have the same slots"
    assert len(caplog.records) == 1
    assert usable(found, several, tell=True) is found


def test_a_server_that_other_machines_do_not_reach_is_refused_by_name() -> None:
    given = config(server={"address": "ipc:///run/kvcore/kvcore.sock"})
    assert usable(given, over(1), tell=True) is given
    with pytest.raises(UnsupportedError, match="2 machines behind a server at 'ipc:///run"):
        usable(given, over(2), tell=True)
    reached = config(server={"address": "tcp://10.0.0.1:7711", "keys": "keys"})
    assert usable(reached, over(2), tell=True) is reached


def test_behind_a_server_ranks_prepare_no_disk(tmp_path: Path) -> None:
    served = config(disk={"path": str(tmp_path)}, server={"address": "tcp://10.0.0.1:7711"})
    assert HeldDisks().prepare(served, replace(MODEL, world_size=2, machines=2), 1) is None
    assert not list(tmp_path.iterdir())


# -- the terms ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        ({"block": {"tokens": 32}}, "block"),
        ({"host": {"capacity": "2MiB"}}, "host"),
        ({"transfer": {"batch_blocks": 3}}, "transfer"),
        ({"namespace": {"secret": "s" * 40}}, "namespace"),
        ({"fusion": {"enabled": True}}, "fusion"),
        ({"vllm": {"windows": "dense"}}, "vllm"),
        ({"tiers": {}}, "tiers"),
        ({"disk": {"path": "/kv"}}, "disk"),
        ({"disk": {"capacity": "2MiB"}}, "disk"),
        ({"disk": {"key_file": "/kv.key"}}, "disk"),
        ({"tiers": {"far": {**STORE, "capacity": "2MiB"}}}, "tiers"),
        ({"tiers": {"far": {**STORE, "options": {"key_file": "/kv.key"}}}}, "tiers"),
    ],
)
def test_other_settings_are_named(tables: dict[str, Any], name: str) -> None:
    own, other = terms_of(config(), MODEL), terms_of(config(**tables), MODEL)
    with pytest.raises(UnsupportedError, match=rf"rank 1 of 2 goes by .* machines: {name}\. Give"):
        check_terms(own, {(0, 0): own, (0, 1): other}, 1, 2)


def test_another_model_or_plugin_is_named() -> None:
    own = terms_of(config(), MODEL)
    others = terms_of(config(), replace(MODEL, world_size=2), ["sparse 1.0"])
    with pytest.raises(UnsupportedError, match=": attention plugins, the model's cache"):
        check_terms(own, {(0, 0): own, (1, 0): others}, 2, 1)


def test_other_tokens_in_a_rank_s_page_are_named() -> None:
    sizes = {"decode": 2, "prefill": 1, "interleave": 4}
    own = terms_of(config(), MODEL, context=sizes)
    other = terms_of(config(), MODEL, context=sizes | {"interleave": 8})
    with pytest.raises(UnsupportedError, match=r"machines: context parallelism\. Give"):
        check_terms(own, {(0, 0): own, (0, 1): other}, 1, 2)


def test_what_a_machine_may_have_of_its_own() -> None:
    """Addresses of stores, folders, and the identity of a model that changes while it is loaded."""

    def options(**given: str) -> dict[str, Any]:
        return {"tiers": {"far": {**STORE, "options": given}}}

    here = {"disk": {"path": "/kv/here", "key_file": "/kv.key"}, **options(key_file="/kv.key")}
    there = {
        "disk": {"path": "/kv/there", "key_env": "KV_KEY"},
        **options(name="there", key_env="KV_KEY"),
    }
    own, other = terms_of(config(**here), MODEL), terms_of(config(**there), MODEL)
    loaded = terms_of(config(**here), replace(MODEL, fingerprint=b"other"))
    assert own == other == loaded == pickle.loads(pickle.dumps(own))
    check_terms(own, {(0, 0): other, (0, 1): loaded}, 1, 2)


@pytest.mark.parametrize("told", [{}, {(0, 0): Terms()}, {(0, 1): "another connector's"}])
def test_a_rank_that_says_nothing_is_named(told: dict[Any, Any]) -> None:
    own = terms_of(config(), MODEL)
    with pytest.raises(UnsupportedError, match="rank 1 of 2 does not serve kvcore"):
        check_terms(own, {(0, 0): own, **told} | {(0, 0): own}, 1, 2)


# -- the connector ------------------------------------------------------------------------------


def caches() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    groups = [KVCacheGroupSpec(names, spec)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def side(vllm_config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> KVCoreConnector:
    return KVCoreConnector(vllm_config, role, caches())


def terms_from(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a rank with that config tells."""
    rank = side(vllm_config, KVConnectorRole.WORKER)
    monkeypatch.setattr(kvcore_vllm.connector, "get_kv_transfer_group", lambda: rank)
    return rank.get_handshake_metadata()


def test_the_leader_starts_when_all_ranks_go_by_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, pool = side(over(2)), SimpleNamespace(cached_block_hash_to_block={})
    connector.bind_gpu_block_pool(pool)  # type: ignore[arg-type]
    assert connector._scheduler is None, "a rank may yet have other settings"
    terms = terms_from(over(2), monkeypatch)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): terms, (0, 1): terms})
    leader = connector._scheduler
    assert leader is not None
    assert leader._prefixes is not None, "vLLM named its pages before"
    connector.set_xfer_handshake_metadata_pp_aware({})
    assert connector._scheduler is leader, "vLLM wakes up, and asks again"
    connector.shutdown()


@pytest.mark.parametrize("other", [None, {**SETTINGS, "block": {"tokens": 32}}])
def test_without_agreement_there_is_no_leader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, other: Any
) -> None:
    connector, told = side(over(2)), {(0, 0): terms_from(over(2), monkeypatch)}
    if other is not None:
        told[0, 1] = terms_from(over(2, other), monkeypatch)
    caplog.clear()
    connector.set_xfer_handshake_metadata_pp_aware(told)
    assert connector._scheduler is None
    [line] = [r.getMessage() for r in caplog.records if "stands aside" in r.getMessage()]
    assert "rank 1 of 2" in line
    connector.set_xfer_handshake_metadata_pp_aware(told)
    assert sum("stands aside" in r.getMessage() for r in caplog.records) == 1


def test_wrong_settings_of_the_leader_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader starts later than on one machine, and still ends the start of vLLM."""
    wrong = {**SETTINGS, "host": {"capacity": "1MiB", "policy": "none such"}}
    with pytest.raises(ConfigError):
        side(over(1, wrong))
    connector, terms = side(over(2, wrong)), terms_from(over(2, wrong), monkeypatch)
    with pytest.raises(ConfigError):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): terms, (0, 1): terms})


def test_the_first_rank_of_another_machine_prepares_its_disk_for_the_leader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It tells once, whatever vLLM asks later, and keeps the folder until it ends."""
    given = [
        {**SETTINGS, "disk": {"path": str(tmp_path / name), "capacity": "2MiB"}} for name in "ab"
    ]
    ranks, told = [], {}
    for number, settings in enumerate(given):
        rank = side(over(2, settings, rank=number), KVConnectorRole.WORKER)
        monkeypatch.setattr(kvcore_vllm.connector, "get_kv_transfer_group", lambda own=rank: own)
        told[0, number] = pickle.loads(pickle.dumps(rank.get_handshake_metadata()))
        again = rank.get_handshake_metadata()
        assert isinstance(again, Told)
        assert again.held is None
        ranks.append(rank)
    assert told[0, 0].held is None, "the leader has that disk"
    assert sorted(told[0, 1].held) == ["disk"]
    assert not (tmp_path / "a").exists()
    connector = side(over(2, given[0]))
    connector.set_xfer_handshake_metadata_pp_aware(told)
    leader = connector._scheduler
    assert leader is not None
    options = str(leader._plan.open_tiers["disk"])
    assert all(str(tmp_path / name) in options for name in "ab")
    [folder] = (tmp_path / "b").rglob("store-*")
    assert lock_store(folder) is None
    for one in (*ranks, connector):
        one.shutdown()
    free = lock_store(folder)
    assert free is not None
    free.close()


def test_on_one_machine_and_behind_another_connector_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's MultiConnector would tell it in place of what the other connectors say."""
    assert terms_from(over(1), monkeypatch) is None
    rank = side(over(2), KVConnectorRole.WORKER)
    assert rank.get_handshake_metadata() is None
    leader = side(over(1))
    assert leader._scheduler is not None
    leader.set_xfer_handshake_metadata_pp_aware({})
    assert leader._scheduler is not None
    leader.shutdown()


def test_blends_are_prepared_with_the_first_plan() -> None:
    """It is a collective: a rank with other settings would not come, and would not get a plan."""
    done: list[str] = []
    connector = KVCoreConnector.__new__(KVCoreConnector)
    cold: Any = "this rank's worker"
    connector._cold, connector._warm_up = cold, done.append  # type: ignore[method-assign, assignment]
    worker = SimpleNamespace(
        count_on=lambda promises: None, begin=lambda metadata: done.append("begin")
    )
    connector._worker = worker  # type: ignore[assignment]
    connector.handle_preemptions(KVCoreMetadata())
    assert done == ["begin"]
    for _ in range(2):
        connector.handle_preemptions(KVCoreMetadata.of(StepPlan(number=1)))
    assert done == ["begin", cold, "begin", "begin"]
