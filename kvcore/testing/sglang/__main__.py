"""``sglang.launch_server``, with stand-ins for what is missing here."""

from kvcore.testing.sglang.standins import install

install()  # here: SGLang's processes are spawned from this module, and run it again

if __name__ == "__main__":
    import os
    import sys

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
