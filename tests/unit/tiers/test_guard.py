"""Encryption and MACs of blocks, without a tier."""

from __future__ import annotations

import hmac
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import NamespaceConfig
from kvcore.errors import ConfigError, CorruptBlock, Mismatch, UnsupportedError
from kvcore.model.identity import Namespaces
from kvcore.tiers.base import BlockRead
from kvcore.tiers.disk.format import Record
from kvcore.tiers.guard import BlockCipher, BlockGuard, BlockMac, Seal, key_of_secret
from kvcore.tiers.remote.format import HEADER_NBYTES, Header, seal, verify

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
KINDS = [BlockCipher, BlockMac]
PARTS = st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4)


def sealed(guard: BlockGuard, block: bytes, bound: bytes) -> tuple[Seal, memoryview]:
    """Return the seal of a block, and the bytes to store."""
    into = memoryview(bytearray(len(block)))
    made = guard.seal([memoryview(block)], len(block), bound, into)
    return made, into if guard.encrypts else memoryview(bytearray(block))


@given(parts=PARTS, bound=st.binary(max_size=40), padding=st.integers(0, 9))
def test_the_cipher_is_aes_gcm_under_a_key_drawn_for_the_nonce(
    parts: list[bytes], bound: bytes, padding: int
) -> None:
    """Compare with the one-shot interface, and with keys derived here as docs/format.md says."""
    data, cipher = b"".join(parts), BlockCipher(KEY)
    into = memoryview(bytearray(len(data) + padding))
    views = [memoryview(part) for part in (*parts, b"p" * padding)]
    made = cipher.seal(views, len(data), bound, into)
    key = hmac.digest(KEY, b"kvcore-disk-1 block" + made.nonce, "sha256")
    assert AESGCM(key).encrypt(made.nonce[:12], data, bound) == bytes(into[: len(data)]) + made.tag
    assert cipher.unseal(made, [into[:7], into[7:]], len(data), bound)
    assert bytes(into[: len(data)]) == data


@given(parts=PARTS, bound=st.binary(max_size=40), padding=st.integers(0, 9))
def test_the_mac_is_aes_gcm_of_nothing_with_the_block_as_associated_data(
    parts: list[bytes], bound: bytes, padding: int
) -> None:
    data, mac = b"".join(parts), BlockMac(KEY)
    views = [memoryview(part) for part in (*parts, b"p" * padding)]
    made = mac.seal(views, len(data), bound)
    key = hmac.digest(KEY, b"kvcore-mac-1 block" + made.nonce, "sha256")
    assert AESGCM(key).encrypt(made.nonce[:12], b"", bound + data) == made.tag
    whole = memoryview(data + b"other padding")
    assert mac.unseal(made, [whole[:7], whole[7:]], len(data), bound)


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_whatever_is_changed_is_noticed(kind: type[BlockGuard], data: st.DataObject) -> None:
    guard = kind(KEY)
    made, stored = sealed(guard, bytes(range(100)), b"bound")
    whole = bytearray(bytes(stored) + made.tag + made.nonce)
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    whole[at] ^= mask
    body, changed = memoryview(whole)[:100], Seal(bytes(whole[116:]), bytes(whole[100:116]))
    assert not guard.unseal(changed, [body], 100, b"bound")
    assert not guard.unseal(made, [memoryview(bytearray(stored))], 100, b"other")
    assert not kind(OTHER).unseal(made, [memoryview(bytearray(stored))], 100, b"bound")
    assert guard.unseal(made, [stored], 100, b"bound")


def test_a_nonce_is_used_once_also_for_the_same_block() -> None:
    for kind in KINDS:
        made = [sealed(kind(KEY), b"block", b"")[0] for _ in range(9)]
        assert len({one.nonce for one in made}) == len({one.tag for one in made}) == 9


def test_a_name_tells_keys_and_algorithms_apart_and_no_key() -> None:
    names = {kind(key).name for kind in KINDS for key in (KEY, OTHER)}
    assert len(names) == 4
    for kind in KINDS:
        guard = kind(KEY)
        assert guard.name == kind(KEY).name
        assert KEY.hex() not in repr(guard)
        assert KEY not in bytes.fromhex(guard.name.split("/")[1])
        with pytest.raises(ConfigError, match="a key of 16 bytes"):
            kind(KEY[:16])


def test_the_key_of_a_secret_is_for_one_purpose() -> None:
    """It is neither the secret nor what the keys of blocks start from."""
    namespaces = Namespaces(NamespaceConfig(secret="s" * 32), b"model")
    keys = {
        key_of_secret("s" * 32, "mac"),
        key_of_secret("s" * 32, "segments"),
        key_of_secret("t" * 32, "mac"),
        namespaces.of().root,
        b"s" * 32,
    }
    assert len(keys) == 5
    assert all(len(key) == 32 for key in keys)


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(UnsupportedError, match=r"secret, need `pip install cryptography"):
        BlockMac(KEY)


# -- values and records: any change of header or block -------------------------------------------

BLOCK = bytes(range(64))
SHARD = b"s" * 16
GUARDS: dict[str, BlockGuard | None] = {
    "none": None,
    "mac": BlockMac(KEY),
    "other mac": BlockMac(OTHER),
    "cipher": BlockCipher(KEY),
    "other cipher": BlockCipher(OTHER),
}
ASKED = BlockRead(0, b"k" * 16, (), parent=b"p" * 16, namespace=b"n" * 16)
PLAIN = Header(len(BLOCK), ASKED.key, ASKED.parent, ASKED.namespace, SHARD, bytes(16))


