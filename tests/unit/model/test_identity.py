"""What adapters share: models by rank, identity, a rank's tiers."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import NamespaceConfig
from kvcore.errors import TierUnavailable, TransferError, UnsupportedError
from kvcore.model import identity
from kvcore.model.identity import (
    Namespaces,
    Weights,
    hooked,
    lora_identity,
    rope_rule,
    settings_digest,
    weights_identity,
)
from kvcore.model.keys import Namespace
from kvcore.model.shape import BlockShape
from kvcore.model.spec import LayerGroup, ModelDescription, head_range
from kvcore.plugins.manager import Offer, Origin
from kvcore.tiers.base import BlockRead, Tier
from kvcore.worker import RefusingWorker
from kvcore.worker.lifecycle import close_worker, open_tiers, refuse_tier

# --- models -----------------------------------------------------------------------------------


def model(kv_heads: int, ranks: int, groups: int = 1) -> ModelDescription:
    shape = BlockShape(layers=groups, kv_heads=kv_heads, head_dim=8, block_tokens=16, dtype="int8")
    made = tuple(LayerGroup(i, 16, (i,)) for i in range(groups))
    return ModelDescription(shape, made, b"model", ranks)


@given(kv_heads=st.integers(1, 64), ranks=st.integers(1, 64))
def test_every_head_is_somewhere_and_no_rank_is_idle(kv_heads: int, ranks: int) -> None:
    spans = [head_range(kv_heads, ranks, rank) for rank in range(ranks)]
    held = [head for start, stop in spans for head in range(start, stop)]
    assert set(held) == set(range(kv_heads))
    assert held == sorted(held)
    sizes = Counter(stop - start for start, stop in spans)
    if kv_heads >= ranks:
        assert len(held) == kv_heads  # none twice
        assert max(sizes) - min(sizes) <= 1
    else:
        copies = Counter(held)
        assert set(sizes) == {1}
        assert max(copies.values()) - min(copies.values()) <= 1


def test_heads_as_engines_place_them() -> None:
    """Megatron's order: rank r of n holds heads r * h / n on; shared heads lie side by side."""
    assert [head_range(8, 2, rank) for rank in range(2)] == [(0, 4), (4, 8)]
    assert [head_range(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_a_rank_holds_blocks_of_its_own_heads() -> None:
    whole = model(kv_heads=8, ranks=4)
    assert whole.head_range(3) == (6, 8)
    assert whole.rank_shape(3) == BlockShape(
        layers=1, kv_heads=2, head_dim=8, block_tokens=16, dtype="int8"
    )
    assert whole.single_group
    assert not model(1, 1, groups=2).single_group


# --- identity ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_weights_remembered() -> None:
    weights_identity.cache_clear()


@pytest.fixture
def weights(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, content: bytes, config: str = "{}") -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_bytes(content)
        (folder / "adapter_config.json").write_text(config)
        return str(folder)

    return make


def test_local_weights_are_known_by_content(weights: Callable[..., str]) -> None:
    one, copy, other = weights("one", b"1"), weights("copy", b"1"), weights("other", b"2")
    assert weights_identity(one, None, None) == weights_identity(copy, "any", "c" * 40)
    assert weights_identity(one, None, None).digest != weights_identity(other, None, None).digest
    assert weights_identity(one, None, None).alone == ""


def test_a_file_of_weights_is_content(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / f"{name}.pt" for name in ("one", "copy", "other"))
    for path, content in ((one, b"1"), (copy, b"1"), (other, b"2")):
        path.write_bytes(content)
    found = [weights_identity(str(path), None, None).digest for path in (one, copy, other)]
    assert found[0] == found[1] != found[2]


def test_weights_of_a_hub_are_known_by_their_commit() -> None:
    commit, other = "a" * 40, "b" * 40
    assert weights_identity("org/model", "main", commit) == Weights(f"org/model@{commit}".encode())
    assert weights_identity("org/model", other, None) == Weights(f"org/model@{other}".encode())
    assert weights_identity("org/model", "main", None).alone.startswith("the weights of org/model")
    assert weights_identity("org/model", None, None).alone != ""


# --- LoRA -------------------------------------------------------------------------------------


def test_an_adapter_is_known_by_name_weights_and_configuration(weights: Callable[..., str]) -> None:
    found = {
        lora_identity("a", weights("one", b"1")),
        lora_identity("b", weights("one", b"1")),
        lora_identity("a", weights("other", b"2")),
        lora_identity("a", weights("alpha", b"1", '{"lora_alpha": 32}')),
        lora_identity("a", weights("targets", b"1", '{"target_modules": ["q_proj"]}')),
    }
    assert len(found) == 5
    assert lora_identity("a", weights("copy", b"1")) in found


def test_an_adapter_that_is_written_again_is_read_again(weights: Callable[..., str]) -> None:
    path = weights("one", b"1")
    before = lora_identity("a", path)
    weights("one", b"2")
    changed = lora_identity("a", path)
    weights("one", b"2", '{"lora_alpha": 32}')
    assert len({before, changed, lora_identity("a", path)}) == 3


@pytest.mark.parametrize("config", [None, "{", ""])
def test_a_half_written_adapter_is_named(weights: Callable[..., str], config: str | None) -> None:
    path = weights("one", b"1", config or "")
    if config is None:
        (Path(path) / "adapter_config.json").unlink()
    with pytest.raises(UnsupportedError, match=path):
        lora_identity("a", path)


HOSTILE_CONFIGS = {
    "nested": '{"a": ' + "[" * 200_000,
    "nested and whole": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "a list": "[]",
    "a number": '{"r": 1e400}',
    "no Unicode": '{"a": "\\ud800"}',
    "large": '{"a": "' + "x" * (1 << 20) + '"}',
}


@pytest.mark.parametrize("config", HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_a_configuration_that_was_made_to_do_harm_costs_that_adapter_only(
    weights: Callable[..., str], config: str
) -> None:
    path = weights("one", b"1", config)
    with contextlib.suppress(UnsupportedError):
        assert lora_identity("a", path).startswith("a:")
    assert lora_identity("a", weights("two", b"1"))


def test_a_pipe_in_place_of_a_configuration_holds_up_nobody(weights: Callable[..., str]) -> None:
    path = weights("one", b"1")
    (Path(path) / "adapter_config.json").unlink()
    os.mkfifo(Path(path) / "adapter_config.json")
    with pytest.raises(UnsupportedError, match="regular file"):
        lora_identity("a", path)


def test_an_adapter_that_is_not_local_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"org/adapter.*local folder"):
        lora_identity("a", "org/adapter")


# --- rope, tenants ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "odd"),
    [
        ({}, None),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, None),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["longrope"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["dynamic"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, ["longrope"]),
        ({"rope_scaling": {"type": "of next year"}}, ["of next year"]),
    ],
)
def test_engine_and_length_count_where_the_rope_depends_on_them(
    config: dict[str, Any], odd: list[str] | None
) -> None:
    expected = None if odd is None else ["vllm", odd, 4096]
    assert rope_rule(config, "vllm", 4096) == expected


def test_namespaces_differ_by_lora_and_tenant() -> None:
    spaces = Namespaces(NamespaceConfig(), b"model")
    made = [spaces.of(), spaces.of("lora"), spaces.of(salt="tenant"), spaces.of("lora", "tenant")]
    assert len({space.digest for space in made}) == 4
    assert spaces.of() is spaces.of(salt="") is made[0]
    assert made[0] == Namespace(b"model")
    assert made[3] == Namespace(b"model", lora="lora", cache_salt="tenant")


def test_the_configured_tenant_and_secret_are_used() -> None:
    spaces = Namespaces(NamespaceConfig(salt="us", secret="s" * 16), b"model")
    assert spaces.of() == Namespace(b"model", cache_salt="us", secret=b"s" * 16)
    assert spaces.of(salt="them") == Namespace(b"model", cache_salt="them", secret=b"s" * 16)


def test_renewed_namespaces_meet_none_made_before() -> None:
    spaces = Namespaces(NamespaceConfig(), b"model")
    seen = [spaces.of().digest]
    for _ in range(2):
        spaces.renew()
        seen.append(spaces.of().digest)
        assert spaces.of().digest == seen[-1]
    assert len(set(seen)) == 3


def test_tenants_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "NAMESPACES_KEPT", 3)
    spaces = Namespaces(NamespaceConfig(), b"model")
    digests = [spaces.of(salt=str(tenant)).digest for tenant in range(10)]
    assert len(spaces._known) <= 3
    assert [spaces.of(salt=str(tenant)).digest for tenant in range(10)] == digests


