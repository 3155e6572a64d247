"""The meaning of kvcore's errors and log lines, and what to do: for `tools.troubleshooting`."""

from __future__ import annotations

from typing import NamedTuple


class Trouble(NamedTuple):
    """A log line, identified by its text, with its meaning and the action to take."""

    text: str
    means: str
    do: str


NOTHING = "Nothing."
REPORT = "Report the traceback."
MEDIUM = "Check the medium."
BUILD_NATIVE = (
    "Install a wheel, or run `python3 kvcore/memory/copy/build_native.py` (needs a C compiler)."
)
RESTART_AND_REPORT = "Restart the engine, and report the traceback."
OWN_ERROR = "An internal error of kvcore. kvcore turns itself off."

ERRORS = {
    "KVCoreError": "See the specific error that was raised.",
    "ConfigError": "Change the setting, option or file that the message names. The message says "
    "what is supported. `kvcore config` shows every value and its source.",
    "PluginError": "Repair or update the plugin, or name it in `plugins.disable`. `kvcore plugins` "
    "lists the plugins that were found.",
    "UnsupportedError": "The engine's page says what is supported. The engine itself continues, "
    "without kvcore or without the part that the message names.",
    "LayoutError": "Report it with the engine's version and the model. kvcore stores no KV whose "
    "memory layout it does not understand.",
    "CapacityError": "Raise the capacity that the message names, or `transfer.queue_depth`.",
    "TierError": "See the specific error that was raised.",
    "TierUnavailable": "Check the medium: does it exist, is it writable, is it full? kvcore tries "
    "the tier again by itself.",
    "BlockMissing": "Nothing: a shared store has evicted the block, and it is computed again. If "
    "it happens often, the store is too small.",
    "CorruptBlock": "Nothing at once: the block is removed and computed again. If it happens "
    "again, check the medium and run `kvcore scrub`.",
    "ClusterError": "Check that etcd is reachable, and that its certificates and the `cluster.*` "
    "settings are right. kvcore registers its entries again by itself.",
    "FormatError": "Use the version of kvcore that wrote the data, or another folder. See "
    "[formats](format.md).",
    "TransferError": "See the log lines before it.",
    "TransferCancelled": NOTHING,
    "DeadlineExceeded": "Nothing at once: the tokens are computed. If it happens often, loading "
    "from the tier is slower than computing: see `transfer.load_deadline_s` and "
    "`planner.enabled`.",
}

