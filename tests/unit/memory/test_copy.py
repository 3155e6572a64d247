"""The copies over memory of any stride, the edges of that memory, and how the library is found."""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.memory import native_lib
from kvcore.memory.copy import DeviceOps, HeadRange, builtin_ops, native, select_ops
from kvcore.memory.copy import build_native as build
from kvcore.memory.copy.native import NativeOps
from kvcore.memory.copy.reference import ReferenceOps
from kvcore.memory.layout import (
    KVView,
    arena_layout,
    trtllm_layout,
    vllm_cpu_layout,
)
from kvcore.model.shape import BlockShape
from support.budget import examples
from support.strides import (
    DTYPES,
    StridedCopy,
    clone,
    contents,
    copies,
    fill,
    memory,
)

ALWAYS, NEVER = 0, 1 << 62
"""Bytes from which on a copy streams: both ways of writing are tested on small copies too."""

both = pytest.mark.parametrize("ops", [ReferenceOps(), NativeOps()], ids=lambda ops: ops.name)


# ---- memory of any stride ----


@both
@given(
    copy=copies([1, 3, 8, 10, 16], [1, 2, 5, 8, 11]), stream_bytes=st.sampled_from([ALWAYS, NEVER])
)
@settings(max_examples=examples(150), deadline=None)
def test_any_strides_to_any_strides(ops: DeviceOps, copy: StridedCopy, stream_bytes: int) -> None:
    """Equal to the oracle in every byte of every storage: nothing else is touched."""
    before, expected = contents(copy.src), copy.expected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_STREAM_BYTES", stream_bytes)
        ops.copy_blocks(*copy)
    assert contents(copy.dst) == expected
    assert contents(copy.src) == before, "wrote to the source"


# ---- fast paths, at the sizes where they cut their work ----

ENGINE_LAYOUTS = ("vec", "HND", "NHD", "arena")


def engine_view(name: str, shape: BlockShape, pages: int, page_tokens: int) -> KVView:
    if name == "vec":
        layout = vllm_cpu_layout(
            name,
            layers=shape.layers,
            num_pages=pages,
            page_tokens=page_tokens,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )
        count = pages * page_tokens * shape.kv_heads * 2 * shape.head_dim
        return KVView(layout, [memory(count, shape.itemsize) for _ in range(shape.layers)])
    if name == "arena":
        layout = arena_layout(shape, pages * page_tokens // shape.block_tokens)
    else:
        layout = trtllm_layout(shape, pages, page_tokens, name)
    count = pages * page_tokens * shape.nbytes // shape.block_tokens // shape.itemsize
    return KVView(layout, [memory(count, shape.itemsize)])


@given(
    names=st.tuples(st.sampled_from(ENGINE_LAYOUTS), st.sampled_from(ENGINE_LAYOUTS)),
    head_dim=st.sampled_from([24, 64, 80, 128, 256, 264]),
    block=st.sampled_from([4, 16, 40, 64, 128, 600]),
    per_page=st.integers(1, 8),
    itemsize=st.sampled_from([1, 2, 2, 4]),
    threshold=st.sampled_from([ALWAYS, NEVER]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 99),
)
# A vec page holds a run of units beyond one tile; units longer than a tile; a head beyond it.
@example(("vec", "arena"), 128, 16, 8, 2, ALWAYS, 0, 1)
@example(("arena", "vec"), 64, 16, 8, 2, ALWAYS, 0, 2)
@example(("vec", "vec"), 64, 600, 1, 2, ALWAYS, 1, 3)
@example(("arena", "vec"), 264, 16, 2, 2, NEVER, 0, 4)
@settings(max_examples=examples(60), deadline=None)
def test_native_equals_reference_at_real_sizes(
    names: tuple[str, str],
    head_dim: int,
    block: int,
    per_page: int,
    itemsize: int,
    threshold: int,
    shift: int,
    seed: int,
) -> None:
    shape = BlockShape(1, 2, head_dim, block, DTYPES[itemsize])
    src, dst = (engine_view(name, shape, 2, block * per_page) for name in names)
    dst = KVView(dst.layout, [shifted(t, shift) for t in dst.tensors])
    fill(src, seed)
    rng = np.random.default_rng(seed)
    units = np.arange(2 * per_page)
    a = np.where(rng.random(len(units)) < 0.1, -1, units)
    b = rng.permutation(units) if seed % 2 else units
    outcomes = []
    for ops in (ReferenceOps(), NativeOps()):
        target = clone(dst)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "_STREAM_BYTES", threshold)
            ops.copy_blocks(src, a, target, b, unit_tokens=block)
        outcomes.append(contents(target))
    assert outcomes[0] == outcomes[1]


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """As many elements of new memory, `by` elements off its alignment."""
    return memory(tensor.numel() + by, tensor.element_size())[by:]


# ---- the edges of memory ----

PAGE = mmap.PAGESIZE