# --- a rank's tiers ---------------------------------------------------------------------------


class Holder(RefusingWorker):
    """Keeps the tiers it is given; ends as it is told to."""

    def __init__(self, ends: bool | Exception = True) -> None:
        self.tiers: dict[str, Tier] = {}
        self._ends = ends

    def open_tier(self, name: str, tier: Tier) -> None:
        self.tiers[name] = tier

    def close(self, *, timeout: float = 30.0) -> bool:
        if isinstance(self._ends, Exception):
            raise self._ends
        return self._ends


def test_a_tier_that_cannot_be_had_fails_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    good: Any = object()

    def opener(name: str, told: dict[str, Any]) -> Tier:
        if told["broken"]:
            raise UnsupportedError("nobody home")
        return good  # type: ignore[no-any-return]

    worker = Holder()
    open_tiers(worker, opener, {"attic": {"broken": True}, "books": {"broken": False}})
    assert worker.tiers["books"] is good
    [error] = worker.tiers["attic"].read([BlockRead(0, bytes(16), [])])
    assert isinstance(error, TierUnavailable)
    assert "nobody home" in str(error)
    assert "attic" in caplog.text


def test_a_rank_that_takes_no_work_opens_no_tier() -> None:
    worker = Holder()
    open_tiers(worker, refuse_tier, {"disk": {}})
    with pytest.raises(TierUnavailable, match="'disk' is not opened"):
        worker.tiers["disk"].check_integrity()


