"""What `kvcore doctor` checks: engines, plugins, the machine, the disk, settings and servers."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvcore._util.private import make_guarded
from kvcore.cli.probe import CONTACT_S, Finding, Level, contacts
from kvcore.config import Config, format_size, read_key
from kvcore.config.paths import memory_of
from kvcore.engines.verdict import judge
from kvcore.errors import ConfigError, KVCoreError, TierUnavailable
from kvcore.memory.hugepages import PAGE, Pages, gives_huge_pages
from kvcore.memory.nixl import FileAgent
from kvcore.plugins import PluginManager
from kvcore.plugins.manager import reason
from kvcore.server.runtime_dir import mount_of
from kvcore.tiers.disk.files import DataFile, Piece
from kvcore.tiers.disk.gds import BACKENDS

__all__ = ["examine"]

_DRIVER = Path("/proc/driver/nvidia/version")
_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_CUFILE = Path("/etc/cufile.json")
_P2PDMA = re.compile(r'^\s*"use_pci_p2pdma"\s*:\s*true', re.MULTILINE)
_MEMORY = Path("/proc/meminfo")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SLOT = 1 << 20
_PROBE_SLOTS = 32
SLOW_BYTES_S = 500e6
"""A disk below this reads KV of most models slower than a GPU computes it."""


def examine(
    config: Config,
    plugins: PluginManager,
    *,
    probe: bool = True,
    contact_s: float | None = CONTACT_S,
) -> Iterator[Finding]:
    """Yield each finding as it is made. Blocks.

    ``probe`` writes 32 MiB to the disk tier's folder and reads them back. The folder is made if it
    is missing; nothing else changes. ``contact_s`` is the time in seconds that each server in the
    settings has to answer. None contacts no server. Without a temporary folder nothing else is
    examined: libraries that engines import end the process then.
    """
    if (missing := _temporary_folder()) is not None:
        yield missing
        return
    yield from _engines(config, plugins)
    yield from _plugins(config, plugins)
    yield _gpu(_DRIVER.exists())
    yield _memory(config)
    yield _huge_pages(config)
    yield _copies(plugins)
    yield from _disk(config, probe)
    yield from _settings(config)
    if contact_s is not None:
        yield from contacts(config, plugins, contact_s)


def _temporary_folder() -> Finding | None:
    """Return a problem if no temporary file can be made."""
    try:
        with tempfile.TemporaryFile():
            return None
    except OSError as error:
        return Finding(
            "temporary folder",
            Level.PROBLEM,
            f"no temporary file can be made: {error.strerror or error}",
            "mount a writable /tmp, or name a folder in TMPDIR; engines need one too",
        )


# -- engines and plugins ------------------------------------------------------------------------


def _engines(config: Config, plugins: PluginManager) -> Iterator[Finding]:
    served = False
    for found in plugins.found("engine"):
        verdict = judge(found.item)
        if verdict.version is None:
            continue
        about = f"engine {found.name}"
        if verdict.served:
            served = True
            yield Finding(about, Level.GOOD, verdict.about)
            if found.item.switch is not None:
                switch = found.item.switch(config)
                level = Level.WARNING if switch.advice else Level.GOOD
                yield Finding(f"start of {found.name}", level, switch.why, switch.advice)
        else:
            yield Finding(about, Level.WARNING, verdict.about, verdict.advice)
    if not served:
        change = "install one that `kvcore plugins` names"
        yield Finding("engine", Level.PROBLEM, "none that kvcore serves is installed", change)
    names = [found.name for found in plugins.found("engine")]
    if config.engine is not None and config.engine not in names:
        change = f"set engine to one of {', '.join(names)}"
        yield Finding("engine", Level.PROBLEM, f"engine = {config.engine!r} is unknown", change)


def _plugins(config: Config, plugins: PluginManager) -> Iterator[Finding]:
    for failure in plugins.failures:
        change = "repair it, or name it in plugins.disable"
        about = f"plugin {failure.origin.plugin}"
        yield Finding(about, Level.WARNING, reason(failure.error), change)
    try:
        plugins.check(config)
    except KVCoreError as error:
        yield Finding("settings", Level.PROBLEM, str(error), "name one that `kvcore plugins` has")


# -- the machine --------------------------------------------------------------------------------


def _gpu(there: bool) -> Finding:
    if there:
        return Finding("GPU", Level.GOOD, _DRIVER.read_text().splitlines()[0])
    return Finding("GPU", Level.WARNING, "no NVIDIA driver", "nothing, if the engine's is for CPUs")


def _memory(config: Config) -> Finding:
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    wanted = config.host.capacity
    found = f"{format_size(free, exact=False)} free, host.capacity {format_size(wanted)}"
    if wanted <= free:
        return Finding("host memory", Level.GOOD, found)
    return Finding("host memory", Level.PROBLEM, found, "lower host.capacity")


def _huge_pages(config: Config) -> Finding:
    if config.host.huge_pages and config.server.address is not None:
        mount = mount_of(memory_of(config.server))
        if gives_huge_pages(mount):
            return Finding("huge pages", Level.GOOD, f"{mount} gives them")
        return Finding(
            "huge pages",
            Level.WARNING,
            f"{mount} gives none to the server: reads from disk are half as fast",
            f"as root: mount -o remount,huge=advise {mount}",
        )
    says = _THP.read_text().strip() if _THP.exists() else "not known to this kernel"
    if not config.host.huge_pages or "[always]" in says or "[madvise]" in says:
        return Finding("huge pages", Level.GOOD, says)
    return Finding("huge pages", Level.WARNING, says, f"write madvise to {_THP}")


def _copies(plugins: PluginManager) -> Finding:
    names = [ops.name for ops in plugins.ops()]
    if "native" in names:
        return Finding("copies", Level.GOOD, ", ".join(names))
    change = "install a wheel, or run kvcore/memory/copy/build_native.py (a C compiler)"
    return Finding("copies", Level.WARNING, "the C copies are not built", change)


# -- disk ---------------------------------------------------------------------------------------


def _disk(config: Config, probe: bool) -> Iterator[Finding]:
    path, capacity = config.disk.path, config.disk.capacity
    if path is None:
        yield Finding("disk", Level.GOOD, "no disk tier (disk.path is unset)")
        return
    try:
        os.close(make_guarded(path))
        used = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        free = shutil.disk_usage(path).free
        speed = _speed(path) if probe else None
    except (OSError, TierUnavailable) as error:
        yield Finding("disk", Level.PROBLEM, f"{path}: {error}", "give a folder to write to")
        return
    room = f"{format_size(free, exact=False)} free, disk.capacity {format_size(capacity)}"
    found = f"{path.absolute()}: {room}"
    if free + used < capacity:
        yield Finding("disk", Level.PROBLEM, found, "lower disk.capacity")
    else:
        yield Finding("disk", Level.GOOD, found)
    if path.stat().st_mode & 0o077:
        yield Finding("disk", Level.WARNING, f"others may enter {path}", f"chmod 700 {path}")
    if config.disk.to_device == "on":
        yield _to_device()
    if speed is not None:
        level = Level.GOOD if speed >= SLOW_BYTES_S else Level.WARNING
        change = "" if level is Level.GOOD else "use a faster disk, or planner.enabled = true"
        yield Finding("disk speed", level, f"reads {speed / 1e9:.2f} GB/s (a quick probe)", change)


def _to_device() -> Finding:
    """Try NIXL's backends, for GPU memory if there is a GPU.

    Only the engine knows which memory holds its KV, so this is a guess.
    """
    kind = "VRAM" if _DRIVER.exists() else "DRAM"
    reasons = []
    for backend in BACKENDS[kind]:
        try:
            FileAgent(backend)
            found = f"NIXL's backend {backend} starts"
            if kind == "VRAM" and not _reads_directly():
                return Finding(
                    "disk to device",
                    Level.WARNING,
                    f"{found}, in cuFile's compatibility mode: reads go through host memory",
                    f'load the kernel module nvidia-fs, or set "use_pci_p2pdma" in {_CUFILE} if '
                    "the drive and the kernel allow it",
                )
            return Finding("disk to device", Level.GOOD, found)
        except KVCoreError as error:  # noqa: PERF203 - two tries
            reasons.append(str(error))
    change = 'or set disk.to_device = "off": blocks go through host memory all the same'
    return Finding("disk to device", Level.WARNING, "; ".join(reasons), change)


def _reads_directly() -> bool:
    """Return True if cuFile has a way past host memory: nvidia-fs, or the kernel's PCI P2PDMA.

    The file system may still have none. cuFile then falls back for each file, and tells only its
    own log.
    """
    if _NVIDIA_FS.is_dir():
        return True
    try:
        return _P2PDMA.search(_CUFILE.read_text()) is not None
    except (OSError, ValueError):
        return False


def _speed(folder: Path) -> float:
    """Return bytes per second of reads, past the page cache if the file system allows it."""
    with tempfile.TemporaryDirectory(prefix=".kvcore-doctor-", dir=folder) as inside:
        file = DataFile(Path(inside) / "probe", _SLOT, num_slots=_PROBE_SLOTS)
        pages = Pages(_PROBE_SLOTS * _SLOT)
        try:
            views = [pages.view[i * _SLOT : (i + 1) * _SLOT] for i in range(_PROBE_SLOTS)]
            pages.view[:PAGE] = os.urandom(PAGE)
            pieces = [Piece(i, i, [view]) for i, view in enumerate(views)]
            _moved(file.write(pieces))
            file.sync()
            began = time.perf_counter()
            _moved(file.read(pieces))
            return _PROBE_SLOTS * _SLOT / (time.perf_counter() - began)
        finally:
            file.close()


def _moved(outcomes: Iterator[tuple[int, int | OSError]]) -> None:
    for _, outcome in outcomes:
        if isinstance(outcome, OSError):
            raise outcome


# -- settings -----------------------------------------------------------------------------------


def _settings(config: Config) -> Iterator[Finding]:
    """Yield findings about settings that are valid alone and wrong together."""
    if config.planner.enabled and not config.metrics.enabled:
        change = "set metrics.enabled = true"
        yield Finding("planner", Level.PROBLEM, "it knows no rates without metrics", change)
    if config.disk.encrypted:
        try:
            read_key(config.disk.key_env, config.disk.key_file)
            yield Finding("encryption", Level.GOOD, "the key can be read")
        except ConfigError as error:
            yield Finding("encryption", Level.PROBLEM, str(error), "see docs/stored-blocks.md")
    if config.disk.encrypted and config.disk.path is None:
        yield Finding("encryption", Level.WARNING, "a key, and no disk tier", "set disk.path")
    if config.tiers and config.namespace.secret is None:
        change = "set namespace.secret in the environment, on every host the same"
        found = "names in shared stores can be guessed from the text"
        yield Finding("secret", Level.WARNING, found, change)