def fenced(nbytes: int, *, at_end: bool) -> torch.Tensor:
    """Bytes that touch, at one end, a memory page which may not be read or written."""
    room = -(-nbytes // PAGE) * PAGE
    area = mmap.mmap(-1, room + 2 * PAGE)
    tensor = torch.frombuffer(area, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (tensor.data_ptr(), tensor.data_ptr() + PAGE + room):
        if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = PAGE + room - nbytes if at_end else PAGE
    return tensor[start : start + nbytes]


def copy_between_fences() -> None:
    for names, head_dim, block, at_end, threshold in itertools.product(
        itertools.product(ENGINE_LAYOUTS, ENGINE_LAYOUTS),
        (24, 64, 90),
        (5, 16),
        (False, True),
        (ALWAYS, NEVER),
    ):
        shape = BlockShape(1, 2, head_dim, block, "bfloat16")
        pair = []
        for name in names:
            view = engine_view(name, shape, 2, 2 * block)
            tensors = [fenced(2 * t.numel(), at_end=at_end) for t in view.tensors]
            pair.append(KVView(view.layout, [t.view(torch.bfloat16) for t in tensors]))
        native._STREAM_BYTES = threshold
        units = np.arange(4)
        NativeOps().copy_blocks(pair[0], units, pair[1], units[::-1], unit_tokens=block)


@pytest.mark.slow
def test_native_copies_stay_inside_their_memory() -> None:
    """In a process of its own, which one read or write too far would kill."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=env,
    )
    assert done.returncode == 0, f"died of {-done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout == "stayed inside\n"


# ---- use ----


@both
def test_threads_share_one_instance(ops: DeviceOps) -> None:
    shape = BlockShape(3, 2, 64, 16, "bfloat16")
    src, dst = engine_view("vec", shape, 16, 32), engine_view("arena", shape, 16, 32)
    fill(src, 1)
    expected = clone(dst)
    ReferenceOps().copy_blocks(src, np.arange(32), expected, np.arange(32), unit_tokens=16)
    with ThreadPoolExecutor(4) as pool:
        done = [
            pool.submit(ops.copy_blocks, src, part, dst, part, unit_tokens=16)
            for part in np.random.default_rng(0).permutation(32).reshape(16, 2)
        ]
        for future in done:
            future.result()
    assert contents(dst) == contents(expected)


@both
@pytest.mark.parametrize("heads", [HeadRange(0, 0, -1), HeadRange(-1, 0, 1), HeadRange(0, 2, 1)])
def test_heads_outside_are_refused(ops: DeviceOps, heads: HeadRange) -> None:
    shape = BlockShape(1, 2, 16, 8, "bfloat16")
    src, dst = engine_view("HND", shape, 2, 8), engine_view("arena", shape, 2, 8)
    before = contents(dst)
    with pytest.raises(LayoutError, match="2 source and 2 destination heads"):
        ops.copy_blocks(src, np.array([0]), dst, np.array([1]), heads=heads)
    assert contents(dst) == before


def test_native_is_for_host_memory_only() -> None:
    shape = BlockShape(1, 2, 16, 8, "bfloat16")
    host = engine_view("arena", shape, 2, 8)
    elsewhere = KVView(host.layout, [t.to("meta") for t in host.tensors])
    for src, dst in ((host, elsewhere), (elsewhere, host)):
        assert not NativeOps().supports(src, dst)
        assert select_ops(src, dst, builtin_ops()).name == "reference"
        with pytest.raises(ConfigError, match="'native' cannot copy between these devices"):
            select_ops(src, dst, builtin_ops(), "native")


# ---- building and finding the library ----


@pytest.mark.slow
def test_the_library_is_built_by_any_compiler_named(tmp_path: Path) -> None:
    made = build.build(tmp_path / "_copy.so")
    assert [p.name for p in tmp_path.iterdir()] == ["_copy.so"]
    assert ctypes.CDLL(str(made)).kvcore_copy_abi() == native_lib._ABI


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler: install gcc or clang, or set CC"):
        build.build(tmp_path / "_copy.so")


def test_a_failed_build_leaves_the_library_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    target = tmp_path / "_copy.so"
    target.write_bytes(b"before")
    with pytest.raises(RuntimeError, match="no such flag"):
        build.build(target)
    assert target.read_bytes() == b"before"


def missing(path: Path) -> None:
    assert not path.exists()


def not_a_library(path: Path) -> None:
    path.write_bytes(b"\x7fELF but cut short")


def of_another_version(path: Path) -> None:
    source = path.with_suffix(".c")
    source.write_text("long kvcore_copy_abi(void) { return -1; }\n")
    compiler = build.compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(path)], check=True)


@pytest.mark.parametrize("make", [missing, not_a_library, of_another_version])
def test_without_the_library_torch_copies_and_the_log_says_so(
    make: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "_copy.so"
    make(path)  # type: ignore[operator]
    monkeypatch.setattr(native_lib, "LIBRARY", path)
    monkeypatch.setattr(native, "load_library", native_lib.load_library.__wrapped__)
    with pytest.raises(UnsupportedError, match=r"python -m kvcore\.memory\.copy\.build_native"):
        NativeOps()
    with caplog.at_level(logging.WARNING, "kvcore.memory.copy"):
        assert [ops.name for ops in builtin_ops()] == ["reference", "link"]
    assert "python -m kvcore.memory.copy.build_native" in caplog.text


if __name__ == "__main__":
    copy_between_fences()
    print("stayed inside")
