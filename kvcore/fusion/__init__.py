"""Fusion: cached chunks assembled into a prompt, with the rows that need it recomputed.

    controller  from measured seconds: how many rows, whether at all, where to put chunks
    find        where stored segments stand in a prompt that does not mark them
    gate        whether a blend under way is going to be too far off
    plan        a prompt as segments: exact prefix, cached chunks, fresh tokens
    reference   the readable oracle over a Hugging Face model; what a fast path must agree with
    rope        cached K, stored after RoPE, moved to another position
    select      which rows to recompute, and how many at each layer

Nothing here imports an engine. The submodules import torch, all but `controller` and `find`; this
module does not.
"""
