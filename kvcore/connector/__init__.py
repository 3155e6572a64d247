"""The parts that the connectors of all engines share. No engine is imported here.

    build             composes the leader and the worker of an engine from a config
    scheduler         base of the leaders: keys, counts, saves, reports, clears
    worker            base of the workers: submits graphs, repeats failed loads, reports
    messages          plans and reports between leader and workers
    step_transport    the manager's transport when graphs leave with the engine's own messages
    page_table        an engine's pages as device units of graphs, and the graphs that use a page
    clients           what clients may learn and ask for
    disagg            promises between the engines of disaggregated prefill
    forward_timer     the time of an engine's forwards
    fusion_*          the same parts for blends: scheduler, worker, messages, chunks, policy
    engine_layers     helpers to run an engine's decoder layers for blends

An adapter adds what belongs to its engine: when it is called, what it may answer, and the engine's
objects. Import the submodules one by one. Only those of the worker load torch.
"""
