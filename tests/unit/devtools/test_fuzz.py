"""Whatever bytes come in: a value, or kvcore's own error. Never another exception, never a hang,
never memory beyond what came in. And nothing that could run code is ever read."""

from __future__ import annotations

import ast
import contextlib
import json
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.cli.explain import as_table, as_text
from kvcore.cli.simulate.trace import read_trace
from kvcore.config import NamespaceConfig, load_config, parse_assignment, read_key
from kvcore.config.fields import parse_size
from kvcore.errors import ConfigError, FormatError, KVCoreError
from kvcore.explain.file import read_records
from kvcore.fusion import _segment_file as segment_file
from kvcore.index import BlockIndex, TierSpec
from kvcore.model.identity import Namespaces
from kvcore.model.keys import KeyChain
from kvcore.tiers.base import BlockRead
from kvcore.tiers.disk.format import MAGIC, Record, read_table
from kvcore.tiers.geometry import Geometry
from kvcore.tiers.guard import BlockCipher, BlockMac
from kvcore.tiers.remote.format import Header, verify
from kvcore_devtools import fuzz
from kvcore_devtools.fuzz import TARGETS, Target, seeds, try_input

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FUZZ = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
SMALL = 4 << 20


def peak(read: Callable[[], object]) -> int:
    """Bytes that a call takes at most."""
    tracemalloc.start()
    try:
        with contextlib.suppress(KVCoreError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def sealed(body: bytes, pad: int = 0) -> bytes:
    """With a seal that is right, so that what is behind it is reached."""
    return body + bytes(pad) + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


# -- every parser -------------------------------------------------------------------------------


@st.composite
def inputs(draw: st.DrawFn, made: list[bytes]) -> bytes:
    """Any bytes, or an input that is right with a part of it replaced."""
    raw = draw(st.binary(max_size=60))
    if not made or draw(st.booleans()):
        return draw(st.sampled_from([b"", b"[" * 3000, b"{" * 3000, b"\x81" * 3000])) + raw
    seed = draw(st.sampled_from(made))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, len(seed))] * 2)))
    return seed[:start] + raw + seed[stop:]


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@FUZZ
@given(data=st.data())
def test_every_parser_gives_a_value_or_kvcores_own_error(
    target: Target, data: st.DataObject, tmp_path: Path
) -> None:
    try_input(target, data.draw(inputs(seeds(target))), tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_seeds_are_inputs_that_are_taken(target: Target, tmp_path: Path) -> None:
    """From what is refused at once, neither driver gets far."""
    assert seeds(target)
    for seed in seeds(target):
        target.read(seed, tmp_path)


def test_fuzzing_without_its_package_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    with pytest.raises(SystemExit, match="2"):
        fuzz.main(["--target", "size"])
    assert "pip install atheris" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"given the parser 'sise'; give one of .*size"):
        fuzz.main(["--target", "sise"])


# -- what is on disk and in stores --------------------------------------------------------------


@FUZZ
@given(body=st.binary(min_size=82, max_size=82), known=st.booleans(), raw=st.binary(max_size=200))
def test_records(body: bytes, known: bool, raw: bytes, tmp_path: Path) -> None:
    data = sealed((MAGIC + b"\1\0" if known else b"KVCx\1\0") + body, 32)
    for each in (data, raw, data[:50] + raw):
        found = Record.unpack(each)
        assert found is None or found.pack()[:88] == each[:88]
    file = tmp_path / "index"
    file.write_bytes(data + raw)
    table, torn = read_table(file)
    assert len(table.slots) + torn <= len(data + raw) // 128 + 1


@FUZZ
@given(body=st.binary(min_size=90, max_size=90), raw=st.binary(max_size=200))
def test_headers_of_values(body: bytes, raw: bytes) -> None:
    for each in (sealed(b"KVR1\1\0" + body, 24), raw):
        found = Header.unpack(each)
        assert found is None or len(found.key) == 16
        if len(each) == 128:
            asked = BlockRead(0, b"k" * 16, [memoryview(bytearray(raw))])
            for guard in (None, BlockMac(bytes(32)), BlockCipher(bytes(32))):
                assert verify(each, asked, b"s" * 16, asked.buffers, guard) is not None


