"""Forged, moved, cut and downgraded KV in stores that somebody else can write to.

The attacker reads and writes everything in the store: values, records, checksums and seals. The
attacker may hold other tenants' blocks and values of other deployments, but not `namespace.secret`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from kvcore.config import load_config
from kvcore.errors import CorruptBlock, Mismatch
from kvcore.model.parts import Part
from kvcore.tiers.base import BlockRead, BlockWrite
from kvcore.tiers.checksum import checksum
from kvcore.tiers.disk.format import Record, read_table, shard_files
from kvcore.tiers.geometry import RECORD_NBYTES, Geometry
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac, key_of_secret
from kvcore.tiers.remote import Item, Shard, StoreOptions, StoreTier
from kvcore.tiers.remote.format import HEADER_NBYTES, Header
from kvcore_devtools.servers import Start, need_client, redis_like, servers
from support.store_parties import STORES, Opener, mooncake
from support.stores import SHAPE, key_of

MAC = BlockMac(key_of_secret("the deployment's secret", "mac"))
OTHER_MAC = BlockMac(key_of_secret("the attacker's secret", "mac"))
CIPHER, OTHER_CIPHER = BlockCipher(bytes(range(32))), BlockCipher(bytes(32))
GEOMETRY = Geometry(SHAPE, b"model", ((0, 1), (1, 2)))
PARENT, SPACE = key_of(90), key_of(91)
KEY = key_of(1)


# -- stores -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with servers(tmp_path_factory.mktemp("servers")) as start:
        yield start


class Scene:
    """A deployment's writer and reader, and an attacker, at one store."""

    def __init__(self, connect: Opener, guard: BlockGuard | None) -> None:
        self.guard = guard
        geometry = GEOMETRY.guarded(guard)
        self.shards = [Shard.of(geometry, rank, "kvcore") for rank in (0, 1)]
        self.name = self.shards[0].name(KEY)
        options = StoreOptions(deadline_s=60.0)
        self.writers = [StoreTier(connect(), shard, options, guard=guard) for shard in self.shards]
        self.attacker = connect()
        self.reader = StoreTier(connect(), self.shards[0], options, guard=guard)
        self.block = random.Random(5).randbytes(self.shards[0].block_nbytes)
        self.write(0, KEY)
        self.value = self.stolen(self.name)

    def write(
        self, shard: int, key: bytes, parent: bytes = PARENT, namespace: bytes = SPACE
    ) -> str:
        """Have the deployment store a block; return the name of its value."""
        write = BlockWrite(0, key, parent, namespace, [memoryview(self.block)])
        assert self.writers[shard].write([write]) == [None]
        return self.shards[shard].name(key)

    def stolen(self, name: str) -> bytes:
        """Return a value as the attacker reads it."""
        value = memoryview(bytearray(HEADER_NBYTES + len(self.block)))
        assert self.attacker.get([Item(name, [value])]) == [None]
        return bytes(value)

    def plant(self, value: bytes) -> None:
        """Put a value in the place of the block's."""
        self.attacker.delete([self.name])
        assert self.attacker.put([Item(self.name, [memoryview(value)])]) == [None]

    def read(self) -> CorruptBlock | None:
        into = memoryview(bytearray(len(self.block)))
        asked = BlockRead(0, KEY, [into], parent=PARENT, namespace=SPACE)
        (error,) = self.reader.read([asked])
        assert error is None or isinstance(error, CorruptBlock), error
        assert error is not None or bytes(into) == self.block
        return error

    def refuses(self, value: bytes, why: set[Mismatch]) -> str:
        """Plant a value, and assert that it is refused for one of these reasons."""
        self.plant(value)
        error = self.read()
        assert error is not None, "forged KV was served"
        assert error.mismatch in why
        return str(error)

    def close(self) -> None:
        for tier in (*self.writers, self.reader):
            tier.close()
        self.attacker.close()


