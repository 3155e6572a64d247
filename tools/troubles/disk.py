"""Log lines of the disk tier."""

from __future__ import annotations

from tools.troubles.entry import NOTHING, Trouble

DISK = [
    Trouble(
        "%s: dropped records torn=%d beyond_data_or_of_other_size=%d",
        "An engine was killed while it wrote, the files were truncated, or somebody without the "
        "secret or key changed the records. These blocks are lost.",
        "Nothing after a crash. Otherwise check the disk, and who can write to the folder.",
    ),
    Trouble(
        "store %s is not used: %s",
        "Its `store.json` has another version, or is damaged.",
        "If nobody needs the store, remove its folder.",
    ),
    Trouble(
        "%s is not used: %s",
        "A folder where `disk.path` keeps stores belongs to another user, or others may write in "
        "it. Nothing in it is read or removed.",
        "If it is this user's, `chmod 700` it. Otherwise find out who made it, and remove it.",
    ),
    Trouble(
        "store %s is not used: it holds blocks of another model",
        "Two models have got the same folder name.",
        "If nobody needs the store, remove its folder.",
    ),
    Trouble(
        "the store %s is not read: %s",
        "Another engine's store disappeared or cannot be opened. Its blocks are computed.",
        NOTHING,
    ),
    Trouble(
        "cutting the store %s to %d blocks to make room",
        "All stores in the folder share its capacity.",
        "Raise `disk.capacity` to keep more.",
    ),
    Trouble(
        "removing the store %s (%d bytes) to make room",
        "All stores in the folder share its capacity. This one has been unused for longest.",
        "Raise `disk.capacity` to keep more.",
    ),
    Trouble(
        "slot %d could not be marked bad: %s",
        "A damaged block was found, and its record could not be erased. It is not used.",
        "Check the disk.",
    ),
    Trouble(
        "a flush failed: %s",
        "Recent writes may not survive a power failure.",
        "Check the disk.",
    ),
    Trouble(
        "no asynchronous I/O for %s (%s): threads do it instead",
        "The kernel, its limits or a sandbox refuse asynchronous I/O. Reads are slower.",
        "Raise `fs.aio-max-nr`, or allow io_submit in the container.",
    ),
    Trouble(
        "disk.to_device: blocks go through host memory all the same, for %s",
        "NIXL, or its backend for this memory (GDS_MT, GDS; POSIX on a CPU), does not start.",
        "Fix what the line names (`pip install nixl-cu13`, GPUDirect Storage), or set "
        "`disk.to_device = off`.",
    ),
    Trouble(
        "tier %s: blocks on their way to the device go through host memory; the first, "
        "for %s; kvcore_bounced_blocks_total counts them",
        "`disk.to_device` is on, but these blocks cannot be read straight into device memory: "
        "they were written before the option was on, or a read by NIXL failed. They are "
        "loaded all the same.",
        "Nothing for older blocks. Otherwise check the disk, or set `disk.to_device = off`.",
    ),
    Trouble(
        "disk.device_staging of %d bytes does not hold one block of %d: raise it; until then "
        "loads from disk go through host memory",
        "One block is larger than the staging buffer in device memory.",
        "Raise `disk.device_staging`, lower `block.tokens`, or set `disk.to_device = off`.",
    ),
    Trouble(
        "no direct I/O in %s: reads and writes go through the page cache",
        "The file system refuses direct I/O.",
        "Nothing, or set `disk.path` to a folder on a local file system.",
    ),
]
