"""What to do about each of kvcore's errors, by class name."""

from __future__ import annotations

from tools.troubles.entry import NOTHING

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
    "StepBroken": "Look at the lines before it. TensorRT-LLM answers its requests with an error. "
    "If its executor has ended, as it does with overlap scheduling, restart the engine.",
    "EngineMustEnd": "Restart the engine, and report the traceback.",
    "PagesInUse": "Restart the engine. If it happens again, a device or its driver hangs: copies "
    "of KV did not end.",
    "RankLostError": "Restart the engine. If memory ran out on the rank, lower the device memory "
    "that the engine takes.",
}
