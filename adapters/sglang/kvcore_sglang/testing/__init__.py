"""SGLang where there is no CUDA: stand-ins for the modules that its CPU build cannot do without.

Test scaffolding. The adapter (``kvcore_sglang``) needs none of it, and on a machine with a GPU
none of it is used.

    python -m kvcore_sglang.testing.server --model-path MODEL ...   launch_server, with stand-ins
"""
