"""The conformance kit's crossings through a real store; all its other cases need none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from kvcore.testing.conformance import CASES, Kit, find_driver, run  # after the skip
from kvcore_devtools.servers import Start, need_client, redis_like

need_client("redis")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("engine", "partner", "passed"),
    [
        ("trtllm", "reference", {"both-ways-through-a-store"}),
        pytest.param(
            "reference",
            "reference",
            {"both-ways-through-a-store", "any-size-through-a-store"},
            # Sizes cross a disk in tests/unit/testing, and a store in test_hosts.
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_kv_crosses_through_a_store(
    start_server: Start, tmp_path: Path, engine: str, partner: str, passed: set[str]
) -> None:
    server = start_server(redis_like("redis-server"))
    with Kit(
        find_driver(engine),
        tmp_path,
        partners=[find_driver(partner)],
        store=f"redis://127.0.0.1:{server.port}/0",
    ) as kit:
        results = run(kit, [one for one in CASES if one.store])
    assert {result.case for result in results if result.outcome == "passed"} == passed
    assert [result.why for result in results if result.outcome == "failed"] == []