TROUBLES: dict[str, list[Trouble]] = {
    "Start": [
        Trouble(
            "plugin_left_out",
            "A plugin could not be loaded. The other plugins work.",
            "Repair it, or name it in `plugins.disable`.",
        ),
        Trouble(
            "ops_left_out",
            "An implementation of the copy operations cannot be used. kvcore uses another one.",
            f"For `native`: {BUILD_NATIVE}",
        ),
        Trouble(
            "attention_hook_left_out",
            "A plugin's attention hook does not support this model, or failed.",
            "See the error in the line. If you do not need the hook, name the plugin in "
            "`plugins.disable`.",
        ),
        Trouble(
            "no native copies: %s",
            "The native copy routines are not built. torch copies instead, more slowly.",
            BUILD_NATIVE,
        ),
        Trouble(
            "model %s has no pinned revision: KV kept on disk is reused for whatever weights the "
            "hub serves under that name; give the engine a revision or a local folder",
            "If the hub changes the weights under this name, old KV is reused with new weights.",
            "Give the engine a revision or a local folder.",
        ),
        Trouble(
            "the tier %s is off: %s",
            "A tier cannot be used. The other tiers work.",
            "Do what the message says, and restart the engine.",
        ),
        Trouble(
            "tier %s cannot be opened here: %s",
            "A worker cannot open a tier that the leader has opened. Nothing is stored there.",
            "Every worker needs access to the folder or store: check mounts, permissions and "
            "addresses.",
        ),
        Trouble(
            "host memory is not pinned (CUDA error %d, locked-memory limit %s bytes): copies to "
            "the GPU are slower; raise the limit (ulimit -l) or lower host.capacity",
            "The GPU cannot access host memory by DMA.",
            "Raise the limit (`ulimit -l unlimited`, or the container's), or lower "
            "`host.capacity`.",
        ),
        Trouble(
            "little memory is left on this machine: host memory of %d bytes is taken only when "
            "blocks come; lower host.capacity",
            "Less than an eighth of the memory of the machine or container would be left.",
            "Lower `host.capacity`, or give the container more memory. Otherwise a process may be "
            "killed when host memory fills up.",
        ),
        Trouble(
            "huge pages are not available (%s): disk reads into host memory are slower; write "
            "madvise or always to %s",
            "Host memory uses pages of 4 KiB.",
            "Write `madvise` to the file that the line names, or set `host.huge_pages = false`.",
        ),
        Trouble(
            "the server's memory is in pages of 4 KiB: reads from disk are half as fast; as root: "
            "mount -o remount,huge=advise %s",
            "The tmpfs of `server.folder` was mounted without huge pages.",
            "Remount it as the line says and restart the server, or set `host.huge_pages = false`.",
        ),
        Trouble(
            "no trace is written: %s",
            "The folder `trace.path` is not writable.",
            "Name a writable folder.",
        ),
        Trouble(
            "attention hooks are left out: %s: %s",
            "The attention hooks do not fit this model or runner. The engine runs without them.",
            "If you do not need the hooks, name the plugin in `plugins.disable`.",
        ),
        Trouble(
            "exact prefixes only: %s",
            "Fusion is on, but does not support this model or engine.",
            "Nothing, or set `fusion.enabled = false`.",
        ),
        Trouble(
            "connector_not_registered",
            "The adapter does not support this version of vLLM, or registration failed.",
            "Install a version that `kvcore plugins` names.",
        ),
        Trouble(
            "hooks_not_registered",
            "The adapter does not support this version of SGLang, or registration failed.",
            "Install a version that `kvcore plugins` names.",
        ),
        Trouble(
            "hook_not_registered",
            "A function of SGLang that kvcore wraps has changed.",
            "Install a version that `kvcore plugins` names.",
        ),
    ],
    "kvcore turns itself off": [
        Trouble(
            "kvcore stands aside, the model runs without it: %s",
            "kvcore does not support this model, or the layout of its KV.",
            "See the engine's page. The engine runs as it does without kvcore.",
        ),
        Trouble(
            "the link between two ranks has failed thread=%s",
            "A message between two ranks of SGLang could not be read or carried out; the error "
            "after it says why. kvcore turns itself off. The engine continues if its ranks still "
            "agree.",
            "Look at the logs of the other ranks, and report it.",
        ),
        Trouble(
            "a link between two ranks stays open: %s did not end",
            "At shutdown, a thread of kvcore was still working on a message from another rank.",
            NOTHING,
        ),
        Trouble(
            "kvcore stands aside on rank %d: %s",
            "kvcore does not support the model, or the layout of its KV, on this rank.",
            "See the engine's page. The engine runs as it does without kvcore.",
        ),
        Trouble(
            "%s: kvcore stands aside until the engine restarts",
            "A worker cannot move KV (`a worker refused its work`), or something unexpected "
            "happened, which the line names. kvcore reports no more hits to the engine.",
            "Look for the worker's own line before it, and restart the engine. Report an error.",
        ),
        Trouble(
            "kvcore failed",
            "An internal error of kvcore in SGLang's scheduler. kvcore turns itself off.",
            RESTART_AND_REPORT,
        ),
        Trouble(
            "%s failed",
            "An internal error of kvcore in a call by TensorRT-LLM. kvcore turns itself off.",
            RESTART_AND_REPORT,
        ),
        Trouble("the load of request %s cannot be planned", OWN_ERROR, RESTART_AND_REPORT),
        Trouble("the step cannot be planned", OWN_ERROR, RESTART_AND_REPORT),
        Trouble("reports could not be taken in", OWN_ERROR, RESTART_AND_REPORT),
    ],
    "Loads and saves": [
        Trouble(
            "load failed, computing instead request=%s attempt=%d retry=%s",
            "Blocks could not be read. They are computed.",
            "Look for the tier's own line before it.",
        ),
        Trouble(
            "load refused request=%s: %s",
            "There was no room for the load. Its tokens are computed.",
            "If it happens often, raise `host.capacity` or `transfer.queue_depth`.",
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
        Trouble("%s tier=%s failed: %s", "An operation on a tier failed.", "Check the tier."),
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
    ],
    "Tiers": [
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
            "An earlier engine left a record of blocks to delete from a store, and it cannot be "
            "read.",
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
            "The bytes that were read are not those that were written. SGLang computes the page.",
            "If it happens again, check the medium; for a disk run `kvcore scrub`.",
        ),
    ],
    "Disk": [
        Trouble(
            "%s: dropped records torn=%d beyond_data_or_of_other_size=%d",
            "An engine was killed while it wrote, or the files were truncated. These blocks are "
            "lost.",
            "Nothing after a crash. Otherwise check the disk.",
        ),
        Trouble(
            "store %s is not used: %s",
            "Its `store.json` has another version, or is damaged.",
            "If nobody needs the store, remove its folder.",
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
    ],
    "Remote stores": [
        Trouble(
            "looking up blocks in store %s failed: %s",
            "Lookups in the store failed and count as misses.",
            "Check the store and the network.",
        ),
        Trouble(
            "a lookup in store %s failed unexpectedly",
            "An error in the client of the store.",
            REPORT,
        ),
        Trouble(
            "store %s does not answer at shutdown: its threads are abandoned",
            "A request to the store hangs.",
            "Check the store and the network.",
        ),
        Trouble(
            "deleting %d blocks from store %s failed: %s",
            "Blocks that were cleared could not be deleted from the store. This engine does not "
            "find them. It deletes them when the store is back; if it ends first, the next engine "
            "does.",
            "Check the store. If the blocks must be gone sooner, delete them with the store's own "
            "tools.",
        ),
        Trouble(
            "deleting from store %s failed unexpectedly",
            "An error in the client of the store.",
            REPORT,
        ),
        Trouble(
            "%s is removed: nobody has used its store for long",
            "A list of blocks to delete from a store is dropped, because nobody has used the store "
            "for 30 days.",
            "Nothing if the store no longer exists. Otherwise repeat the clear.",
        ),
        Trouble(
            "the splits of other engines cannot be read: %s",
            "A store did not say how other engines share blocks over their ranks and stages. "
            "kvcore continues with what it knew before.",
            "Nothing: kvcore asks again. If it persists, check the store.",
        ),
        Trouble(
            "only engines with as many ranks and stages find what this one stores: %s",
            "Engines with too many different numbers of ranks or stages use the store with this "
            "model, or one has too many ranks.",
            "Set `prefix` to another value on all of them, or use fewer sizes.",
        ),
        Trouble(
            "%d corrupt values could not be deleted: %s",
            "Damaged values could not be deleted. They are not used.",
            "Check the store.",
        ),
        Trouble(
            "no other node holds KV of %s, only of %s",
            "The nodes of a `peer` store have another model or another `block.tokens`, or split "
            "heads over another number of ranks. Nothing is read from them. Logged once per model.",
            "Nothing before the first prompts. Afterwards, compare the two names and the settings.",
        ),
        Trouble(
            "a promise names %s, which is neither a peer nor in `guests`",
            "A request brought a promise of KV at a node that the settings do not admit. Its "
            "blocks are looked for at the peers instead. Logged once per node.",
            "If the node is yours, add its host or network to `guests`. Otherwise find out who "
            "sends these requests.",
        ),
        Trouble(
            "a promise names an invalid node: %s",
            "The node in a request's promise is not HOST:PORT or HOST:FIRST-LAST.",
            "Use the same version of kvcore on both sides. Proxies must pass promises on "
            "unchanged.",
        ),
        Trouble(
            "a request of another node is refused: %s",
            "A `peer` node received something that is not a message of this version, or from a "
            "sender with too many leases. The other nodes are served.",
            "Use the same version of kvcore on all nodes. Find out who connects to `listen`.",
        ),
        Trouble(
            "a request of another node could not be answered",
            "An internal error on this node. The other node computes.",
            REPORT,
        ),
        Trouble(
            "serving other nodes' reads of this node's memory failed",
            "NIXL raised an error. Other nodes wait for bytes, give up, and compute.",
            REPORT,
        ),
        Trouble(
            "promise refused request=%s: %s",
            "A request brought a promise of KV for another prompt, model, tenant or version. It "
            "is looked up like any other request.",
            "Send a promise with the prompt it was made for, to an engine with the same model.",
        ),
    ],
    "Fusion": [
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
    ],
    "Server": [
        Trouble(
            "no kvcore server answers: the engine computes until one does",
            "The engine started before its server, or uses a wrong address.",
            "Start `kvcore server`, or correct `server.address`. Engines join by themselves.",
        ),
        Trouble(
            "the server does not answer in %g s",
            "The engine computes, and sends no requests until the server answers a heartbeat.",
            "If it happens often, give the server a CPU core of its own, or raise "
            "`server.deadline_s`.",
        ),
        Trouble(
            "the kvcore server keeps no tokens of what is stored, and only marked chunks are "
            "found: set fusion.enabled for the server too",
            "Fusion is on in the engine and off in the server, so the server does not know the "
            "text of its blocks.",
            "Start the server with the engines' config file, or set `fusion.enabled` there.",
        ),
        Trouble(
            "the kvcore server is gone: the engine computes until it is back",
            "The server was silent for a whole lease.",
            "Start it again. Blocks on disk are found again.",
        ),
        Trouble(
            "the kvcore server takes no more messages: joining it anew",
            "The server was thousands of messages behind, and the engine could not report what "
            "has ended. With a new session, the server releases all of it.",
            "If it happens often, give the server a CPU core of its own.",
        ),
        Trouble(
            "the kvcore server refuses this engine: %s",
            "Versions, the model or settings do not match. The engine runs without shared KV.",
            "Do what the message says. Usually both sides need the same version of kvcore.",
        ),
        Trouble(
            "not sent: %s",
            "A message exceeds the size that the protocol allows. The prompt is computed.",
            "Nothing, unless prompts have millions of tokens.",
        ),
        Trouble(
            "refused kind=%s: %s",
            "The server refused a client's request; the line says why. The client computes.",
            "Find out which client it is: one of another version, or not a kvcore client at all.",
        ),
        Trouble(
            "refused: session of another client session=%d who=%s",
            "A client named a session that its connection did not open. Nothing was done.",
            "Nothing if its connection broke: it joins again. Otherwise find out what `who` is.",
        ),
        Trouble(
            "a request failed kind=%s",
            "An internal error of the server. The client computes.",
            "Report it, with the lines that follow.",
        ),
        Trouble(
            "a reply is lost: %s",
            "The client does not receive its replies: it is gone, or stopped.",
            NOTHING,
        ),
        Trouble(
            "session is silent session=%d seconds=%.1f",
            "A client's process is alive but sends nothing. The server keeps the slots that its "
            "copies may use.",
            "Check that process: is it stopped?",
        ),
        Trouble(
            "read failed graph=%d op=%d: %s",
            "The server did not report the result of a read in time. The prompt is computed.",
            "Look at the server's log.",
        ),
        Trouble(
            "graph refused graph=%d: %s",
            "A transfer belongs to a session that has ended, or to another server. Its tokens are "
            "computed.",
            NOTHING,
        ),
    ],
    "Events and cluster": [
        Trouble(
            "no block events to %s: pip install %s (%s)",
            "The package for that bus is missing. No events are published there.",
            "Install it.",
        ),
        Trouble(
            "no block events: %s",
            "The endpoint cannot be used. The engine serves without publishing events.",
            "Correct `events.endpoint`, or free the port.",
        ),
        Trouble(
            "a thread tells block events, as no process can be started: %s",
            "No second Python process could be started. A thread of the engine publishes the "
            "events, at some cost to the engine.",
            'Fix the reason in the line (limits, a sandbox), or set `events.publisher = "thread"`.',
        ),
        Trouble(
            "the process that tells block events is started anew: %s",
            "The process was killed, or failed. Consumers see a gap and request a snapshot.",
            "If it ran out of memory, give the container more: it keeps a copy of what is held.",
        ),
        Trouble(
            "block events are told no more, their process ends too often: %s",
            "The process was restarted several times and ended each time. The engine serves "
            "without publishing events.",
            "Look at the lines before it. Restart the engine when the cause is fixed.",
        ),
        Trouble(
            "block events are told no more: what ships them to their process failed",
            "An internal error of kvcore. The engine serves without publishing events.",
            "Report the traceback, and restart the engine.",
        ),
        Trouble(
            "the process that tells block events failed",
            "An internal error of kvcore. The process is restarted.",
            REPORT,
        ),
        Trouble(
            "block events do not reach NATS, stream %s: %s",
            "The NATS server is down, or accepts nothing. Some batches wait; the newest are "
            "dropped. Another line says when it accepts them again.",
            "Check the NATS server, its JetStream and the network.",
        ),
        Trouble(
            "stream %s is not made or changed: %s",
            "NATS does not let kvcore create its stream.",
            "Create it by hand, or give the account permission.",
        ),
        Trouble(
            "events of blocks=%d were dropped: raise events.queue_blocks",
            "Events came faster than they could be sent. Consumers see the gap and catch up.",
            "Raise `events.queue_blocks`.",
        ),
        Trouble(
            "tokens of blocks are left out of events: %s",
            "A client of the server sent tokens that do not fit their blocks. The blocks are "
            "published without tokens.",
            "Use the same version of kvcore on both sides. If they are the same, report it.",
        ),
        Trouble(
            "a request for events is left alone: %s",
            "The replay socket received an invalid request.",
            "Find out who connects there.",
        ),
        Trouble(
            "a request of %d frames is left alone",
            "The replay socket received something that is not a consumer's request.",
            "Find out who connects there.",
        ),
        Trouble(
            "a publisher of block events does not answer; what is known may be old",
            "A consumer cannot catch up, because the engine is down or cut off.",
            "Nothing if it was stopped on purpose: the consumer catches up when it is back.",
        ),
        Trouble(
            "an answer of a publisher of block events is not understood: %s",
            "The publisher has another version, or is not kvcore.",
            "Use the same version on both sides.",
        ),
        Trouble(
            "a batch of block events is not understood: %s",
            "The publisher has another version, or is not kvcore. The consumer requests a "
            "snapshot.",
            "Use the same version on both sides.",
        ),
        Trouble(
            "a message is passed over: %s",
            "Something else publishes at that endpoint.",
            "Give each engine an endpoint or a topic of its own.",
        ),
        Trouble(
            "an entry in etcd is ignored: %s",
            "An entry under `cluster.prefix` is not kvcore's, or has another version.",
            "Remove it, or use another prefix.",
        ),
        Trouble(
            "the lease %x is lost; its entries are registered again under a new one",
            "The process was stopped, or cut off from etcd, for longer than `cluster.ttl_s`.",
            "If it happens often, raise `cluster.ttl_s`.",
        ),
        Trouble(
            "looking up peer nodes failed unexpectedly, those known stay",
            "An internal error of kvcore, logged with the line. The lookup is repeated.",
            "Report it.",
        ),
        Trouble(
            "renewing the lease in etcd failed; it is tried again",
            "An internal error of kvcore, logged with the line. If the lease is not renewed in "
            "time, it ends and a new one is taken.",
            "Report it.",
        ),
        Trouble(
            "peer nodes cannot be looked up, those known stay: %s",
            "etcd does not answer a `peer` node. The node continues with the nodes it knew last.",
            "Check etcd. When it answers, the lookup is repeated by itself.",
        ),
        Trouble(
            "a node of the cluster is ignored: its address is %r",
            "The `peer` of a worker's entry in etcd is not tcp://HOST:PORT.",
            "Correct the entry, or remove it.",
        ),
    ],
    "Operator commands": [
        Trouble(
            "the audit log lacks a line: %s",
            "The command was carried out, but its line is only in the log.",
            "Check the disk of `control.audit`.",
        ),
        Trouble(
            "an order failed kind=%s",
            "A bug: a command of `kvcore ctl` was not carried out, or only in part.",
            "Report it with the lines around it.",
        ),
        Trouble(
            "refused what is no order: %s",
            "Something other than `kvcore ctl` of this version connects to `control.address`.",
            "Find out who connects there.",
        ),
        Trouble(
            "an answer to an order is lost: %s",
            "`kvcore ctl` was interrupted, or asked for more than fits a message.",
            "`kvcore ctl list` shows the current state. Give it a lower `--limit`.",
        ),
    ],
    "Traces and records": [
        Trouble(
            "no records of requests are written: %s",
            "The folder `explain.path` is not writable.",
            "Name a writable folder.",
        ),
        Trouble(
            "records of requests are not written any more: %s",
            "Writing to `explain.path` failed.",
            "Check the disk, and restart the engine.",
        ),
        Trouble(
            "no spans are made: %s",
            "`explain.spans` needs a package that is not installed.",
            "`pip install opentelemetry-api`, or set `explain.spans = false`.",
        ),
        Trouble("trace %s is full and ends here", "The trace file has reached 256 MiB.", NOTHING),
        Trouble("trace %s ends here: %s", "Writing the trace failed.", "Check the disk."),
        Trouble("trace %s: %s", "The trace file could not be closed.", "Check the disk."),
    ],
}
