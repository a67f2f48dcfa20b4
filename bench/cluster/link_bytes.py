"""`python -m bench.cluster.link_bytes`: count the bytes that ranks send in both passes of a layer.

Each rank has a network namespace and a link to its node's switch; another link joins the two switches. The kernel
counts bytes per rank and between the nodes, at full speed. The overhead of TCP/IP, 66 bytes per packet (Ethernet 14,
IPv4 20, TCP with time stamps 32) including acknowledgements, is subtracted. A plain all-to-all of equal size verifies
this: without headers, its byte count is exact. The formula counts one row per token and rank (with two levels: per
node, then per rank) with experts for it, in four all-to-alls, and ten bytes for each of its pairs there: a code of two
bytes, a router weight of four, and its gradient.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fusedmoe
from bench.cluster.__main__ import run_ranks
from bench.cluster.network import missing, remove_left_behind, run
from bench.gpu.process import ROOT
from bench.provenance import provenance
from fusedmoe.comm.collectives import all_gather_object, all_reduce
from fusedmoe.comm.topology import Topology

FILE = "link_bytes.json"
MEASURED = ("fusedmoe/comm", "fusedmoe/engine", "fusedmoe/kernels/deduplicate.py", "bench/cluster/link_bytes.py")
EXPERTS, PAIR_BYTES, HEADER_BYTES = 16, 10, 66
# Bytes per row, and tokens per rank: enough to make the metadata of each call negligible.
TOKENS = {256: 4096, 1024: 2048, 4096: 512}
_ROUNDS, _SETTLE_S, _SECONDS, _PORT = 3, 0.2, 600, 29556


class Links:
    """Namespaces of ranks on two nodes, from `make` to `remove`."""

    def __init__(self, ranks: int) -> None:
        own = f"fusedmoe-{os.getpid()}"
        self.ranks, self.spaces = ranks, [f"{own}-{rank}" for rank in range(ranks)]
        self.switches = [f"{own}-switch{node}" for node in range(2)]

    def make(self) -> None:
        remove_left_behind()
        for name in (*self.spaces, *self.switches):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for name in self.switches:
            run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
            run("ip", "-n", name, "link", "set", "switch", "up")
        self._join((self.switches[0], "across"), (self.switches[1], "across"))
        for rank, name in enumerate(self.spaces):
            self._join((name, "wire"), (self.switches[rank // (self.ranks // 2)], f"rank{rank}"))
            run("ip", "-n", name, "addr", "add", f"10.78.0.{1 + rank}/24", "dev", "wire")

    def _join(self, *ends: tuple[str, str]) -> None:
        (a, at_a), (b, at_b) = ends
        run("ip", "link", "add", at_a, "netns", a, "type", "veth", "peer", "name", at_b, "netns", b)
        for space, device in ends:
            if space in self.switches:
                run("ip", "-n", space, "link", "set", device, "master", "switch")
            run("ip", "-n", space, "link", "set", device, "up")

    def remove(self) -> None:
        for name in (*self.spaces, *self.switches):
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def must_travel(expert_WSK: np.ndarray, experts: int, nodes: int, dispatch: str) -> dict[str, tuple[int, int]]:
    """Return the rows and pairs that a dispatch sends from all ranks ("links"), and between nodes ("across")."""
    W = len(expert_WSK)
    rank_WSK = expert_WSK // (experts // W)
    goes_WSR = (rank_WSK[..., None] == np.arange(W)).sum(2)  # pairs of each token on each rank
    own_W = np.arange(W)[:, None, None]
    elsewhere_WSR = (np.arange(W) // (W // nodes) != own_W // (W // nodes)) * goes_WSR
    if dispatch == "direct":
        return {"links": _rows(goes_WSR * (np.arange(W) != own_W)), "across": _rows(elsewhere_WSR)}
    # First to the rank with the same index on each node, then forwarded.
    across = _rows(elsewhere_WSR.reshape(*elsewhere_WSR.shape[:2], nodes, -1).sum(3))
    inside = _rows(goes_WSR * (np.arange(W) % (W // nodes) != own_W % (W // nodes)))
    return {"links": (across[0] + inside[0], across[1] + inside[1]), "across": across}


def _rows(pairs_WSR: np.ndarray) -> tuple[int, int]:
    return int((pairs_WSR > 0).sum()), int(pairs_WSR.sum())


def expected_rows(tokens: int, ranks: int, experts: int, k: int) -> float:
    """Return the expected rows sent by `ranks` ranks with direct dispatch and uniform routing."""
    reached = 1 - math.comb(experts - experts // ranks, k) / math.comb(experts, k)
    return ranks * tokens * (ranks - 1) * reached


def measure(topology: Topology, bytes_of_row: int, k: int, dispatch: str) -> dict[str, Any]:
    """Count the bytes of both passes of a layer, and of a plain transfer of equal size. Collective."""
    W, S, M = topology.size, TOKENS[bytes_of_row], bytes_of_row // 4
    torch.manual_seed(0)
    gate = fusedmoe.gates.TopK(EXPERTS, k=k)
    layer = fusedmoe.MoELayer(M, gate, fusedmoe.experts.FeedForward(8), topology=topology, dispatch=dispatch)
    for parameter in gate.parameters():
        torch.nn.init.orthogonal_(parameter)  # all experts are chosen equally often
    torch.manual_seed(1 + topology.rank)
    x_SM = torch.randn(S, M).requires_grad_()
    with torch.no_grad():
        chosen = all_gather_object(topology.world, gate(x_SM).expert_SK.numpy())
    must = must_travel(np.stack(chosen), EXPERTS, 2, dispatch)

    def both_passes() -> None:
        layer(x_SM).square().sum().backward()

    # The formula's average number of bytes between each pair of ranks.
    rows, pairs = must["links"]
    each = (4 * rows * bytes_of_row + pairs * PAIR_BYTES) // (W * (W - 1))
    plain = torch.zeros(each * (W - 1), dtype=torch.uint8)
    sizes = [each if rank != topology.rank else 0 for rank in range(W)]

    def plain_transfer() -> None:
        dist.all_to_all_single(torch.empty_like(plain), plain, sizes, sizes)

    both_passes()
    plain_transfer()
    nothing = _counted(topology, lambda: None)
    wire, beside = _counted(topology, both_passes) - nothing, _counted(topology, plain_transfer) - nothing
    between = W // 2 * (W // 2) * 2 * each  # of the plain transfer
    plainly = {"links": (beside[0], each * W * (W - 1)), "across": (beside[1], between)}
    found: dict[str, Any] = {"ranks": W, "k": k, "row_bytes": bytes_of_row, "tokens": S, "dispatch": dispatch}
    found["uniform_rows"] = round(expected_rows(S, W, EXPERTS, k))
    for number, (where, (rows, pairs)) in enumerate(must.items()):
        least = 4 * rows * bytes_of_row
        (sent, net), (plain_BN, plain_bytes) = wire[number], plainly[where]
        found[where] = {
            "rows": rows,
            "pairs": pairs,
            "bytes": round(net),
            "overhead": sent / net,
            "over_rows": net / least,
            "over_rows_and_pairs": net / (least + PAIR_BYTES * pairs),
            "plain_overhead": plain_BN[0] / plain_bytes,
            "plain_without_headers": plain_BN[1] / plain_bytes,
        }
    return found


def _counted(topology: Topology, call: Callable[[], None]) -> np.ndarray:
    """Return the bytes of one call, with and without headers: from all ranks, and between the nodes. Collective.

    The minimum over rounds, because TCP retransmits on a busy machine.
    """
    rounds = [_sent(topology)]
    for _ in range(_ROUNDS):
        call()
        rounds.append(_sent(topology))
    return np.diff(rounds, axis=0).min(0)


def _sent(topology: Topology) -> np.ndarray:
    all_reduce(topology.world, torch.zeros(1), operation="start of a measurement")
    time.sleep(_SETTLE_S)  # until the last acknowledgement was sent
    statistics = Path("/sys/class/net/wire/statistics")
    own, crossed = tuple(int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets")), (0, 0)
    if topology.rank % (topology.size // 2) == 0:  # one rank per node
        switch = sys.argv[2 + topology.rank // (topology.size // 2)]
        command = ["ip", "-n", switch, "-s", "-j", "link", "show", "across"]
        shown = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=20).stdout)
        crossed = tuple(shown[0]["stats64"]["tx"][name] for name in ("bytes", "packets"))
    counted = np.array(all_gather_object(topology.world, (own, crossed)), dtype=np.float64).sum(0)
    return np.stack([counted[:, 0], counted[:, 0] - HEADER_BYTES * counted[:, 1]], 1)


def rank_main() -> None:
    cases, out = json.loads(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        world = dist.get_world_size()
        topology = Topology.from_sizes(world, ranks_per_node=world // 2, timeout_s=60)
        with topology.guard("counting bytes"):
            found = [measure(topology, *case) for case in cases]
            if topology.rank == 0:
                out.write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def count(ranks: int, cases: Sequence[tuple[int, int, str]], seconds: float = _SECONDS) -> list[dict[str, Any]]:
    """Count cases of (bytes per row, K, dispatch) on `ranks` ranks, and remove all processes and namespaces.

    Raises:
        RuntimeError: a rank failed or timed out.
    """
    links = Links(ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        try:
            links.make()
            command = [sys.executable, "-m", "bench.cluster.link_bytes", "rank", *links.switches]
            command += [json.dumps(cases), str(out)]
            commands = [["ip", "netns", "exec", space, *command] for space in links.spaces]
            own = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": "wire"}
            run_ranks(commands, [own | {"TORCH_CPP_LOG_LEVEL": "ERROR"}] * ranks, seconds)
            return json.loads(out.read_text())
        finally:
            links.remove()


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.cluster.link_bytes", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks, on two nodes (default: 2 4)"
    )
    parser.add_argument(
        "--k",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        help=f"numbers of experts per token, of {EXPERTS} (default: 2 4 8)",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(TOKENS), choices=list(TOKENS), help="bytes per row (default: all)"
    )
    parser.add_argument("--dispatch", nargs="+", default=["direct", "2dh"], choices=["direct", "2dh"])
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench/results", help=f"folder of {FILE} (default: bench/results)"
    )
    given = parser.parse_args()
    if lacking := missing():
        print(f"link bytes cannot be counted: {lacking}")
        return 0
    cases = [(of, k, dispatch) for dispatch in given.dispatch for of in given.rows for k in given.k]
    begun = provenance(MEASURED)
    found = [one for ranks in given.ranks for one in count(ranks, cases)]
    given.results.mkdir(parents=True, exist_ok=True)
    record = {"run": begun, "experts": EXPERTS, "pair_bytes": PAIR_BYTES, "cases": found}
    (given.results / FILE).write_text(json.dumps(record, indent=1) + "\n")
    show(found)
    return 0


def show(found: Sequence[dict[str, Any]]) -> None:
    table = Table(title="Bytes on links over those of rows, and of rows and pairs; of a plain transfer over its own")
    for name in ("ranks", "dispatch", "K", "row", "leave ranks", "", "plain", "cross nodes", "", "plain"):
        table.add_column(name, justify="right")
    for one in found:
        cells = [one["ranks"], one["dispatch"], one["k"], one["row_bytes"]]
        for where in ("links", "across"):
            of = one[where]
            cells += [f"{of[name]:.3f}" for name in ("over_rows", "over_rows_and_pairs", "plain_without_headers")]
        table.add_row(*map(str, cells))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    sys.exit(rank_main() if sys.argv[1:2] == ["rank"] else main())
