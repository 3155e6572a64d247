"""Fusion: cached chunks assembled into a prompt, with the rows that need it recomputed.

    find        where stored segments stand in a prompt that does not mark them
    rope        cached K, stored after RoPE, moved to another position

Nothing here imports an engine. The submodules import torch; this module does not.
"""
