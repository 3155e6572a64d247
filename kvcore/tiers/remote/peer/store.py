"""The memory of all nodes as a store: each node writes to its own memory, and the others read it.

    put       into the memory that this node lends
    exists    here, or at any other node
    get       from here, or by NIXL READ under a lease of the first other node that has the value
    delete    here, and at every node that can be asked

A node is a rank, with its own ``listen`` address. A leader lends no memory; it only asks. Nothing
is copied to a node that has not asked for it. What a node holds is lost when the node ends.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcore.errors import (
    BlockMissing,
    CapacityError,
    ConfigError,
    TierError,
    TierUnavailable,
)
from kvcore.memory.buffers import nbytes_of
from kvcore.memory.hugepages import Pages
from kvcore.memory.nixl import CHANNEL_NBYTES, nixl_module
from kvcore.tiers.base import SlotError
from kvcore.tiers.remote.base import BlockStore, Item, fill, wrong_size
from kvcore.tiers.remote.peer.agent import Agent, Remote
from kvcore.tiers.remote.peer.discovery import PeerDiscovery, open_discovery
from kvcore.tiers.remote.peer.leases import LentMemory
from kvcore.tiers.remote.peer.messages import (
    MAX_NAMES,
    Done,
    Ended,
    Find,
    Found,
    Lease,
    Leased,
    Meet,
    Met,
    Remove,
    Reply,
    Request,
    folder_of,
)
from kvcore.tiers.remote.peer.options import PeerOptions, addresses
from kvcore.tiers.remote.peer.rpc import Peers, PeerServer
from kvcore.tiers.remote.tier import StoreKind

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig
    from kvcore.tiers.spec import TierContext

_log = logging.getLogger("kvcore.tiers.peer")

_MAX_REFUSED = 100
_NOT_HERE = (BlockMissing, TierUnavailable)


class _Unreachable(TierUnavailable):
    """A node did not answer, which says nothing about the others."""


class _RemoteItem(NamedTuple):
    """An item that another node has leased to this one: its position, and where it lies."""

    position: int
    remote: Remote


class _Loan(NamedTuple):
    """A lease of another node, and the positions of the items that were read under it."""

    lease: int
    positions: list[int]


class PeerStore(BlockStore):
    """The memory of all nodes. With ``rank`` None, the store only looks up and deletes.

    NIXL starts with the first value that is written or read. Each step of a call takes at most
    ``timeout_s``: asking for leases, meeting a new node, reading, and ending the leases.
    """

    def __init__(self, options: PeerOptions, rank: int | None = None) -> None:
        """Allocate the lent memory, and start answering other nodes.

        Raises UnsupportedError without NIXL or pyzmq, ConfigError for invalid addresses, and
        TierUnavailable if ``listen`` cannot be bound or the memory cannot be allocated.
        """
        nixl_module()
        self._options = options
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._warned: set[str] = set()
        self._refused: set[str] = set()
        self._memory: Pages | None = None
        self.lent: LentMemory | None = None
        self._server: PeerServer | None = None
        self._discovery: PeerDiscovery | None = None
        self._advertised: str | None = None
        own: list[str] = []
        if rank is not None:
            self._advertised = options.advertised(rank)
            own = [options.address(rank), self._advertised]
            self._memory = Pages(max(options.lend, 1))
            self.lent = LentMemory(self._memory.view[: options.lend], lease_s=options.lease_s)
            self._server = PeerServer(
                own[0],
                self.lent,
                self._memory.address,
                self._introduce,
                self._progress,
                keys=options.keys,
            )
        listed = [] if isinstance(options.peers, str) else options.peers
        every = [address for text in listed for address in addresses(text)]
        self.peers = Peers(every, options.timeout_s, own, keys=options.keys)

    def join(self, cluster: ClusterConfig | None) -> None:
        """Start discovery of the other nodes if ``peers`` is "etcd". Does no I/O on this thread.

        Raises ConfigError if ``cluster`` does not name etcd.
        """
        if self._options.peers == "etcd":
            self._discovery = open_discovery(
                cluster, self._advertised, self.peers.update, _is_address
            )

    # -- the contract -----------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        """Read values as `BlockStore.get` does, from this node and from others.

        A value that only unreachable nodes may have is reported as BlockMissing, because the store
        as a whole works. Only if no peer answers at all is it reported as TierUnavailable.
        """
        results = [self._own(item) for item in items]
        nodes = dict.fromkeys(node for item in items for node in item.nodes)
        first = self.peers.available(a for node in nodes for a in self._promised(node))
        others = [a for a in self.peers.available() if a not in first]
        heard: set[str] = set()
        for at in (first, others):
            absent = [i for i, error in enumerate(results) if isinstance(error, _NOT_HERE)]
            for start in range(0, len(absent) if at else 0, MAX_NAMES):
                heard |= self._fetch(items, absent[start : start + MAX_NAMES], results, at)
        if not heard and others:
            return results
        return [BlockMissing(str(e)) if isinstance(e, _Unreachable) else e for e in results]

    @property
    def has_nodes(self) -> bool:
        return True

    @property
    def folders(self) -> set[str]:
        own = self.lent.folders if self.lent is not None else ()
        return self.peers.folders.union(own)

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        """Look up values at ``node`` first, and the rest at all other nodes.

        Raises TierUnavailable if neither ``node`` nor any other node answers.
        """
        promised = self._promised(node)
        there: set[str] = set()
        away: TierUnavailable | None = None
        if promised:
            try:
                there = self._find(names, self.peers.available(promised))
            except TierUnavailable as error:
                away = error
                if not self.peers.available():
                    raise
        rest = [name for name in names if name not in there]
        try:
            held = self.exists(rest) if rest else []
        except TierUnavailable:
            if away is not None or not promised:
                raise
            held = [False] * len(rest)
        there.update(name for name, is_held in zip(rest, held, strict=True) if is_held)
        return [name in there for name in names]

    def node(self, ranks: int) -> str:
        first, last = self._options.advertised(0), self._options.advertised(ranks - 1)
        further = f"-{last.rpartition(':')[2]}" if ranks > 1 else ""
        return first.removeprefix("tcp://") + further

    def exists(self, names: Sequence[str]) -> list[bool]:
        here = self.lent.exists(names) if self.lent is not None else [False] * len(names)
        held = {name for name, is_here in zip(names, here, strict=True) if is_here}
        rest = [name for name in names if name not in held]
        there = self._find(rest)
        self._warn_of_other_models(rest)
        return [name in held or name in there for name in names]

    def delete(self, names: Sequence[str]) -> None:
        if self.lent is not None:
            self.lent.remove(names)
        for start in range(0, len(names), MAX_NAMES):
            self._ask_all(Remove(list(names[start : start + MAX_NAMES])))

    def close(self) -> None:
        if self._discovery is not None:
            self._discovery.close()
        answered = self._server is None or self._server.close()
        self.peers.close()
        if not answered:  # NIXL still works on the memory
            return
        with self._lock:
            agent, self._agent = self._agent, None
        if (agent is None or agent.close()) and self._memory is not None:
            self._memory.close()

    # -- this node --------------------------------------------------------------------------

    def _put(self, item: Item) -> TierError | None:
        if self.lent is None:
            return TierUnavailable(f"{item.name} cannot be stored: only ranks lend memory")
        nbytes = nbytes_of(item.parts)
        if nbytes > CHANNEL_NBYTES:
            return SlotError(
                f"given {nbytes} bytes as {item.name}; supported are at most {CHANNEL_NBYTES}"
            )
        try:
            self._started()
        except TierUnavailable as error:
            return error
        if self.lent.put(item.name, item.parts):
            return None
        return TierUnavailable(
            f"no space for {nbytes} bytes in the {self._options.lend} that are lent: raise `lend`"
        )

    def _own(self, item: Item) -> TierError | None:
        """Read a value from this node's own memory."""
        missing = BlockMissing(f"no node holds {item.name}")
        if self.lent is None:
            return missing
        try:
            lease, [place] = self.lent.lease([item.name])
        except CapacityError as error:
            return TierUnavailable(str(error))
        try:
            if place is None:
                return missing
            return None if fill(item, self.lent.view(place)) else wrong_size(item, place.nbytes)
        finally:
            self.lent.end(lease)

    def _started(self) -> Agent:
        """Return this node's NIXL agent, started if necessary. Raises TierUnavailable."""
        with self._lock:
            if self._agent is None:
                name = f"kvcore-{socket.gethostname()}-{uuid.uuid4().hex}"
                channels = 2 * self._options.parallel  # one per thread of `StoreTier`
                self._agent = Agent(name, self._options.backend, channels, self._memory)
            return self._agent

    def _introduce(self) -> tuple[str, bytes]:
        agent = self._started()
        return agent.name, agent.metadata

    def _progress(self) -> None:
        agent = self._agent
        if agent is not None:
            agent.progress()

    # -- other nodes ------------------------------------------------------------------------

    def _promised(self, node: str) -> list[str]:
        """Return those addresses of a promised node that belong to peers or admitted guests."""
        try:
            every = addresses(node)
        except ConfigError as error:
            _log.warning("a promise names an invalid node: %s", error)
            return []
        others = [a for a in every if a not in self.peers.own]
        admitted = [a for a in others if a in self.peers or self._options.admits(a)]
        refused = len(admitted) < len(others) and node not in self._refused
        if refused and len(self._refused) < _MAX_REFUSED:
            self._refused.add(node)
            _log.warning(
                "a promise names %s, which is neither a peer nor in `guests` at `guest_ports`", node
            )
        return admitted

    def _find(self, names: Sequence[str], at: Sequence[str] | None = None) -> set[str]:
        """Return the names that nodes hold. Raises what `_ask_all` raises."""
        held = set[str]()
        for start in range(0, len(names), MAX_NAMES):
            part = list(names[start : start + MAX_NAMES])
            for answer in self._ask_all(Find(part), at):
                if isinstance(answer, Found) and len(answer.held) == len(part):
                    held.update(n for n, there in zip(part, answer.held, strict=True) if there)
        return held

    def _ask_all(self, request: Request, at: Sequence[str] | None = None) -> list[Reply]:
        """Ask the nodes at the addresses ``at``, or all available ones, and return their answers.

        Raises TierUnavailable if there are other nodes and none of them answers.
        """
        chosen = self.peers.available() if at is None else at
        asked = self.peers.ask(dict.fromkeys(chosen, request))
        answers = [answer for answer in asked.values() if not isinstance(answer, TierUnavailable)]
        if (at is not None or len(self.peers)) and not answers:
            raise next(
                (error for error in asked.values() if isinstance(error, TierUnavailable)),
                TierUnavailable("no other node has answered: all are left alone for a while"),
            )
        return answers

    def _fetch(
        self,
        items: Sequence[Item],
        absent: Sequence[int],
        results: list[TierError | None],
        at: Sequence[str],
    ) -> set[str]:
        """Read the items at the positions ``absent`` under leases of the nodes at ``at``.

        Fills in ``results``. Returns the nodes that answered every request.
        """
        asked_at = time.monotonic()
        request = Lease([items[position].name for position in absent])
        asked = self.peers.ask(dict.fromkeys(at, request))
        silent = {a: said for a, said in asked.items() if isinstance(said, TierUnavailable)}
        for error in silent.values():  # each of these nodes may be the one that has them
            for position in absent:
                if isinstance(results[position], BlockMissing):
                    results[position] = _Unreachable(str(error))
        loans: dict[str, _Loan] = {}
        for address, answer in asked.items():
            if isinstance(answer, Leased) and any(answer.places):
                leased = _fitting(items, absent, answer, results)
                until = asked_at + answer.seconds
                outcome = self._read(address, answer.agent, items, leased, until)
                loans[address] = _Loan(answer.lease, [one.position for one in leased])
                for position in loans[address].positions:
                    results[position] = outcome
        return asked.keys() - silent.keys() - self._end_leases(loans, items, results)

    def _read(
        self,
        address: str,
        owner: str,
        items: Sequence[Item],
        leased: Sequence[_RemoteItem],
        leased_until: float,
    ) -> TierUnavailable | None:
        """Read the items that were found at a node. Returns the error; None on success.

        The timeout of the reads begins when this node can read. Starting NIXL and meeting the owner
        may take long on a busy machine, and have timeouts of their own.
        """
        try:
            agent = self._started()
            if owner == agent.name:
                return TierUnavailable("this node reached itself under another address")
            if leased and not agent.knows(owner):
                self._meet(agent, address, owner)
            until = min(time.monotonic() + self._options.timeout_s, leased_until)
            for together in _channels_of(leased):
                with agent.read(owner, [one.remote for one in together], until) as values:
                    for one, value in zip(together, values, strict=True):
                        fill(items[one.position], value)
        except TierUnavailable as error:
            return error
        return None

    def _meet(self, agent: Agent, address: str, owner: str) -> None:
        reply = self.peers.ask({address: Meet()})[address]
        if isinstance(reply, TierUnavailable):
            raise reply
        if not isinstance(reply, Met) or reply.agent != owner:
            raise TierUnavailable(f"the node at {address} has restarted")
        agent.meet(owner, reply.metadata)

    def _end_leases(
        self,
        loans: Mapping[str, _Loan],
        items: Sequence[Item],
        results: list[TierError | None],
    ) -> set[str]:
        """End the leases of these nodes, and return the nodes that did not answer.

        Values read under a lease that had expired may be wrong, and become BlockMissing. If a node
        does not answer, its values are kept: their checksums tell whether they are right.
        """
        gone: set[str] = set()
        ended = self.peers.ask({address: Done(loan.lease) for address, loan in loans.items()})
        for address, answer in ended.items():
            positions = loans[address].positions
            if isinstance(answer, TierUnavailable):
                gone.add(address)
                for position in (p for p in positions if results[p] is not None):
                    results[position] = _Unreachable(str(results[position]))
            elif isinstance(answer, Ended) and not answer.held:
                for position in (p for p in positions if results[p] is None):
                    results[position] = BlockMissing(
                        f"the lease of {items[position].name} at {address} expired too early"
                    )
        return gone

    def _warn_of_other_models(self, names: Sequence[str]) -> None:
        """Log once per model and block shape that the other nodes hold only others."""
        wanted = {_model_of(folder_of(name)) for name in names}
        held = {_model_of(folder) for folder in self.peers.folders}
        if not held or wanted & held:
            return
        for model in wanted - self._warned:
            self._warned.add(model)
            _log.warning("no other node holds KV of %s, only of %s", model, ", ".join(sorted(held)))


