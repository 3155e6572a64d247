"""kvcore as the storage under HiCache: SGLang's own host pools and interface, then its engine.

The contract part has pools as the engine makes them, on a CPU with `kvcore_sglang.testing`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import ConfigError, TierUnavailable, UnsupportedError
from kvcore.harness.compare import (
    ONE_THREAD,
    SMALL_SGLANG,
    answers,
    assert_same_answers,
    small_engine,
)
from kvcore.harness.engine_process import EngineDied, EngineProcess
from kvcore.harness.models import tiny_vision_model
from kvcore.harness.prompts import windows
from kvcore.testing.waiting import until
from kvcore_devtools.server_fixture import running, server_process
from support.hicache import assert_from_storage, hicache, stored

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

LAYERS, HEADS, DIM, PAGES = 3, 2, 8, 12
Attach = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    """SGLang can be imported here, without a GPU too."""
    from kvcore_sglang.testing.hicache import stand_in
    from kvcore_sglang.testing.standins import install

    if install():
        from sglang.srt.mem_cache.pool_host import base, mha

        stand_in(base, mha)


# -- the interface, with real host pools --------------------------------------------------------


def mha_pool(layout: str, page: int, dtype: str = "bfloat16") -> Any:
    import torch
    from sglang.srt.mem_cache import device_pool_info as info
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    kind, slots = getattr(torch, dtype), PAGES * page
    buffers = [torch.zeros(slots, HEADS, DIM, dtype=kind) for _ in range(2 * LAYERS)]
    table = torch.zeros(LAYERS, dtype=torch.uint64)
    device = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=tuple(buffers[:LAYERS]),
            v=tuple(buffers[LAYERS:]),
            k_data_ptrs=table,
            v_data_ptrs=table,
            layout=info.KVBufferLayout.NHD,
        ),
        page_size=page,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=kind,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        device, 1.0, 0, page, layout, device_capacity_tokens=slots, start_layer=0, end_layer=LAYERS
    )


def storage_config(settings: dict[str, Any], **other: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": {
            "backend_name": "kvcore",
            "module_path": "kvcore_sglang.storage",
            "class_name": "KVCoreStorage",
            "interface_v1": 1,
            "kvcore": settings,
        },
    }
    return HiCacheStorageConfig(**{**fields, **other})


@pytest.fixture
def attach(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """Makes the backend as SGLang's factory does, for a host pool. No engine has loaded a model."""
    import sglang.srt.runtime_context as context
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

    import kvcore_sglang.storage

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    loaded = type("LlamaForCausalLM", (), {"modules": lambda self: iter(())})
    loaded.__module__ = "sglang.srt.models.llama"
    monkeypatch.setattr(kvcore_sglang.storage, "serving_model", loaded)
    made: list[Any] = []

    def attached(pool: Any, args: dict[str, Any] | None = None, **config: Any) -> Any:
        given = {"model_path": str(model), "device": "cpu", **(args or {})}
        monkeypatch.setattr(context, "get_server_args", lambda: ServerArgs(**given))
        settings = {"disk": {"path": str(tmp_path / "kv"), "capacity": "4MiB"}}
        chosen = storage_config(settings, **config)
        storage = StorageBackendFactory.create_backend("dynamic", chosen, pool)
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, "kv")
        made.append(storage)
        return storage

    yield attached
    for storage in made:
        storage.close()