@FUZZ
@given(told=JSON, key=st.sampled_from(["version", "model", "shape", "heads", "cipher", "format"]))
def test_store_json(told: Any, key: str) -> None:
    good = {
        "format": "kvcore disk tier", "version": 1, "model": "00", "heads": [[0, 1]],
        "shape": {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_tokens": 1,
                  "dtype": "int8", "kv_factor": 1, "v_head_dim": 1},
    }  # fmt: skip
    assert Geometry.from_json(good)
    for each in (told, {**good, key: told}, {**good, "shape": {**good["shape"], "layers": told}}):
        with contextlib.suppress(FormatError):
            Geometry.from_json(each)


NUMBER = st.one_of(st.integers(0, 40), st.just(2**32 - 1), st.integers(0, 2**32 - 1))


@FUZZ
@given(numbers=st.tuples(*[NUMBER] * 4), body=st.binary(max_size=400), raw=st.binary(max_size=400))
def test_segment_files(numbers: Any, body: bytes, raw: bytes, tmp_path: Path) -> None:
    """Also records whose seals are right and whose numbers are not: they may claim gigabytes."""
    header = struct.pack(
        "<4sIIII16sQ", b"KVSR", *numbers, b"p" * 16, xxhash.xxh3_64_intdigest(body)
    )
    file = tmp_path / "segments"
    for content in (segment_file._file_header(16) + sealed(header) + body + raw, raw):
        file.write_bytes(content)
        try:
            store = segment_file.SegmentFile(file, 16)
        except FormatError:
            continue
        for kept in store.records():
            assert len(kept.piece.keys) * 16 <= len(content)
        store.close()


def test_nobody_is_believed_how_much_there_is(tmp_path: Path) -> None:
    """Seals are right, and numbers claim as much as they can: nothing is allocated for them."""
    most = 2**32 - 1
    header = struct.pack("<4sIIII16sQ", b"KVSR", most, most, most, most, b"p" * 16, 0)
    file = tmp_path / "segments"
    file.write_bytes(segment_file._file_header(16) + sealed(header) + b"body")

    def read_segments() -> None:
        store = segment_file.SegmentFile(file, 16)
        assert not list(store.records())
        store.close()

    shape = dict.fromkeys(("layers", "kv_heads", "head_dim", "block_tokens"), 2**60)
    store = {
        "format": "kvcore disk tier", "version": 1, "model": "00", "heads": [[0, 2**60]],
        "shape": {**shape, "dtype": "int8"},
    }  # fmt: skip
    trace = tmp_path / "trace"
    line = {"timestamp": 1, "input_length": 2**62, "output_length": 2**62, "hash_ids": [1]}
    trace.write_text(json.dumps(line))
    for read in (
        read_segments,
        lambda: Geometry.from_json(store),
        lambda: list(read_trace(trace)),
        lambda: parse_size("9" * 4000 + "TiB"),
        lambda: Header.unpack(sealed(b"KVR1\1\0\0\0" + b"\xff" * 88, 24)),
    ):
        assert peak(read) < SMALL


# -- what a person or an engine gives -----------------------------------------------------------


@FUZZ
@given(raw=st.binary(max_size=300), told=JSON, suffix=st.sampled_from([".toml", ".yaml"]))
def test_settings(raw: bytes, told: Any, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"kvcore{suffix}"
    tables = [{"host": told}, {"disk": {"capacity": told}}, {"tiers": {"a": told}}, {"block": told}]
    for content in (raw, *(yaml.safe_dump(each).encode() for each in tables)):
        file.write_bytes(content)
        with contextlib.suppress(ConfigError):
            load_config(file, env={})


@FUZZ
@given(text=st.text(max_size=60), name=st.sampled_from(["host.capacity", "fusion.ratio", "tiers"]))
def test_assignments_sizes_and_keys(text: str, name: str) -> None:
    for read in (
        lambda: parse_size(text),
        lambda: load_config(overrides=parse_assignment(f"{name}={text}"), env={}),
        lambda: parse_assignment(text),
        lambda: read_key("K", None, {"K": text}),
    ):
        with contextlib.suppress(ConfigError):
            read()


@FUZZ
@given(raw=st.binary(max_size=300), told=JSON, ids=st.lists(st.integers(), max_size=4))
def test_traces_and_records_of_requests(
    raw: bytes, told: Any, ids: list[int], tmp_path: Path
) -> None:
    line = {"timestamp": 1, "input_length": told, "output_length": 1, "hash_ids": ids}
    content = json.dumps(line).encode() + b"\n" + raw
    file = tmp_path / "trace.jsonl"
    for each in (raw, content):
        file.write_bytes(each)
        with contextlib.suppress(FormatError):
            list(read_trace(file))
    record = json.dumps({"request": "r", "at": 1}).encode()
    (tmp_path / "requests-1.jsonl").write_bytes(
        b"\n".join([raw, json.dumps(told).encode(), record])
    )
    found = list(read_records(tmp_path))
    assert any(each["request"] == "r" for each in found)
    assert as_text({"request": "r", "at": 1})
    assert as_table([{"request": "r", "at": 1}]).row_count == 1


# -- tenants ------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=80),
    mine=st.text(min_size=1, max_size=8),
    other=st.text(min_size=1, max_size=8),
)
def test_a_tenant_cannot_probe_anothers_cache(prompt: list[int], mine: str, other: str) -> None:
    """The same prompt finds nothing under another salt, and no key of one is a key of the other."""
    spaces = Namespaces(NamespaceConfig(secret="s" * 16), b"model")
    chains = [KeyChain(spaces.of("", salt), 16) for salt in (mine, other)]
    keys = [list(chain.extend(prompt)) for chain in chains]
    index = BlockIndex([TierSpec("host", 16)])
    index.lifecycle.commit(
        index.lifecycle.reserve("host", keys[0], 0, len(keys[0]), chains[0].namespace.digest)
    )
    assert index.match(keys[0]).depths == (len(keys[0]),)
    assert index.match(keys[1]).depths == (len(keys[0]) if mine == other else 0,)
    assert mine == other or not set(keys[0]) & set(keys[1])


