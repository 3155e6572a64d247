"""One process that keeps KV for every engine of a machine.

    engine A   leader ── RemoteManager ──┐ questions, reports          ┌── index, plans
               worker ── ServedWorker ─┐ │                             │
                                       │ ├──▶ Server ── Space a model ─┼── host arena (shared)
    engine B   leader ── RemoteManager ┼─┘                             │        ▲
               worker ── ServedWorker ─┤                               └── tiers, reads and writes
                                       └── copies: engine pages ◀──────────────▶┘

The server decides and does the I/O of tiers; a worker copies between the arena, which it maps, and
its engine's pages. The leader logic of an adapter is the same as without a server.

    places     the folder: socket, arenas, and who may still touch which memory
    messages   what is said, and how much of it at most
    space      one model on the server: what a session began, and how it ends
    server     the loop
    link       a client's socket
    keeper     how a client joins, and stays one
    client     the leader's side
    worker     the worker's side
    keys       CURVE keys, for TCP
    exporter   its metrics, over HTTP
"""
