"""The parsers of kvcore that read foreign input, and a fuzzer for them.

    python -m kvcore_devtools.fuzz --seconds 60                 each parser in turn
    python -m kvcore_devtools.fuzz --seconds 600 --target graph

Whatever the bytes, a parser returns a value or raises one of kvcore's own errors. `TARGETS` is the
only list of the parsers. It leaves out messages between the ranks of one engine. This module runs
libFuzzer through atheris, guided by coverage, with one process per parser; it needs the package
atheris. In CI, `tests/unit/devtools/test_fuzz.py` runs the same parsers with hypothesis.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.errors import ConfigError, KVCoreError, UnsupportedError

__all__ = ["TARGETS", "Target", "fuzz", "main", "named", "need_atheris", "seeds", "try_input"]

MAX_INPUT = 4096
HANG_S = 60
"""Seconds after which an input counts as a hang, even on a busy machine."""
_BLIND = "no interesting inputs were found"
"""What libFuzzer prints for a target whose coverage it cannot see."""
MEMORY_MB = 4096
"""Memory limit of the process in MiB. An input that needs more declares a false size."""


class Target(NamedTuple):
    """A parser. ``read`` takes bytes and an empty folder for files. ``seeds`` are valid inputs."""

    name: str
    read: Callable[[bytes, Path], object]
    seeds: Sequence[bytes] = ()


def try_input(one: Target, data: bytes, folder: Path) -> None:
    """Parse ``data``. Raises what the parser must not raise, but no error of kvcore."""
    with contextlib.suppress(KVCoreError):
        one.read(data, folder)


def _text(data: bytes) -> str:
    """Decode bytes as any text that a JSON string can hold, including lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def _json(data: bytes) -> Any:
    """Decode JSON. Return None if it is invalid, because the callers check that before."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# -- on disk and in stores ------------------------------------------------------------------------

_KEY = bytes(range(16))
_STORE = json.dumps(
    {
        "format": "kvcore disk tier", "version": 1, "model": "00", "heads": [[0, 1]],
        "shape": {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1,
                  "dtype": "int8", "kv_factor": 1, "v_head_dim": 1},
    }
).encode()  # fmt: skip


def _record(data: bytes, _: Path) -> None:
    from kvcore.tiers.disk.format import Record

    found = Record.unpack(data)
    assert found is None or len(found.key) == 16


def _index(data: bytes, folder: Path) -> None:
    from kvcore.tiers.disk.format import read_table

    table, torn = read_table(_file(folder, "index", data))
    assert len(table.slots) + torn <= len(data) // 128 + 1


def _header(data: bytes, _: Path) -> None:
    from kvcore.tiers.base import BlockRead
    from kvcore.tiers.guard import BlockCipher, BlockMac
    from kvcore.tiers.remote.format import Header, verify

    Header.unpack(data)
    asked = BlockRead(0, _KEY, [memoryview(bytearray(data[128:]))])
    for guard in (None, BlockMac(bytes(32)), BlockCipher(bytes(32))):
        verify(data[:128], asked, _KEY, asked.buffers, guard)


def _geometry(data: bytes, _: Path) -> None:
    from kvcore.tiers.geometry import Geometry

    Geometry.from_json(_json(data))


def _segments(data: bytes, folder: Path) -> None:
    from kvcore.fusion._segment_file import SegmentFile

    path = folder / "segments"
    path.unlink(missing_ok=True)
    store = SegmentFile(_file(folder, "segments", data), 16)
    try:
        for kept in store.records():
            assert 16 * len(kept.piece.keys) <= len(data)
    finally:
        store.close()


def _records(data: bytes, folder: Path) -> None:
    from kvcore.explain.file import read_records

    _file(folder, "requests-1.jsonl", data)
    for record in read_records(folder):
        assert isinstance(record["request"], str)


# -- from other processes -------------------------------------------------------------------------


def _request(data: bytes, _: Path) -> None:
    from kvcore.admin.messages import HEADER
    from kvcore.server.messages import decode_request, split

    with contextlib.suppress(KVCoreError):
        split(data)
    decode_request([HEADER, data])


def _reply(data: bytes, _: Path) -> None:
    from kvcore.admin.messages import HEADER
    from kvcore.server.messages import decode_reply

    decode_reply([HEADER, data])


def _frames(data: bytes, _: Path) -> None:
    from kvcore.server.messages import decode_request

    decode_request(data.split(b"|"))


def _graph(data: bytes, _: Path) -> None:
    from kvcore.transfer.graph import decode_graph

    decode_graph(data)


def _events(data: bytes, _: Path) -> None:
    from kvcore.events.wire import decode, number

    with contextlib.suppress(KVCoreError):
        number(data)
    decode(data)


def _member(data: bytes, _: Path) -> None:
    from kvcore.cluster.base import Member

    Member.from_json(data)


def _metrics(data: bytes, _: Path) -> None:
    from kvcore.cli.top import parse

    parse(data.decode("utf-8", "replace"), 1.0)


# -- from users and clients -----------------------------------------------------------------------


def _settings(suffix: str, data: bytes, folder: Path) -> None:
    from kvcore.config import load_config

    load_config(_file(folder, f"kvcore{suffix}", data), env={})


def _assignment(data: bytes, _: Path) -> None:
    from kvcore.config import load_config, parse_assignment

    load_config(overrides=parse_assignment(_text(data)), env={})


def _size(data: bytes, _: Path) -> None:
    from kvcore.config.fields import parse_size

    parse_size(_text(data))


def _secret(data: bytes, _: Path) -> None:
    from kvcore.config import read_key

    read_key("K", None, {"K": _text(data)})


def _trace(data: bytes, folder: Path) -> None:
    from kvcore.cli.simulate.trace import read_trace

    for request in read_trace(_file(folder, "trace.jsonl", data)):
        assert request is not None


def _wishes(data: bytes, _: Path) -> None:
    from kvcore.fusion.options import fusion_options

    fusion_options(_json(data), 1000)


def _controls(data: bytes, _: Path) -> None:
    """Read what a request asks of kvcore, as text and decoded. Nothing of it may raise."""
    from kvcore.connector.control import ControlReader
    from kvcore.telemetry.metrics import Metrics

    reader = ControlReader(Metrics(enabled=False))
    reader.read("r", data.decode("utf-8", "surrogateescape"))
    reader.read("r", _json(data))


def _tenant(data: bytes, _: Path) -> None:
    from kvcore.config import NamespaceConfig
    from kvcore.model.identity import Namespaces

    spaces = Namespaces(NamespaceConfig(secret="s" * 16), b"model")
    assert len(spaces.of(_text(data[:8]), _text(data)).digest) > 0


def _salt(data: bytes, _: Path) -> None:
    """Parse a salt of TensorRT-LLM, whose requests carry their fusion options there."""
    importlib.import_module("kvcore_trtllm.salt").read_salt("kvcore:" + _text(data), 1000)


_SETTINGS = b"""
[host]
capacity = "1GiB"
[disk]
path = "kv"
capacity = "2GiB"
[tiers.a]
plugin = "redis"
options = {url = "redis://localhost", retries = 1}
[block]
tokens = 16
"""
_YAML = b"host: {capacity: 1GiB}\ndisk: {path: kv}\ntiers: {a: {plugin: s3}}\nblock: {tokens: 16}\n"
_LINE = b'{"timestamp": 1, "input_length": 20, "output_length": 2, "hash_ids": [1]}\n'
_PAGE = b'# TYPE kvcore_hits_total counter\nkvcore_hits_total{engine="0"} 3\n'
_MEMBER = b'{"kind": "leader", "name": "a", "address": "tcp://a:1", "details": {"x": "y"}}'


def _sealed() -> dict[str, list[bytes]]:
    """Return inputs that must be generated: complete ones with valid checksums."""
    import msgspec

    from kvcore.fusion import _segment_file
    from kvcore.server import messages
    from kvcore.tiers.disk.format import Record
    from kvcore.tiers.remote.format import Header
    from kvcore.transfer.graph import Priority, TransferGraph, encode

    record = Record(_KEY, _KEY, _KEY, _KEY, 4096, 7).pack()
    graph = TransferGraph(1, Priority.SAVE, _KEY, _KEY, (_KEY,), (0,), (-1,), (), ())
    event = [1.0, [{"type": "BlockRemoved", "block_hashes": [_KEY], "medium": "CPU"}]]
    return {
        "record": [record],
        "index": [record + bytes(128) + record],
        "header": [Header(64, _KEY, _KEY, _KEY, _KEY, _KEY).pack() + bytes(64)],
        "segments": [_segment_file._file_header(16)],
        "request": [messages.frames(messages.StatusRequest(1))[1]],
        "reply": [messages.frames(messages.StatusReply(1, {"a": 1}))[1]],
        "frames": [b"|".join(messages.frames(messages.StatusRequest(1)))],
        "graph": [encode(graph)],
        "events": [msgspec.msgpack.encode(event)],
    }


TARGETS = (
    Target("record", _record),
    Target("index", _index),
    Target("header", _header),
    Target("geometry", _geometry, (_STORE,)),
    Target("segments", _segments),
    Target("records", _records, (b'{"request": "r", "at": 1}\n',)),
    Target("request", _request),
    Target("reply", _reply),
    Target("frames", _frames),
    Target("graph", _graph),
    Target("events", _events),
    Target("member", _member, (_MEMBER,)),
    Target("metrics", _metrics, (_PAGE,)),
    Target("toml", partial(_settings, ".toml"), (_SETTINGS,)),
    Target("yaml", partial(_settings, ".yaml"), (_YAML,)),
    Target("assignment", _assignment, (b"host.capacity=8GiB", b"tiers.a.plugin=redis")),
    Target("size", _size, (b"1.5GiB", b"4096")),
    Target("secret", _secret, (b"00" * 32, b"A" * 43 + b"=")),
    Target("trace", _trace, (_LINE,)),
    Target("controls", _controls, (b'{"load": false, "save": true, "save_tokens": 512}',)),
    Target("wishes", _wishes, (b'{"fusion": {"ratio": 0.3, "chunks": [[12, 512]]}}',)),
    Target("tenant", _tenant, (b"tenant", b"\xff\xfe")),
    Target("salt", _salt, (b'{"once": "1", "fusion": {"ratio": 0.3}, "salt": "a"}',)),
)
"""All parsers."""


def seeds(one: Target) -> list[bytes]:
    """Return valid inputs of a parser."""
    return [*one.seeds, *_sealed().get(one.name, [])]


def named(name: str) -> Target:
    """Return the parser with this name. Raises ConfigError if there is none."""
    for each in TARGETS:
        if each.name == name:
            return each
    raise ConfigError(
        f"given the parser {name!r}; give one of {', '.join(t.name for t in TARGETS)}"
    )


# -- atheris --------------------------------------------------------------------------------------


def need_atheris() -> Any:
    """Return the package atheris. Raises UnsupportedError if it is missing."""
    try:
        return importlib.import_module("atheris")
    except ImportError as error:
        raise UnsupportedError(
            f"{error}: coverage-guided fuzzing needs atheris; `pip install atheris`, or run the "
            "same parsers with `pytest tests/unit/devtools/test_fuzz.py`"
        ) from error


def fuzz(one: Target, seconds: int, artifacts: Path) -> None:
    """Try inputs for ``seconds``, and keep one that breaks the parser in ``artifacts``.

    Does not return: libFuzzer ends the process, with exit code 0 if it found nothing. Raises
    UnsupportedError without atheris.
    """
    atheris = need_atheris()
    with tempfile.TemporaryDirectory(prefix="kvcore-fuzz-") as scratch:
        corpus, folder = Path(scratch) / "corpus", Path(scratch) / "files"
        corpus.mkdir()
        folder.mkdir()
        with atheris.instrument_imports(include=["kvcore", "kvcore_trtllm"]):
            for number, seed in enumerate(seeds(one)):  # making the seeds also imports the parsers
                _file(corpus, str(number), seed)
                try_input(one, seed, folder)

        def once(data: bytes) -> None:
            try_input(one, data, folder)

        options = [
            f"-max_total_time={seconds}", f"-max_len={MAX_INPUT}", f"-timeout={HANG_S}",
            f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={artifacts}/{one.name}-",
            "-print_final_stats=1",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options, str(corpus)], once)
        atheris.Fuzz()


def _each(names: Sequence[str], seconds: int, artifacts: Path) -> list[str]:
    """Fuzz each parser in a process of its own.

    Return the names of the parsers that broke, or whose coverage was not seen.
    """
    found = []
    for name in names:
        command = [sys.executable, "-m", "kvcore_devtools.fuzz", "--alone", "--target", name]
        command += ["--seconds", str(seconds), "--artifacts", str(artifacts)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        said = done.stdout + done.stderr
        verdict = "BROKEN" if done.returncode else "BLIND" if _BLIND in said else "nothing found"
        runs = re.search(r"number_of_executed_units: *(\d+)", said)
        print(f"{name:12} {runs[1] if runs else '?':>10} inputs  {verdict}", flush=True)
        if verdict != "nothing found":
            found.append(name)
            print("\n".join(said.splitlines()[-40:]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if an input breaks a parser."""
    made = argparse.ArgumentParser(prog="python -m kvcore_devtools.fuzz")
    made.add_argument("--seconds", type=int, default=60, help="for each parser")
    made.add_argument("--target", action="append", help="only this parser; may be given again")
    made.add_argument("--artifacts", type=Path, default=Path("fuzz"), help="folder for inputs")
    made.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    names = options.target or [each.name for each in TARGETS]
    chosen = [named(name) for name in names]
    try:
        need_atheris()
    except UnsupportedError as error:
        made.error(str(error))
    options.artifacts.mkdir(parents=True, exist_ok=True)
    if options.alone:
        fuzz(chosen[0], options.seconds, options.artifacts)
    return 1 if _each(names, options.seconds, options.artifacts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
