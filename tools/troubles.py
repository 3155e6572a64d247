"""What kvcore's errors and its log's lines mean, and what to do: for `tools.troubleshooting`."""

from __future__ import annotations

from typing import NamedTuple


class Trouble(NamedTuple):
    """A line of the log by its text, what it means, and what to do."""

    text: str
    means: str
    do: str


NOTHING = "Nothing."

ERRORS = {
    "KVCoreError": "See the one that was raised.",
    "ConfigError": "Change the setting, option or file that the message names; it says what is "
    "supported. `kvcore config` shows every value and where it came from.",
    "PluginError": "Repair or update the plugin, or name it in `plugins.disable`. `kvcore plugins` "
    "shows what was found.",
    "UnsupportedError": "See the page of the engine for what is served. The engine itself runs on, "
    "without kvcore or without the part that is named.",
    "LayoutError": "Report it with the engine's version and model. KV is not stored where its "
    "place in memory is not understood.",
    "CapacityError": "Raise the capacity that is named, or `transfer.queue_depth`.",
    "TierError": "See the one that was raised.",
    "TierUnavailable": "Look at the medium: is it there, writable, not full? The tier is tried "
    "again by itself.",
    "BlockMissing": "Nothing: a store that others use has dropped it, and it is computed again. "
    "Where it happens often the store is too small.",
    "CorruptBlock": "Nothing at once: the block is taken out and computed again. Where it happens "
    "again look at the medium, and run `kvcore scrub`.",
    "ClusterError": "Look at etcd: is it there, and do its certificates and `cluster.*` fit? What "
    "was entered is entered anew by itself.",
    "FormatError": "Use the version of kvcore that wrote it, or another folder. See "
    "[formats](format.md).",
    "TransferError": "See the lines before it in the log.",
    "TransferCancelled": NOTHING,
    "DeadlineExceeded": "Nothing at once: it is computed. Where it happens often the tier is "
    "slower than computing: see `transfer.load_deadline_s` and `planner.enabled`.",
}

