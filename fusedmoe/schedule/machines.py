"""Machines by name, and what collectives and products take on so many ranks of one, where nobody has measured it.

    costs = MACHINES["dgx-h100"].costs(ranks=1024, ep=64, esp=1, mp=8)

Two levels of links: a rank reaches ranks of its own node over one of its own, and all others over its share of the
node's network cards, s = cards · rate / ranks of the node: all of them send at once. Of a group's p ranks q are in each
of m nodes, p = q·m; start is what any collective takes to start, l and B are what a further message takes and what a
link carries, i inside a node and x across (B_x = s). n is what `cost.LINES` counts: for an all-to-all all bytes of a
rank's rows, for the others all bytes that are gathered or reduced.

    all-to-all      start + (q−1)·l_i + (p−q)·l_x  +  n · max{(q−1)/(p·B_i), (p−q)/(p·B_x)}
    all-gather      start + (p−1)·l_i              +  n · (p−1)/(p·B_i)             and reduce-scatter, in one node
    all-reduce      start + 2(q−1)·l_i + 2⌈log2 m⌉·l_x  +  n · max{2(q−1)/(q·B_i), 2(m−1)/(m·q·B_x)}
    product, copy   start + n/rate, both as on the slowest of all ranks

All-to-all is one message for each peer, and the messages of both levels travel side by side. The ring is Thakur,
Rabenseifner and Gropp's ("Optimization of Collective Communication Operations in MPICH", 2005). All-reduce is a ring
inside each node, which leaves every rank 1/q of the sum, a tree across nodes that has the whole bandwidth (Sanders,
Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009), and a ring back; what is
reduced goes through the three in pieces, so that the slowest of them counts, as NCCL has it.

Stragglers: ranks differ by a relative spread σ. A collective waits for the slowest rank, so what computes takes as long
as there: 1 + σ·E(N) of the mean, with E(N) the expected maximum of N standard normal numbers. The step is the slowest
rank's; the others spend the difference in their collectives.

What is not in it: switches between nodes that have less than the full bisection, messages of different sizes, and a
network that others use, too.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Testbed:
    """A cluster: `nodes` of `gpus` each as the paper's groups see them (N_EP and N_ESP = N_MP)."""

    __test__ = False  # no test case, whatever its name

    costs: CostModel
    nodes: int
    gpus: int
    seq_lens: tuple[int, ...]


class Known(NamedTuple):
    """A figure, and who says so. `estimate`: nobody has measured or promised it."""

    value: float
    source: str
    estimate: bool = False


_NCCL = "NCCL, src/graph/tuning.cc"
_DEEPEP = "DeepEP README, normal kernels on H800"
_HERE = "bench/results, H100 80GB HBM3"
_H100_SHARE = "the share that an H100 reaches of its data sheet"

# What NCCL's own model has for a ring of small messages.
_START_S = Known(8.4e-6, f"{_NCCL}: a ring's base latency")
_NVLINK_S = Known(0.6e-6, f"{_NCCL}: a step over NVLink, 0.47–0.6 µs by version")
_NETWORK_S = Known(2.7e-6, f"{_NCCL}: a step over the network")
_LAUNCH_S = Known(5e-6, "a kernel's launch and end", True)
_CONTENTION = Known(0.9, "cards and NVLink share a GPU's memory and copy engines only", True)
# Kernels of collectives take multiprocessors and memory from what computes; on two H100s with NCCL we have also seen a
# product of 1.18 ms take 2.08.
_COMPUTES_BESIDE = Known(1 / 1.189, "arXiv 2507.03114, H100, A100, MI250 and MI210: slowed by 18.9% on average", True)
_LINKS_BESIDE = Known(1.0, "kernels of collectives keep their multiprocessors, and links are slower than memory", True)
_SPREAD = Known(0.02, "SC22, Sinha et al.: GPUs of one kind vary by 8%, taken as four standard deviations", True)
_NETWORK_REACHED = Known(0.86, f"{_DEEPEP}: 43 of 50 GB/s between two nodes")


