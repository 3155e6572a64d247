"""Fusion: assemble a prompt from cached chunks, and recompute the rows that need it.

    plan        a prompt as segments: exact prefix, cached chunks, fresh tokens
    rope        cached K, stored after RoPE, rotated to another position
    select      which rows to recompute, and how many at each layer
    fusor       the blend, run through an engine's own decoder layers
    attend      attention of scattered rows
    ops         the device operations of a blend, and the choice between implementations
    placed      the cached KV of a prompt, in the pages of its request
    gate        estimates a blend's error while it runs, and enlarges its ratio
    controller  whether to blend, and how many rows to recompute, from measured seconds
    find        finds stored segments in a prompt that does not mark them
    segments    the tokens of stored blocks, in which `find` searches
    options     what a request may set
    reference   a readable oracle over a Hugging Face model; the fast path must agree with it

Nothing here imports an engine. This module does not import torch, and neither do `controller`,
`find`, `options` and `segments`; the other submodules do.
"""