TROUBLES: dict[str, list[Trouble]] = {
    "Start": [
        Trouble(
            "plugin_left_out",
            "A plugin could not be loaded; the others serve.",
            "Repair it, or name it in `plugins.disable`.",
        ),
        Trouble(
            "ops_left_out",
            "An implementation of the copies cannot be used; another is.",
            "For `native`: install a wheel, or run "
            "`python3 kvcore/memory/copy/build_native.py` (a C compiler).",
        ),
        Trouble(
            "attention_hook_left_out",
            "A plugin's hook around attention is not for this model, or failed.",
            "Look at its error; name the plugin in `plugins.disable` if it is not wanted.",
        ),
        Trouble(
            "no native copies: %s",
            "The C copies are not built; torch does them, more slowly.",
            "Install a wheel, or run `python3 kvcore/memory/copy/build_native.py` (a C compiler).",
        ),
        Trouble(
            "model %s has no pinned revision: KV kept on disk is reused for whatever weights the "
            "hub serves under that name; give the engine a revision or a local folder",
            "Weights that change under one name would be served old KV.",
            "Give the engine a revision or a local folder.",
        ),
        Trouble(
            "the tier %s is off: %s",
            "A tier cannot be used; the others serve.",
            "Do what the message says, and restart the engine.",
        ),
        Trouble(
            "tier %s cannot be opened here: %s",
            "A worker cannot open a tier that its leader found; nothing goes there.",
            "Every worker needs the folder or store: look at mounts, rights and addresses.",
        ),
        Trouble(
            "host memory is not pinned (CUDA error %d, locked-memory limit %s bytes): copies to "
            "the GPU are slower; raise the limit (ulimit -l) or lower host.capacity",
            "The GPU cannot copy from host memory by itself.",
            "Raise the limit (`ulimit -l unlimited`, or the container's), or lower "
            "`host.capacity`.",
        ),
        Trouble(
            "little memory is left on this machine: host memory of %d bytes is taken only when "
            "blocks come; lower host.capacity",
            "Less than an eighth of the machine's memory, or of the container's, would be left.",
            "Lower `host.capacity`, or give the container more: when host memory fills up, "
            "something may be killed.",
        ),
        Trouble(
            "huge pages are not to be had (%s): disk reads into host memory are slower; write "
            "madvise or always to %s",
            "Memory is in pages of 4 KiB.",
            "Write `madvise` to the file named, or set `host.huge_pages = false`.",
        ),
        Trouble(
            "the server's memory is in pages of 4 KiB: reads from disk are half as fast; as root: "
            "mount -o remount,huge=advise %s",
            "The tmpfs that `server.folder` lies on was mounted without huge pages.",
            "Mount it again as the line says and start the server anew, or set "
            "`host.huge_pages = false`.",
        ),
        Trouble(
            "no trace is written: %s",
            "The folder of `trace.path` cannot be written.",
            "Give one that can.",
        ),
        Trouble(
            "attention hooks are left out: %s: %s",
            "Hooks around attention do not fit this model or runner; the engine runs without.",
            "Name the plugin in `plugins.disable` if it is not wanted.",
        ),
        Trouble(
            "exact prefixes only: %s",
            "Fusion is on, and is not right for this model or engine.",
            "Nothing, or `fusion.enabled = false`.",
        ),
        Trouble(
            "connector_not_registered",
            "This vLLM is outside of what the adapter serves, or registering failed.",
            "Install a version that `kvcore plugins` names.",
        ),
        Trouble(
            "hooks_not_registered",
            "This SGLang is outside of what the adapter serves, or registering failed.",
            "Install a version that `kvcore plugins` names.",
        ),
        Trouble(
            "hook_not_registered",
            "A function of SGLang that kvcore goes around has changed.",
            "Install a version that `kvcore plugins` names.",
        ),
    ],
    "Standing aside": [
        Trouble(
            "kvcore stands aside, the model runs without it: %s",
            "The model, or the way its KV lies, is not one that kvcore serves right.",
            "See the engine's page. The engine runs as without kvcore.",
        ),
        Trouble(
            "the line between two ranks has failed thread=%s",
            "What one rank of SGLang tells another could not be read or carried out, as the error "
            "after it says. kvcore stands aside; the engine goes on where its ranks still agree.",
            "Look at the other ranks' logs, and report it.",
        ),
        Trouble(
            "a line between two ranks stays open: %s did not end",
            "At shutdown a thread of kvcore was still at work on what another rank had told it.",
            NOTHING,
        ),
        Trouble(
            "kvcore stands aside on rank %d: %s",
            "As above, on one rank.",
            "See the engine's page. The engine runs as without kvcore.",
        ),
        Trouble(
            "a worker refused its work: kvcore stands aside until the engine restarts",
            "A worker cannot move KV; nothing more is promised.",
            "Look for the worker's own line before it; restart the engine.",
        ),
        Trouble(
            "%s: kvcore stands aside until the engine restarts",
            "Something unexpected, named in the line; nothing more is promised.",
            "Restart the engine; report what stands before it in the log.",
        ),
        Trouble(
            "kvcore failed",
            "An error of kvcore's own in SGLang's scheduler; it stands aside.",
            "Restart the engine; report the traceback.",
        ),
        Trouble(
            "%s failed",
            "An error of kvcore's own in TensorRT-LLM's calls; it stands aside.",
            "Restart the engine; report the traceback.",
        ),
        Trouble(
            "the load of request %s cannot be planned",
            "An error of kvcore's own; it stands aside.",
            "Restart the engine; report the traceback.",
        ),
        Trouble(
            "the step cannot be planned",
            "An error of kvcore's own; it stands aside.",
            "Restart the engine; report the traceback.",
        ),
        Trouble(
            "reports could not be taken in",
            "An error of kvcore's own; it stands aside.",
            "Restart the engine; report the traceback.",
        ),
    ],
    "Loads and saves": [
        Trouble(
            "load failed, computing instead request=%s attempt=%d retry=%s",
            "Blocks could not be read; they are computed.",
            "Look for the tier's own line before it.",
        ),
        Trouble(
            "load refused request=%s: %s",
            "There was no room to load through; it is computed.",
            "Where it happens often raise `host.capacity` or `transfer.queue_depth`.",
        ),
        Trouble(
            "load abandoned at its deadline graph=%d after_s=%s",
            "A load was late; its tokens are computed.",
            "Where it happens often look at the tier, or set `planner.enabled = true`.",
        ),
        Trouble(
            "a load failed and is tried again graph=%d",
            "Blocks could not be read in the first try.",
            "Look for the tier's own line before it.",
        ),
        Trouble(
            "a promised load failed request=%s: %s",
            "TensorRT-LLM takes no word back: the request is failed.",
            "Look at the tier, and at `trtllm.stage_wait_s`.",
        ),
        Trouble(
            "computed_again",
            "A request's KV could not be loaded; SGLang computes it from the start.",
            "Look for the tier's own line before it.",
        ),
        Trouble("%s tier=%s failed: %s", "An operation on a tier failed.", "Look at the tier."),
        Trouble(
            "transfer op failed graph=%d path=%s",
            "A copy failed; a load is computed, a save is dropped.",
            "Report the traceback.",
        ),
        Trouble(
            "graph refused: %s",
            "The queue is full: a load is computed, a save is dropped.",
            "Raise `transfer.queue_depth`.",
        ),
        Trouble(
            "report of an unknown op graph=%d op=%d",
            "A worker reported work that its leader does not know.",
            "Report it, unless the cache was cleared at that time.",
        ),
        Trouble(
            "transfers still hung at shutdown; what they wrote is not published",
            "A medium did not answer before the engine ended.",
            "Look at the medium.",
        ),
        Trouble("shutdown: %s", "Something failed while closing.", "Look at the tier it names."),
    ],
    "Tiers": [
        Trouble(
            "tier left alone tier=%s failures=%d pause_s=%g",
            "Three failures: it is neither read nor written for a while, then tried.",
            "Look at the medium. It comes back by itself.",
        ),
        Trouble("tier works again tier=%s", "It was left alone, and answers.", NOTHING),
        Trouble("the tier %s failed: %s", "Reading or writing failed.", "Look at the medium."),
        Trouble("the tier %s raised", "A plugin's tier raised.", "Report the traceback."),
        Trouble(
            "a clear is not written down in %s, and may come undone with a restart: %s",
            "The disk took no note of a clear. If the engine is killed before its ranks have "
            "erased what was cleared, that is found again.",
            "Look at the disk; stop the engine and remove the folder to be sure.",
        ),
        Trouble(
            "%s cannot be read, all of the store is cleared: %s",
            "The note of what was cleared is damaged, so that all of it counts as cleared.",
            "Nothing: what is needed is computed and stored anew.",
        ),
        Trouble(
            "a clear is not written down in %s, and lost if this engine ends before a kvcore "
            "server confirms it: %s",
            "`server.folder` took no note of a clear.",
            "Look at that folder. If the engine ended before its server was back, stop the server "
            "and remove its disk tier's folder to be sure.",
        ),
        Trouble(
            "%s cannot be read, all of the model is cleared: %s",
            "The note of what an engine wanted cleared is damaged, so that all counts as cleared.",
            "Nothing: what is needed is computed and stored anew.",
        ),
        Trouble(
            "%d blocks to be removed from a store are not written down, and stay there if this "
            "engine ends before it is done: %s",
            "Neither `disk.path` nor `server.folder` took a note of what a store is to remove.",
            "Look at those folders. If the engine ended before the store was back, empty that.",
        ),
        Trouble(
            "what a store is still to remove cannot be read in %s: %s",
            "The note of an engine that ended is there and cannot be read.",
            "Look at that folder; empty the store to be sure.",
        ),
        Trouble(
            "tier %s could not forget %d slots: %s",
            "What was cleared may be found there after a restart.",
            "Look at the medium; remove the folder if it must be gone.",
        ),
        Trouble("closing tier %s: %s", "It failed while closing.", "Look at the medium."),
        Trouble(
            "a stored page is bad and dropped: %s",
            "Bytes were not those written; SGLang computes the page.",
            "Where it happens again look at the medium; `kvcore scrub` for a disk.",
        ),
    ],
    "Disk": [
        Trouble(
            "%s: dropped records torn=%d beyond_data_or_of_other_size=%d",
            "An engine was killed while it wrote, or the files were cut: these blocks are gone.",
            "Nothing after a crash. Otherwise look at the disk.",
        ),
        Trouble(
            "store %s is not used: %s",
            "Its `store.json` is of another version, or damaged.",
            "Remove the store's folder if nobody needs it.",
        ),
        Trouble(
            "store %s is not used: it holds blocks of another model",
            "Two models came to the same name of a folder.",
            "Remove the store's folder if nobody needs it.",
        ),
        Trouble(
            "the store %s is not read: %s",
            "A store of another engine vanished or cannot be opened; its blocks are computed.",
            NOTHING,
        ),
        Trouble(
            "cutting the store %s to %d blocks to make room",
            "The capacity is shared by all stores in the folder.",
            "Raise `disk.capacity` to keep more.",
        ),
        Trouble(
            "removing the store %s (%d bytes) to make room",
            "The capacity is shared by all stores in the folder; this one was used last of all.",
            "Raise `disk.capacity` to keep more.",
        ),
        Trouble(
            "slot %d could not be marked bad: %s",
            "A bad block was found, and its record could not be erased; it is not served.",
            "Look at the disk.",
        ),
        Trouble(
            "a flush failed: %s",
            "What was written may not survive a loss of power.",
            "Look at the disk.",
        ),
        Trouble(
            "no asynchronous I/O for %s (%s): threads do it instead",
            "The kernel, its limits or a sandbox refuse it; reads are slower.",
            "Raise `fs.aio-max-nr`, or allow io_submit in the container.",
        ),
        Trouble(
            "disk.to_device: blocks go through host memory all the same, for %s",
            "NIXL, or its backend for this memory (GDS_MT, GDS; POSIX on a CPU), does not start.",
            "What it names: `pip install nixl-cu13`, GPUDirect Storage; or `disk.to_device = off`.",
        ),
        Trouble(
            "tier %s: blocks on their way to the device go through host memory; the first, "
            "for %s; kvcore_bounced_blocks_total counts them",
            "`disk.to_device` is on, and these cannot be read so: they were written before it was, "
            "or a read by NIXL failed. They come all the same.",
            "Nothing, for older blocks; else look at the disk, or set `disk.to_device = off`.",
        ),
        Trouble(
            "disk.device_staging of %d bytes does not hold one block of %d: raise it; until then "
            "loads from disk go through host memory",
            "A block is larger than what is to be set aside for it in device memory.",
            "Raise `disk.device_staging`, lower `block.tokens`, or set `disk.to_device = off`.",
        ),
        Trouble(
            "no direct I/O in %s: reads and writes go through the page cache",
            "The file system refuses it.",
            "Give `disk.path` on a local file system, or leave it.",
        ),
    ],
    "Remote stores": [
        Trouble(
            "store %s does not tell what it holds: %s",
            "Lookups there failed: misses.",
            "Look at the store and at the network.",
        ),
        Trouble(
            "asking store %s failed", "An error in the store's client.", "Report the traceback."
        ),
        Trouble(
            "store %s still answers nothing at shutdown: it is left behind",
            "A request hangs.",
            "Look at the store and at the network.",
        ),
        Trouble(
            "store %s keeps %d blocks: %s",
            "Blocks that were cleared could not be removed. This engine does not find them, and "
            "removes them when the store is back, or the engine after it does.",
            "Look at the store; remove them with its own means if they must be gone before.",
        ),
        Trouble(
            "removing from store %s failed",
            "An error in the store's client.",
            "Report the traceback.",
        ),
        Trouble(
            "at which sizes others write is not known: %s",
            "A store did not say how other engines share blocks over their ranks and stages. What "
            "was known of them is.",
            "Nothing: it is asked again. Where it stays so, look at the store.",
        ),
        Trouble(
            "what this engine writes is found by engines of its size only: %s",
            "Engines of very many sizes use the store with this model, or one of very many ranks.",
            "Give `prefix` another value on all of them, or use fewer sizes.",
        ),
        Trouble(
            "%d bad values stay in the store: %s",
            "They could not be removed. They are not served.",
            "Look at the store.",
        ),
        Trouble(
            "no other node holds KV of %s, only of %s",
            "The nodes of a `peer` store have another model, another `block.tokens`, or cut heads "
            "among another number of ranks. Once a model: nothing is read from them.",
            "Nothing before the first prompts; afterwards compare the two names, and the settings.",
        ),
        Trouble(
            "a promise names %s, which is not asked: no peer, nor of `guests`",
            "A request came with a promise of KV at a node that the settings do not let promises "
            "name. Once a node: its blocks are looked for at the peers.",
            "Add its host or network to `guests` if it is yours; else look at who sends requests.",
        ),
        Trouble(
            "a promise names no node: %s",
            "The node in a request's promise is not HOST:PORT or HOST:FIRST-LAST.",
            "Use one version of kvcore on both; proxies must pass promises on as they are.",
        ),
        Trouble(
            "another node's message is refused: %s",
            "Somebody sends a `peer` node what is no message of this version, or holds too many "
            "leases; the others are served.",
            "Use one version of kvcore on all nodes; look at who connects to `listen`.",
        ),
        Trouble(
            "a message of another node could not be answered",
            "A fault of this node's; the other computes.",
            "Report the traceback.",
        ),
        Trouble(
            "promise refused request=%s: %s",
            "A request brings the promise of KV of another prompt, model, tenant or version; it is "
            "looked up as any other.",
            "Send a promise with the prompt it was made for, to an engine of the same model.",
        ),
    ],
    "Fusion": [
        Trouble(
            "request=%s is answered without fusion: %s",
            "What the request asks of fusion cannot be read.",
            "Change the request: see [fusion](fusion.md).",
        ),
        Trouble(
            "request %s is answered without fusion: %s",
            "What the request asks of fusion cannot be read.",
            "Change the request: see [fusion](fusion.md).",
        ),
        Trouble(
            "%d blends failed one after another: exact prefixes only until the engine restarts",
            "Fusion fails with this model.",
            "Report the tracebacks before it; set `fusion.enabled = false`.",
        ),
        Trouble(
            "blend failed, computing instead request=%s",
            "The request is computed in full.",
            "Report the traceback.",
        ),
        Trouble(
            "no memory for the chunks of request=%s: %s",
            "The request is computed in full.",
            "Lower `fusion.staging_max`, or what the engine takes of the device.",
        ),
        Trouble(
            "the model's layers could not be timed",
            "Whether a blend is worth it is not measured.",
            "Report the traceback.",
        ),
        Trouble(
            "a chunk is computed, since it cannot be loaded: %s",
            "There was no room to load through.",
            "Where it happens often raise `host.capacity`.",
        ),
        Trouble(
            "chunks have not arrived from their tier in time, computing instead",
            "The tier is late.",
            "Look at the tier, and at `transfer.load_deadline_s`.",
        ),
        Trouble(
            "attention hooks are not called again: %s: %s",
            "A hook around attention failed.",
            "Report the traceback to the plugin.",
        ),
        Trouble(
            "attention hook %r failed at layer %d and is not called again",
            "A hook around attention failed.",
            "Report the traceback to the plugin.",
        ),
        Trouble(
            "tokens of stored blocks are not kept in %s: %s",
            "The file of segments cannot be used: after a restart chunks are not found.",
            "Look at the file; remove it if it is of another version.",
        ),
        Trouble(
            "%s is written by another engine: tokens are not kept",
            "Two engines of one model share the folder: one of them writes.",
            "Nothing, or give each its own `disk.path`.",
        ),
        Trouble(
            "%s could not be %s: %s",
            "The file of segments could not be written: after a restart chunks are not found.",
            "Look at the disk.",
        ),
    ],
    "Server": [
        Trouble(
            "no kvcore server answers: the engine computes until one does",
            "The engine started before its server, or reaches another address.",
            "Start `kvcore server`, or correct `server.address`. Engines join by themselves.",
        ),
        Trouble(
            "the server does not answer in %g s",
            "The engine computes and leaves the server alone until it answers a heartbeat.",
            "Where it happens often give the server a core of its own, or raise "
            "`server.deadline_s`.",
        ),
        Trouble(
            "the kvcore server keeps no tokens of what is stored, and only marked chunks are "
            "found: set fusion.enabled for the server too",
            "Fusion is on in the engine and off in the server, which does not learn what text its "
            "blocks hold.",
            "Start the server with the engines' config file, or set `fusion.enabled` there.",
        ),
        Trouble(
            "the kvcore server is gone: the engine computes until it is back",
            "Nothing was heard of it for a lease.",
            "Start it again; what is on disk is found again.",
        ),
        Trouble(
            "the kvcore server takes no more messages: joining it anew",
            "The server was behind by thousands of messages, and could not be told what has ended; "
            "with a new session it gives all of that back.",
            "Where it happens often give the server a core of its own.",
        ),
        Trouble(
            "the kvcore server refuses this engine: %s",
            "Versions, the model or settings do not fit together; the engine runs without KV of "
            "others.",
            "Do what the message says: as a rule the same version of kvcore on both sides.",
        ),
        Trouble(
            "not sent: %s",
            "A message would be larger than the protocol allows; the prompt is computed.",
            "Nothing, unless prompts have millions of tokens.",
        ),
        Trouble(
            "refused kind=%s: %s",
            "The server did not do what a client asked, and says why; the client computes.",
            "Look at which client it is: another version, or no client of kvcore at all.",
        ),
        Trouble(
            "refused: session of another client session=%d who=%s",
            "A client named a session that its connection has not opened. Nothing was done.",
            "Nothing where its connection broke: it joins anew. Else look at what `who` is.",
        ),
        Trouble(
            "a request failed kind=%s",
            "A fault of the server's; the client computes.",
            "Report it, with the lines that follow.",
        ),
        Trouble(
            "a reply is lost: %s",
            "The client does not take its answers: it is gone, or stands still.",
            NOTHING,
        ),
        Trouble(
            "session is silent session=%d seconds=%.1f",
            "A client's process lives and says nothing; what its copies use is kept for it.",
            "Look at that process: is it stopped?",
        ),
        Trouble(
            "read failed graph=%d op=%d: %s",
            "The server did not tell in time what became of a read; the prompt is computed.",
            "Look at the server's log.",
        ),
        Trouble(
            "graph refused graph=%d: %s",
            "A plan came of a server that is not the one the worker has mapped; it is computed.",
            NOTHING,
        ),
    ],
    "Events and cluster": [
        Trouble(
            "no block events to %s: pip install %s (%s)",
            "The package for that bus is missing; nothing is told there.",
            "Install it.",
        ),
        Trouble(
            "no block events: %s",
            "The endpoint cannot be used; the engine serves without telling.",
            "Correct `events.endpoint`, or free the port.",
        ),
        Trouble(
            "a thread tells block events, as no process can be started: %s",
            "Python could not be started once more; events are told, at some cost to the engine.",
            'Look at the reason (limits, a sandbox), or set `events.publisher = "thread"`.',
        ),
        Trouble(
            "the process that tells block events is started anew: %s",
            "It was killed or failed. Consumers see a gap and catch up by a snapshot.",
            "Where it is out of memory, give the container more: it keeps a copy of what is held.",
        ),
        Trouble(
            "block events are told no more, their process ends too often: %s",
            "It was started anew some times and ended each time. The engine serves without events.",
            "Look at the lines before; restart the engine when the cause is gone.",
        ),
        Trouble(
            "block events are told no more: what ships them to their process failed",
            "A defect in kvcore; the engine serves without events.",
            "Report it with the traceback; restart the engine.",
        ),
        Trouble(
            "the process that tells block events failed",
            "A defect in kvcore; it is started anew.",
            "Report it with the traceback.",
        ),
        Trouble(
            "%s is let go: nobody has used its store for long",
            "What a store was still to remove is forgotten after 30 days in which nobody used it.",
            "Nothing, if the store is gone; else clear again what was cleared there.",
        ),
        Trouble(
            "block events do not reach NATS, stream %s: %s",
            "The server is away or takes nothing. Some batches wait, the newest are left out; "
            "a line says when it takes them again.",
            "Look at the NATS server, its JetStream and the network.",
        ),
        Trouble(
            "stream %s is not made or changed: %s",
            "NATS does not let kvcore make its stream.",
            "Make it by hand, or give the account the right to.",
        ),
        Trouble(
            "events of blocks=%d were dropped: raise events.queue_blocks",
            "They came faster than they could be sent. Consumers see the gap and catch up.",
            "Raise `events.queue_blocks`.",
        ),
        Trouble(
            "tokens of blocks are left out of events: %s",
            "A client of the server sent tokens that do not fit their blocks; the blocks are told.",
            "Use one version of kvcore on both sides; report it where they are the same.",
        ),
        Trouble(
            "a request for events is left alone: %s",
            "Somebody asked the replay socket for what makes no sense.",
            "Look at who connects there.",
        ),
        Trouble(
            "a request of %d frames is left alone",
            "Somebody who is no consumer talks to the replay socket.",
            "Look at who connects there.",
        ),
        Trouble(
            "a publisher of block events does not answer; what is known may be old",
            "A consumer cannot catch up: the engine is gone or cut off.",
            "Nothing, if it was stopped; it catches up when it is back.",
        ),
        Trouble(
            "an answer of a publisher of block events is not understood: %s",
            "The publisher is of another version, or none.",
            "Use the same version on both sides.",
        ),
        Trouble(
            "a batch of block events is not understood: %s",
            "The publisher is of another version, or none; the consumer catches up by a snapshot.",
            "Use the same version on both sides.",
        ),
        Trouble(
            "a message is passed over: %s",
            "Something else publishes at that endpoint.",
            "Give each engine an endpoint or a topic of its own.",
        ),
        Trouble(
            "an entry in etcd is passed over: %s",
            "Something under `cluster.prefix` is not kvcore's, or of another version.",
            "Remove it, or use another prefix.",
        ),
        Trouble(
            "the lease %x is lost; what was entered is entered anew",
            "The process stood still, or was cut off from etcd, for longer than `cluster.ttl_s`.",
            "Raise `cluster.ttl_s` where it happens often.",
        ),
        Trouble(
            "looking up nodes failed, those known stay",
            "A fault of kvcore. It is tried again, and what failed is in the log.",
            "Report it.",
        ),
        Trouble(
            "keeping a lease in etcd failed; it is tried again",
            "As above. A lease that is not renewed in time is given up, and taken anew.",
            "Report it.",
        ),
        Trouble(
            "nodes cannot be looked up, those known stay: %s",
            "etcd does not answer a `peer` node; it goes on with the nodes it knew last.",
            "Look at etcd. Once it answers they are looked up again, without being asked to.",
        ),
        Trouble(
            "a node of the cluster is passed over: its address is %r",
            "A worker's entry in etcd has a `peer` that is not tcp://HOST:PORT.",
            "Correct the entry, or take it out.",
        ),
    ],
    "Orders of operators": [
        Trouble(
            "the audit log lacks a line: %s",
            "The order was carried out; the line is in the log only.",
            "Look at the disk of `control.audit`.",
        ),
        Trouble(
            "an order failed kind=%s",
            "A bug: the order of `kvcore ctl` was not carried out, or in part.",
            "Report it with the lines around it.",
        ),
        Trouble(
            "refused what is no order: %s",
            "Something else than `kvcore ctl` of this version talks to `control.address`.",
            "Look at who connects there.",
        ),
        Trouble(
            "an answer to an order is lost: %s",
            "`kvcore ctl` was interrupted, or asked for more than a message holds.",
            "`kvcore ctl list` shows what is so; give it a lower `--limit`.",
        ),
    ],
    "Traces": [
        Trouble(
            "no records of requests are written: %s",
            "The folder of `explain.path` cannot be written.",
            "Give one that can.",
        ),
        Trouble(
            "records of requests are not written any more: %s",
            "The disk of `explain.path` failed.",
            "Look at the disk; restart the engine.",
        ),
        Trouble(
            "no spans are made: %s",
            "`explain.spans` needs a package that is not there.",
            "`pip install opentelemetry-api`, or set it to false.",
        ),
        Trouble("trace %s is full and ends here", "A file of 256 MiB.", NOTHING),
        Trouble("trace %s ends here: %s", "The disk failed.", "Look at the disk."),
        Trouble("trace %s: %s", "The file could not be closed.", "Look at the disk."),
    ],
}
