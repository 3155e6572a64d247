"""What a rank of vLLM's pipeline makes of the layers it is told of: the same as every other.

vLLM itself plans the memory of the stages here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from kvcore.errors import RankLostError, UnsupportedError
from kvcore.harness.models import tiny_model
from kvcore.model.spec import LayerGroup, ModelDescription
from kvcore_vllm import connector as connector_module
from kvcore_vllm.connector import KVCoreConnector
from kvcore_vllm.describe import describe
from kvcore_vllm.handshake import Told
from kvcore_vllm.stages import Stages, gather
from support.vllm_configs import changed

STEP = 128
Specs = dict[str, Any]
Made = tuple[Any, list[KVCacheConfig]]


@cache
def _vllm_config() -> Any:
    model = tiny_model("lfm2", layers=6, heads=4, kv_heads=2, head_dim=64, vocabulary=512)
    args = EngineArgs(str(model), dtype="float32", enforce_eager=True, enable_prefix_caching=True)
    return args.create_engine_config()


def vllm_config(stages: int, **changes: Any) -> Any:
    changes = {"cache_config__kv_cache_layout": "LBHNC", **changes}
    return changed(_vllm_config(), {"parallel_config__pipeline_parallel_size": stages, **changes})


def full(**fields: Any) -> Any:
    kind = fields.pop("kind", FullAttentionSpec)
    given = {"block_size": STEP, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return kind(**given | fields)


def window(**fields: Any) -> Any:
    return full(kind=SlidingWindowSpec, **{"sliding_window": 64, **fields})


def state(layer: int) -> Any:
    """States of the kind of the layer: those of layers 3 and up have another shape."""
    return MambaSpec(
        block_size=STEP,
        shapes=((2, 256 if layer < 3 else 320),),
        dtypes=(torch.float32,),
        page_size_padded=full().page_size_bytes,
        mamba_type="short_conv",
        mamba_cache_mode="align",
    )


def model_of(kinds: str) -> Specs:
    """A letter a layer: a state, a window, or full attention."""
    made = {
        "s": lambda layer: (f"model.layers.{layer}.conv", state(layer)),
        "w": lambda layer: (f"model.layers.{layer}.self_attn.attn", window()),
        "f": lambda layer: (f"model.layers.{layer}.self_attn.attn", full()),
    }
    return dict(made[kind](layer) for layer, kind in enumerate(kinds))


def planned(specs: Specs, stages: Sequence[range], made: Any) -> list[KVCacheConfig]:
    """What vLLM tells a rank of each stage."""
    named = list(specs.items())
    return get_kv_cache_configs(
        made, [dict(named[own.start : own.stop]) for own in stages], [64 << 20] * len(stages)
    )


def ranges(*borders: int) -> list[range]:
    return [range(*pair) for pair in pairwise(borders)]


def described(
    kinds: str, *borders: int, dense: str = "", **changes: Any
) -> tuple[ModelDescription, ModelDescription]:
    """The model as the leader and as a rank describe it, in stages with these borders."""
    stages = ranges(*borders)
    made = vllm_config(len(stages), **changes)
    told = Stages(planned(model_of(kinds), stages, made))
    names = told.names if len(stages) > 1 else ()
    leads = describe(made, told.of_leader(), 16, dense, names)
    return leads, describe(made, told.whole(), 16, dense, names)


def in_blocks(groups: Sequence[LayerGroup]) -> list[tuple[int, str]]:
    """The layers of blocks in order, with their names."""
    return sorted(pair for own in groups for pair in zip(own.layers, own.names, strict=True))


@pytest.mark.parametrize(
    ("kinds", "borders"),
    [
        ("ffff", (0, 2, 4)),
        ("fffff", (0, 2, 3, 5)),
        ("sfsfsf", (0, 3, 6)),
        ("fssfssf", (0, 1, 7)),
        ("wfwfwf", (0, 3, 6)),
        ("wfwwwf", (0, 2, 6)),
        ("ffwwwf", (0, 2, 6)),
    ],
)
def test_leader_and_ranks_describe_the_same_and_stages_divide_it(
    kinds: str, borders: tuple[int, ...]
) -> None:
    leader, rank = described(kinds, *borders)
    assert leader == rank
    specs, stages = list(model_of(kinds)), ranges(*borders)
    full_layers = [name for name, kind in zip(specs, kinds, strict=True) if kind == "f"]
    assert in_blocks(leader.groups) == [*enumerate(full_layers)]
    for number, own in enumerate(stages):
        held = [name for _, name in in_blocks(leader.rank_groups(number))]
        assert held == [specs[layer] for layer in own if kinds[layer] == "f"]
        point = leader.rank_point(number)
        if point is None:
            assert set(kinds) == {"f"}
            continue
        found = [name for group in (*point.states, *point.seen) for name in group.names]
        assert sorted(found) == sorted(specs[layer] for layer in own if kinds[layer] != "f")
    assert leader.shape.layers == len(full_layers)


def test_one_stage_is_described_as_ever() -> None:
    for kinds in ("ffff", "sfsf", "wfwf"):
        leader, rank = described(kinds, 0, 4)
        whole = planned(model_of(kinds), [range(4)], made := vllm_config(1))[0]
        assert leader == rank == describe(made, generate_scheduler_kv_cache_config([whole]), 16)


def test_blocks_are_read_in_any_stages_and_points_in_those_that_wrote_them() -> None:
    """A point's rows are cut by what each stage keeps of it."""
    alone, halves = described("ffff", 0, 4)[0], described("ffff", 0, 2, 4)[0]
    assert alone.fingerprint == halves.fingerprint
    for kinds in ("sfsfsf", "wfwfwf"):
        split = [(0, 6), (0, 3, 6), (0, 2, 6), (0, 2, 4, 6)]
        assert len({described(kinds, *borders)[0].fingerprint for borders in split}) == 4
    dense = [described("wfwfwf", *borders, dense="told")[0] for borders in ((0, 6), (0, 3, 6))]
    assert dense[0].fingerprint == dense[1].fingerprint
    assert [model.point for model in dense] == [None, None]
    assert dense[1].stages == ((0, 3), (3, 6))


