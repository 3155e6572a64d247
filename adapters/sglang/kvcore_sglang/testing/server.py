"""``sglang.launch_server`` with stand-ins for the modules that are missing.

This is a module of its own because processes that are spawned from a package's ``__main__`` do not
run it again.
"""

import runpy

from kvcore_sglang.testing.standins import install

install()  # at the top: SGLang's processes are spawned from this module, and run it again

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
