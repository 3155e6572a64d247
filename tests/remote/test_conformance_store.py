"""The conformance kit's crossings through a real store; all its other cases need none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from kvcore.testing.conformance import CASES, Kit, find_driver, run  # after the skip
from kvcore.testing.servers import Start, need_client, redis_like

need_client("redis")


@pytest.mark.engine
def test_kv_crosses_through_a_store(start_server: Start, tmp_path: Path) -> None:
    server = start_server(redis_like("redis-server"))
    with Kit(
        find_driver("trtllm"),
        tmp_path,
        partners=[find_driver("reference")],
        store=f"redis://127.0.0.1:{server.port}/0",
    ) as kit:
        [result] = run(kit, [one for one in CASES if one.store])
    assert (result.outcome, result.why) == ("passed", "")
