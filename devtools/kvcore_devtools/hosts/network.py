"""`Network`: network namespaces, their cables, and what a test can do to them.

    namespace of the switch      bridge ── port1      port2      port3
                                             │          │          │    veth pairs
    namespace of each host                  eth0       eth0       eth0
                                         10.93.0.1  10.93.0.2  10.93.0.3

None of it has a name on the machine. A process (`keeper`) holds each namespace; its standard input
is a pipe from this process. However this process ends, the pipes close, the keepers end what runs
on their hosts, and the kernel removes the rest. Nothing needs to be cleaned up.

netem delays and drops a host's frames at both ends of its cable. If the kernel lacks it, a process
(`cable`) between port and switch does:

    bridge ── far1 ──▶ cable ──▶ near1 ── bridge ── port1 ── eth0

The host keeps its interface, its address and its connections when that process is added or removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.errors import UnsupportedError
from kvcore_devtools.hosts import cable, keeper

__all__ = ["Facts", "Host", "Network", "why_not"]

MAX_HOSTS = 250
_TOOLS = {
    **dict.fromkeys(("ip", "tc", "bridge"), "iproute2"),
    **dict.fromkeys(("nsenter", "unshare"), "util-linux"),
}
"""The programs that are called, and the Debian packages that contain them."""
_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
_READY_S = 60.0
_COMMAND_S = 60.0
_QUEUE_MS = 200
_BURST_NBYTES = 16384
"""Bytes that a slow cable passes in one burst; more than any frame."""
_FRAME_NBYTES = 1514
_TUN = "/dev/net/tun"
_LISTENING = "0A"
_DISABLED, _FORWARDING = 0, 3


class Facts(NamedTuple):
    """What a `Network` can do on this machine.

    ``privileges`` says how it was created. ``rate`` is true if the kernel can make a cable slow,
    and ``netem`` if it can also delay and drop packets. ``tap`` is true if a process can do that
    instead.
    """

    privileges: str
    rate: bool
    netem: bool
    tap: bool

    def __str__(self) -> str:
        lacks = []
        if not (self.rate or self.netem):
            lacks.append("cables cannot be slowed down: no sch_tbf")
        if not (self.netem or self.tap):
            lacks.append(
                "packets cannot be delayed or dropped: no sch_netem, and no access to " + _TUN
            )
        elif not self.netem:
            lacks.append("a process delays and drops packets: no sch_netem")
        return "; ".join([f"network namespaces, {self.privileges}", *lacks])


class _Helper:
    """A Python child process that prints "ready", and ends when its standard input closes."""

    def __init__(self, within: Sequence[str], script: str, *arguments: str) -> None:
        """Start the script. Raises UnsupportedError, with its output, if it does not start."""
        self._process = subprocess.Popen(
            [*within, sys.executable, "-I", "-S", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only this process handles an interrupt from the terminal
        )
        self.pid = self._process.pid
        self._hear()

    def tell(self, line: str) -> None:
        """Send a line and block until it took effect. Raises UnsupportedError if it ended."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()
        self._hear()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.closed or self._process.stdout.readline() != b"ready\n":
            raise UnsupportedError(self._why())

    def _why(self) -> str:
        """Reap the process and return the tail of its output."""
        _, errors = self._process.communicate(timeout=_READY_S)
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """End the process. Blocks. Idempotent."""
        self._process.communicate()  # closes its standard input, and waits


class _Namespace:
    """A network namespace and its keeper. ``enter`` is the command that runs others in it."""

    def __init__(self, unshare: Sequence[str], user: bool) -> None:
        """Create the namespace with ``unshare``. Raises UnsupportedError if that is not allowed."""
        own = keeper.namespace_of("self")
        self._keeper = _Helper(unshare, keeper.__file__, str(own))
        self.pid = self._keeper.pid
        number = keeper.namespace_of(self.pid)
        if own is None or number is None:
            self.close()
            raise UnsupportedError(f"cannot read /proc/{self.pid}/ns/net; mount /proc")
        self.number = number
        self.enter = [_tool("nsenter"), f"--net=/proc/{self.pid}/ns/net"]
        if user:
            self.enter += [f"--user=/proc/{self.pid}/ns/user", "--preserve-credentials"]
        self.enter.append("--")

    def close(self) -> None:
        """End all processes in it. Blocks. Idempotent."""
        self._keeper.close()