def test_stages_beside_tensor_parallel_ranks() -> None:
    """The ranks of a stage have the same layers, and each its own heads."""
    stages, specs = ranges(0, 3, 6), model_of("sfsfsf")
    specs |= {name: full(num_kv_heads=1) for name in specs if name.endswith("attn")}
    specs = {
        name: spec if name.endswith("attn") else state(0).__class__(
            **{**vars(spec), "page_size_padded": full(num_kv_heads=1).page_size_bytes}
        )
        for name, spec in specs.items()
    }  # fmt: skip
    made = vllm_config(2, parallel_config__tensor_parallel_size=2)
    told = Stages(planned(specs, stages, made))
    found = describe(made, told.whole(), 16, stages=told.names)
    assert (found.world_size, found.tensor_ranks, found.stages) == (4, 2, ((0, 1), (1, 3)))
    rows = [point.row_nbytes for rank in range(4) if (point := found.rank_point(rank))]
    one = found.shape.nbytes // 6
    assert rows == [one, one, 2 * one, 2 * one]


def test_windows_are_dense_where_a_stage_has_nothing_else() -> None:
    leader, rank = described("wwffwf", 0, 2, 6)
    assert leader == rank
    assert leader.point is None
    assert leader.stages == ((0, 2), (2, 6))


