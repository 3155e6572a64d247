"""Hosts for tests: network namespaces that act as machines, connected by cables to one switch.

    with Network("a", "b", "store") as network:
        a, store = network["a"], network["store"]
        server = a.start(["redis-server", "--bind", a.address, ...])
        a.cut()                     # drop all packets, without an error
        a.heal()
        a.slow(1e6)                 # bytes per second, each way
        a.slow(delay_s=0.05, loss=0.02)
        a.kill()                    # power failure: end every process of the host

Memory, files and the clock are those of the one machine. Needs root, or a system that lets users
create namespaces; `why_not` says what is missing. The kernel delays and drops packets (netem). If
it cannot, a process does, which needs access to /dev/net/tun.
"""

from kvcore_devtools.hosts.network import Facts, Host, Network, why_not

__all__ = ["Facts", "Host", "Network", "why_not"]
