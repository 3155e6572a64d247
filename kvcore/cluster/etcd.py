"""A directory in etcd, through its JSON gateway (etcd3gw), with one lease per process.

    PREFIX/members/KIND/NAME         a member, under the lease
    PREFIX/elections/MODEL/GROUP     the leader, under its lease; the term is the revision at which
                                     this key was created, and etcd's revisions only grow
    PREFIX/records/MODEL/GROUP/KEY   values of leaders; a write succeeds only while its writer holds
                                     the election key

A thread renews the lease three times per TTL and claims the leadership where it is vacant. If the
lease is lost, the thread takes a new one and registers every entry again under it.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease
from requests.adapters import HTTPAdapter

from kvcore._util.threads import GuardedThread, nobody_waits
from kvcore.cluster.base import Leadership, Member, check_name, select_members
from kvcore.errors import ClusterError, ConfigError, FormatError

__all__ = ["EtcdDirectory"]

_log = logging.getLogger("kvcore.cluster")

ANSWER_BYTES = 16 << 20
"""Longest answer that is read: some 40,000 members."""

_RENEWALS = 3
"""Renewals per TTL."""

_FREE_SHARE = 0.1
"""Share of the renewal interval during which the lock stays free, however late a renewal is."""

_MARGIN = 0.1
"""Share of the TTL that the holder does not rely on, because clocks run at different rates."""

_FAILURES = (
    Etcd3Exception,
    requests.RequestException,
    *(ValueError, TypeError, LookupError, AttributeError),  # the answer does not come from etcd
)

T = TypeVar("T")


class _HeldLease(NamedTuple):
    """A lease, and the time until which it is certainly valid."""

    lease: int
    until: float


class _StoredValue(NamedTuple):
    """The value at a key, and the revisions at which the key was created and last changed.

    ``key`` is encoded as etcd's gateway sends it.
    """

    key: str
    value: bytes
    revision: int
    changed: int


class _Tls(NamedTuple):
    """Paths of the CA certificate, the client certificate and the client key."""

    ca_cert: str | None
    cert: str | None
    key: str | None


class EtcdDirectory:
    """A directory in etcd. The constructor does not wait for a server.

    ``endpoints`` such as "http://host:2379" are tried in turn.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ttl_s: int = 10,
        prefix: str = "/kvcore",
        ca_cert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the renewal thread. Raises ConfigError for an invalid endpoint or TTL.

        ``ttl_s`` is the time, in seconds, after which a process that died is considered gone.
        """
        if ttl_s < 1 or not endpoints:
            raise ConfigError(
                f"given ttl_s={ttl_s} and the endpoints {list(endpoints)}; supported are a TTL of "
                "at least 1 s and at least one endpoint"
            )
        tls = _Tls(ca_cert, cert, key)
        self._clients = [_client(endpoint, ttl_s / _RENEWALS, tls) for endpoint in endpoints]
        self._prefix = prefix.rstrip("/")
        self._ttl = ttl_s
        self._clock = clock
        self._lock = threading.RLock()
        self._held: _HeldLease | None = None
        self._entries: list[_Entry] = []
        self._candidacies: list[_EtcdCandidacy] = []
        self._unreadable: dict[str, int] = {}  # key of a logged entry -> its revision then
        self._stop = threading.Event()
        self._thread = GuardedThread("kvcore-etcd", self._run, nobody_waits)  # leases end by time
        self._thread.start()

    # -- directory --------------------------------------------------------------------------

    def join(self, member: Member) -> _Entry:
        """Register a member now or, if etcd is down, later: `Membership.held` tells."""
        entry = _Entry(self, member)
        with self._lock:
            self._entries.append(entry)
            self._attempt(lambda: self._register(entry))
        return entry

    def members(
        self, kind: str | None = None, *, model: str | None = None, group: str | None = None
    ) -> Sequence[Member]:
        found, unreadable = [], {}
        for entry in self._range(self._key("members", ""), below=True):
            try:
                found.append(Member.from_json(entry.value))
            except FormatError as error:  # noqa: PERF203  written by another version
                unreadable[entry.key] = entry.changed
                if self._unreadable.get(entry.key) != entry.changed:
                    _log.warning("an entry in etcd is ignored: %s", error)
        self._unreadable = unreadable
        return select_members(found, kind, model, group)

    def campaign(self, model: str, group: str, name: str) -> _EtcdCandidacy:
        for text in (model, group, name):
            check_name(text)
        candidacy = _EtcdCandidacy(self, model, group, name)
        with self._lock:
            self._candidacies.append(candidacy)
            self._attempt(lambda: self._claim(candidacy))
        return candidacy

    def leader(self, model: str, group: str) -> Leadership | None:
        found = self._range(self._key("elections", model, group))
        return Leadership(_text(found[0].value), found[0].revision) if found else None

    def record(self, model: str, group: str, key: str) -> str | None:
        check_name(key)
        found = self._range(self._key("records", model, group, key))
        return _text(found[0].value) if found else None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._ttl)
        with self._lock:
            held, self._held = self._held, None
            self._entries, self._candidacies = [], []
            if held is not None:
                self._attempt(lambda: self._revoke(held.lease))

    # -- lease ------------------------------------------------------------------------------

    def holds(self, lease: int) -> bool:
        """Return True if this lease is certainly valid. O(1)."""
        held = self._held
        return held is not None and held.lease == lease and self._clock() < held.until

    def _run(self) -> None:
        """Renew the lease three times per TTL.

        The interval counts from the start of a renewal. If etcd does not answer one, there is time
        for another before the lease expires.
        """
        every, wait = self._ttl / _RENEWALS, self._ttl / _RENEWALS
        while not self._stop.wait(wait):
            began = self._clock()
            with self._lock:
                if not self._stop.is_set():
                    self._attempt(self._renew)
            took = self._clock() - began
            wait = max(every - took, every * _FREE_SHARE)

    def _renew(self) -> None:
        """Renew the lease, or replace it if it is lost.

        Then register the entries that the lease lacks, and claim vacant leaderships.
        """
        held = self._held
        if held is not None and not self._refreshed(held):
            self._revoke(held.lease)  # its entries, if any are left, go at once
            self._lose(held)
        self._need_lease()
        for entry in self._entries:
            if not entry.held:
                self._register(entry)
        for candidacy in self._candidacies:
            self._claim(candidacy)

    def _refreshed(self, held: _HeldLease) -> bool:
        """Renew the lease, and return True if it is still held.

        An answer that comes after the lease has ended counts as lost: callers may have seen in
        the meantime that the lease is not held, so its terms are over.
        """
        began = self._clock()
        if began >= held.until:
            return False
        left = self._call(lambda client: Lease(held.lease, client).refresh())
        if left <= 0 or self._clock() >= held.until:
            return False
        self._held = _HeldLease(held.lease, self._until(began))
        return True

    def _lose(self, held: _HeldLease) -> None:
        _log.warning(
            "the lease %x is lost; its entries are registered again under a new one", held.lease
        )
        self._held = None

    def _need_lease(self) -> int:
        if self._held is None:
            began = self._clock()
            lease = self._call(lambda client: client.lease(self._ttl))
            self._held = _HeldLease(lease.id, self._until(began))
        return self._held.lease

    def _until(self, began: float) -> float:
        """Return the end of a lease requested at ``began``; etcd's own count starts later."""
        return began + self._ttl * (1 - _MARGIN)

    def _revoke(self, lease: int) -> None:
        try:
            self._call(lambda client: Lease(lease, client).revoke())
        except ClusterError as error:
            _log.debug("lease %x could not be revoked: %s", lease, error)

    # -- entries and elections --------------------------------------------------------------

    def _register(self, entry: _Entry) -> None:
        lease = self._need_lease()
        member = entry.member
        key = self._key("members", member.kind, member.name)
        self._call(lambda client: client.put(key, member.to_json(), Lease(lease, client)))
        entry.lease = lease

    def _withdraw(self, entry: _Entry) -> None:
        with self._lock:
            self._entries.remove(entry)
            entry.lease = None
            key = self._key("members", entry.member.kind, entry.member.name)
            self._call(lambda client: client.delete(key))

    def _claim(self, candidacy: _EtcdCandidacy) -> None:
        """Create the election key if it does not exist, in one atomic transaction.

        Afterwards the candidate knows whether it leads, and in which term.
        """
        lease = self._need_lease()
        key = self._key("elections", candidacy.model, candidacy.group)
        put = {"key": _b64(key), "value": _b64(candidacy.name), "lease": lease}
        term = self._transact(
            [{"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}],
            [{"request_put": put}],
            [{"request_range": {"key": _b64(key)}}],
            read=lambda answer: _term(answer, lease, candidacy.name),
        )
        candidacy.won = None if term is None else (lease, term)

    def _resign(self, candidacy: _EtcdCandidacy) -> None:
        with self._lock:
            won, candidacy.won = candidacy.won, None
            if candidacy in self._candidacies:
                self._candidacies.remove(candidacy)
            if won is not None:
                key = self._key("elections", candidacy.model, candidacy.group)
                delete = {"request_delete_range": {"key": _b64(key)}}
                self._transact([_is_term(key, won[1])], [delete], read=_succeeded)

    def _record(self, candidacy: _EtcdCandidacy, term: int, key: str, value: str) -> bool:
        check_name(key)
        at = self._key("records", candidacy.model, candidacy.group, key)
        election = self._key("elections", candidacy.model, candidacy.group)
        put = {"request_put": {"key": _b64(at), "value": _b64(value)}}
        return self._transact([_is_term(election, term)], [put], read=_succeeded)

    # -- requests ---------------------------------------------------------------------------

    def _key(self, *parts: str) -> str:
        return "/".join((self._prefix, *parts))

    def _range(self, key: str, *, below: bool = False) -> list[_StoredValue]:
        """Return what is stored at a key, or at all keys that start with it if ``below``.

        The gateway omits an empty value, which etcd3gw's own ``get`` mistakes for an etcd error.
        """
        request = {"key": _b64(key)}
        if below:
            request["range_end"] = _b64(key[:-1] + chr(ord(key[-1]) + 1))

        def ask(client: Etcd3Client) -> list[_StoredValue]:
            answer = client.post(client.get_url("/kv/range"), json=request)
            return [
                _StoredValue(
                    kv["key"],
                    base64.b64decode(kv.get("value", "")),
                    int(kv["create_revision"]),
                    int(kv["mod_revision"]),
                )
                for kv in answer.get("kvs", [])
            ]

        return self._call(ask)

    def _transact(
        self,
        compare: list[Any],
        success: list[Any],
        failure: Sequence[Any] = (),
        *,
        read: Callable[[Any], T],
    ) -> T:
        request = {"compare": compare, "success": success, "failure": list(failure)}
        return self._call(lambda client: read(client.transaction(request)))

    def _attempt(self, work: Callable[[], object]) -> None:
        """Run ``work``; a failure is logged, and the next renewal tries again."""
        try:
            work()
        except ClusterError as error:
            _log.debug("%s", error)
        except Exception:  # noqa: BLE001 - thread boundary: renewals must go on
            _log.exception("renewing the lease in etcd failed; it is tried again")

    def _call(self, ask: Callable[[Etcd3Client], T]) -> T:
        """Return the answer of the first endpoint that gives a readable one.

        The endpoint that answered last is tried first. Raises ClusterError if none answers.
        """
        failed: Exception | None = None
        for client in list(self._clients):
            try:
                return ask(client)
            except _FAILURES as error:  # noqa: PERF203  another endpoint may answer
                failed = error
                with self._lock:
                    self._clients.remove(client)
                    self._clients.append(client)
        places = ", ".join(client.base_url for client in self._clients)
        raise ClusterError(
            f"etcd at {places} failed to answer a request: {type(failed).__name__}: {failed}"
        ) from failed


class _Entry:
    """A member registered under the directory's lease."""

    def __init__(self, directory: EtcdDirectory, member: Member) -> None:
        self.member = member
        self.lease: int | None = None
        self._directory = directory

    @property
    def held(self) -> bool:
        return self.lease is not None and self._directory.holds(self.lease)

    def leave(self) -> None:
        self._directory._withdraw(self)


class _EtcdCandidacy:
    """A candidacy in etcd. ``won`` is the lease and the term in which it leads, or None."""

    def __init__(self, directory: EtcdDirectory, model: str, group: str, name: str) -> None:
        self.model = model
        self.group = group
        self.name = name
        self.won: tuple[int, int] | None = None
        self._directory = directory

    @property
    def term(self) -> int | None:
        won = self.won
        return won[1] if won is not None and self._directory.holds(won[0]) else None

    def record(self, key: str, value: str) -> bool:
        term = self.term
        return term is not None and self._directory._record(self, term, key, value)

    def resign(self) -> None:
        self._directory._resign(self)


def _is_term(election: str, term: int) -> dict[str, Any]:
    return {
        "key": _b64(election),
        "target": "CREATE",
        "result": "EQUAL",
        "create_revision": term,
    }


def _term(answer: Any, lease: int, name: str) -> int | None:
    """Return the term in which a candidate leads after its attempt to create the election key.

    None if another candidate leads. A key that an earlier request of this candidate created, and
    whose answer was lost, counts as its own.
    """
    if _succeeded(answer):
        return int(answer["header"]["revision"])
    for kv in answer["responses"][0]["response_range"].get("kvs", []):
        if int(kv.get("lease", 0)) == lease and kv.get("value") == _b64(name):
            return int(kv["create_revision"])
    return None


def _succeeded(answer: Any) -> bool:
    return bool(answer.get("succeeded"))


def _text(value: bytes) -> str:
    """Decode a value that any client may have written."""
    return value.decode(errors="replace")


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _client(endpoint: str, timeout: float, tls: _Tls) -> Etcd3Client:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f'given the endpoint {endpoint!r}; supported is "http://host:2379"')
    client = Etcd3Client(
        host=parts.hostname,
        port=parts.port or 2379,
        protocol=parts.scheme,
        timeout=timeout,
        api_path="/v3/",
        ca_cert=tls.ca_cert,
        cert_cert=tls.cert,
        cert_key=tls.key,
    )
    client.session.mount(f"{parts.scheme}://", _BoundedAdapter())
    return client


class _BoundedAdapter(HTTPAdapter):
    """Reads no more than ANSWER_BYTES of an answer: whoever writes to etcd decides how long it is.

    A longer one raises RequestException.
    """

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        response = super().send(*args, **kwargs)
        response.raw = _BoundedBody(response.raw)
        return response


class _BoundedBody:
    """The body of an answer, in place of urllib3's."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        left = ANSWER_BYTES
        for chunk in self._raw.stream(*args, **kwargs):
            left -= len(chunk)
            if left < 0:
                self._raw.close()
                raise requests.RequestException(f"an answer has more than {ANSWER_BYTES} bytes")
            yield chunk
