"""Files of a folder, moved by NIXL's storage backends: POSIX, or GPUDirect Storage.

store    names, publication, time limits ──▶ lane    memory and an agent of its own ──▶ NIXL
"""
