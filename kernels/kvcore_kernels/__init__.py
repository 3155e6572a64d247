"""Triton kernels for kvcore: one folder an op, each with its naive twin in torch.

    copy       engine pages <-> canonical blocks, any two layouts
    shift      the same, with K rotated on the way (RoPE moved by a distance)
    attend     attention of scattered rows over paged KV, by their true positions
    deviation  squared distance of fresh to cached K and V
    choose     top-k or threshold to sorted row ids
    merge      fresh rows into pages at their slots
    pack       KV in fp8 or int8 with a scale per block and head, and back

In a folder ``kernel.py`` holds the device code, ``launch.py`` checks arguments and launches, and
``naive.py`` has the same signature in plain torch. kvcore finds the copies (``ops.py``) and what a
blend needs (``fusion.py``) through ``plugin.py``.
Importing this package, or its plugin, imports neither torch nor Triton.
"""