def _model_of(folder: str) -> str:
    """Return the model and block shape of a folder, without its heads and layers."""
    return folder.rpartition("/")[0]


def _is_address(text: str) -> bool:
    """Return True if ``text`` is tcp://HOST:PORT of one node."""
    try:
        return addresses(text.removeprefix("tcp://")) == [text]
    except ConfigError:
        return False


def _fitting(
    items: Sequence[Item],
    absent: Sequence[int],
    answer: Leased,
    results: list[TierError | None],
) -> list[_RemoteItem]:
    """Return the leased values that are still wanted and have the expected size.

    A value of another size becomes an error in ``results``.
    """
    wanted = []
    for position, place in zip(absent, answer.places, strict=False):
        if place is None or results[position] is None:
            continue
        address, nbytes = place
        if nbytes == nbytes_of(items[position].parts) <= CHANNEL_NBYTES:
            wanted.append(_RemoteItem(position, Remote(address, nbytes)))
        else:
            results[position] = wrong_size(items[position], nbytes)
    return wanted


def _channels_of(wanted: Sequence[_RemoteItem]) -> Iterator[list[_RemoteItem]]:
    """Yield batches of items that fit one channel."""
    together: list[_RemoteItem] = []
    room = CHANNEL_NBYTES
    for one in wanted:
        if one.remote.nbytes > room:
            yield together
            together, room = [], CHANNEL_NBYTES
        together.append(one)
        room -= one.remote.nbytes
    if together:
        yield together


def _join(store: PeerStore, context: TierContext) -> None:
    store.join(context.cluster)


KIND = StoreKind(PeerOptions, PeerStore, _join)