@dataclass(frozen=True)
class Link:
    """A kind of links: seconds for a further message, bytes/s one way, and the share of these that collectives
    reach."""

    message_s: Known
    bytes_per_s: Known
    reached: Known

    @property
    def speed(self) -> float:
        """Bytes/s that are reached."""
        return self.bytes_per_s.value * self.reached.value


@dataclass(frozen=True)
class Machine:
    """Nodes of equal ranks, every one a GPU."""

    words: str
    ranks_per_node: int
    dtype: str  # that `flops` is for, as in the settings
    _: KW_ONLY
    flops: Known  # FLOP/s of a matrix product
    product_start_s: Known = _LAUNCH_S  # of a copy, too
    copied_bytes_per_s: Known  # of rows in another order: these bytes are read and written in a second
    start_s: Known = _START_S  # of a collective
    intra: Link  # of a rank, inside its node
    inter: Link  # of one network card
    cards: Known  # of a node
    contention: Known = _CONTENTION  # the share of its speed that each kind of link keeps while both are in use
    computes_beside: Known = _COMPUTES_BESIDE  # the share that what computes keeps while a kind of link is in use
    links_beside: Known = _LINKS_BESIDE  # the share that a kind of link keeps while the rank computes
    spread: Known = _SPREAD  # standard deviation of what computes between ranks, as a share of the mean

    def figures(self) -> Iterator[tuple[str, Known]]:
        """Yields all figures by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Known):
                yield field.name, value
            elif isinstance(value, Link):
                yield from ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in fields(value))

    def node(self, ranks: int) -> int:
        """Returns the ranks of each node of a job. Raises `ConfigError` where they do not fill nodes."""
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ConfigError(f"{ranks} ranks do not fill nodes of {self.ranks_per_node}; choose a multiple of that")
        return min(ranks, self.ranks_per_node)

    def with_spread(self, spread: float) -> Machine:
        """Returns the machine with a spread that was measured (`spread_of`)."""
        return replace(self, spread=Known(spread, "as given"))

    def costs(self, ranks: int, ep: int = 1, esp: int = 1, mp: int = 1) -> CostModel:
        """Returns the lines of a job of so many ranks, by the axes of `Topology`.

        Raises `ConfigError` for axes that do not divide the ranks, groups that are not spread evenly over nodes,
        experts that are split over more than a node, and a spread that is no number from 0.
        """
        node = self.node(ranks)
        for what, axes in (("ep · esp", (ep, esp)), ("mp", (mp,))):
            need = math.prod(axes)
            if min(ranks, *axes) < 1 or ranks % need:
                raise ConfigError(f"{what} = {need} does not divide the {ranks} ranks")
        if node % esp:
            raise ConfigError(f"esp = {esp}: an expert is split over ranks of one node of {node}; choose a divisor")
        sigma = self.spread.value
        if not 0 <= sigma < math.inf:
            raise ConfigError(f"spread = {sigma} must be a number from 0")
        # A collective waits for the slowest rank, so what computes takes as long as there.
        slowest = slowest_of(ranks, sigma)
        lines = {
            "gemm": Line(self.product_start_s.value * slowest, slowest / self.flops.value),
            "copy": Line(self.product_start_s.value * slowest, slowest / self.copied_bytes_per_s.value),
        }
        if ep > 1:
            p, q = ep, self._in_node("ep", ep, esp, node)
            alpha_s = self.start_s.value + (q - 1) * self.intra.message_s.value + (p - q) * self.inter.message_s.value
            beta_s = max((q - 1) / p / self.intra.speed, (p - q) / p / self._share(node))
            lines["all-to-all/ep"] = Line(alpha_s, beta_s)
        if esp > 1:
            alpha_s = self.start_s.value + (esp - 1) * self.intra.message_s.value
            ring = Line(alpha_s, (esp - 1) / esp / self.intra.speed)
            lines |= {"all-gather/esp": ring, "reduce-scatter/esp": ring}
        # Where no rank has a copy of what MP splits, what it does not split is still everybody's.
        if ranks > 1:
            lines["all-reduce/dp"] = self.all_reduce(ranks, *((ranks // mp, mp) if ranks > mp else (ranks, 1)))
        computes, links, link = self.computes_beside.value, self.links_beside.value, self.contention.value
        contention = Contention(computes, computes, links, link, links, link)
        return CostModel(lines, contention, f"{self.words}; a model, not measured")

    def all_reduce(self, ranks: int, size: int, stride: int) -> Line:
        """Returns the line of an all-reduce over groups of `size` ranks, each `stride` from the next, all at once.

        Raises `ConfigError` for groups that are not spread evenly over nodes.
        """
        node = self.node(ranks)
        q = self._in_node("data parallel", size, stride, node)
        m = size // q
        alpha_s = self.start_s.value + 2 * (q - 1) * self.intra.message_s.value
        alpha_s += 2 * math.ceil(math.log2(m)) * self.inter.message_s.value
        inside_s = 2 * (q - 1) / q / self.intra.speed
        return Line(alpha_s, max(inside_s, 2 * (m - 1) / m / q / self._share(node)))

    def _share(self, node: int) -> float:
        """Returns the network's bytes/s for each rank."""
        return self.cards.value * self.inter.speed / node

    @staticmethod
    def _in_node(group: str, size: int, stride: int, node: int) -> int:
        """Returns the number of a group's ranks in each of its nodes; an error calls it `group`."""
        if node % (size * stride) == 0:
            return size
        if stride % node == 0:
            return 1
        if node % stride == 0 and size * stride % node == 0:
            return node // stride
        raise ConfigError(
            f"{group} groups of {size} ranks, each {stride} from the next, are not spread evenly over nodes of {node}; "
            "choose sizes that divide a node, or are multiples of one"
        )


