"""Log lines of fusion."""

from __future__ import annotations

from tools.troubles.entry import REPORT, Trouble

FUSION = [
    Trouble(
        "request=%s is answered without fusion: %s",
        "The fusion options of the request are invalid.",
        "Change the request: see [fusion](fusion.md).",
    ),
    Trouble(
        "request %s is answered without fusion: %s",
        "The fusion options of the request are invalid.",
        "Change the request: see [fusion](fusion.md).",
    ),
    Trouble(
        "%d blends failed one after another: exact prefixes only until the engine restarts",
        "Fusion fails with this model.",
        "Report the tracebacks before it, and set `fusion.enabled = false`.",
    ),
    Trouble(
        "blend failed, computing instead request=%s",
        "The request is computed in full.",
        REPORT,
    ),
    Trouble(
        "blend cannot begin, computing instead request=%s",
        "A rank lacks memory for the blend. The request is computed in full.",
        "Lower `fusion.staging_max`, or the device memory that the engine takes.",
    ),
    Trouble(
        "chunks could not be copied request=%s",
        "The request is computed in full.",
        REPORT,
    ),
    Trouble(
        "chunks did not arrive request=%s",
        "The request is computed in full.",
        REPORT,
    ),
    Trouble(
        "this rank is out of step with the others: the engine must end",
        "The engine's own layer, or a sum over ranks, failed on this rank during a blend. "
        "The other ranks may wait for it in any collective, so the engine ends.",
        "Restart the engine. If memory ran out, lower the device memory that the engine takes.",
    ),
    Trouble(
        "the operations of blends could not be compiled yet",
        "The first blends wait for the compiler.",
        REPORT,
    ),
    Trouble(
        "no memory for the chunks of request=%s: %s",
        "The request is computed in full.",
        "Lower `fusion.staging_max`, or the device memory that the engine takes.",
    ),
    Trouble(
        "the model's layers could not be timed",
        "kvcore cannot measure whether a blend is worth it.",
        REPORT,
    ),
    Trouble(
        "a blend could not be timed",
        "The device failed to record an event. The KV is right, but this blend does not count when "
        "kvcore measures whether blends are worth it.",
        REPORT,
    ),
    Trouble(
        "a chunk is computed because it cannot be loaded: %s",
        "There was no room for the load.",
        "If it happens often, raise `host.capacity`.",
    ),
    Trouble(
        "chunks did not arrive from their tier in time, computing instead",
        "The tier is too slow.",
        "Check the tier, and `transfer.load_deadline_s`.",
    ),
    Trouble(
        "attention hooks are not called again: %s: %s",
        "An attention hook failed.",
        "Report the traceback to the author of the plugin.",
    ),
    Trouble(
        "attention hook %r failed at layer %d and is not called again",
        "An attention hook failed.",
        "Report the traceback to the author of the plugin.",
    ),
    Trouble(
        "tokens of stored blocks are kept no more, and %s is emptied",
        "The thread that writes the segments file has stopped; the line before says why. After a "
        "restart, chunks are not found.",
        "Report the line before, and restart the engine.",
    ),
    Trouble(
        "tokens of stored blocks are not kept in %s: %s",
        "The segments file cannot be used. After a restart, chunks are not found.",
        "Check the file. If it has another version, remove it.",
    ),
    Trouble(
        "%s is written by another engine: tokens are not kept",
        "Two engines with the same model share the folder, and only one of them writes the "
        "segments file.",
        "Nothing, or give each engine its own `disk.path`.",
    ),
    Trouble(
        "%s could not be %s: %s",
        "The segments file could not be written. After a restart, chunks are not found.",
        "Check the disk.",
    ),
]