@pytest.fixture(params=STORES, ids=lambda kind: kind.__name__)
def scene(
    request: pytest.FixtureRequest, start_server: Start, tmp_path: Path
) -> Iterator[Callable[..., Scene]]:
    with ExitStack() as stack:
        connect = request.param(start_server, tmp_path, stack)

        def make(guard: BlockGuard | None = MAC) -> Scene:
            made = Scene(connect, guard)
            stack.callback(made.close)
            return made

        yield make


def resealed(header: bytes) -> bytes:
    """Return 128 bytes with the unkeyed seal made again."""
    return header[:120] + xxhash.xxh3_64_intdigest(header[:96]).to_bytes(8, "little")


def plain_value(block: bytes, shard: bytes) -> bytes:
    """Return what anybody can make: a value without a MAC, its checksums right."""
    digest = checksum(KEY, [memoryview(block)], len(block))
    return Header(len(block), KEY, PARENT, SPACE, shard, digest).pack() + block


def sealed_value(guard: BlockGuard, block: bytes, shard: bytes) -> bytes:
    """Return what somebody with another key can make."""
    header = Header(len(block), KEY, PARENT, SPACE, shard, bytes(16), guard.flag)
    into = memoryview(bytearray(block))
    nonce, tag = guard.seal([memoryview(block)], len(block), header.associated_data, into)
    return header._replace(checksum=tag, nonce=nonce).pack() + bytes(into)


beside_mooncake = pytest.mark.parametrize(
    "scene",
    [
        pytest.param(kind, id=kind.__name__, marks=[pytest.mark.exhaustive] * (kind is mooncake))
        for kind in STORES
    ],
    indirect=True,
)
"""Mooncake's servers take seconds to start. `make test` tries every forged value there, and what a
guard does above any store at the others."""

FORGED = {Mismatch.FORGED}
OTHER = {Mismatch.OTHER}
TRUNCATED = {Mismatch.TRUNCATED}


@pytest.mark.parametrize("guard", [MAC, CIPHER], ids=["mac", "aead"])
def test_every_forged_value_of_a_store_is_refused(
    scene: Callable[..., Scene], guard: BlockGuard
) -> None:
    """Each is refused and named, and then what the deployment wrote is read again."""
    one = scene(guard)
    good, shard = one.value, one.shards[0].digest
    assert one.read() is None
    lie = random.Random(6).randbytes(len(one.block))
    text = one.refuses(plain_value(lie, shard), FORGED)
    assert "has no MAC and is not encrypted" in text
    for other in {MAC, OTHER_MAC, CIPHER, OTHER_CIPHER} - {guard}:
        one.refuses(sealed_value(other, lie, shard), FORGED)
    one.refuses(resealed(good[:HEADER_NBYTES]) + lie, FORGED)
    one.refuses(good[:-1], TRUNCATED)
    one.refuses(good[:HEADER_NBYTES], TRUNCATED)
    one.refuses(good + b"\0", TRUNCATED)
    one.refuses(one.stolen(one.write(0, key_of(2))), OTHER)
    one.refuses(one.stolen(one.write(1, KEY)), OTHER)
    one.plant(good)
    assert one.read() is None


@beside_mooncake
@pytest.mark.parametrize("field", ["parent", "namespace"])
def test_a_block_of_another_chain_or_tenant_is_refused(
    scene: Callable[..., Scene], field: str
) -> None:
    """The deployment itself sealed it, for another parent or namespace."""
    one = scene()
    one.attacker.delete([one.name])
    name = one.write(0, KEY, **{field: key_of(77)})
    error = one.read()
    assert name == one.name
    assert error is not None
    assert error.mismatch is Mismatch.OTHER


@beside_mooncake
def test_without_a_secret_a_protected_value_is_a_miss_that_says_so(
    scene: Callable[..., Scene],
) -> None:
    one = scene(None)
    for guard in (MAC, CIPHER):
        text = one.refuses(sealed_value(guard, one.block, one.shards[0].digest), FORGED)
        assert "neither a namespace.secret nor a key" in text