def expected_maximum(count: int) -> float:
    """Returns E(N) of N standard normal numbers: the integral of 1 − Φ(x)^N above 0, less that of Φ(x)^N below."""
    from scipy.special import log_ndtr

    x = np.linspace(0.0, 12.0, 6001)
    above, below = -np.expm1(count * log_ndtr(x)), np.exp(count * log_ndtr(-x))
    return float(np.trapezoid(above - below, x))


def slowest_of(ranks: int, spread: float) -> float:
    """Returns the time of the slowest of so many ranks, over the mean."""
    return 1.0 + spread * expected_maximum(ranks)


def spread_of(timelines: Sequence[Timeline]) -> float:
    """Returns σ of computation, as measured: the standard deviation over ranks of a task's duration as a share of its
    mean; of all tasks the root of the mean square, in which longer tasks count for more.

    `timelines`: of one step, a rank each. Raises `ConfigError` for fewer than two, or nothing that all of them compute.
    """
    durations: dict[tuple[object, ...], list[float]] = {}
    for timeline in timelines:
        before: Counter[tuple[object, ...]] = Counter()  # what a layer does more than once
        for span in timeline.on("compute"):
            task = (span.kind, span.chunk, span.layer, span.phase)
            durations.setdefault((*task, before[task]), []).append(span.duration_s)
            before[task] += 1
    of_all = [of for of in durations.values() if len(of) == len(timelines) > 1 and sum(of) > 0]
    if not of_all:
        raise ConfigError("spread: give the timelines of one step of at least two ranks that compute the same tasks")
    means = [statistics.mean(of) for of in of_all]
    squares = (statistics.variance(of, mean) / mean for of, mean in zip(of_all, means, strict=True))
    return math.sqrt(sum(squares) / sum(means))


