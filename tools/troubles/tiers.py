"""Log lines of loads, saves and tiers in general."""

from __future__ import annotations

from tools.troubles.entry import MEDIUM, NOTHING, REPORT, Trouble

LOADS_AND_SAVES = [
    Trouble(
        "load failed, computing instead request=%s attempt=%d retry=%s",
        "Blocks could not be read. They are computed.",
        "Look for the tier's own line before it.",
    ),
    Trouble(
        "load refused request=%s: %s",
        "There was no room for the load, or vLLM counts on other tokens than kvcore had offered. "
        "They are computed.",
        "If there is often no room, raise `host.capacity` or `transfer.queue_depth`. Report the "
        "other, with the version of vLLM.",
    ),
    Trouble(
        "every step waits for all saves, because vLLM has %s",
        "This release of vLLM may write pages in a way that kvcore does not know. Answers stay "
        "right.",
        "Report it with the version of vLLM.",
    ),
    Trouble(
        "load abandoned at its deadline graph=%d after_s=%s",
        "A load was late. Its tokens are computed.",
        "If it happens often, check the tier, or set `planner.enabled = true`.",
    ),
    Trouble(
        "a load failed and is tried again graph=%d",
        "Blocks could not be read at the first attempt.",
        "Look for the tier's own line before it.",
    ),
    Trouble(
        "a promised load failed request=%s: %s",
        "TensorRT-LLM cannot retract a reported hit, so the request fails.",
        "Check the tier, and `trtllm.stage_wait_s`.",
    ),
    Trouble(
        "computed_again",
        "The KV of a request could not be loaded. SGLang computes the request from the start.",
        "Look for the tier's own line before it.",
    ),
    Trouble(
        "%s tier=%s failed: %s",
        "An operation on a tier failed.",
        "Check the tier. If its store was removed or moved under the engine, restart the engine.",
    ),
    Trouble(
        "transfer op failed graph=%d path=%s",
        "A copy failed. A load is computed; a save is dropped.",
        REPORT,
    ),
    Trouble(
        "graph refused: %s",
        "The transfer queue is full. A load is computed; a save is dropped.",
        "Raise `transfer.queue_depth`.",
    ),
    Trouble(
        "ignored the report of an unknown op graph=%d op=%d",
        "A worker reported work that its leader does not know.",
        "Report it, unless the cache was cleared at that time.",
    ),
    Trouble(
        "transfers still hung at shutdown; what they wrote is not published",
        "A medium did not answer before the engine ended.",
        MEDIUM,
    ),
    Trouble("shutdown: %s", "Closing a part of kvcore failed.", "Check the tier it names."),
]

TIERS = [
    Trouble(
        "tier left alone tier=%s failures=%d pause_s=%g",
        "After three failures kvcore neither reads nor writes the tier for a while, and then "
        "tries it again.",
        "Check the medium. The tier comes back by itself.",
    ),
    Trouble(
        "tier works again tier=%s",
        "A tier that was left alone after failures answers again.",
        NOTHING,
    ),
    Trouble("the tier %s failed: %s", "Reading or writing failed.", MEDIUM),
    Trouble("the tier %s raised", "A plugin's tier raised an exception.", REPORT),
    Trouble(
        "a clear could not be recorded in %s, and a restart may undo it: %s",
        "The clear could not be recorded on disk. If the engine is killed before its ranks "
        "have erased the cleared blocks, these are found again.",
        "Check the disk. To be sure, stop the engine and remove the folder.",
    ),
    Trouble(
        "%s cannot be read, all of the store is cleared: %s",
        "The record of cleared blocks is damaged, so the whole store counts as cleared.",
        "Nothing: KV is computed and stored again as it is needed.",
    ),
    Trouble(
        "a clear is not written down in %s, and lost if this engine ends before a kvcore "
        "server confirms it: %s",
        "The clear could not be recorded in `server.folder`.",
        "Check that folder. If the engine ended before its server was back, stop the server "
        "and remove the folder of its disk tier to be sure.",
    ),
    Trouble(
        "%s cannot be read, all of the model is cleared: %s",
        "The record of an engine's clear is damaged, so all blocks of the model are cleared.",
        "Nothing: KV is computed and stored again as it is needed.",
    ),
    Trouble(
        "%d pending deletes cannot be recorded; if this engine ends first, their blocks stay "
        "in the store: %s",
        "The blocks that a store still has to delete could not be recorded in `disk.path` or "
        "in `server.folder`.",
        "Check those folders. If the engine ended before the store was back, empty the store.",
    ),
    Trouble(
        "the pending deletes in %s cannot be read: %s",
        "An earlier engine left a record of blocks to delete from a store, and it cannot be read.",
        "Check that folder. To be sure, empty the store.",
    ),
    Trouble(
        "tier %s could not forget %d slots: %s",
        "Blocks that were cleared may be found there after a restart.",
        "Check the medium. If they must be gone, remove the folder.",
    ),
    Trouble("closing tier %s: %s", "Closing the tier failed.", MEDIUM),
    Trouble(
        "a stored page is corrupt and was dropped: %s",
        "The bytes that were read are not those that were written. The engine computes the page.",
        "If it happens again, check the medium; for a disk run `kvcore scrub`.",
    ),
]