class Host:
    """One machine of a `Network`, which creates it.

    ``address`` is where the other hosts reach it. ``command`` is the command that runs another one
    on this host. Only one thread at a time may change its cable.
    """

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address = f"10.93.0.{number}"
        self._network = network
        self._port = f"port{number}"
        self._line, self._taps = f"line{number}", (f"near{number}", f"far{number}")
        self._namespace = network._unshare()
        self._cable: _Helper | None = None
        self._whole = True
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(self._namespace.enter)

    @property
    def pid(self) -> int:
        """Id of a process that is in the host's namespace as long as the host exists."""
        return self._namespace.pid

    # -- processes --------------------------------------------------------------------------

    def start(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on this host and return at once.

        ``options`` are those of `subprocess.Popen`. The process id is that of ``argv`` itself. The
        process ends with the host at the latest.
        """
        process = subprocess.Popen([*self.command, *argv], **options)
        self._started.append(process)
        return process

    def run(self, argv: Sequence[str], timeout_s: float = _COMMAND_S) -> str:
        """Run a command and return its output. Raises CalledProcessError or TimeoutExpired."""
        done = subprocess.run(
            [*self.command, *argv], check=True, timeout=timeout_s, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    def listens(self, port: int) -> bool:
        """Return True if a process on this host accepts TCP connections at ``port``."""
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError):
                for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_ = line.split()
                    if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                        return True
        return False

    def kill(self) -> None:
        """Kill all processes of the host, as in a power failure. The host can be used again."""
        for process in self._started:  # one may not have entered the namespace yet
            process.kill()
        left = keeper.end_all(self._namespace.number, (self.pid,))
        if left:
            raise UnsupportedError(f"processes {left} on host {self.name} do not end")
        for process in self._started:
            process.wait()
        self._started.clear()

    # -- the cable --------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Number of bytes received so far."""
        return self._counted(0)

    @property
    def sent(self) -> int:
        """Number of bytes sent so far."""
        return self._counted(8)

    def _counted(self, column: int) -> int:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[column])
        raise UnsupportedError(f"host {self.name} has no eth0 because its network is closed")

    def cut(self) -> None:
        """Drop all frames from and to this host at the switch.

        The host sees no error: its link stays up.
        """
        self._forward(False)

    def slow(
        self,
        bytes_s: float | None = None,
        *,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Degrade the cable both ways. Replaces earlier conditions; connections stay open.

        Args:
            bytes_s: bandwidth in bytes per second; None sets no limit. The queue holds a fifth of a
                second; packets beyond that are dropped.
            delay_s: added delay in seconds.
            jitter_s: each packet's delay varies by up to this many seconds.
            loss: share of packets to drop in addition.
            seed: decides which packets are dropped, counted from this call. Only used if a process
                drops them (`Facts.netem`). Some hundred Mbit/s get through in that case.

        The conditions hold when this returns. Raises UnsupportedError if this machine cannot do it.
        """
        if not (0 <= loss <= 1 and 0 <= jitter_s <= delay_s and (bytes_s is None or bytes_s > 0)):
            raise ValueError(
                f"given {bytes_s} bytes/s, a delay of {delay_s} s with a jitter of {jitter_s} s, "
                f"and a loss of {loss}; supported are more than 0 bytes/s or None, a jitter from 0 "
                "to the delay, and a loss from 0 to 1"
            )
        facts, far = self._network.facts, bool(delay_s or loss)
        can_rate, can_far = facts.rate or facts.netem, facts.tap or facts.netem
        if (bytes_s and not can_rate) or (far and not can_far):
            raise UnsupportedError(
                f"given a delay of {delay_s} s and a loss of {loss:.0%}, at {bytes_s} bytes/s; "
                f"supported here: {facts}. Ask for less, run a kernel with sch_netem, or allow "
                f"access to {_TUN}"
            )
        if facts.netem:
            self._queue_with(_netem(bytes_s, delay_s, jitter_s, loss) if bytes_s or far else None)
            return
        self._queue_with(_tbf(bytes_s) if bytes_s else None)
        if far and self._cable is None:
            self._cable = self._put_in()
        if self._cable is not None:
            self._cable.tell(f"{delay_s} {jitter_s} {loss} {seed}")

    def heal(self) -> None:
        """Restore the cable to full speed, without loss.

        Raises UnsupportedError if the process that delayed packets has ended unexpectedly, because
        it has dropped them all since.
        """
        process, self._cable = self._cable, None
        if process is not None:
            enter = self._network._switch.enter
            _ip(enter, f"link set {self._port} master hub", f"link del {self._line}")
        self._forward(True)
        self._queue_with(None)
        if process is not None:
            process.tell("0 0 0 0")  # raises if it has ended
            process.close()

    def _queue_with(self, kind: str | None) -> None:
        """Set the queueing discipline at both ends of the cable; None removes it."""
        for enter, device in self._ends:
            if kind is None:  # there may be nothing to remove
                _run(enter, "tc", f"qdisc del dev {device} root", check=False)
            else:
                _run(enter, "tc", f"qdisc replace dev {device} root {kind}")

    def _put_in(self) -> _Helper:
        """Add a process between the port and the switch, which only forwards so far."""
        enter = self._network._switch.enter
        process = _Helper(enter, cable.__file__, *self._taps)
        near, far = self._taps
        _ip(
            enter,
            f"link add {self._line} type bridge",
            f"link set {self._line} up",
            *(f"link set {tap} txqueuelen {cable.MAX_FRAMES} up" for tap in self._taps),
            f"link set {near} master {self._line}",
            f"link set {self._port} master {self._line}",
        )
        if not self._whole:  # a port forwards after it moved to another bridge
            self._forward(False)
        _ip(enter, f"link set {far} master hub")
        return process

    @property
    def _ends(self) -> list[tuple[Sequence[str], str]]:
        """Return both ends of the cable, as (command that enters the namespace, interface)."""
        return [(self._namespace.enter, "eth0"), (self._network._switch.enter, self._port)]

    def _forward(self, whether: bool) -> None:
        """Let the switch forward frames at this host's port, or drop them."""
        self._whole = whether
        state = _FORWARDING if whether else _DISABLED
        _run(self._network._switch.enter, "bridge", f"link set dev {self._port} state {state}")

    def _plug_in(self) -> None:
        _ip(
            self._network._switch.enter,
            f"link add {self._port} type veth peer name eth0 netns {self.pid}",
            f"link set {self._port} master hub",
            f"link set {self._port} up",
        )
        _ip(
            self._namespace.enter,
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
        )

    def _close(self) -> None:
        if self._cable is not None:
            self._cable.close()
        self._namespace.close()
        for process in self._started:
            process.wait()


class Network(AbstractContextManager["Network"], Mapping[str, Host]):
    """Hosts by name, all on one switch, for the length of a ``with`` block.

    Raises UnsupportedError, with what is missing, if this machine cannot provide hosts.
    """

    def __init__(self, *names: str) -> None:
        if not 0 < len(set(names)) == len(names) <= MAX_HOSTS:
            raise ValueError(f"given {names}; supported are 1 to {MAX_HOSTS} different names")
        self._names = names
        self._hosts: dict[str, Host] = {}

    def __enter__(self) -> Network:
        self._switch, self._rootless = _switch()
        try:
            enter = self._switch.enter
            _ip(enter, "link add hub type bridge", "link set hub up", "link set lo up")
            self.facts = self._look()
            for number, name in enumerate(self._names, 1):
                self._hosts[name] = host = Host(self, name, number)
                host._plug_in()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the hosts, and remove the hosts. Blocks. Idempotent."""
        for host in self._hosts.values():
            host._close()
        self._hosts.clear()
        self._switch.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def heal(self) -> None:
        """Restore every cable to full speed, without loss."""
        for host in self._hosts.values():
            host.heal()

    def _look(self) -> Facts:
        """Find out what this kernel supports, with the switch's loopback device."""
        has = {}
        for kind in ("netem delay 1ms", f"tbf rate 1mbit burst {_BURST_NBYTES} latency 50ms"):
            line = f"qdisc add dev lo root {kind}"
            has[kind.split()[0]] = _run(self._switch.enter, "tc", line, check=False)
            _run(self._switch.enter, "tc", "qdisc del dev lo root", check=False)
        tap = _run(self._switch.enter, "ip", "tuntap add probe mode tap", check=False)
        if tap:
            _run(self._switch.enter, "ip", "tuntap del probe mode tap")
        how = "in a user namespace" if self._rootless else "as root"
        return Facts(how, has["tbf"], has["netem"], tap)

    def _unshare(self) -> _Namespace:
        command = [*self._switch.enter, _tool("unshare"), "--net", "--"]
        return _Namespace(command, self._rootless)


def why_not() -> str | None:
    """Return what this machine lacks for hosts, as a sentence, or None if it lacks nothing."""
    try:
        with Network("probe"):
            return None
    except UnsupportedError as error:
        return str(error)


def _switch() -> tuple[_Namespace, bool]:
    """Create the switch's namespace. Return it, and True if it is in its own user namespace."""
    refused = []
    for user in (False, True):
        if os.geteuid() != 0 and not user:
            continue
        rights = ["--user", "--map-root-user"] if user else []
        try:
            return _Namespace([_tool("unshare"), *rights, "--net", "--"], user), user
        except UnsupportedError as error:
            refused.append(f"{'in a user namespace' if user else 'as root'}: {error}")
    raise UnsupportedError(
        f"cannot create network namespaces ({'; '.join(refused)}); run as root with CAP_SYS_ADMIN "
        "(in a container, grant it), or on a system that lets users create them"
    )


def _tbf(bytes_s: float) -> str:
    return f"tbf rate {_bits(bytes_s)} burst {_BURST_NBYTES} latency {_QUEUE_MS}ms"


def _netem(bytes_s: float | None, delay_s: float, jitter_s: float, loss: float) -> str:
    """Return netem's parameters. Its queue must also hold the packets in flight."""
    frames = cable.MAX_FRAMES
    rate = ""
    if bytes_s is not None:
        frames = 16 + int(bytes_s * (delay_s + _QUEUE_MS / 1000) / _FRAME_NBYTES)
        rate = f" rate {_bits(bytes_s)}"
    delay = f" delay {delay_s * 1000:g}ms" + (f" {jitter_s * 1000:g}ms" if jitter_s else "")
    return f"netem limit {frames}{rate}{delay} loss {loss * 100:g}%"


def _bits(bytes_s: float) -> str:
    return f"{max(int(bytes_s * 8), 8000)}bit"


def _tool(name: str) -> str:
    """Return the path of a program. Raises UnsupportedError with the package to install."""
    found = shutil.which(name, path=_SEARCHED)
    if found is None:
        raise UnsupportedError(f"hosts need {name}: install {_TOOLS[name]}")
    return found


def _ip(enter: Sequence[str], *lines: str) -> None:
    """Run lines of ip in a namespace. Raises UnsupportedError with its error message."""
    _run(enter, "ip", "-batch -", "\n".join(lines) + "\n")


def _run(enter: Sequence[str], tool: str, line: str, given: str = "", check: bool = True) -> bool:
    """Run a tool in a namespace, and return whether it succeeded.

    With ``check``, a failure raises UnsupportedError.
    """
    done = subprocess.run(
        [*enter, _tool(tool), *line.split()],
        input=given,
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode and check:
        raise UnsupportedError(f"{tool} {line} {given}: {done.stderr.strip()}")
    return not done.returncode
