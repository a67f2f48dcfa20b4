"""Two nodes on one machine: network namespaces joined by a rate-limited link, each with a rate-limited loopback.

The nodes are joined by a pair of virtual interfaces with a token bucket at each end, so each direction has the full
rate. Ranks of a node communicate over its loopback device, limited to its own rate (one bucket for both directions, as
on a bus). Messages up to the bucket size are not delayed. A bucket must hold what the link sends between two scheduler
runs, or the rate is not reached; if all cores compute, these are milliseconds apart.

Names contain the process id, so concurrent runs do not interfere; the next run removes remains of killed runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from bench.cluster.setting import Setting

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # only inside our own namespaces
_PREFIX = "fusedmoe-"
_COMMAND_S = 20.0


def missing() -> str | None:
    """Return what this machine lacks for two nodes, or None."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"it needs {' and '.join(absent)} (on Debian: apt-get install iproute2)"
    # root in a container may lack the permission
    name = f"{_PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=_COMMAND_S)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)
    if made.returncode != 0:
        return f"network namespaces are not allowed here ({made.stderr.strip()})"
    return None


class TwoNodes:
    """The two nodes, from `make` to `remove`.

    Args:
        inter_mbit: rate of the inter-node link, per direction.
        intra_mbit: rate of each node's loopback, for both directions together.
        bucket_kb: bucket size of the link.
    Attributes:
        interfaces: name of each node's end of the link.
    """

    def __init__(self, inter_mbit: int, intra_mbit: int, bucket_kb: int) -> None:
        self._rates, self._bucket_kb = (inter_mbit, intra_mbit), bucket_kb
        self.names = tuple(f"{_PREFIX}{os.getpid()}-{node}" for node in "ab")
        self.interfaces = tuple(f"fm{os.getpid()}{node}" for node in "ab")

    def command(self, node: int, *arguments: str) -> list[str]:
        """Return the command line that runs a command inside a node; `ip` execs it, so the PID stays the same."""
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
            # An idle link sends a full bucket at once, so buckets are small, to make chunks as slow as one message.
            # Loopback's packets of 64 KiB would exceed them; and fewer packets take less processor time from
            # computation.
            for device in ("lo", interface):
                run("ip", "-n", name, "link", "set", device, "mtu", "9000")
            # Otherwise idle connections would restart slowly, and an isolated collective would take longer than one in
            # a sequence.
            setting = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
            run("ip", "netns", "exec", name, "sh", "-c", f"echo 0 > {setting}")
            for device, rate, bucket_kb in ((interface, inter, self._bucket_kb), ("lo", intra, 32)):
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *_shape(rate, bucket_kb))

    def remove(self) -> None:
        # Interfaces and buckets disappear with their namespace, after its last process.
        for name in self.names:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)


def set_rate(setting: Setting) -> None:
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
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=_COMMAND_S)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        number = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and number.isdigit() and not Path(f"/proc/{number}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_COMMAND_S)
            time.sleep(0.1)
