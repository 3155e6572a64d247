"""Registration and leadership from a list, and what both directories have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.cluster import Leadership, Member, open_directory
from kvcore.cluster.base import KINDS
from kvcore.cluster.static import StaticDirectory
from kvcore.config import load_config
from kvcore.config.schema_cluster import ClusterConfig
from kvcore.errors import ConfigError, FormatError
from kvcore.testing.waiting import until
from kvcore.tiers.remote.peer.discovery import PeerDiscovery

A = Member("leader", "a", "tcp://a:1", "m", "g", {"events": "tcp://a:2"})
B = Member("leader", "b", "tcp://b:1", "m", "g")
W = Member("worker", "a", "tcp://a:3", "m", "other")

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,8}", fullmatch=True)


@given(
    st.sampled_from(KINDS), names, st.text(), names, names, st.dictionaries(st.text(), st.text())
)
def test_a_member_survives_the_wire(
    kind: str, name: str, address: str, model: str, group: str, details: dict[str, str]
) -> None:
    member = Member(kind, name, address, model, group, details)
    assert Member.from_json(member.to_json()) == member


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": "king", "name": "x"}', "\x00"])
def test_what_is_no_member_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        Member.from_json(text)


@pytest.mark.parametrize("name", ["", "a/b", "/", "a b", "-a", "a\n"])
def test_names_that_would_leave_their_place_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="supported"):
        Member("leader", name)
    with pytest.raises(ConfigError, match="supported"):
        Member("leader", "a", group=name)


def test_the_list_says_who_is_there_and_who_leads() -> None:
    directory = StaticDirectory([B, W, A])
    assert directory.members() == [A, B, W]
    assert directory.members("leader", model="m") == [A, B]
    assert directory.members(group="other") == [W]
    assert directory.leader("m", "g") == Leadership("a", 1)
    assert directory.leader("m", "other") is None
    first, second = directory.campaign("m", "g", "a"), directory.campaign("m", "g", "b")
    assert (first.term, second.term) == (1, None)
    assert first.record("epoch", "7")
    assert not second.record("epoch", "8")
    assert directory.record("m", "g", "epoch") == "7"
    first.resign()
    assert first.term is None
    assert not first.record("epoch", "9")
    assert directory.join(A).held


def test_one_that_is_not_listed_is_named() -> None:
    directory = StaticDirectory([A])
    with pytest.raises(ConfigError, match=r"cluster\.members\.b"):
        directory.join(B)
    with pytest.raises(ConfigError, match="one name"):
        StaticDirectory([A, A])


def test_the_settings_choose_the_directory() -> None:
    assert open_directory(load_config(env={})) is None
    listed = {"members": {"a": {"address": "tcp://a:1", "model": "m"}}}
    directory = open_directory(load_config(overrides={"cluster": listed}, env={}))
    assert directory is not None
    assert [member.name for member in directory.members("leader", model="m")] == ["a"]
    both = load_config(overrides={"cluster": {**listed, "etcd": ["http://x:1"]}}, env={})
    with pytest.raises(ConfigError, match="choose one"):
        open_directory(both)


def test_an_endpoint_that_is_none_is_named() -> None:
    pytest.importorskip("etcd3gw")
    config = load_config(overrides={"cluster": {"etcd": ["nowhere"]}}, env={})
    with pytest.raises(ConfigError, match="2379"):
        open_directory(config)


def test_a_node_whose_address_is_none_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not at every look."""
    names = ["here:1", "nonsense"]

    class Found(StaticDirectory):
        def members(self, *_: object, **__: object) -> list[Member]:
            return [Member("worker", name, details={"peer": name}) for name in names]

    nodes: list[list[str]] = []
    seldom = ClusterConfig(ttl_s=3600)  # its thread looks once
    discovery = PeerDiscovery(
        Found([]), seldom, None, lambda found: nodes.append(list(found)), lambda a: ":" in a
    )
    until(lambda: nodes)
    for _ in range(3):
        discovery._look()
    assert caplog.text.count("its address is 'nonsense'") == 1
    names.remove("nonsense")
    discovery._look()
    names.append("nonsense")
    discovery._look()
    assert caplog.text.count("its address is 'nonsense'") == 2
    assert {tuple(found) for found in nodes} == {("here:1",)}
    discovery.close()
