"""Tenants in settings: names, salts, quotas; what makes no sense is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcore.admin.tenants import UNNAMED, Tenants, Usage, check_quotas
from kvcore.config import load_config, settings
from kvcore.config.schema_control import parse_quota
from kvcore.errors import ConfigError
from kvcore.index import BlockIndex, TierSpec
from kvcore.model.identity import Namespaces, lora_identity
from kvcore.telemetry.metrics import Metrics

BLOCK = 1000


def make(**tenants: Any) -> Tenants:
    config = load_config(None, {"tenants": tenants, "namespace": {"salt": "usual"}})
    index = BlockIndex([TierSpec("host", 10), TierSpec("disk", 40)])
    return Tenants(config, b"f" * 16, index, BLOCK, Metrics(), clock=lambda: 0.0)


def adapter(folder: Path) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"weights")
    return str(folder)


def test_a_tenants_namespaces_are_those_of_its_requests(tmp_path: Path) -> None:
    path = adapter(tmp_path / "sql")
    spaces = Namespaces(load_config(None, {"namespace": {"salt": "usual"}}).namespace, b"f" * 16)
    lora = {"sql": path}
    tenants = make(ann={"salt": "ann", "loras": lora}, bob={"salt": "b"}, rest={"salt": ""})
    assert list(tenants.spaces("ann")) == [
        spaces.of("", "ann"),
        spaces.of(lora_identity("sql", path), "ann"),
    ]
    assert tenants.name_of(spaces.of("", "b").digest) == "bob"
    assert tenants.name_of(spaces.of().digest) == "rest"
    assert tenants.name_of(spaces.of("", "c").digest) == ""


def test_an_adapter_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.ann\.loras\.sql: .* /nowhere"):
        make(ann={"salt": "ann", "loras": {"sql": "/nowhere"}})


def test_quotas_are_blocks_of_a_tier() -> None:
    quota = {"host": "25%", "disk": str(7 * BLOCK + 1)}
    assert list(make(ann={"salt": "a", "quota": quota}, bob={"salt": "b"}).usage()) == [
        Usage("ann", "host", 0, 2),
        Usage("bob", "host", 0, None),
        Usage("ann", "disk", 0, 7),
        Usage("bob", "disk", 0, None),
    ]
    assert parse_quota("12.5 %", 80) == 10
    assert parse_quota("1KiB", 80) == 1024


def test_nobody_has_a_quota_too() -> None:
    """A client that draws its salts anew for every request gets no more than one of nobody's."""
    config = load_config(
        None,
        {
            "tenants": {"ann": {"salt": "a", "quota": {"disk": "50%"}}},
            "clients": {"unnamed_quota": {"host": "20%"}},
        },
    )
    index = BlockIndex([TierSpec("host", 10), TierSpec("disk", 40)])
    tenants = Tenants(config, b"f" * 16, index, BLOCK, Metrics())
    for n in range(20):
        space = tenants.space_of(f"salt-{n}").digest
        reservation = index.lifecycle.reserve("host", [bytes([n]) * 16], 0, 1, space)
        index.lifecycle.commit(reservation)
    assert Usage(UNNAMED, "host", 2, 2) in tenants.usage()
    assert Usage(UNNAMED, "disk", 0, None) in tenants.usage()
    assert tenants.digests(UNNAMED) == []
    with pytest.raises(ConfigError, match=r"clients\.unnamed_quota names the tiers tape"):
        check_quotas(load_config(None, {"clients": {"unnamed_quota": {"tape": "1%"}}}))


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        ({"a b": {"salt": "a"}}, "tenant name 'a b'"),
        ({"ann": {"salt": "a", "quota": {"host": "much"}}}, "given 'much'"),
        ({"ann": {"salt": "a", "quota": {"host": "101%"}}}, "up to 100%"),
        ({"ann": {"salt": "a", "quota": {"host": True}}}, "given True"),
        (
            {"ann": {"salt": "a", "quota": {"tape": "1%"}}},
            "names the tiers tape; there are disk, host",
        ),
        ({"ann": {"salt": "a", "quota": {"host": "999B"}}}, "less than a block of 1000 bytes"),
        ({"ann": {"salt": "x"}, "bob": {"salt": "x"}}, "'bob' and 'ann' have one salt"),
        ({"ann": {}}, "tenants.ann .*: has no salt"),
        ({"ann": {"sald": "x"}}, "did you mean tenants.ann.salt"),
    ],
)
def test_what_makes_no_sense_is_named(tenants: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make(**tenants)


def test_a_salt_is_not_shown() -> None:
    config = load_config(None, {"tenants": {"ann": {"salt": "hunter2"}}})
    assert "hunter2" not in str(settings(config))
    assert "hunter2" not in repr(config)