def fill(pool: Any, seed: int = 0) -> None:
    """Every element of the pool is one of its own."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))


def slots(pool: Any, pages: Sequence[int]) -> Any:
    """Token slots of pages, as the controller names them."""
    import torch

    size = pool.page_size
    runs = [torch.arange(p * size, (p + 1) * size) for p in pages]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)


LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_into_other_places_after_a_restart(
    attach: Attach, layout: str, page: int
) -> None:
    import torch

    pool = mha_pool(layout, page)
    fill(pool)
    before = pool.kv_buffer.clone()
    keys = [f"page-{i}" for i in range(5)]
    first = attach(pool)
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, slots(pool, [3, 1, 4, 0, 5])) == [True] * 5
    assert first.batch_exists([*keys[:3], "other", keys[3]]) == 3
    first.close()
    fill(pool, seed=1)
    elsewhere = pool.kv_buffer.clone()
    second = attach(pool)
    assert second.batch_exists(keys) == 5
    asked = [keys[2], "unknown", keys[0]]
    assert second.batch_get_v1(asked, slots(pool, [7, 8, 9])) == [True, False, True]
    for target, source in ((7, 4), (9, 3)):
        got = pool.get_data_page(target * page)
        pool.kv_buffer, kept = before, pool.kv_buffer
        assert torch.equal(got, pool.get_data_page(source * page))
        pool.kv_buffer = kept
    for untouched in (0, 1, 6, 10):
        got = pool.get_data_page(untouched * page)
        pool.kv_buffer, kept = elsewhere, pool.kv_buffer
        assert torch.equal(got, pool.get_data_page(untouched * page))
        pool.kv_buffer = kept


def test_the_interface_of_flat_pages_gives_the_same(attach: Attach) -> None:
    """Without ``interface_v1`` HiCache hands over flat tensors: the same pages."""
    import torch

    pool = mha_pool("page_first", 4)
    fill(pool)
    storage = attach(pool)
    values = [pool.get_data_page(p * 4) for p in range(3)]
    assert storage.batch_set(["a", "b"], values[:2])
    assert storage.set("c", values[2])
    assert storage.exists("c")
    assert not storage.exists("d")
    found = storage.batch_get(["a", "d", "c"], [pool.get_dummy_flat_data_page() for _ in range(3)])
    assert torch.equal(found[0], values[0])
    assert found[1] is None
    assert torch.equal(found[2], values[2])
    assert torch.equal(storage.get("b", pool.get_dummy_flat_data_page()), values[1])
    assert storage.batch_get_v1(["b"], slots(pool, [9])) == [True]
    assert torch.equal(pool.get_data_page(36), values[1])


def test_what_makes_other_bytes_finds_nothing(attach: Attach) -> None:
    """Equal keys of HiCache, and another rank, size, type, layout, page or model."""
    pool = mha_pool("page_first", 4)
    keys = ["a"]
    storage = attach(pool)
    storage.batch_set_v1(keys, slots(pool, [0]))
    storage.close()
    others: list[tuple[Any, dict[str, Any]]] = [
        (mha_pool("page_first", 4), {"tp_rank": 0, "tp_size": 2}),
        (mha_pool("page_first", 4), {"tp_rank": 1, "tp_size": 2}),
        (mha_pool("page_first", 4), {"pp_rank": 1, "pp_size": 2}),
        (mha_pool("page_first", 4, "float16"), {}),
        (mha_pool("layer_first", 4), {}),
        (mha_pool("page_first", 2), {}),
        (mha_pool("page_first", 4), {"args": {"json_model_override_args": '{"rope_theta": 7}'}}),
        (mha_pool("page_first", 4), {"args": {"load_format": "dummy"}}),
        (mha_pool("page_first", 4), {"args": {"rl_on_policy_target": "fsdp"}}),
    ]
    for other, config in others:
        found = attach(other, **config)
        assert found.batch_exists(keys) == 0, config
        found.close()
    again = attach(pool)
    assert again.batch_exists(keys) == 1


def test_pages_of_weights_that_the_files_do_not_tell_are_not_found_after_a_restart(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    pool, keys = mha_pool("page_first", 4), ["a"]
    for _ in range(2):
        storage = attach(pool, args={"load_format": "dummy"})
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, slots(pool, [0])) == [True]
        assert storage.batch_exists(keys) == 1
        storage.close()
    assert "load_format='dummy'" in caplog.text


def test_pages_of_weights_that_were_updated_in_place_are_this_engines(attach: Attach) -> None:
    pool, keys = mha_pool("page_first", 4), ["a"]
    storage = attach(pool)
    assert storage.batch_set_v1(keys, slots(pool, [0])) == [True]
    storage.weights_changed()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(["a", "b"], slots(pool, [1, 2])) == [True, True]
    storage.close()
    again = attach(pool)
    assert again.batch_exists(["a", "b"]) == 1, "the page of the files' weights"


def test_models_that_take_media_are_refused(attach: Attach) -> None:
    """The content of a medium is named by the client, in the hashes that pages are named by."""
    args = {"model_path": str(tiny_vision_model()), "enable_multimodal": True}
    with pytest.raises(UnsupportedError, match="takes media"):
        attach(mha_pool("page_first", 4), args=args)
    attach(mha_pool("page_first", 4), args={**args, "language_model_only": True})


def test_capacity_is_held_and_old_pages_go(attach: Attach, tmp_path: Path) -> None:
    pool = mha_pool("page_first", 4)
    storage = attach(pool)
    keys = [f"page-{i}" for i in range(3000)]
    for start in range(0, len(keys), PAGES):
        batch = keys[start : start + PAGES]
        assert all(storage.batch_set_v1(batch, slots(pool, range(len(batch)))))
    assert storage.batch_exists(keys[:1]) == 0
    assert storage.batch_exists(keys[-10:]) == 10
    used = sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*") if f.is_file())
    assert used <= 4 << 20
    with pytest.raises(UnsupportedError, match="every client can ask for it"):
        storage.clear()
    assert storage.batch_exists(keys[-1:]) == 1
    storage.close()
    storage = attach(pool, {"admin_api_key": "of the operator"})
    assert storage.batch_exists(keys[-1:]) == 1
    storage.clear()
    assert storage.batch_exists(keys[-1:]) == 0


def test_models_and_settings_that_cannot_be_kept_are_refused(attach: Attach) -> None:
    from kvcore_sglang.storage import KVCoreStorage

    pool = mha_pool("page_first", 4)
    with pytest.raises(ConfigError, match="settings go under 'kvcore'"):
        KVCoreStorage(storage_config({}, extra_config={"backend_name": "kvcore"}), {})
    with pytest.raises(ConfigError, match="capacityy"):
        KVCoreStorage(storage_config({"disk": {"capacityy": "1GiB"}}), {})
    with pytest.raises(UnsupportedError, match="MLA on 2"):
        attach(pool, is_mla_model=True, tp_size=2)
    with pytest.raises(UnsupportedError, match="LoRA"):
        attach(pool, args={"enable_lora": True})
    with pytest.raises(UnsupportedError, match="speculative"):
        attach(pool, args={"speculative_algorithm": "NGRAM"})
    storage = attach(pool)
    with pytest.raises(TierUnavailable, match="cannot be used"):
        attach(pool)  # the folder is taken
    with pytest.raises(UnsupportedError, match="mamba"):
        storage.register_mem_host_pool_v2(pool, "mamba")


@pytest.mark.parametrize("dtype", ["float8_e5m2", "uint8"])
def test_pools_whose_bytes_do_not_say_what_they_are_are_refused(attach: Attach, dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=dtype):
        attach(mha_pool("page_first", 4, dtype))
    pool = mha_pool("page_first", 4)
    copies = SimpleNamespace(**vars(pool), get_data_page=lambda *a, **k: pool.kv_buffer.clone())
    with pytest.raises(UnsupportedError, match="views of one buffer"):
        attach(copies)


# -- the engine ---------------------------------------------------------------------------------


engine = partial(small_engine, engine="sglang")


def disk(folder: Path) -> dict[str, Any]:
    return {"disk": {"path": str(folder / "kv"), "capacity": "1GiB"}}


def test_hicache_finds_after_a_restart_what_it_stored(model: Path, tmp_path: Path) -> None:
    """The same tokens; the pages come from storage; rotten ones are computed again."""
    page = 16
    prompts = windows(model, 6, 300, 900, seed=11)
    with engine(model, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    args = hicache(disk(tmp_path), page_size=page)
    with engine(model, None, **args) as process:
        assert_same_answers(answers(process, prompts), expected)
        stored(tmp_path / "kv", page, prompts)
    with engine(model, None, **args) as process:
        warm = answers(process, prompts)
        assert_same_answers(warm, expected)
        assert_from_storage(warm, prompts, page)
        process.reset_prefix_cache()
        _rot(next((tmp_path / "kv").rglob("shard-0.data")))
        got = answers(process, prompts)
        assert_same_answers(got, expected)
        assert "a stored page is corrupt and was dropped" in process.log.read_text()
        assert sum(g.cached_tokens for g in got) < sum(w.cached_tokens for w in warm)


@pytest.mark.exhaustive
def test_hicache_finds_in_a_server_what_another_engine_stored(model: Path, tmp_path: Path) -> None:
    """The same tokens over one server, and without it when it was killed."""
    page, folder = 16, tmp_path / "server"
    prompts = windows(model, 6, 300, 900, seed=11)
    pages = sum((len(prompt) - 1) // page for prompt in prompts)
    with engine(model, None, disable_radix_cache=True) as process:
        expected = answers(process, prompts)
    settings = {"server": {"address": "local", "folder": str(folder), "deadline_s": 5.0}}
    args = hicache(settings, page_size=page)
    given = ["server.address=local", f"server.folder={folder}", "host.capacity=256MiB"]
    with server_process(*given) as server:
        with engine(model, None, **args) as process:
            assert_same_answers(answers(process, prompts), expected)
            until(lambda: in_host_memory(folder) >= pages)
        with engine(model, None, **args) as process:
            warm = answers(process, prompts)
            assert_same_answers(warm, expected)
            assert_from_storage(warm, prompts, page)
            process.reset_prefix_cache()
            server.kill()
            server.wait()
            alone = answers(process, prompts)
            assert_same_answers(alone, expected)
            assert not any(answer.sources.get("storage", 0) for answer in alone)


def in_host_memory(folder: Path) -> int:
    """Return how many pages of its only model a server has in host memory."""
    [model] = running(folder)["models"]
    return int(model["tiers"]["host"][0])


def _rot(data: Path) -> None:
    picks, size = random.Random(2), data.stat().st_size
    with data.open("r+b") as file:
        for _ in range(40):
            file.seek(picks.randrange(size))
            file.write(b"\xa5" * 64)


def test_an_engine_that_cannot_have_the_storage_says_why(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "kv"
    blocked.write_text("not a folder")
    args = {**SMALL_SGLANG, **hicache(disk(tmp_path))}
    process = EngineProcess(model, engine="sglang", env=ONE_THREAD, **args)
    with pytest.raises(EngineDied, match="TierUnavailable"):
        process.wait_ready()
    process.kill()