def _costs_of(words: str, contention: float, units: float, printed: Sequence[tuple[float, float]]) -> CostModel:
    """Returns the costs of a cluster of the FSMoE paper, by the coefficients (α, β) of its Fig. 5 in the order of
    `LINES`. `units`: how many of the printed ones are in a byte."""
    # As printed they are in milliseconds; in n of fp32 elements on testbed A and of bytes on B; for matrix products n
    # is 4·MAC = 2·FLOP on both. The exponents of A's all-to-all and all-gather are swapped in print: these units and
    # this swap give the times of the paper's Table 2. The contention is no number of the paper's: with it, simulation
    # meets Table 5.
    lines = {
        name: Line(alpha_ms * 1e-3, beta_ms * 1e-3 * (2.0 if name == "gemm" else units))
        for name, (alpha_ms, beta_ms) in zip(LINES, printed, strict=False)
    }
    return CostModel(lines, Contention.between_links(contention), words)


#: Machines of the FSMoE paper by letter, their lines in seconds for each byte and FLOP.
TESTBEDS = {
    "A": Testbed(
        _costs_of(
            "FSMoE testbed A: 6 nodes, RTX A6000, NVLink and PCIe 4.0, 200 Gb/s",
            0.65,
            0.25,
            ((2.87e-1, 2.21e-6), (3.37e-1, 2.32e-7), (3.95e-1, 2.34e-7), (5.11e-1, 4.95e-6), (4.26e-2, 2.29e-11)),
        ),
        nodes=6,
        gpus=8,
        seq_lens=(512, 1024, 2048),
    ),
    "B": Testbed(
        _costs_of(
            "FSMoE testbed B: 8 nodes, RTX 2080 Ti, PCIe 3.0, 100 Gb/s",
            0.75,
            1.0,
            ((1.75e-1, 3.06e-7), (3.20e-2, 1.68e-7), (3.91e-2, 1.67e-7), (8.37e-2, 5.99e-7), (9.24e-2, 4.42e-11)),
        ),
        nodes=8,
        gpus=4,
        seq_lens=(256, 512, 1024),
    ),
}


def _published(name: str, words: str, rate: float, memory: float) -> Machine:
    """Returns a testbed of the FSMoE paper: links by which its own sizes give its lines of all-to-all and all-gather
    back. `rate`, `memory`: of its one network card and of a GPU's memory, in bytes/s."""
    # All-reduce is left to the model, which can be held against the paper's.
    testbed, paper = TESTBEDS[name], f"FSMoE Fig. 5, testbed {name}"
    line, (nodes, gpus) = testbed.costs.line, (testbed.nodes, testbed.gpus)
    across, inside = line("all-to-all/ep"), line("all-gather/esp")
    meets = "by it simulation meets the paper's Table 5"
    carried, sheet = (nodes - 1) / nodes / across.beta_s * gpus, "NVIDIA's data sheet of the GPU"
    return Machine(
        words,
        gpus,
        "fp32",
        flops=Known(line("gemm").per_s, f"{paper}: products"),
        product_start_s=Known(line("gemm").alpha_s, f"{paper}: products"),
        copied_bytes_per_s=Known(0.9 * memory / 2, f"{sheet}: {memory / 1e9:g} GB/s; {_H100_SHARE}, 90%", True),
        start_s=Known(0.0, "no part of the paper's lines by itself: all of it is in the messages", True),
        intra=Link(
            Known(inside.alpha_s / (gpus - 1), f"{paper}: all-gather"),
            Known((gpus - 1) / gpus / inside.beta_s, f"{paper}: all-gather"),
            Known(1.0, f"{paper}: what was reached"),
        ),
        inter=Link(
            Known(across.alpha_s / (nodes - 1), f"{paper}: all-to-all"),
            Known(rate, "FSMoE Table 3"),
            Known(carried / rate, f"{paper}: all-to-all"),
        ),
        cards=Known(1, "FSMoE Table 3"),
        contention=Known(testbed.costs.contention.share("intra", "inter"), meets, True),
        computes_beside=Known(1.0, meets, True),
        links_beside=Known(1.0, meets, True),
    )


