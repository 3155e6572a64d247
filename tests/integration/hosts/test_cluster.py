"""Leases and an election in an etcd on another host, over cables that delay and lose.

host a: a member that stands for election ──┐
                                            ├── switch ── host store: etcd
host b: another ────────────────────────────┘
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvcore
from kvcore.testing.waiting import until
from kvcore_devtools.hosts import Host, Network
from kvcore_devtools.servers import Start, etcd, need_client

need_client("etcd3gw")

TTL_S = 5
LIMIT_S = 180.0
STRETCHES = 6
ROOT = str(Path(kvcore.__file__).resolve().parents[1])

CANDIDATE = """
import sys, time
from kvcore.cluster import Member
from kvcore.cluster.etcd import EtcdDirectory
where, ttl_s, name = sys.argv[1:]
directory = EtcdDirectory([where], ttl_s=int(ttl_s))
entry, candidacy = directory.join(Member("leader", name)), directory.campaign("m", "g", name)
while True:
    before = time.monotonic()
    term, lease = candidacy.term, entry.lease if entry.held else None
    print(before, time.monotonic(), term or 0, lease or 0, flush=True)
    time.sleep(0.02)
"""


class Look(NamedTuple):
    """What a candidate says of itself, at some time between two; 0 is None."""

    after: float
    before: float
    term: int
    lease: int


class Candidate:
    """On a host, and what it has said so far."""

    def __init__(self, host: Host, where: str, log: Path) -> None:
        self.name = host.name
        self.looks: list[Look] = []
        with open(log, "wb") as errors:
            self._process = host.start(
                [sys.executable, "-c", CANDIDATE, where, str(TTL_S), host.name],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": ROOT},
            )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            after, before, term, lease = line.split()
            self.looks.append(Look(float(after), float(before), int(term), int(lease)))

    @property
    def last(self) -> Look:
        return self.looks[-1] if self.looks else Look(0, 0, 0, 0)

    def end(self) -> None:
        self._process.kill()
        self._thread.join()

    def led(self) -> list[tuple[float, float]]:
        """Times, from and to, in which it certainly led: between looks that saw one term."""
        return [
            (one.before, two.after)
            for one, two in itertools.pairwise(self.looks)
            if one.term == two.term != 0
        ]


@pytest.fixture
def candidates(
    network: Network, start_server: Start, tmp_path: Path
) -> Iterator[tuple[Candidate, Candidate]]:
    store = network["store"]
    server = start_server(etcd(store.address), store)
    where = f"http://{server.address}"
    made = [Candidate(network[name], where, tmp_path / f"{name}.log") for name in ("a", "b")]
    yield made[0], made[1]
    for candidate in made:
        candidate.end()


def leases_last(candidates: tuple[Candidate, Candidate]) -> bool:
    """Whether both keep what they have for longer than a lease that is not renewed lasts."""
    first = [candidate.last for candidate in candidates]
    time.sleep(1.2 * TTL_S)
    return all(
        {look.lease for look in candidate.looks if look.after >= begin.after} == {begin.lease}
        for candidate, begin in zip(candidates, first, strict=True)
    )


def test_leases_outlive_delay_and_loss_and_one_leads(
    network: Network, candidates: tuple[Candidate, Candidate]
) -> None:
    if not (network.facts.netem or network.facts.tap):
        pytest.skip(str(network.facts))
    for host in network.values():
        host.slow(delay_s=0.025, loss=0.01)  # two cables on every way
    until(lambda: all(one.last.lease for one in candidates), "not entered")
    until(lambda: any(one.last.term for one in candidates), "nobody leads")
    # A machine that stands still loses leases too, though not every time.
    assert any(leases_last(candidates) for _ in range(STRETCHES)), "leases are lost"
    leader, other = sorted(candidates, key=lambda one: one.last.term, reverse=True)
    old = leader.last.term
    network[leader.name].slow(delay_s=0.05, loss=0.9)
    until(lambda: other.last.term, "nobody took over")
    network[leader.name].heal()
    until(lambda: leader.last.lease, "not entered again")
    assert leader.last.term != old
    spans = [candidate.led() for candidate in candidates]
    both = [
        (mine, theirs)
        for mine in spans[0]
        for theirs in spans[1]
        if max(mine[0], theirs[0]) < min(mine[1], theirs[1])
    ]
    assert not both, f"both led: {both[:3]}"
