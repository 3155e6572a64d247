"""The memory of other nodes as a store: what one has put into its own, the others find and read.

    put       into the part of this node's memory that it lends
    exists    here, or at any of the other nodes
    get       from here; else a lease of the first other node that has it, and a NIXL READ
    delete    here, and at every node that can be asked

A node is a rank. It lends with its own ``listen`` address; a leader has no memory, it only asks.
Nothing is copied to a node that has not asked, and what a node holds is gone when it ends.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from kvcore.config.fields import Seconds
from kvcore.config.schema import Size, parse_size
from kvcore.errors import (
    BlockMissing,
    CapacityError,
    ConfigError,
    CorruptBlock,
    TierError,
    TierUnavailable,
)
from kvcore.memory.buffers import nbytes_of
from kvcore.memory.hugepages import Pages
from kvcore.memory.nixl import LANE_NBYTES, nixl_module
from kvcore.tiers.base import SlotError
from kvcore.tiers.remote.base import BlockStore, Item, fill
from kvcore.tiers.remote.options import StoreOptions
from kvcore.tiers.remote.peer.agent import Agent, Remote
from kvcore.tiers.remote.peer.discovery import Roster, open_roster
from kvcore.tiers.remote.peer.leases import Lending
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
from kvcore.tiers.remote.peer.rpc import Answerer, Peers
from kvcore.tiers.remote.tier import StoreKind

if TYPE_CHECKING:
    from kvcore.config.schema_cluster import ClusterConfig
    from kvcore.tiers.spec import TierContext

_log = logging.getLogger("kvcore.tiers.peer")

_ADDRESS = re.compile(r"(?P<host>[^\s:/]+|\[[0-9a-fA-F:]+\]):(?P<first>[0-9]+)(-(?P<last>[0-9]+))?")
_MAX_RANKS = 64
_TOLD_NODES = 100
_NOT_HERE = (BlockMissing, TierUnavailable)
_EVERY_ADDRESS = ("0.0.0.0", "*", "[::]")


class _Away(TierUnavailable):
    """A node does not answer: that says nothing of the others."""


def addresses(text: str) -> list[str]:
    """tcp://HOST:PORT of each rank of a node. Raises ConfigError."""
    found = _ADDRESS.fullmatch(text)
    first = int(found["first"]) if found else 0
    last = int(found["last"] or first) if found else 0
    if found is None or not (0 < first <= last <= 65535 and last - first < _MAX_RANKS):
        raise ConfigError(
            f"given {text!r}; supported is HOST:PORT, or HOST:FIRST-LAST with a port for each of "
            f"up to {_MAX_RANKS} ranks"
        )
    return [f"tcp://{found['host']}:{port}" for port in range(first, last + 1)]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Raises ConfigError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(f"{error}; supported is a network as 10.0.0.0/16") from error


class PeerOptions(StoreOptions):
    """Where this node is, where the others are, and what it lends."""

    known_by = ()  # whichever nodes there are

    listen: str = Field(
        default="0.0.0.0:7801",
        description="HOST:PORT on which rank 0 is asked by other nodes; a further rank has the "
        "port as many further on.",
    )
    advertise: Annotated[str, Field(pattern=r"^([^\s:/]+|\[[0-9a-fA-F:]+\])$")] | None = Field(
        default=None,
        description="HOST by which other nodes reach this one. Unset: that of `listen`, or this "
        "host's name where that is every address.",
    )
    peers: list[str] | Literal["etcd"] = Field(
        default=[],
        description="Every node, this one too: HOST:PORT, or HOST:FIRST-LAST where one has several "
        'ranks. Or "etcd": nodes find each other through `[cluster]`, among those of the same '
        "`cluster.model` and `cluster.group`.",
    )
    guests: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Hosts beside `peers` whose memory is read when a promise names them: names, "
        'addresses, or networks as "10.0.0.0/16". A promise comes with a request, so whoever may '
        "send requests may name any node of these. Empty: a promise names none but peers.",
    )
    lend: Size = Field(
        default=parse_size("1GiB"),
        description="Bytes of host memory that each rank lends. They are beside `host.capacity`, "
        "and what lies there is gone when the rank ends.",
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Longest time, in seconds, that a value stays in its place for a reader.",
    )
    backend: Annotated[str, Field(min_length=1)] = Field(
        default="UCX", description="NIXL's backend. What UCX uses is set by its own variables."
    )

    @field_validator("listen")
    @classmethod
    def _one_address(cls, text: str) -> str:
        if len(addresses(text)) != 1:
            raise ConfigError(f"given {text!r}; supported is HOST:PORT of rank 0")
        return text

    @field_validator("peers")
    @classmethod
    def _many_addresses(cls, texts: list[str] | str) -> list[str] | str:
        for text in () if isinstance(texts, str) else texts:
            addresses(text)
        return texts

    @field_validator("guests")
    @classmethod
    def _hosts(cls, texts: list[str]) -> list[str]:
        for text in texts:
            if "/" in text:
                _network(text)
        return texts

    def invites(self, address: str) -> bool:
        """Whether tcp://HOST:PORT may be a guest."""
        host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            return host in self.guests
        return host in self.guests or any(
            number in _network(text) for text in self.guests if "/" in text
        )

    def address(self, rank: int) -> str:
        """Where ``rank`` is asked. Raises ConfigError where it would be no port."""
        host, _, port = self.listen.rpartition(":")
        [address] = addresses(f"{host}:{int(port) + rank}")
        return address

    def reached(self, rank: int) -> str:
        """Where others ask ``rank``. Raises ConfigError where it would be no port."""
        host, _, port = self.address(rank).removeprefix("tcp://").rpartition(":")
        if self.advertise is not None:
            host = self.advertise
        elif host in _EVERY_ADDRESS:
            host = socket.gethostname()
        return f"tcp://{host}:{port}"