def test_an_end_that_hangs_or_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    close_worker(Holder())
    assert caplog.records == []
    close_worker(Holder(ends=False))
    assert "still hung" in caplog.text
    close_worker(Holder(ends=TransferError("a thread died")))
    assert "a thread died" in caplog.text


def test_kv_made_under_hooks_around_attention_is_kept_apart() -> None:
    def found(name: str, version: str = "1") -> str:
        return Offer("attention", name, Origin("plugin", "package", version), None).identity

    own = b"f" * 32
    assert hooked(own, []) == own
    one, other = [found("a")], [found("b")]
    kinds = [
        own,
        *(hooked(own, hooks) for hooks in (one, other, [*one, *other], [found("a", "2")])),
    ]
    assert len(set(kinds)) == 5
    assert {len(kind) for kind in kinds} == {32}
    assert hooked(own, [*one, *other]) == hooked(own, [*other, *one])
    assert hooked(b"g" * 32, one) != hooked(own, one)


def test_settings_are_alike_with_the_same_secret_and_salt_only() -> None:
    def digest(**given: str) -> bytes:
        return settings_digest(NamespaceConfig(**given))

    secret, other = "s" * 32, "t" * 32
    given = [{}, {"secret": secret}, {"secret": other}, {"salt": "a"}, {"salt": "b"}]
    given += [{"secret": secret, "salt": "a"}, {"secret": secret, "salt": "b"}]
    assert len({digest(**one) for one in given}) == len(given)
    assert all(digest(**one) == digest(**one) for one in given)
    assert {len(digest(**one)) for one in given} == {16}
