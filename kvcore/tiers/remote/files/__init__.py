"""Files of a folder, moved by NIXL's storage backends: POSIX, or GPUDirect Storage.

store    names, atomic renames, timeouts ──▶ channel    its own memory and agent ──▶ NIXL
"""
