"""docs/format.md is right: its tables decode what is written, and other versions are refused."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import FormatError
from kvcore.fusion import _segment_file as segment_file
from kvcore.fusion._chains import ChainPiece
from kvcore.memory import checksums as sums
from kvcore.model.parts import Part
from kvcore.model.shape import BlockShape
from kvcore.tiers.base import BlockRead
from kvcore.tiers.checksum import checksum as block_checksum
from kvcore.tiers.disk.format import MAGIC, Record, read_table
from kvcore.tiers.geometry import PARTIAL_VERSION, VERSION, Geometry
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac, key_of_secret
from kvcore.tiers.remote import format as frame
from kvcore.tiers.remote import shard_registry as splits

PAGE = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
DIGEST = st.binary(min_size=16, max_size=16)
NUMBER = st.integers(0, 2**64 - 1)
FIELDS = [DIGEST] * 4 + [NUMBER] * 2
NOTHING = st.just(b"")
RECORD = st.builds(Record, *FIELDS, NOTHING, NOTHING, NUMBER, st.just(0))
GUARDS = {1: BlockCipher, 2: BlockMac}


def table(title: str) -> list[tuple[int, int, str, str]]:
    """Return (offset, bytes, field, remark) of each row below a heading of the page."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \| ?(.*?) ?\|$", section, re.MULTILINE)
    assert rows
    return [(int(at), int(size), name, remark) for at, size, name, remark in rows]


def sealed(title: str) -> int:
    """Return the bytes that the page calls sealed, in its section or just above."""
    before, after = PAGE.split(f"### {title}\n")
    covers = r"The\s+seal\s+covers\s+bytes\s+0\s+to\s+(\d+)"
    found = re.findall(covers, after.split("\n#")[0])
    return int((found or re.findall(covers, before)[-1:])[0])


def decode(title: str, data: bytes, guard: BlockGuard | None = None) -> dict[str, bytes]:
    """Return the page's fields of ``data``. There are no gaps, overlaps or unsealed bytes."""
    fields: dict[str, bytes] = {}
    at = 0
    for offset, size, name, _ in table(title):
        assert offset == at
        fields[name] = data[offset : offset + size]
        at += size
    assert at == len(data)
    assert not any(fields.get("zeros", b""))
    covered = data[: sealed(title)]
    seal = xxhash.xxh3_64_intdigest(covered) if guard is None else guard.record_seal(covered)
    assert int.from_bytes(fields["seal"], "little") == seal
    return fields


def constant(title: str, field: str) -> str:
    return next(remark for _, _, name, remark in table(title) if name == field).strip("`")


@given(RECORD)
def test_a_record_is_what_the_page_says(record: Record) -> None:
    fields = decode("Record of shard-N.index", record.pack())
    for name in ("key", "parent", "namespace", "checksum"):
        assert fields[name] == getattr(record, name)
    for name in ("stamp", "nbytes"):
        assert int.from_bytes(fields[name], "little") == getattr(record, name)
    assert fields["magic"].decode() == constant("Record of shard-N.index", "magic")
    assert str(int.from_bytes(fields["version"], "little")) == constant(
        "Record of shard-N.index", "version"
    )
    assert fields["nonce"] == record.sum.to_bytes(8, "little") + bytes(8)


def test_sums_are_what_the_page_says() -> None:
    names = dict(re.findall(r"^\| `(\w+)` \| `(0x[0-9A-F]{16})` \|$", PAGE, re.MULTILINE))
    assert {name: int(value, 16) for name, value in names.items()} == {
        "KEY": sums.KEY,
        "FIRST": sums.FIRST,
        "SECOND": sums.SECOND,
    }
    key = bytes(range(16))
    assert sums.bound_to(key, 5) == 5 ^ xxhash.xxh3_64_intdigest(key)


@given(RECORD, st.tuples(DIGEST, DIGEST), st.sampled_from(sorted(GUARDS)))
def test_a_sealed_record_is_what_the_page_says(record: Record, seal: Any, flag: int) -> None:
    """Its associated data, too, is what the page says."""
    record = record._replace(nonce=seal[0], tag=seal[1], sum=0, flags=flag)
    guard = GUARDS[flag](bytes(32))
    packed = record.pack(guard)
    fields = decode("Record of shard-N.index", packed, guard)
    assert int.from_bytes(fields["flags"], "little") == GUARDS[flag].flag == flag
    assert (fields["nonce"], fields["tag"]) == seal
    assert Record.unpack(packed, guard) == record
    assert Record.unpack(packed) is None
    words = packed[:64] + bytes(16) + packed[80:88] + b"base (0, 2)"
    assert record.associated_data(b"base (0, 2)") == words
    flags = constant("Record of shard-N.index", "flags")
    assert flags == "0; 1: the block is encrypted; 2: it has a MAC"


