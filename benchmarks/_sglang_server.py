"""SGLang's server on a CPU: with HiCache, and with attention that computes fresh rows alone.

A module of its own: SGLang's processes are spawned from it, and run it again.
"""

import runpy

from kvcore_sglang.testing.standins import install

install()

if __name__ in ("__main__", "__mp_main__"):
    from sglang.srt.mem_cache.pool_host import base, mha

    from kvcore_sglang.attention import register
    from kvcore_sglang.testing.hicache import stand_in

    register()
    stand_in(base, mha)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