class _Find(NamedTuple):
    """An item that another node has lent to us: its position, and where it lies."""

    position: int
    remote: Remote


class PeerStore(BlockStore):
    """``rank`` None lends nothing and reads nothing: it asks.

    NIXL is started with the first value that is put or read. A call takes ``timeout_s`` for each of
    its steps at most: to ask, to meet a node that is new, to read, to say that it has read.
    """

    def __init__(self, options: PeerOptions, rank: int | None = None) -> None:
        """Raises UnsupportedError without NIXL or pyzmq, ConfigError for addresses that cannot be,
        TierUnavailable where ``listen`` is taken or the memory is not granted."""
        nixl_module()
        self._options = options
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._told: set[str] = set()
        self._uninvited: set[str] = set()
        self._memory: Pages | None = None
        self.lending: Lending | None = None
        self._answerer: Answerer | None = None
        self._roster: Roster | None = None
        self._reached: str | None = None
        own: list[str] = []
        if rank is not None:
            self._reached = options.reached(rank)
            own = [options.address(rank), self._reached]
            self._memory = Pages(max(options.lend, 1))
            self.lending = Lending(self._memory.view[: options.lend], lease_s=options.lease_s)
            self._answerer = Answerer(
                own[0], self.lending, self._memory.address, self._introduce, self._progress
            )
        listed = [] if isinstance(options.peers, str) else options.peers
        every = [address for text in listed for address in addresses(text)]
        self.peers = Peers(every, options.timeout_s, own)

    def join(self, cluster: ClusterConfig | None) -> None:
        """Find the other nodes, and be found by them, where ``peers`` says so. Does no I/O here.

        Raises ConfigError where ``cluster`` does not do for it.
        """
        if self._options.peers == "etcd":
            self._roster = open_roster(cluster, self._reached, self.peers.update, _is_address)

    # -- the contract -----------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> list[TierError | None]:
        return [self._put(item) for item in items]

    def get(self, items: Sequence[Item]) -> list[TierError | None]:
        """As `BlockStore.get`. What only nodes that are away could have had is missing: each of
        them is left alone by itself, and the store works, unless no peer answers any more."""
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
        return [BlockMissing(str(e)) if isinstance(e, _Away) else e for e in results]

    @property
    def has_nodes(self) -> bool:
        return True

    @property
    def folders(self) -> set[str]:
        own = self.lending.folders if self.lending is not None else ()
        return self.peers.folders.union(own)

    def exists_at(self, node: str, names: Sequence[str]) -> list[bool]:
        """What the node has not is asked of the others. Raises TierUnavailable where neither it nor
        one of them answers."""
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
        first, last = self._options.reached(0), self._options.reached(ranks - 1)
        further = f"-{last.rpartition(':')[2]}" if ranks > 1 else ""
        return first.removeprefix("tcp://") + further

    def exists(self, names: Sequence[str]) -> list[bool]:
        here = self.lending.exists(names) if self.lending is not None else [False] * len(names)
        held = {name for name, is_here in zip(names, here, strict=True) if is_here}
        rest = [name for name in names if name not in held]
        there = self._find(rest)
        self._tell_strangers(rest)
        return [name in held or name in there for name in names]

    def delete(self, names: Sequence[str]) -> None:
        if self.lending is not None:
            self.lending.remove(names)
        for start in range(0, len(names), MAX_NAMES):
            self._ask_all(Remove(list(names[start : start + MAX_NAMES])))

    def close(self) -> None:
        if self._roster is not None:
            self._roster.close()
        if self._answerer is not None:
            self._answerer.close()
        self.peers.close()
        with self._lock:
            agent, self._agent = self._agent, None
        if (agent is None or agent.close()) and self._memory is not None:
            self._memory.close()

    # -- this node --------------------------------------------------------------------------

    def _put(self, item: Item) -> TierError | None:
        if self.lending is None:
            return TierUnavailable(f"{item.name} has nowhere to lie: only ranks lend memory")
        nbytes = nbytes_of(item.parts)
        if nbytes > LANE_NBYTES:
            return SlotError(f"{item.name} has {nbytes} bytes; others read {LANE_NBYTES} at most")
        try:
            self._started()
        except TierUnavailable as error:
            return error
        if self.lending.put(item.name, item.parts):
            return None
        return TierUnavailable(
            f"no room for {nbytes} bytes in the {self._options.lend} that are lent: raise `lend`"
        )

    def _own(self, item: Item) -> TierError | None:
        """What comes of reading a value of this node's own memory."""
        missing = BlockMissing(f"no node holds {item.name}")
        if self.lending is None:
            return missing
        try:
            lease, [place] = self.lending.lease([item.name])
        except CapacityError as error:
            return TierUnavailable(str(error))
        try:
            if place is None:
                return missing
            return None if fill(item, self.lending.view(place)) else _misfit(item, place.nbytes)
        finally:
            self.lending.end(lease)

    def _started(self) -> Agent:
        """This node in NIXL. Raises TierUnavailable."""
        with self._lock:
            if self._agent is None:
                name = f"kvcore-{socket.gethostname()}-{uuid.uuid4().hex}"
                lanes = 2 * self._options.parallel  # as many as `StoreTier` has threads
                self._agent = Agent(name, self._options.backend, lanes, self._memory)
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
        """The addresses of a node that a promise names, as far as they are peers' or guests'."""
        try:
            every = addresses(node)
        except ConfigError as error:
            _log.warning("a promise names no node: %s", error)
            return []
        others = [a for a in every if a not in self.peers.own]
        welcome = [a for a in others if a in self.peers or self._options.invites(a)]
        strange = len(welcome) < len(others) and node not in self._uninvited
        if strange and len(self._uninvited) < _TOLD_NODES:
            self._uninvited.add(node)
            _log.warning("a promise names %s, which is not asked: no peer, nor of `guests`", node)
        return welcome

    def _find(self, names: Sequence[str], at: Sequence[str] | None = None) -> set[str]:
        """Names that nodes hold. Raises as `_ask_all` does."""
        held = set[str]()
        for start in range(0, len(names), MAX_NAMES):
            part = list(names[start : start + MAX_NAMES])
            for answer in self._ask_all(Find(part), at):
                if isinstance(answer, Found) and len(answer.held) == len(part):
                    held.update(n for n, there in zip(part, answer.held, strict=True) if there)
        return held

    def _ask_all(self, request: Request, at: Sequence[str] | None = None) -> list[Reply]:
        """What the nodes answer that may be asked now, all of them or those ``at`` addresses.
        Raises TierUnavailable where there are others than this, and none answers."""
        chosen = self.peers.available() if at is None else at
        asked = self.peers.ask(dict.fromkeys(chosen, request))
        answers = [answer for answer in asked.values() if not isinstance(answer, TierUnavailable)]
        if (at is not None or len(self.peers)) and not answers:
            raise next(
                (error for error in asked.values() if isinstance(error, TierUnavailable)),
                TierUnavailable("every other node is left alone for a while: none has answered"),
            )
        return answers

    def _fetch(
        self,
        items: Sequence[Item],
        absent: Sequence[int],
        results: list[TierError | None],
        at: Sequence[str],
    ) -> set[str]:
        """Read the items at ``absent`` from those nodes ``at`` addresses that have them, under a
        lease of each. Returns those that answered all the time."""
        asked_at = time.monotonic()
        request = Lease([items[position].name for position in absent])
        asked = self.peers.ask(dict.fromkeys(at, request))
        read: dict[str, list[int]] = {}
        for answer in asked.values():
            if isinstance(answer, TierUnavailable):
                for position in absent:  # it may be the one that has them
                    if isinstance(results[position], BlockMissing):
                        results[position] = _Away(str(answer))
        for address, answer in asked.items():
            if isinstance(answer, Leased) and any(answer.places):
                finds = _fitting(items, absent, answer, results)
                leased_until = asked_at + answer.seconds
                error = self._read(address, answer.agent, items, finds, leased_until)
                for find in finds:
                    results[find.position] = error
                read[address] = [find.position for find in finds]
        used = {address: asked[address] for address in read}
        gone = self._give_back(used, items, read, results)
        return {a for a, said in asked.items() if not isinstance(said, TierUnavailable)} - gone

    def _read(
        self,
        address: str,
        owner: str,
        items: Sequence[Item],
        finds: Sequence[_Find],
        leased_until: float,
    ) -> TierUnavailable | None:
        """Fill the items that were found at a node; why that did not work, None if it did.

        The timeout of the reads begins when this node can read: starting NIXL and meeting the owner
        may take a busy machine long, and have timeouts of their own.
        """
        try:
            agent = self._started()
            if owner == agent.name:
                return TierUnavailable("this node asked itself for what it had not a moment ago")
            if finds and not agent.knows(owner):
                self._meet(agent, address, owner)
            until = min(time.monotonic() + self._options.timeout_s, leased_until)
            for together in _lanes_of(finds):
                with agent.read(owner, [find.remote for find in together], until) as values:
                    for find, value in zip(together, values, strict=True):
                        fill(items[find.position], value)
        except TierUnavailable as error:
            return error
        return None

    def _meet(self, agent: Agent, address: str, owner: str) -> None:
        reply = self.peers.ask({address: Meet()})[address]
        if isinstance(reply, TierUnavailable):
            raise reply
        if not isinstance(reply, Met) or reply.agent != owner:
            raise TierUnavailable(f"the node at {address} has been started anew")
        agent.meet(owner, reply.metadata)

    def _give_back(
        self,
        asked: Mapping[str, Reply | TierUnavailable],
        items: Sequence[Item],
        read: Mapping[str, Sequence[int]],
        results: list[TierError | None],
    ) -> set[str]:
        """End leases. What was read under one that had ended before may be anything. A node that
        says nothing to that is gone, and what was read is judged by its checksum. Returns those."""
        gone: set[str] = set()
        used = {a: Done(leased.lease) for a, leased in asked.items() if isinstance(leased, Leased)}
        for address, answer in self.peers.ask(used).items():
            if isinstance(answer, TierUnavailable):
                gone.add(address)
                for position in read[address]:
                    if results[position] is not None:
                        results[position] = _Away(str(results[position]))
            if isinstance(answer, Ended) and not answer.held:
                for position in read[address]:
                    if results[position] is None:
                        results[position] = BlockMissing(
                            f"{items[position].name} was lent by {address} for less time than "
                            "reading it took"
                        )
        return gone

    def _tell_strangers(self, names: Sequence[str]) -> None:
        """Say once of each model and block shape that the other nodes hold nothing but others."""
        wanted = {_model_of(folder_of(name)) for name in names}
        held = {_model_of(folder) for folder in self.peers.folders}
        if not held or wanted & held:
            return
        for model in wanted - self._told:
            self._told.add(model)
            _log.warning("no other node holds KV of %s, only of %s", model, ", ".join(sorted(held)))


