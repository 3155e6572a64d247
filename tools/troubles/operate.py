"""Log lines of operator commands, traces and records."""

from __future__ import annotations

from tools.troubles.entry import NOTHING, Trouble

OPERATOR_COMMANDS = [
    Trouble(
        "an order is refused, because the audit log cannot be written: %s",
        "A command of `kvcore ctl` was not carried out, because no record of it could be kept.",
        "Make room on the disk of `control.audit`, then give the command again. If the file was "
        "removed, restart kvcore.",
    ),
    Trouble(
        "the audit log lacks a line: %s",
        "How a command ended is only in the log. That it began is in the file.",
        "Check the disk of `control.audit`.",
    ),
    Trouble(
        "refused: a message of another user who=%s",
        "A process of another user has written to kvcore's local socket. It got no answer.",
        "Check who may enter the folder of `server.address` or `control.address`, and find out "
        "what that process is. Clients of a server must run as its user.",
    ),
    Trouble(
        "sglang.keep_on_flush is false, and SGLang has no --admin-api-key: every client can erase "
        "every tier with /flush_cache",
        "SGLang's `/flush_cache` is open to every client, and erases KV of all engines that share "
        "it.",
        "Start SGLang with `--admin-api-key`, or leave `sglang.keep_on_flush` true.",
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
        "an order could not be taken",
        "An internal error of kvcore. The command was not carried out; others are.",
        "Report the traceback.",
    ),
    Trouble(
        "an answer to an order is lost: %s",
        "`kvcore ctl` was interrupted, or asked for more than fits a message.",
        "`kvcore ctl list` shows the current state. Give it a lower `--limit`.",
    ),
]

TRACES_AND_RECORDS = [
    Trouble(
        "a record of a request is left out: %s",
        "It could not be written as JSON, or the disk of `explain.path` failed.",
        "Check the disk. If it is well, report the line.",
    ),
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
        "%s is left out: %s",
        "`kvcore explain` found a name of a record file that is a pipe, a device or unreadable.",
        "Remove it from the folder of `explain.path`.",
    ),
    Trouble(
        "%s is left out: it has more than %d bytes",
        "A file of records is far larger than kvcore writes them.",
        "Remove it from the folder of `explain.path`.",
    ),
    Trouble(
        "no spans are made: %s",
        "`explain.spans` needs a package that is not installed.",
        "`pip install opentelemetry-api`, or set `explain.spans = false`.",
    ),
    Trouble("trace %s is full and ends here", "The trace file has reached 256 MiB.", NOTHING),
    Trouble("trace %s ends here: %s", "Writing the trace failed.", "Check the disk."),
    Trouble("trace %s: %s", "The trace file could not be closed.", "Check the disk."),
]
