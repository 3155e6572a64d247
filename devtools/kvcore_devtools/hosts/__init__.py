"""Hosts for tests: network namespaces stand for machines, on one switch, each by a cable.

    with Network("a", "b", "store") as network:
        a, store = network["a"], network["store"]
        server = a.start(["redis-server", "--bind", a.address, ...])
        a.cut()                     # nothing comes or goes, and nobody is told
        a.heal()
        a.slow(1e6)                 # bytes a second, each way
        a.slow(delay_s=0.05, loss=0.02)
        a.kill()                    # the power is gone: every process of the host

Memory, files and the clock are those of one machine. Works as root, and elsewhere where the system
lets a user make namespaces; `why_not` says what is in the way. Packets are delayed and lost by the
kernel (netem), and where it cannot by a process, which needs a /dev/net/tun that may be opened.
"""

from kvcore_devtools.hosts.network import Facts, Host, Network, why_not

__all__ = ["Facts", "Host", "Network", "why_not"]
