"""A client of Mooncake Store that only lends memory, until it is killed.

    python -m kvcore_devtools.mooncake_lender MASTER HOST BYTES PORT

MASTER is the master's HOST:PORT, and HOST the name by which other machines reach this one. It
accepts connections at PORT as soon as it has joined, to show that it has.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

from kvcore.errors import TierUnavailable
from kvcore.tiers.remote.mooncake import MooncakeOptions, MooncakeStore

_PAUSE_S = 0.2


def main() -> None:
    master, host, nbytes, port = sys.argv[1:]
    joined = socket.socket()
    joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    joined.bind((host, int(port)))  # before Mooncake's client picks ports of its own
    store = MooncakeStore(MooncakeOptions(master=master, host=host, lend=int(nbytes)), rank=0)
    while True:
        try:
            store.exists(["joined"])
            break
        except TierUnavailable as error:
            print(error, file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)
    joined.listen()
    signal.pause()


if __name__ == "__main__":
    main()