def _model_of(folder: str) -> str:
    """What a folder's values are of, whichever heads and layers: a model and a block shape."""
    return folder.rpartition("/")[0]


def _is_address(text: str) -> bool:
    """Whether it is tcp://HOST:PORT of one node."""
    try:
        return addresses(text.removeprefix("tcp://")) == [text]
    except ConfigError:
        return False


def _fitting(
    items: Sequence[Item],
    absent: Sequence[int],
    leased: Leased,
    results: list[TierError | None],
) -> list[_Find]:
    """What is still wanted of the values that a node has lent, and has the size it should have."""
    finds = []
    for position, place in zip(absent, leased.places, strict=False):
        if place is None or results[position] is None:
            continue
        address, nbytes = place
        if nbytes == nbytes_of(items[position].parts) <= LANE_NBYTES:
            finds.append(_Find(position, Remote(address, nbytes)))
        else:
            results[position] = _misfit(items[position], nbytes)
    return finds


def _lanes_of(finds: Sequence[_Find]) -> Iterator[list[_Find]]:
    """Finds that fit one lane, as many at a time as do."""
    together: list[_Find] = []
    room = LANE_NBYTES
    for find in finds:
        if find.remote.nbytes > room:
            yield together
            together, room = [], LANE_NBYTES
        together.append(find)
        room -= find.remote.nbytes
    if together:
        yield together


def _misfit(item: Item, nbytes: int) -> CorruptBlock:
    return CorruptBlock(f"{nbytes} bytes lie under {item.name}; {nbytes_of(item.parts)} are wanted")


def _join(store: PeerStore, context: TierContext) -> None:
    store.join(context.cluster)


KIND = StoreKind(PeerOptions, PeerStore, _join)
