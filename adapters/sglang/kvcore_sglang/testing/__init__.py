"""SGLang without CUDA: its driver, and stand-ins for CUDA-only modules that it imports.

For tests only. The adapter (``kvcore_sglang``) needs none of it. The stand-ins are not used on a
machine with a GPU.

    python -m kvcore_sglang.testing.server --model-path MODEL ...   launch_server, with stand-ins
"""
