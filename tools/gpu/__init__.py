"""One command for a machine with a GPU, and the files that a machine without a network needs.

    python -m tools.gpu               run the parts, one after another (`make gpu`)
    python -m tools.gpu.page FILE     show a result in docs/gpu.md
    python -m tools.gpu.bundle        pack what the machine lacks (`make gpu-bundle`)

The command line, `runner` and `record` need Python's standard library only. Each part is a child
process, so that a crash, a hang or a fault of the GPU in one part does not end the others.
"""
