"""The two-host demo from its store to its verdict, with the reference engine in vLLM's place."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from rich.console import Console

from demo.cluster import COLD, FAR, LOCAL, TIER, Setting, problems, run
from kvcore.harness.engine_process import EngineProcess
from kvcore_devtools.hosts import Host, Network
from kvcore_devtools.servers import need_client

TOKEN_NBYTES = 1024
"""Of `random_llama`'s KV."""


class Small(Setting):
    def engine(self, name: str, host: Host | None, tier: Mapping[str, Any]) -> EngineProcess:
        return EngineProcess(
            "random",
            engine="reference",
            kvcore={"host": {"capacity": "8MiB", "huge_pages": False}, "tiers": {TIER: tier}},
            within=host.command if host else (),
            log=self.results / f"cluster-{name}.log",
        )


@pytest.mark.parametrize(
    ("store", "client", "on_hosts"),
    [("mooncake", "mooncake.store", True), ("redis", "redis", False)],
)
def test_documents_come_from_the_other_host(
    network: Network, tmp_path: Path, store: str, client: str, on_hosts: bool
) -> None:
    need_client(client)
    picks = random.Random(1)
    prompts = [[picks.randrange(1, 512) for _ in range(400 + 50 * i)] for i in range(2)]
    setting = Small("random", "float32", store, 512, TOKEN_NBYTES, tmp_path)
    hosts: dict[str, Host | None] = dict.fromkeys(("a", "b", "store"))
    if on_hosts:
        hosts = dict(network)
    before = network["b"].received
    answers = list(run(setting, prompts, hosts, Console(quiet=True)))
    assert [answer.phase for answer in answers] == [COLD] * 2 + [FAR] * 2 + [LOCAL] * 2
    assert problems(answers) == []
    assert (network["b"].received - before > 400 * TOKEN_NBYTES) == on_hosts