@pytest.mark.parametrize(
    ("kinds", "borders", "why"),
    [
        ("ssfsfs", (0, 2, 6), r"with \[0, 2\] layers on its stages"),
        ("sfsf", (0, 2, 3, 4), r"with \[1, 0, 1\] layers"),
    ],
)
def test_a_stage_without_attention_is_not_served(
    kinds: str, borders: tuple[int, ...], why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        described(kinds, *borders)


def test_stages_that_are_not_known_are_not_served() -> None:
    made = vllm_config(2)
    [first, _] = planned(model_of("ffff"), ranges(0, 2, 4), made)
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2, and the layers of 0"):
        describe(made, first, 16)
    unlike = Stages([first, KVCacheConfig(8, [], [])])
    with pytest.raises(UnsupportedError, match=r"with \[1, 0\] groups"):
        unlike.whole()


# -- how all learn of it -------------------------------------------------------------------------


def rank_config(rank: int, stages: int = 2) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config={}, kv_load_failure_policy="recompute", kv_role="kv_both"
    )
    world = {"parallel_config__rank": rank, "parallel_config__world_size": stages}
    return vllm_config(stages, kv_transfer_config=transfer, **world)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The connectors of two ranks, which were told of each other, and what vLLM told them."""
    told = planned(model_of("sfsfsf"), ranges(0, 3, 6), rank_config(0))
    monkeypatch.setattr(connector_module, "gather", lambda config, own: Stages(told))
    ranks = [
        KVCoreConnector(rank_config(rank), KVConnectorRole.WORKER, told[rank]) for rank in range(2)
    ]
    return ranks, told


def leading(told: list[KVCacheConfig]) -> Any:
    own = generate_scheduler_kv_cache_config(told)
    return KVCoreConnector(rank_config(0), KVConnectorRole.SCHEDULER, own)


def test_the_first_rank_tells_the_leader_before_the_first_request(made: Made) -> None:
    ranks, told = made
    spoken = [rank.get_handshake_metadata() for rank in ranks]
    assert spoken[1] is None, "other connectors of vLLM take no word of later stages"
    assert isinstance(spoken[0], Told)
    leader, pool = leading(told), SimpleNamespace(cached_block_hash_to_block={})
    assert leader._scheduler is None
    leader.bind_gpu_block_pool(pool)
    leader.set_xfer_handshake_metadata_pp_aware({(0, 0): spoken[0]})
    assert leader._model == ranks[0]._model == ranks[1]._model
    assert leader._scheduler._prefixes is not None
    leader.shutdown()


@pytest.mark.parametrize("said", [{}, {0: KVConnectorHandshakeMetadata()}])
def test_a_leader_that_is_told_nothing_stands_aside(
    made: Made, said: Mapping[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    leader = leading(made[1])
    leader.set_xfer_handshake_metadata(said)
    request: Any = SimpleNamespace(request_id="r")
    for _ in range(2):
        assert leader.get_num_new_matched_tokens(request, 0) == (0, False)
    assert caplog.text.count("kvcore stands aside") == 1
    assert "no rank told the scheduler" in caplog.text


def test_stages_that_are_not_served_are_told_by_one_line(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    _, told = made
    leader = leading(told)
    leader.set_xfer_handshake_metadata({0: Told(Stages([told[0], KVCacheConfig(8, [], [])]))})
    assert leader._scheduler is None
    assert caplog.text.count("kvcore stands aside") == 1
    assert "Traceback" not in caplog.text


def test_a_rank_that_cannot_tell_the_others_ends_the_engine(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it. Here there is no group of ranks at all."""
    monkeypatch.setattr(connector_module, "gather", gather)
    with pytest.raises(RankLostError, match="tell their layers"):
        KVCoreConnector(rank_config(1), KVConnectorRole.WORKER, made[1][1])
    assert gather(vllm_config(1), made[1][0]) is None


def test_wrong_settings_end_the_start(made: Made, tmp_path: Path) -> None:
    leader = leading(made[1])
    host = leader._config.host.model_copy(update={"policy": "nobody's"})
    leader._config = leader._config.model_copy(update={"host": host})
    with pytest.raises(connector_module.ConfigError):
        leader.set_xfer_handshake_metadata({0: made[0][0].get_handshake_metadata()})
