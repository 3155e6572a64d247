"""Log lines of the start, and lines with which kvcore turns itself off."""

from __future__ import annotations

from tools.troubles.entry import BUILD_NATIVE, NOTHING, OWN_ERROR, RESTART_AND_REPORT, Trouble

START = [
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
        "the variable %s is not read: did you mean %s?",
        "An environment variable looks like a setting, and kvcore reads no such name.",
        "Give it the name in the line: two underscores stand before and between the names.",
    ),
    Trouble(
        "settings that pages have no use for are ignored: %s",
        "Below another cache (HiCache, vLLM's offloading) kvcore keeps the engine's pages in one "
        "tier. It has no host memory there, and writes every page at once.",
        "Remove those settings.",
    ),
    Trouble(
        "no native copies: %s",
        "The native copy routines are not built. torch copies instead, more slowly.",
        BUILD_NATIVE,
    ),
    Trouble(
        "KV of this engine is not shared, and not found after a restart: %s",
        "kvcore cannot tell this engine's KV from other KV, for the reason in the line. It is kept "
        "under a random mark ([what KV is shared](identity.md)).",
        "Do what the line says, or nothing if the KV need not outlive the engine.",
    ),
    Trouble(
        "requests are answered without kvcore: %s",
        "kvcore cannot tell the KV of these requests from other KV, for the reason in the line. "
        "Each reason is repeated every ten minutes at most.",
        "Do what the line says. The answers are right.",
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
        "host memory of %d bytes is not pinned (%s; locked-memory limit %s bytes): copies to "
        "the GPU are slower; raise the limit (ulimit -l) or lower host.capacity",
        "The GPU cannot access host memory by DMA.",
        "Raise the limit (`ulimit -l unlimited`, or the container's), or lower `host.capacity`.",
    ),
    Trouble(
        "the driver refuses copies in one call (cuMemcpyBatchAsync, error %d): they are made one "
        "by one, which is slower",
        "NVIDIA's driver has a call for many copies at once. It returned the CUresult that is "
        "named. Every copy is made all the same.",
        "Report it with the driver's version (`nvidia-smi`). A newer driver may accept the call.",
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
        "vLLM does not take the connector's name, so a vLLM that names it does not start.",
        "Install a version that `kvcore plugins` names.",
    ),
    Trouble(
        "engine_untried",
        "kvcore was not run with this release of the engine, but every probe holds. It serves.",
        "Nothing. `kvcore plugins` names the releases that were tried.",
    ),
    Trouble(
        "hooks_not_registered",
        "SGLang does not take kvcore's hooks, and kvcore's linker stands aside.",
        "Install a version that `kvcore plugins` names.",
    ),
    Trouble(
        "engine_untried",
        "kvcore has not been tried with this release of the engine. All required probes hold.",
        "Nothing, or install a release that the line names.",
    ),
    Trouble(
        "every step waits for all saves, because vLLM has %s",
        "A step of this vLLM can write pages in a way that kvcore does not know.",
        "Nothing, or install a release that `kvcore plugins` calls tried: saves then overlap.",
    ),
    Trouble(
        "hook_not_registered",
        "A function of SGLang that kvcore's linker wraps is absent or has changed.",
        "Nothing if kvcore is HiCache's storage. Else install a version with every probe.",
    ),
    Trouble(
        "updates of the weights in place are not noticed by this SGLang: clear the storage after "
        "one",
        "kvcore as HiCache's storage does not know this SGLang's functions that update weights.",
        "Nothing if weights never change in place. Else clear the storage after each update, or "
        "install a release that `kvcore plugins` names.",
    ),
]

TURNS_OFF = [
    Trouble(
        "kvcore stands aside, the model runs without it: %s",
        "kvcore does not support this model, or the layout of its KV.",
        "See the engine's page. The engine runs as it does without kvcore.",
    ),
    Trouble(
        "kvcore stands aside, vLLM's offloading works without it: %s",
        "vLLM's keys cannot tell this model's KV from other KV, or the medium cannot be used.",
        "See [below vLLM's own offloading](vllm.md#below-vllms-own-offloading).",
    ),
    Trouble(
        "an error in %s: kvcore stands aside until the engine restarts, vLLM's offloading goes on",
        OWN_ERROR,
        RESTART_AND_REPORT,
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
        "A worker cannot move KV (`a worker refused its work`), or kvcore failed in a call by the "
        "engine (`an error in ...`, with its trace). kvcore reports no more hits to the engine; "
        "`kvcore_standing_aside` is 1.",
        "Look for the worker's own line before it, and restart the engine. Report an error.",
    ),
    Trouble("%s: kvcore stands aside on this rank", OWN_ERROR, RESTART_AND_REPORT),
    Trouble(
        "an error in %s: kvcore's storage stands aside until the engine restarts",
        OWN_ERROR,
        RESTART_AND_REPORT,
    ),
    Trouble(
        "the engine's metrics can no longer be told what kvcore counts",
        "Prometheus refused kvcore's counts. SGLang's metrics have none of them from then on.",
        "`/server_info` still has the counts. Restart the engine, and report the error.",
    ),
    Trouble(
        "an error in %s",
        "A second error, while kvcore recovered from the first, which the log has before it. What "
        "the engine counts on is told as failed all the same.",
        RESTART_AND_REPORT,
    ),
    Trouble(
        "the thread %s has stopped after an error",
        "An internal error of kvcore in one of its threads. What waits for the thread fails, and "
        "the next lines say what kvcore does without it.",
        RESTART_AND_REPORT,
    ),
    Trouble(
        "the thread %s cannot be started: %s",
        "The process or the container has as many threads as it may. kvcore does without this one.",
        "Raise the limit (`pids` of the container, `ulimit -u`), and restart the engine.",
    ),
    Trouble(
        "the thread %s did not end in %.3g s and is left behind",
        "Something that the thread waits for hangs: a disk, a store or a device.",
        "Look at what the thread is named after. It ends with the process.",
    ),
    Trouble("the end of the thread %s could not be told", OWN_ERROR, RESTART_AND_REPORT),
    Trouble(
        "this rank loads and saves no more: %s",
        "A thread that moves bytes has stopped after an internal error. The leader stops kvcore.",
        RESTART_AND_REPORT,
    ),
    Trouble(
        "what observes transfers has failed, and is called again",
        "An internal error of kvcore in its metrics or its trace. Transfers go on.",
        "Report the traceback.",
    ),
    Trouble(
        "blends could not be declined; there is no other rank",
        "The same, before a blend. The engine computes the tokens.",
        RESTART_AND_REPORT,
    ),
    Trouble(
        "an error in the metrics' %s: counts are lost",
        "An internal error of kvcore in vLLM's metrics. Nothing else is affected.",
        "Report the traceback.",
    ),
    Trouble(
        "unforeseen at the start: %s",
        "An internal error of kvcore while it looked at SGLang's model. The next line says that "
        "kvcore stands aside.",
        RESTART_AND_REPORT,
    ),
    Trouble(
        "weights_not_watched",
        "kvcore does not find vLLM's worker in its process, and is not told when weights are "
        "changed in place.",
        "Set `namespace.weights_change` to `any_time` if they are.",
    ),
    Trouble(
        "weights were changed in place: KV from before is not found any more",
        "vLLM's workers were given other weights. What is kept from then on is this engine's "
        "alone.",
        NOTHING,
    ),
]
