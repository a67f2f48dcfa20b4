"""Two nodes on one machine: network namespaces that a link of a given rate joins, each with a slower loopback.

Between the nodes runs a pair of virtual interfaces; a token bucket holds each end to the rate, so each direction has
all of it. Ranks of one node reach each other by the node's own address, that is over its loopback device, which is held
to a rate of its own (one bucket for both directions: a bus). Messages up to the buckets' size go through unhindered.
But a bucket must hold what the link carries between two looks at it, or the rate is not reached; and where all cores
compute, there are milliseconds between them.

Names carry the process id, so that two runs do not meet; what a killed run has left behind is removed by the next.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from bench.cluster.setting import Setting

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # inside namespaces of our own: nobody else's network
_PREFIX = "fusedmoe-"
_COMMAND_S = 20.0


def missing() -> str | None:
    """Says what this machine lacks for two nodes; None where all is there."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"it needs {' and '.join(absent)} (on Debian: apt-get install iproute2)"
    # A container may be root and still not be allowed to.
    name = f"{_PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=_COMMAND_S)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)
    if made.returncode != 0:
        return f"network namespaces are not allowed here ({made.stderr.strip()})"
    return None


class TwoNodes:
    """The two nodes, from `make` to `remove`.

    Args:
        inter_mbit: rate of the link between the nodes, each way.
        intra_mbit: rate of each node's loopback, both ways together.
        bucket_kb: size of the link's buckets.
    Attributes:
        interfaces: the name of each node's end of the link.
    """

    def __init__(self, inter_mbit: int, intra_mbit: int, bucket_kb: int) -> None:
        self._rates, self._bucket_kb = (inter_mbit, intra_mbit), bucket_kb
        self.names = tuple(f"{_PREFIX}{os.getpid()}-{node}" for node in "ab")
        self.interfaces = tuple(f"fm{os.getpid()}{node}" for node in "ab")

    def command(self, node: int, *arguments: str) -> list[str]:
        """Returns what runs a command inside a node; `ip` becomes the command, so its process is the command's."""
        return ["ip", "netns", "exec", self.names[node], *arguments]

    def make(self) -> None:
        remove_left_behind()
        inter, intra = self._rates
        for name in self.names:
            run("ip", "netns", "add", name)
        (a, b), (at_a, at_b) = self.names, self.interfaces
        run("ip", "link", "add", at_a, "netns", a, "type", "veth", "peer", "name", at_b, "netns", b)
        for name, interface, address in zip(self.names, self.interfaces, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for device in ("lo", interface):
                run("ip", "-n", name, "link", "set", device, "up")
            # A link that was idle sends a full bucket at once: small ones, so that chunks travel no faster than one
            # message. Loopback's packets of 64 KiB would not go through; and the fewer packets, the less of the
            # processors they take from what computes.
            for device in ("lo", interface):
                run("ip", "-n", name, "link", "set", device, "mtu", "9000")
            # A connection that was idle would begin slowly again, and a collective by itself take longer than between
            # others.
            setting = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
            run("ip", "netns", "exec", name, "sh", "-c", f"echo 0 > {setting}")
            for device, rate, bucket_kb in ((interface, inter, self._bucket_kb), ("lo", intra, 32)):
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *_shape(rate, bucket_kb))

    def remove(self) -> None:
        """Removes what there is of the nodes, also when `make` was interrupted."""
        # Interfaces and buckets go with their namespace, which goes when its last process has ended.
        for name in self.names:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)


def set_rate(setting: Setting) -> None:
    """Gives the link between the nodes the setting's rate, from inside a node: called by a rank of each."""
    assert setting.inter_mbit is not None
    device = os.environ["GLOO_SOCKET_IFNAME"]
    run("tc", "qdisc", "change", "dev", device, "root", *_shape(setting.inter_mbit, setting.bucket_kb))


def _shape(rate_mbit: int, bucket_kb: int) -> tuple[str, ...]:
    return "tbf", "rate", f"{rate_mbit}mbit", "burst", f"{bucket_kb}kb", "latency", "100ms"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def remove_left_behind() -> None:
    """The namespaces of runs whose process is gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=_COMMAND_S)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        number = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and number.isdigit() and not Path(f"/proc/{number}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)
            time.sleep(0.1)
