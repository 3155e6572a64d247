"""Triton kernels for kvcore: one folder for each op, with a naive twin in torch.

    copy       engine pages <-> canonical blocks, any two layouts
    shift      the same, with K rotated during the copy (RoPE moved by a distance)
    attend     attention of scattered rows over paged KV, by their true positions
    deviation  squared distance between fresh and cached K and V
    choose     sorted row ids, by top-k or by a threshold
    merge      fresh rows written to pages at their slots
    pack       KV to fp8 or int8 with a scale per block and head, and back
    sums       checksums of blocks

In each folder, ``kernel.py`` has the device code, ``launch.py`` checks the arguments and launches,
and ``naive.py`` has the same signature in plain torch. kvcore finds the copies (``ops.py``) and the
operations of a blend (``fusion.py``) through ``plugin.py``. Importing this package or its plugin
imports neither torch nor Triton.
"""
