"""One process that keeps the KV cache for every engine of a machine.

    engine A   leader ── RemoteManager ──┐ requests, reports           ┌── index, plans
               worker ── ServedWorker ─┐ │                             │
                                       │ ├──▶ Server ── ModelCache ────┼── host arena (shared)
    engine B   leader ── RemoteManager ┼─┘              for each model │        ▲
               worker ── ServedWorker ─┤                               └── tiers, reads and writes
                                       └── copies: engine pages ◀──────────────▶┘

The server decides and does the I/O of the tiers. A worker maps the arena and copies between it and
the pages of its engine. An adapter's leader runs the same code with and without a server.

    server            the loop: receives requests and dispatches them
    sessions          who may speak in a session, and when it ends
    model_caches      prepares the models, finds the one that is meant
    model_cache       one model: its index, its tiers, and the transfers of every session
    pending_prefills  prompts that another engine promised and is saving here
    pending_clears    clear requests that no server has acknowledged
    runtime_dir       the directory: socket, arenas, and who may still touch which memory
    messages          the requests and replies, with their limits
    client            the leader's side: `RemoteManager`
    remote_index      the part of the server's index that an adapter reads
    segments          fusion's search for stored tokens, on both sides
    session           how a leader joins the server, and stays joined
    worker            the worker's side: `ServedWorker`
    pages             an engine's own pages in a server: `ServedPages`
    page_model        what the server takes such pages for
    rpc               a client's socket
    exporter          Prometheus metrics over HTTP
    errors            reasons to refuse a request
"""