def test_the_keys_of_blocks_are_what_the_page_says() -> None:
    """test_guard.py compares the rest with the one-shot interface."""
    key = bytes(range(32))
    guards = {"kvcore-disk-1": BlockCipher(key), "kvcore-mac-1": BlockMac(key)}
    for label, guard in guards.items():
        algorithm = {1: "aes-256-gcm", 2: "aes-256-gmac"}[guard.flag]
        name = hmac.digest(key, f"{label} key".encode(), "sha256")[:16].hex()
        assert guard.name == f"{algorithm}/{name}"
        record = hmac.digest(key, f"{label} record".encode(), "sha256")
        seal = hashlib.blake2b(b"body", digest_size=8, key=record).digest()
        assert guard.record_seal(b"body") == int.from_bytes(seal, "little")
        for text in (f"{label} key", f"{label} block", f"{label} record", f"{algorithm}/"):
            assert f"`{text}`" in PAGE
    mac = hmac.digest(b"secret", b"kvcore-key-1 mac", "sha256")
    assert key_of_secret("secret", "mac") == mac
    assert "`kvcore-key-1 mac`" in PAGE


@given(key=DIGEST, data=st.binary(min_size=1, max_size=300))
def test_the_checksum_is_what_the_page_says(key: bytes, data: bytes) -> None:
    seed = int.from_bytes(key[:8], "little")
    found = block_checksum(key, [memoryview(data)], len(data))
    assert found == xxhash.xxh3_128_digest(data, seed=seed)


@given(NUMBER, st.tuples(*[DIGEST] * 5))
def test_a_values_header_is_what_the_page_says(nbytes: int, digests: Any) -> None:
    header = frame.Header(nbytes, *digests)
    fields = decode("Header of a value", header.pack())
    names = ("key", "parent", "namespace", "shard", "checksum")
    assert tuple(fields[name] for name in names) == digests
    assert int.from_bytes(fields["nbytes"], "little") == nbytes
    assert fields["magic"].decode() == constant("Header of a value", "magic")
    assert not any(fields["nonce"])


@given(NUMBER, st.tuples(*[DIGEST] * 5), DIGEST, st.sampled_from(sorted(GUARDS)))
def test_a_sealed_values_header_is_what_the_page_says(
    nbytes: int, digests: Any, nonce: bytes, flag: int
) -> None:
    header = frame.Header(nbytes, *digests, flag, nonce)
    packed = header.pack()
    fields = decode("Header of a value", packed)
    assert (fields["checksum"], fields["nonce"]) == (digests[-1], nonce)
    assert int.from_bytes(fields["flags"], "little") == flag
    assert frame.Header.unpack(packed) == header
    assert header.associated_data == packed[:80] + bytes(16)


def test_a_split_is_what_the_page_says() -> None:
    parts = (Part((0, 2), (0, 3)), Part((0, 2), (3, 5)))
    value = splits.pack("base", parts)
    assert value is not None
    fields = decode("Value of a split", value)
    assert fields["magic"].decode() == constant("Value of a split", "magic")
    assert str(int.from_bytes(fields["version"], "little")) == constant(
        "Value of a split", "version"
    )
    text = fields["text"].rstrip(b"\0")
    assert json.loads(text) == {"base": "base", "parts": [[[0, 2], [0, 3]], [[0, 2], [3, 5]]]}
    assert "`<prefix>/<base>/splits/<0 to 15>`" in PAGE
    assert splits.PLACES == 16


@given(blocks=st.integers(1, 4), first=st.integers(0, 9), head=st.integers(0, 5), space=st.binary())
def test_segments_are_what_the_page_says(blocks: int, first: int, head: int, space: bytes) -> None:
    """The body, too, is what the page says."""
    header = decode("Header of segments", segment_file._file_header(16))
    assert header["magic"] == b"KVCSEGS\0"
    assert int.from_bytes(header["block_tokens"], "little") == 16
    keys = [bytes([i]) * 16 for i in range(blocks)]
    tokens = np.arange(head + 16 * blocks, dtype="<u4")
    data = segment_file._pack(space, ChainPiece(first, b"p" * 16, keys, head, tokens))
    fields = decode("Record of segments", data[:52])
    body = data[52:]
    assert body == space + b"".join(keys) + tokens.tobytes()
    assert int.from_bytes(fields["body"], "little") == xxhash.xxh3_64_intdigest(body)
    keyed = segment_file._pack(space, ChainPiece(first, b"p" * 16, keys, head, tokens), b"key")
    digest = hashlib.blake2b(keyed[:36] + keyed[52:], digest_size=8, key=b"key").digest()
    assert decode("Record of segments", keyed[:52])["body"] == digest
    assert decode("Header of segments", segment_file._file_header(16, True))["keyed"][0] == 1
    told = {
        name: int.from_bytes(fields[name], "little")
        for name in ("blocks", "first", "head", "namespace_nbytes")
    }
    assert told == {
        "blocks": blocks, "first": first, "head": head, "namespace_nbytes": len(space),
    }  # fmt: skip
    assert fields["parent"] == b"p" * 16
    assert fields["magic"].decode() == constant("Record of segments", "magic")