def test_without_the_secret_keys_cannot_be_guessed() -> None:
    """One who knows text, model and salt, and sees names of blocks, cannot tell what they are."""
    prompt = list(range(64))
    found = {
        secret: tuple(
            KeyChain(
                Namespaces(NamespaceConfig(secret=secret), b"model").of("", "salt"), 16
            ).extend(prompt)
        )
        for secret in ("one" * 8, "two" * 8, None)
    }
    assert len(set(found.values())) == 3


# -- code that runs what it reads ---------------------------------------------------------------

RUNS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Modules whose reading runs what it is given."""
CALLS = {"eval", "exec", "compile"}
STAND_INS = {"adapters/trtllm/kvcore_trtllm/testing/executor.py"}
"""Does to objects what TensorRT-LLM's own channel does to them; nothing is read from outside."""


def risks(source: str) -> list[str]:
    """What in a source could run what it reads: imports, also by name, and calls."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in RUNS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += _risky_call(node)
    return found


def _risky_call(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    first = call.args[0] if call.args else None
    named = first.value if isinstance(first, ast.Constant) else None
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in CALLS or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        return [name]
    if name == "torch.load" and options.get("weights_only") != "True":
        return [name]
    if name in ("np.load", "numpy.load") and options.get("allow_pickle") == "True":
        return [name]
    if name.endswith("import_module") and isinstance(named, str) and named.split(".")[0] in RUNS:
        return [named]
    return []


def test_nothing_that_is_read_can_run_code() -> None:
    files = [f for room in ("kvcore", "adapters", "kernels") for f in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    found = {str(f.relative_to(ROOT)): risks(f.read_text()) for f in files}
    assert {name for name, what in found.items() if what} == STAND_INS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch, dill.source",
        "importlib.import_module('pickle')", "yaml.load(f, Loader=l)", "eval(text)",
        "torch.load(f)", "np.load(f, allow_pickle=True)", "def f():\n    import cloudpickle",
    ],
)  # fmt: skip
def test_the_search_finds_them(source: str) -> None:
    assert risks(source)
    assert not risks("import json\nyaml.safe_load(f)\ntorch.load(f, weights_only=True)")


def test_what_is_fuzzed_is_instrumented_before_it_is_imported() -> None:
    """Else atheris sees no coverage, tries inputs blindly and finds nothing."""
    watched = """
        import contextlib, sys
        from pathlib import Path
        from kvcore_devtools import fuzz
        early = []
        class Atheris:
            @contextlib.contextmanager
            def instrument_imports(self, include):
                early.extend(name for name in sys.modules if name.startswith(tuple(include)))
                yield
            def Setup(self, arguments, once): once(b"anything")
            def Fuzz(self): pass
        fuzz.need_atheris = Atheris
        for one in fuzz.TARGETS[:1]:
            fuzz.fuzz(one, 1, Path())
        harmless = {"kvcore", "kvcore.errors", "kvcore.masking"}
        harmless |= {"kvcore._util", "kvcore._util.cpus"}  # `import kvcore` notes the cores
        harmless |= {"kvcore_devtools", "kvcore_devtools.fuzz"}
        assert set(early) <= harmless, sorted(set(early) - harmless)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(watched)], check=True)