FIELDS = {
    "magic": (0, 4), "version": (4, 6), "flags": (6, 8), "nbytes": (8, 16), "key": (16, 32),
    "parent": (32, 48), "namespace": (48, 64), "shard": (64, 80), "tag": (80, 96),
    "nonce": (96, 112),
}  # fmt: skip


@pytest.mark.parametrize("guard", [MAC, CIPHER], ids=["mac", "aead"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_in_any_field_is_refused(
    field: str, guard: BlockGuard, tmp_path: Path
) -> None:
    """The seal is made again after each; this needs no server."""
    from kvcore.tiers.remote.memory import MemoryStore

    store = MemoryStore()
    store.close = lambda: None  # type: ignore[method-assign]
    one = Scene(lambda: store, guard)
    for position in range(*FIELDS[field]):
        for mask in (1, 2, 0x80):
            changed = bytearray(one.value)
            changed[position] ^= mask
            header = resealed(bytes(changed[:HEADER_NBYTES]))
            one.refuses(header + bytes(changed[HEADER_NBYTES:]), set(Mismatch))
    one.close()


# -- engines ------------------------------------------------------------------------------------

pytest.importorskip("transformers")

from kvcore.testing.engine import EngineArgs, Llama, ReferenceEngine, random_llama  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_llama()


@pytest.fixture(scope="module")
def plain(model: Llama) -> Iterator[Callable[[Sequence[int]], list[int]]]:
    """Answers without kvcore."""
    with ReferenceEngine(model, EngineArgs(num_pages=128, prefix_cache=False)) as engine:
        yield lambda prompt: engine.generate([prompt], 6)[0]


def words(seed: int, count: int = 96) -> list[int]:
    picks = random.Random(seed)
    return [picks.randrange(1, 512) for _ in range(count)]


class Served(NamedTuple):
    """What an engine answered, how many tokens it reused, and what it refused, by reason."""

    answers: list[list[int]]
    reused: int
    refused: dict[str, float]


Engines = Callable[..., Served]


@pytest.fixture
def serve(model: Llama) -> Engines:
    """Start an engine over lower tiers, answer prompts, and end it."""

    def run(
        tables: dict[str, Any],
        *prompts: Sequence[int],
        secret: str | None = "s" * 32,
        salt: str = "",
        meanwhile: Callable[[], None] | None = None,
    ) -> Served:
        space = {"namespace": {"secret": secret}} if secret else {}
        config = load_config(
            overrides={"host": {"capacity": "16MiB", "huge_pages": False}, **space, **tables},
            env={},
        )
        engine = ReferenceEngine(model, EngineArgs(), config)
        answers, reused = [], 0
        if meanwhile is not None:
            meanwhile()
        for prompt in prompts:
            request = engine.submit(prompt, 6, salt=salt)
            engine.run()
            engine.settle()
            answers.append(request.answer)
            reused += sum(request.reused.get(tier, 0) for tier in ("disk", "far"))
        refused: dict[str, float] = {}
        assert engine.leader is not None
        for metrics in (engine.leader.metrics, *(made.metrics for made in engine.workers)):
            counts = metrics.snapshot().get("kvcore_refused_blocks_total", {})
            for labels, count in counts.items():
                reason = labels.split("|")[-1]
                refused[reason] = refused.get(reason, 0) + count
        engine.check_integrity()
        engine.close()
        return Served(answers, reused, refused)

    return run


def disk_at(folder: Path, **more: Any) -> dict[str, Any]:
    return {"disk": {"path": str(folder), "capacity": "64MiB", **more}}


class DiskFiles:
    """The one store of a disk tier's folder, as somebody who can write there sees it."""

    def __init__(self, path: Path) -> None:
        [manifest] = path.glob("*/*/store.json")
        self.folder = manifest.parent
        self.geometry = Geometry.load(self.folder)
        self.data, self.index = shard_files(self.folder, 0)
        self.slot_nbytes = (self.geometry.shard_shape(0).nbytes + 4095) // 4096 * 4096

    def records(self) -> dict[int, Record]:
        table, _ = read_table(self.index, sealed=False)
        return {int(slot): table.record(place) for place, slot in enumerate(table.slots)}

    def block(self, slot: int, nbytes: int) -> bytes:
        with self.data.open("rb") as file:
            file.seek(slot * self.slot_nbytes)
            return file.read(nbytes)

    def put(self, slot: int, record: Record, block: bytes | None = None) -> None:
        """Write a record, its seal made as without a secret, and a block."""
        with self.index.open("r+b") as file:
            file.seek(slot * RECORD_NBYTES)
            file.write(record.pack())
        if block is not None:
            self.put_block(slot, block)

    def put_block(self, slot: int, block: bytes) -> None:
        with self.data.open("r+b") as file:
            file.seek(slot * self.slot_nbytes)
            file.write(block)


def fitting(record: Record, block: bytes) -> Record:
    """Return the record with the right checksum for a block, which needs no secret."""
    return record._replace(checksum=checksum(record.key, [memoryview(block)], len(block)))


def lies(files: DiskFiles) -> None:
    """Replace every block by other KV with a checksum that fits."""
    for slot, record in files.records().items():
        block = random.Random(slot).randbytes(record.nbytes)
        files.put(slot, fitting(record, block), block)


def downgraded(files: DiskFiles) -> None:
    for slot, record in files.records().items():
        block = random.Random(slot).randbytes(record.nbytes)
        files.put(slot, fitting(record, block)._replace(flags=0, nonce=b"", tag=b""), block)


def resealed_by_another(files: DiskFiles) -> None:
    name = files.geometry.shard_name(0)
    for slot, record in files.records().items():
        block = random.Random(slot).randbytes(record.nbytes)
        record = fitting(record, block)
        made = OTHER_MAC.seal([memoryview(block)], len(block), record.associated_data(name))
        files.put(slot, record._replace(nonce=made.nonce, tag=made.tag), block)


def turned(files: DiskFiles) -> None:
    """Give each slot the bytes of the next one, and its MAC."""
    records = files.records()
    blocks = {slot: files.block(slot, record.nbytes) for slot, record in records.items()}
    slots = list(records)
    for slot, other in zip(slots, [*slots[1:], slots[0]], strict=True):
        record = fitting(records[slot], blocks[other])
        theirs = records[other]
        files.put(slot, record._replace(nonce=theirs.nonce, tag=theirs.tag), blocks[other])


def moved_to_another_namespace(files: DiskFiles) -> None:
    for slot, record in files.records().items():
        files.put(slot, record._replace(namespace=key_of(66)))


def hung_on_the_first(files: DiskFiles) -> None:
    """Make the first block the parent of all others."""
    records = files.records()
    [first] = [record.key for record in records.values() if record.parent == bytes(16)]
    for slot, record in records.items():
        if record.key != first:
            files.put(slot, record._replace(parent=first))


def older(files: DiskFiles) -> None:
    for slot, record in files.records().items():
        files.put(slot, record._replace(stamp=record.stamp - 1))


def overwritten(files: DiskFiles) -> None:
    for slot, record in files.records().items():
        files.put_block(slot, random.Random(slot).randbytes(record.nbytes))


def truncated(files: DiskFiles) -> None:
    """Cut the data file, and leave it as long as it was: the engine sees no change of size."""
    size = files.data.stat().st_size
    os.truncate(files.data, 0)
    os.truncate(files.data, size)


def retagged(files: DiskFiles) -> None:
    """Change what a record's own seal does not cover."""
    index = bytearray(files.index.read_bytes())
    for slot in files.records():
        index[slot * RECORD_NBYTES + 104] ^= 1
    files.index.write_bytes(index)


def exchanged(files: DiskFiles) -> None:
    """Exchange records whole, each with a good seal and the tag of its own block."""
    index = files.index.read_bytes()
    slots = list(files.records())
    moved = bytearray(index)
    for slot, other in zip(slots, [*slots[1:], slots[0]], strict=True):
        record = index[other * RECORD_NBYTES :][:RECORD_NBYTES]
        moved[slot * RECORD_NBYTES : (slot + 1) * RECORD_NBYTES] = record
    files.index.write_bytes(moved)


Attack = Callable[[DiskFiles], None]
ATTACKS: dict[Attack, tuple[str, str]] = {
    lies: ("corrupt", "corrupt"),
    downgraded: ("corrupt", "corrupt"),
    resealed_by_another: ("corrupt", "corrupt"),
    turned: ("corrupt", "corrupt"),
    moved_to_another_namespace: ("corrupt", "corrupt"),
    hung_on_the_first: ("corrupt", "corrupt"),
    older: ("corrupt", "corrupt"),
    overwritten: ("corrupt", "corrupt"),
    truncated: ("corrupt", "corrupt"),
    retagged: ("forged", "forged"),
    exchanged: ("corrupt", "other"),
}
"""Attacks on a disk folder, and the reasons that are counted: at rest, and while an engine runs."""


@pytest.mark.parametrize("live", [False, True], ids=["at rest", "live"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_forged_kv_in_the_disk_folder_is_recomputed(
    attack: Attack,
    live: bool,
    serve: Engines,
    plain: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = words(1)
    serve(disk_at(tmp_path), prompt, salt="mine")
    files = DiskFiles(tmp_path)

    def act() -> None:
        attack(files)

    if not live:
        act()
    with caplog.at_level(logging.WARNING, logger="kvcore"):
        found = serve(disk_at(tmp_path), prompt, salt="mine", meanwhile=act if live else None)
    assert found.answers == [plain(prompt)]
    assert found.refused.get(ATTACKS[attack][live], 0) >= 1
    assert "disk2h tier=disk failed" in caplog.text or "dropped records torn=" in caplog.text
    again = serve(disk_at(tmp_path), prompt, salt="mine")
    assert again.answers == [plain(prompt)]
    assert again.reused > 0, "the good blocks are back"


def test_without_a_secret_the_same_forgery_is_served(
    serve: Engines, plain: Any, tmp_path: Path
) -> None:
    """The attack is real: a checksum protects a single user's disk from rot alone."""
    prompt = words(2)
    serve(disk_at(tmp_path), prompt, secret=None)
    lies(DiskFiles(tmp_path))
    found = serve(disk_at(tmp_path), prompt, secret=None)
    assert found.reused > 0
    assert not found.refused
    assert found.answers != [plain(prompt)]


def test_blocks_of_another_deployment_are_not_found(
    serve: Engines, plain: Any, tmp_path: Path
) -> None:
    """The attacker copies whole stores between folders: of another secret, of none, encrypted."""
    prompt = words(5)
    for number, secret in enumerate(("t" * 32, None)):
        serve(disk_at(tmp_path / str(number)), prompt, secret=secret)
        theirs = DiskFiles(tmp_path / str(number)).folder
        mine = tmp_path / f"mine {number}"
        serve(disk_at(mine), words(6))
        store = DiskFiles(mine).folder
        for name in ("shard-0.data", "shard-0.index"):
            (store / name).write_bytes((theirs / name).read_bytes())
        found = serve(disk_at(mine), prompt)
        assert found.answers == [plain(prompt)]
        assert not found.reused


def test_a_value_put_back_after_a_clear_is_the_same_kv(
    serve: Engines, plain: Any, tmp_path: Path
) -> None:
    """A replay under its own key is not detected. It is what these tokens compute to."""
    prompt = words(7)
    serve(disk_at(tmp_path), prompt)
    files = DiskFiles(tmp_path)
    index, data = files.index.read_bytes(), files.data.read_bytes()
    os.truncate(files.index, 0)
    assert not serve(disk_at(tmp_path), words(8)).reused
    files.index.write_bytes(index)
    files.data.write_bytes(data)
    found = serve(disk_at(tmp_path), prompt)
    assert found.answers == [plain(prompt)]
    assert found.reused > 0


def without_a_seal(value: bytes, block: bytes) -> bytes:
    """Return what anybody can make who does not know of the secret."""
    header = header_of(value)
    digest = checksum(header.key, [memoryview(block)], len(block))
    return header._replace(flags=0, nonce=b"", checksum=digest).pack() + block


def with_its_own_seal(value: bytes, block: bytes) -> bytes:
    """Return other KV behind the deployment's own header: its flag, its nonce and its tag."""
    return header_of(value).pack() + block


def with_the_seal_of_another(value: bytes, block: bytes) -> bytes:
    """Return other KV that somebody with another key has sealed."""
    header = header_of(value)
    guard = OTHER_MAC if header.flags == OTHER_MAC.flag else OTHER_CIPHER
    into = memoryview(bytearray(block))
    data = header.associated_data
    nonce, tag = guard.seal([memoryview(block)], len(block), data, into)
    return header._replace(nonce=nonce, checksum=tag).pack() + bytes(into)


def header_of(value: bytes) -> Header:
    header = Header.unpack(value[:HEADER_NBYTES])
    assert header is not None
    return header


@pytest.mark.parametrize("sealed", [False, True], ids=["mac", "aead"])
def test_an_engine_recomputes_what_was_forged_in_a_real_redis(
    start_server: Start,
    serve: Engines,
    plain: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sealed: bool,
) -> None:
    """Every value of the server is replaced by one with other KV, in each way in turn."""
    need_client("redis")
    import redis as client

    server = start_server(redis_like("redis-server"))
    monkeypatch.setenv("STORE_KEY", bytes(range(32)).hex())
    options = {"url": f"redis://127.0.0.1:{server.port}/0", "lookup_s": 20.0, "timeout_s": 60.0}
    if sealed:
        options["key_env"] = "STORE_KEY"
    tables = {"tiers": {"far": {"plugin": "redis", "capacity": "64MiB", "options": options}}}
    prompt = words(9)
    serve(tables, prompt)
    assert serve(tables, prompt).reused > 0
    connection = client.Redis(port=server.port)
    for lie in (without_a_seal, with_its_own_seal, with_the_seal_of_another):
        names = [name for name in connection.keys() if b"/splits/" not in name]  # noqa: SIM118
        assert names
        for name in names:
            value = connection.get(name)
            header = header_of(value)
            assert header.flags == (1 if sealed else 2)
            connection.set(name, lie(value, random.Random(str(name)).randbytes(header.nbytes)))
        found = serve(tables, prompt)
        assert found.answers == [plain(prompt)], lie.__name__
        assert not found.reused, lie.__name__
        assert found.refused.get("forged", 0) >= 1, lie.__name__
        assert serve(tables, prompt).reused > 0, "the good values are back"
    connection.close()


@beside_mooncake
def test_a_rank_with_another_part_reads_no_forged_value(scene: Callable[..., Scene]) -> None:
    """A reader that needs half of a larger value verifies all of it."""
    one = scene()
    half = one.shards[0].sibling(Part((0, 1), (0, 2)))
    whole, value = one.shards[0], one.value
    from kvcore.tiers.remote.object_keys import ShardSlice
    from kvcore.tiers.remote.tier import _Value

    [part] = ShardSlice.all_of([whole.part], half)
    changed = bytearray(value)
    changed[-1] ^= 1  # a byte that this rank does not need
    one.plant(bytes(changed))
    into = memoryview(bytearray(half.block_nbytes))
    wanted = _Value(part, BlockRead(0, KEY, [into], parent=PARENT, namespace=SPACE), MAC)
    assert one.reader.store.get([wanted.item]) == [None]
    error = wanted.verify()
    assert error is not None
    assert error.mismatch is Mismatch.FORGED