def value_of(guard: BlockGuard | None, header: Header = PLAIN) -> bytearray:
    header, block = seal(header, guard, [memoryview(BLOCK)])
    return bytearray(header.pack() + b"".join(block))


def check(value: bytes | bytearray, guard: BlockGuard | None) -> CorruptBlock | None:
    """Return what a reader says of a value; assert that what it accepts is the block."""
    body = memoryview(bytearray(value[HEADER_NBYTES:]))
    error = verify(value[:HEADER_NBYTES], ASKED, SHARD, [body[:9], body[9:]], guard)
    assert error is not None or bytes(body) == BLOCK
    return error


def resealed(value: bytearray) -> bytearray:
    """Return a value with the unkeyed seal of its header made again, as an attacker would."""
    header, body = value[:96], value[HEADER_NBYTES:]
    import xxhash

    pad = value[96:120]
    return header + pad + xxhash.xxh3_64_intdigest(bytes(header)).to_bytes(8, "little") + body


@pytest.mark.parametrize("name", ["mac", "cipher"])
@given(st.data())
def test_a_value_that_was_changed_anywhere_is_refused(name: str, data: st.DataObject) -> None:
    """Only the zeros behind the nonce mean nothing. The attacker makes all unkeyed sums again."""
    guard = GUARDS[name]
    value = value_of(guard)
    good = bytes(value)
    for _ in range(data.draw(st.integers(1, 3))):
        places = st.one_of(st.integers(0, 111), st.integers(HEADER_NBYTES, len(value) - 1))
        value[data.draw(places)] = data.draw(st.integers(0, 255))
    again = resealed(value)
    same = again[:112] == good[:112] and again[128:] == good[128:]
    assert same or check(again, guard) is not None
    cut = data.draw(st.integers(0, len(good) - 1))
    assert check(good[:cut], guard) is not None
    assert check(good + b"x", guard) is not None


@pytest.mark.parametrize("reader", GUARDS)
@pytest.mark.parametrize("writer", GUARDS)
def test_a_value_is_read_by_its_own_kind_and_key_only(writer: str, reader: str) -> None:
    """There is no downgrade, and the text says what is missing."""
    value = value_of(GUARDS[writer])
    error = check(value, GUARDS[reader])
    if writer == reader:
        assert error is None
        return
    assert error is not None
    assert error.mismatch is Mismatch.FORGED
    assert any(word in str(error) for word in ("namespace.secret", "accepts only values that"))


@pytest.mark.parametrize("name", ["none", "mac", "cipher"])
@pytest.mark.parametrize("field", ["key", "parent", "namespace", "shard"])
def test_a_value_of_another_block_is_refused(name: str, field: str) -> None:
    """Its writer had the secret: the value is replayed under the name of another block."""
    value = value_of(GUARDS[name], PLAIN._replace(**{field: b"x" * 16}))
    error = check(value, GUARDS[name])
    assert error is not None
    assert error.mismatch is Mismatch.OTHER


@given(st.binary(min_size=HEADER_NBYTES + 64, max_size=HEADER_NBYTES + 64))
def test_noise_is_refused(noise: bytes) -> None:
    for guard in GUARDS.values():
        assert check(noise, guard) is not None


RECORD = Record(ASKED.key, ASKED.parent, ASKED.namespace, bytes(16), len(BLOCK), 7)


@pytest.mark.parametrize("name", ["mac", "cipher"])
@given(
    st.sampled_from(["key", "parent", "namespace", "nonce", "tag"]),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
)
def test_a_record_that_was_changed_anywhere_is_refused(
    name: str, field: str, lie: bytes, stamp: int
) -> None:
    guard = GUARDS[name]
    assert guard is not None
    record = RECORD._replace(flags=guard.flag)
    made, stored = sealed(guard, BLOCK, record.associated_data(b"shard"))
    record = record._replace(nonce=made.nonce, tag=made.tag)

    def mismatch(changed: Record, shard: bytes = b"shard") -> Mismatch | None:
        return changed.mismatch(guard, [memoryview(bytearray(stored))], shard)

    assert mismatch(record) is None
    assert mismatch(record._replace(**{field: lie})) is not None
    assert stamp == 7 or mismatch(record._replace(stamp=stamp)) is not None
    assert mismatch(record, b"other shard") is not None
    assert mismatch(record._replace(flags=0)) is Mismatch.FORGED
    assert mismatch(record._replace(flags=3 - guard.flag)) is Mismatch.FORGED
    assert record.mismatch(None, [stored], b"shard") is Mismatch.FORGED


def test_rot_is_told_from_forgery_where_the_checksum_can() -> None:
    from kvcore.tiers.checksum import checksum

    guard = BlockMac(KEY)
    record = RECORD._replace(flags=guard.flag)
    made, _ = sealed(guard, BLOCK, record.associated_data(b""))
    record = record._replace(nonce=made.nonce, tag=made.tag)
    record = record._replace(checksum=checksum(record.key, [memoryview(BLOCK)], len(BLOCK)))
    bad = memoryview(bytearray(BLOCK))
    bad[5] ^= 1
    assert record.mismatch(guard, [bad], b"") is Mismatch.CORRUPT
    forged = record._replace(checksum=checksum(record.key, [bad], len(bad)))
    assert forged.mismatch(guard, [bad], b"") is Mismatch.FORGED