#: Every machine by its name.
MACHINES = {
    "dgx-h100": Machine(
        "DGX H100, 8 GPUs a node, InfiniBand NDR",
        8,
        "bf16",
        flops=Known(7.94e14, f"{_HERE}: 8192³ product"),
        copied_bytes_per_s=Known(3.03e12 / 2, f"{_HERE}: large copy, 3.03 TB/s read and written"),
        intra=Link(
            _NVLINK_S,
            Known(450e9, "NVIDIA H100 data sheet: NVLink 900 GB/s both ways"),
            Known(0.77, f"{_DEEPEP}: 153 GB/s of the 200 that its NVLink has one way; not measured on an H100", True),
        ),
        inter=Link(_NETWORK_S, Known(50e9, "NVIDIA DGX H100 user guide: ConnectX-7, 400 Gb/s"), _NETWORK_REACHED),
        cards=Known(8, "NVIDIA DGX H100 user guide: eight for the compute fabric"),
    ),
    "gb200-nvl72": Machine(
        "GB200 NVL72, 64 of a rack's 72 GPUs, InfiniBand NDR",  # experts come in powers of two
        64,
        "bf16",
        flops=Known(0.8 * 2.5e15, f"NVIDIA GB200 data sheet: 2.5 PFLOP/s dense; {_H100_SHARE}, 80%", True),
        copied_bytes_per_s=Known(0.9 * 8e12 / 2, f"NVIDIA GB200 data sheet: 8 TB/s; {_H100_SHARE}, 90%", True),
        intra=Link(
            _NVLINK_S,
            Known(900e9, "NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s both ways"),
            Known(0.77, f"{_DEEPEP}; not measured on a GB200", True),
        ),
        inter=Link(_NETWORK_S, Known(50e9, "NVIDIA DGX GB200 user guide: ConnectX-7, 400 Gb/s"), _NETWORK_REACHED),
        # Of four GPUs a tray; its two BlueField-3 are for storage and management.
        cards=Known(
            64, "NVIDIA DGX GB200 user guide, compute trays: 4 ConnectX-7 single port 400G for the cluster network"
        ),
    ),
    "p4d-a100": Machine(
        "EC2 p4d.24xlarge, 8 A100 (40 GB) a node, Ethernet (EFA)",
        8,
        "bf16",
        flops=Known(0.8 * 3.12e14, f"NVIDIA A100 data sheet: 312 TFLOP/s dense; {_H100_SHARE}, 80%", True),
        copied_bytes_per_s=Known(0.9 * 1.555e12 / 2, f"NVIDIA A100 data sheet: 1,555 GB/s; {_H100_SHARE}, 90%", True),
        intra=Link(
            _NVLINK_S,
            Known(300e9, "NVIDIA A100 data sheet: NVLink 600 GB/s both ways"),
            Known(0.78, f"{_NCCL}: 235 GB/s at most on GPUs of this generation"),
        ),
        inter=Link(
            Known(5.4e-6, "twice what NCCL has for InfiniBand", True),
            Known(12.5e9, "AWS, P4d instances: 400 Gb/s, over four cards"),
            Known(0.86, f"{_DEEPEP}; not measured over EFA", True),
        ),
        cards=Known(4, "AWS EC2 user guide, EFA: p4d.24xlarge has up to four, one on each network card"),
    ),
    "fsmoe-a": _published("A", "FSMoE testbed A: 8 RTX A6000 a node, 200 Gb/s", 25e9, 768e9),
    "fsmoe-b": _published("B", "FSMoE testbed B: 4 RTX 2080 Ti a node, 100 Gb/s", 12.5e9, 616e9),
}


def scale_of(machine: Machine) -> list[int]:
    """Return the numbers of ranks of a scaling study: 8 to 4,096, doubled each time, in whole nodes."""
    found = (8 * 2**power for power in range(10))
    return [ranks for ranks in found if ranks <= machine.ranks_per_node or ranks % machine.ranks_per_node == 0]
