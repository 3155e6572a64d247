"""``sglang.launch_server``, with stand-ins for what is missing here.

Not a package's ``__main__``, which processes that are spawned from it would not run again.
"""

import runpy

from kvcore_sglang.testing.standins import install

install()  # here: SGLang's processes are spawned from this module, and run it again

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
