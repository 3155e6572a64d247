"""Log lines of events and of the cluster."""

from __future__ import annotations

from tools.troubles.entry import REPORT, Trouble

EVENTS_AND_CLUSTER = [
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
        "block events go to NATS no more: %s",
        "An internal error of kvcore. The engine serves on; its events count as unsent.",
        "Report the traceback, and restart the engine.",
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
        "a connection of %s to %s is closed: %s",
        "A client sent a longer message than any that kvcore expects there, something that is not "
        "ZeroMQ, or too many are connected. The other clients are served. Logged once a minute.",
        "Find out who connects there, and keep it out by the network or by `keys`.",
    ),
    Trouble(
        "CURVE keys cannot be read, those known stay: %s",
        "A file in the folder of keys is not a key, or cannot be read. Clients whose keys were "
        "added since are refused. Logged once a minute.",
        "Remove or replace the file that the line names.",
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
        "The publisher has another version, or is not kvcore. The consumer requests a snapshot.",
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
]
