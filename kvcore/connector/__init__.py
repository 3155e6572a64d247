"""What every engine's adapter needs beside the core; no engine is involved.

    model     a model as kvcore sees it: layer groups, block shape, heads by rank
    identity  who made KV: weights, LoRA, tenant; the namespaces of requests
    paging    an engine's pages as the device units of transfer graphs; which graphs use a page
    outbox    the manager's transport, where graphs leave with the engine's own messages
    chunks    what of a prompt is stored at another place, for blends
    build     leader and worker of an engine, put together from a config
    rank      what a worker does to its tiers at the start and at the end

An adapter keeps what is its engine's own: when it is called, what it may answer, what its objects
are named. The submodules are imported one by one; only using a worker loads torch.
"""