def test_store_json_and_the_folders_name_are_what_the_page_says() -> None:
    shape = BlockShape(2, 2, 8, 16, "float16")
    geometry = Geometry(shape, b"model", ((0, 1), (1, 2)))
    section = PAGE.split("### store.json\n")[1].split("\n#")[0]
    keys = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    told = geometry.to_json()
    encrypted = Geometry(shape, b"model", ((0, 2),), "aes-256-gcm/00")
    staged = Geometry(shape, b"model", ((0, 2), (0, 2)), layers=((0, 1), (1, 2)))
    partial = replace(geometry, held=(1, 2))
    assert sorted(encrypted.to_json()) == sorted(set(keys) - {"layers", "held"})
    assert sorted(told) == sorted(set(keys) - {"cipher", "layers", "held"})
    assert sorted(staged.to_json()) == sorted(set(keys) - {"cipher", "held"})
    assert sorted(partial.to_json()) == sorted(set(keys) - {"cipher"})
    versions = [one.to_json()["version"] for one in (geometry, staged, partial)]
    assert versions == [1, 2, 3]
    assert "`version` | 1; 2 with `layers`; 3 with `held`" in section
    for one in (encrypted, staged, partial):
        assert Geometry.from_json(one.to_json()) == one
    assert partial.base == geometry.base
    assert staged.shard_name(1).decode() == f"{staged.base} (0, 2) (1, 2)"
    assert encrypted.shard_name(0).decode() == f"{encrypted.base} (0, 2)"
    shape_row = next(line for line in section.splitlines() if line.startswith("| `shape`"))
    assert set(re.findall(r"`(\w+)`", shape_row)) - {"shape"} == set(told["shape"])
    text = json.dumps({"shape": shape.to_dict(), "version": 1}, sort_keys=True)
    assert geometry.base == xxhash.xxh3_128_hexdigest(text.encode() + b"model")
    cut = {"cipher": encrypted.cipher, "shape": shape.to_dict(), "version": 1}
    text = json.dumps(cut, sort_keys=True)
    assert encrypted.base == xxhash.xxh3_128_hexdigest(text.encode() + b"model")


# -- other versions -----------------------------------------------------------------------------


def reseal(data: bytes, at: int, version: int, covered: int) -> bytes:
    """Return ``data`` as another version would have written it."""
    changed = bytearray(data)
    changed[at : at + 2] = version.to_bytes(2, "little")
    changed[-8:] = xxhash.xxh3_64_intdigest(bytes(changed[:covered])).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.parametrize("version", [0, PARTIAL_VERSION + 1])
def test_a_store_of_another_version_is_refused_by_name(version: int) -> None:
    geometry = Geometry(BlockShape(2, 2, 8, 16, "float16"), b"model", ((0, 2),))
    with pytest.raises(FormatError, match=rf"version {version}; this kvcore reads {VERSION} to"):
        Geometry.from_json(geometry.to_json() | {"version": version})


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_a_record_of_another_version_is_not_there(version: int, tmp_path: Path) -> None:
    good = Record(b"k" * 16, b"p" * 16, b"n" * 16, b"c" * 16, 5, 6).pack()
    other = reseal(good, len(MAGIC), version, 88)
    assert Record.unpack(reseal(good, len(MAGIC), VERSION, 88)) is not None
    assert Record.unpack(other) is None
    (tmp_path / "index").write_bytes(good + other)
    found, torn = read_table(tmp_path / "index")
    assert (found.slots.tolist(), torn) == ([0], 1)


@pytest.mark.parametrize("version", [0, frame.VERSION + 1])
def test_a_value_of_another_version_is_refused_by_name(version: int) -> None:
    good = frame.Header(1, *[b"k" * 16] * 5).pack()
    data = reseal(good, 4, version, 96)
    asked = BlockRead(0, b"k" * 16, [memoryview(b"x")])
    error = frame.verify(data, asked, b"k" * 16, asked.buffers)
    assert f"of format version {version}; this kvcore reads {frame.VERSION}" in str(error)


@pytest.mark.parametrize("version", [0, segment_file.VERSION + 1])
def test_segments_of_another_version_are_refused_by_name(version: int, tmp_path: Path) -> None:
    data = reseal(segment_file._file_header(16), 8, version, 24)
    (tmp_path / "segments").write_bytes(data)
    with pytest.raises(FormatError, match=rf"version {version}, this kvcore reads"):
        segment_file.SegmentFile(tmp_path / "segments", 16)
    assert (tmp_path / "segments").read_bytes() == data
