"""Cost models of named machines for any number of ranks, from data sheets and published measurements.

    costs = MACHINES["dgx-h100"].costs(ranks=1024, ep=64, esp=1, mp=8)

Links have two levels: intra-node (index i), and inter-node (index x), where a rank's bandwidth B_x is its share of the
node's network cards, cards · rate / ranks per node, because all ranks send at once. A group of p = q·m ranks has q
ranks in each of m nodes. start is the start-up time of a collective, l the time of a further message, B the bandwidth.
n is the unit of `cost.LINES`: for an all-to-all the bytes of a rank's rows, otherwise all bytes gathered or reduced.

    all-to-all      start + (q−1)·l_i + (p−q)·l_x  +  n · max{(q−1)/(p·B_i), (p−q)/(p·B_x)}
    in two levels   2·start + (q−1)·l_i + (m−1)·l_x  +  n · {c·(m−1)/(m·B_x) + (q−1)/(q·B_i)}
    all-gather      start + (p−1)·l_i              +  n · (p−1)/(p·B_i)             and reduce-scatter, in one node
    all-reduce      start + 2(q−1)·l_i + 2⌈log2 m⌉·l_x  +  n · max{2(q−1)/(q·B_i), 2(m−1)/(m·q·B_x)}
    product, copy   start + n/rate, both as on the slowest of all ranks

An all-to-all sends one message per peer, on both levels at once. With two levels, ranks of equal local index exchange
between nodes first, c rows for each row of the direct exchange, and forward inside the node. The ring is that of
Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication Operations in MPICH", 2005). An all-reduce
pipelines a ring reduce-scatter inside each node, which leaves 1/q of the sum on each rank, a full-bandwidth tree across
nodes (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009) and a
ring all-gather. As in NCCL, the slowest one determines the time.

A collective waits for the slowest rank. With a relative spread σ of compute times over ranks, compute tasks take 1 +
σ·E(N) of the mean, with E(N) the expected maximum of N standard normal numbers.

Not modelled: networks with less than full bisection bandwidth, messages of different sizes, other traffic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.schedule.timeline import Timeline


@dataclass(frozen=True)
class Testbed:
    """A cluster of `nodes` with `gpus` each; in the FSMoE paper N_EP nodes and N_ESP = N_MP GPUs."""

    __test__ = False  # not a pytest class

    costs: CostModel
    nodes: int
    gpus: int
    seq_lens: tuple[int, ...]


class SourcedValue(NamedTuple):
    """A value and its source.

    `estimate`: the source neither measures nor specifies it. `bounds`: lowest and highest published value, if known.
    """

    value: float
    source: str
    estimate: bool = False
    bounds: tuple[float, float] | None = None


_NCCL_SOURCE = "NCCL, src/graph/tuning.cc"
_DEEPEP_SOURCE = "DeepEP README, normal kernels on H800"
_OWN_MEASUREMENTS = "bench/results, H100 80GB HBM3"
_H100_SHARE_SOURCE = "the fraction of its data sheet that an H100 reaches"

_COLLECTIVE_START_S = SourcedValue(8.4e-6, f"{_NCCL_SOURCE}: a ring's base latency")
_NVLINK_MESSAGE_S = SourcedValue(
    0.6e-6, f"{_NCCL_SOURCE}: a step over NVLink, 0.47–0.6 µs by version", bounds=(0.47e-6, 0.6e-6)
)
_NETWORK_MESSAGE_S = SourcedValue(2.7e-6, f"{_NCCL_SOURCE}: a step over the network")
_KERNEL_LAUNCH_S = SourcedValue(5e-6, "a kernel's launch and end", True)
_LINK_CONTENTION = SourcedValue(0.9, "cards and NVLink share a GPU's memory and copy engines only", True)
# Kernels of collectives use multiprocessors and memory bandwidth. Bounds: with NCCL on two H100s, a matrix product of
# 1.18 ms took 2.08 ms during a collective; with 16 of 132 multiprocessors of an H200 held by another kernel, Triton's
# grouped products took 1.1 times as long.
_COMPUTE_SPEED_DURING_TRANSFER = SourcedValue(
    1 / 1.189,
    "arXiv 2507.03114, H100, A100, MI250 and MI210: slowed by 18.9% on average",
    True,
    (1.18 / 2.08, 1 / 1.1),
)
_LINK_SPEED_DURING_COMPUTE = SourcedValue(
    1.0, "kernels of collectives keep their multiprocessors, and links are slower than memory", True
)
_COMPUTE_TIME_SPREAD = SourcedValue(
    0.02, "SC22, Sinha et al.: GPUs of one kind vary by 8%, taken as four standard deviations", True
)
# Bounds: 40 to 47 of 50 GB/s per GPU, over InfiniBand or RoCE.
_NETWORK_EFFICIENCY = SourcedValue(0.86, f"{_DEEPEP_SOURCE}: 43 of 50 GB/s between two nodes", bounds=(0.8, 0.94))

#: Largest relative error of predictions with a machine (docs/results.md).
PREDICTION_ERROR = SourcedValue(0.12, "steps of 2 and 4 ranks on emulated links, published results on H100s")


@dataclass(frozen=True)
class Link:
    message_s: SourcedValue  # time of a further message
    bytes_per_s: SourcedValue  # in one direction
    reached: SourcedValue  # fraction of `bytes_per_s` that collectives reach

    @property
    def speed(self) -> float:
        return self.bytes_per_s.value * self.reached.value


@dataclass(frozen=True)
class Machine:
    """Nodes of identical GPUs, one rank per GPU."""

    description: str
    ranks_per_node: int
    dtype: str  # of `flops`, as in the settings
    _: KW_ONLY
    memory_bytes: SourcedValue | None = None  # of a GPU; None: unknown
    flops: SourcedValue  # FLOP/s of a matrix product
    product_start_s: SourcedValue = _KERNEL_LAUNCH_S  # also of a copy
    copied_bytes_per_s: SourcedValue  # bytes of permuted rows per second, each read and written
    start_s: SourcedValue = _COLLECTIVE_START_S  # start-up time of a collective
    intra: Link  # per rank
    inter: Link  # per network card
    cards: SourcedValue  # network cards per node
    contention: SourcedValue = _LINK_CONTENTION  # fraction of its speed that a link keeps while both kinds are in use
    computes_beside: SourcedValue = (
        _COMPUTE_SPEED_DURING_TRANSFER  # fraction that computation keeps while a link is in use
    )
    links_beside: SourcedValue = _LINK_SPEED_DURING_COMPUTE  # fraction that a link keeps during computation
    spread: SourcedValue = _COMPUTE_TIME_SPREAD  # of compute time over ranks: standard deviation / mean

    def figures(self) -> Iterator[tuple[str, SourcedValue]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, SourcedValue):
                yield field.name, value
            elif isinstance(value, Link):
                yield from ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in fields(value))

    def node(self, ranks: int) -> int:
        """Return the ranks per node of a job. Raises `ConfigError` if its ranks do not fill nodes."""
        if ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            raise ConfigError(f"{ranks} ranks do not fill nodes of {self.ranks_per_node}; start a multiple of it")
        return min(ranks, self.ranks_per_node)

    def with_values(
        self,
        *,
        ranks_per_node: int | None = None,
        cards: int | None = None,
        card_bytes_per_s: float | None = None,
        spread: float | None = None,
    ) -> Machine:
        """Return the machine with the given values in place of its own; None keeps a value.

        Args:
            cards: network cards per node; None: as many per rank as this machine has.
            card_bytes_per_s: line rate of a network card in one direction; collectives reach `inter.reached` of it.
            spread: relative spread σ of compute time over ranks (`measured_spread`).
        Raises:
            ConfigError: a value is not positive. `costs` checks the spread.
        """
        gbit_s = None if card_bytes_per_s is None else card_bytes_per_s * 8e-9
        numbers = {"ranks per node": ranks_per_node, "network cards per node": cards, "Gbit/s per card": gbit_s}
        given = {name: number for name, number in numbers.items() if number is not None}
        for name, number in given.items():
            if not 0 < number < math.inf:
                raise ConfigError(f"{name} = {number:g} must be a finite number > 0")
        inter = self.inter
        if card_bytes_per_s is not None:
            inter = replace(inter, bytes_per_s=SourcedValue(card_bytes_per_s, "as given"))
        return replace(
            self,
            description=", ".join([self.description, *(f"with {number:g} {name}" for name, number in given.items())]),
            ranks_per_node=self.ranks_per_node if ranks_per_node is None else ranks_per_node,
            cards=self._cards_per_node(ranks_per_node) if cards is None else SourcedValue(cards, "as given"),
            inter=inter,
            spread=self.spread if spread is None else SourcedValue(spread, "as given"),
        )

    def _cards_per_node(self, ranks_per_node: int | None) -> SourcedValue:
        """Return the cards of a node with as many cards per rank as this machine has."""
        if ranks_per_node is None or ranks_per_node == self.ranks_per_node:
            return self.cards
        number = self.cards.value * ranks_per_node / self.ranks_per_node
        return self.cards._replace(value=number, source=f"as many per rank as: {self.cards.source}")

    def at_bounds(self, is_fast: bool) -> Machine:
        """Return the machine with each figure at the slow or the fast end of its `bounds`."""

        def moved(of: Machine | Link) -> dict[str, Any]:
            return {field.name: moved_value(field.name, getattr(of, field.name)) for field in fields(of)}

        def moved_value(name: str, value: Any) -> Any:
            if isinstance(value, Link):
                return Link(**moved(value))
            # The slow end is the longest time, but the smallest speed or share.
            is_movable = isinstance(value, SourcedValue) and value.bounds is not None
            return value._replace(value=value.bounds[is_fast != name.endswith("_s")]) if is_movable else value

        return Machine(**moved(self))

    def costs(
        self, ranks: int, ep: int = 1, esp: int = 1, mp: int = 1, *, crossing_share: float | None = None
    ) -> CostModel:
        """Return the cost model of a job with these axis sizes of `Topology`.

        `crossing_share`: two-level dispatch ("2dh"), in which this many rows cross between nodes for each row that
        direct dispatch would send; None: direct.

        Raises `ConfigError` if axes do not divide the ranks, groups are not spread evenly over nodes, an expert is
        split over several nodes, or the spread is not a number >= 0.
        """
        node = self.node(ranks)
        for what, axes in (("ep · esp", (ep, esp)), ("mp", (mp,))):
            need = math.prod(axes)
            if min(ranks, *axes) < 1 or ranks % need:
                raise ConfigError(f"{what} = {need} does not divide the {ranks} ranks")
        if node % esp:
            raise ConfigError(f"esp = {esp}: must divide the {node} ranks of a node")
        sigma = self.spread.value
        if not 0 <= sigma < math.inf:
            raise ConfigError(f"spread = {sigma} must be a finite number >= 0")
        slowest = slowest_rank_factor(ranks, sigma)
        lines = {
            "gemm": Line(self.product_start_s.value * slowest, slowest / self.flops.value),
            "copy": Line(self.product_start_s.value * slowest, slowest / self.copied_bytes_per_s.value),
        }
        if ep > 1:
            q = self._ranks_per_node("ep", ep, esp, node)
            lines["all-to-all/ep"] = self._all_to_all(ep, q, node, crossing_share if 1 < q < ep else None)
        if esp > 1:
            alpha_s = self.start_s.value + (esp - 1) * self.intra.message_s.value
            ring = Line(alpha_s, (esp - 1) / esp / self.intra.speed)
            lines |= {"all-gather/esp": ring, "reduce-scatter/esp": ring}
        # MP-sharded parameters may have no replica, but all ranks replicate the other parameters.
        if ranks > 1:
            lines["all-reduce/dp"] = self.all_reduce(ranks, *((ranks // mp, mp) if ranks > mp else (ranks, 1)))
        computes, links, link = self.computes_beside.value, self.links_beside.value, self.contention.value
        contention = Contention(computes, computes, links, link, links, link)
        return CostModel(lines, contention, f"{self.description}; modelled, not measured")

    def _all_to_all(self, p: int, q: int, node: int, crossing_share: float | None) -> Line:
        inside_s, across_s, m = self.intra.message_s.value, self.inter.message_s.value, p // q
        network = self._network_bytes_per_s(node)
        if crossing_share is None:
            alpha_s = self.start_s.value + (q - 1) * inside_s + (p - q) * across_s
            return Line(alpha_s, max((q - 1) / p / self.intra.speed, (p - q) / p / network))
        alpha_s = 2 * self.start_s.value + (q - 1) * inside_s + (m - 1) * across_s
        return Line(alpha_s, crossing_share * (m - 1) / m / network + (q - 1) / q / self.intra.speed)

    def all_reduce(self, ranks: int, size: int, stride: int) -> Line:
        """Return the cost of concurrent all-reduces over groups of `size` ranks with stride `stride`.

        Raises `ConfigError` if groups are not spread evenly over nodes.
        """
        node = self.node(ranks)
        q = self._ranks_per_node("data parallel", size, stride, node)
        m = size // q
        alpha_s = self.start_s.value + 2 * (q - 1) * self.intra.message_s.value
        alpha_s += 2 * math.ceil(math.log2(m)) * self.inter.message_s.value
        inside_s = 2 * (q - 1) / q / self.intra.speed
        return Line(alpha_s, max(inside_s, 2 * (m - 1) / m / q / self._network_bytes_per_s(node)))

    def _network_bytes_per_s(self, node: int) -> float:
        return self.cards.value * self.inter.speed / node

    @staticmethod
    def _ranks_per_node(group: str, size: int, stride: int, node: int) -> int:
        if node % (size * stride) == 0:
            return size
        if stride % node == 0:
            return 1
        if node % stride == 0 and size * stride % node == 0:
            return node // stride
        raise ConfigError(
            f"{group} groups of {size} ranks with stride {stride} are not spread evenly over nodes of {node} ranks; "
            "choose sizes that divide a node or are multiples of it"
        )


def expected_maximum(count: int) -> float:
    """Return E(N) of N standard normal numbers: ∫(1 − Φ(x)^N) dx over x > 0 minus ∫Φ(x)^N dx over x < 0."""
    from scipy.special import log_ndtr

    x = np.linspace(0.0, 12.0, 6001)
    above, below = -np.expm1(count * log_ndtr(x)), np.exp(count * log_ndtr(-x))
    return float(np.trapezoid(above - below, x))


def slowest_rank_factor(ranks: int, spread: float) -> float:
    return 1.0 + spread * expected_maximum(ranks)


def measured_spread(timelines: Sequence[Timeline]) -> float:
    """Return the spread σ of compute time over ranks, from the timelines of one step, one per rank.

    σ² is the mean over tasks, weighted by mean duration, of (standard deviation over ranks / mean)². Raises
    `ConfigError` for fewer than two timelines, or without common compute tasks.
    """
    durations: dict[tuple[object, ...], list[float]] = {}
    for timeline in timelines:
        for task, span in timeline.by_task().items():
            if "compute" in span.resources:
                durations.setdefault(task, []).append(span.duration_s)
    of_all = [of for of in durations.values() if len(of) == len(timelines) > 1 and sum(of) > 0]
    if not of_all:
        raise ConfigError("spread: needs timelines of one step on at least two ranks with the same compute tasks")
    means = [statistics.mean(of) for of in of_all]
    squares = (statistics.variance(of, mean) / mean for of, mean in zip(of_all, means, strict=True))
    return math.sqrt(sum(squares) / sum(means))


def _testbed_costs(words: str, contention: float, units: float, printed: Sequence[tuple[float, float]]) -> CostModel:
    """Return an FSMoE testbed's cost model from `printed`, the (α, β) of Fig. 5 in the order of `LINES`.

    `units`: units of the figure's message sizes per byte (fp32 elements: 1/4).
    """
    # Printed in milliseconds, with n in fp32 elements on testbed A and in bytes on B; for matrix products n is 4·MAC =
    # 2·FLOP. The exponents of A's all-to-all and all-gather are swapped in print. These units and this swap reproduce
    # the paper's Table 2. The paper has no contention; this one was fitted to Table 5.
    lines = {
        name: Line(alpha_ms * 1e-3, beta_ms * 1e-3 * (2.0 if name == "gemm" else units))
        for name, (alpha_ms, beta_ms) in zip(LINES, printed, strict=False)
    }
    return CostModel(lines, Contention.between_links(contention), words)


#: Testbeds of the FSMoE paper by letter. Coefficients are in seconds per byte or FLOP.
TESTBEDS = {
    "A": Testbed(
        _testbed_costs(
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
        _testbed_costs(
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


def _testbed_machine(name: str, words: str, rate: float, memory: float, memory_bytes: float) -> Machine:
    """Return a machine whose links reproduce the paper's all-to-all and all-gather costs on an FSMoE testbed.

    `rate`, `memory`: bandwidths of its network card and GPU memory in bytes/s. `memory_bytes`: of a GPU.
    """
    # All-reduce costs come from the model, to compare them with the paper's.
    testbed, paper = TESTBEDS[name], f"FSMoE Fig. 5, testbed {name}"
    line, (nodes, gpus) = testbed.costs.line, (testbed.nodes, testbed.gpus)
    across, inside = line("all-to-all/ep"), line("all-gather/esp")
    meets = "with it, simulation matches the paper's Table 5"
    carried, sheet = (nodes - 1) / nodes / across.beta_s * gpus, "NVIDIA's data sheet of the GPU"
    return Machine(
        words,
        gpus,
        "fp32",
        memory_bytes=SourcedValue(memory_bytes, sheet),
        flops=SourcedValue(line("gemm").per_s, f"{paper}: products"),
        product_start_s=SourcedValue(line("gemm").alpha_s, f"{paper}: products"),
        copied_bytes_per_s=SourcedValue(
            0.9 * memory / 2, f"{sheet}: {memory / 1e9:g} GB/s; {_H100_SHARE_SOURCE}, 90%", True
        ),
        start_s=SourcedValue(0.0, "not separate in the paper's costs: included in the messages", True),
        intra=Link(
            SourcedValue(inside.alpha_s / (gpus - 1), f"{paper}: all-gather"),
            SourcedValue((gpus - 1) / gpus / inside.beta_s, f"{paper}: all-gather"),
            SourcedValue(1.0, f"{paper}: bandwidth reached"),
        ),
        inter=Link(
            SourcedValue(across.alpha_s / (nodes - 1), f"{paper}: all-to-all"),
            SourcedValue(rate, "FSMoE Table 3"),
            SourcedValue(carried / rate, f"{paper}: all-to-all"),
        ),
        cards=SourcedValue(1, "FSMoE Table 3"),
        contention=SourcedValue(testbed.costs.contention.speed_fraction("intra", "inter"), meets, True),
        computes_beside=SourcedValue(1.0, meets, True),
        links_beside=SourcedValue(1.0, meets, True),
    )


MACHINES = {
    "dgx-h100": Machine(
        "DGX H100, 8 GPUs per node, InfiniBand NDR",
        8,
        "bf16",
        memory_bytes=SourcedValue(80e9, "NVIDIA H100 data sheet: 80 GB"),
        flops=SourcedValue(
            7.94e14, f"{_OWN_MEASUREMENTS}: 8192³ product", bounds=(6.5e14, 8e14)
        ),  # bounds: grouped products
        copied_bytes_per_s=SourcedValue(3.03e12 / 2, f"{_OWN_MEASUREMENTS}: large copy, 3.03 TB/s read and written"),
        intra=Link(
            _NVLINK_MESSAGE_S,
            SourcedValue(450e9, "NVIDIA H100 data sheet: NVLink 900 GB/s both ways"),
            # Bounds: one-sided stores between two H100s reach 419 of 450 GB/s.
            SourcedValue(
                0.77,
                f"{_DEEPEP_SOURCE}: 153 of 200 GB/s NVLink bandwidth in one direction; not measured on an H100",
                True,
                (0.77, 0.93),
            ),
        ),
        inter=Link(
            _NETWORK_MESSAGE_S,
            SourcedValue(50e9, "NVIDIA DGX H100 user guide: ConnectX-7, 400 Gb/s"),
            _NETWORK_EFFICIENCY,
        ),
        cards=SourcedValue(8, "NVIDIA DGX H100 user guide: eight for the compute fabric"),
    ),
    "gb200-nvl72": Machine(
        "GB200 NVL72, 64 of a rack's 72 GPUs, InfiniBand NDR",  # numbers of experts are powers of two
        64,
        "bf16",
        memory_bytes=SourcedValue(186e9, "NVIDIA GB200 NVL72 data sheet: 13.4 TB on 72 GPUs"),
        flops=SourcedValue(
            0.8 * 2.5e15, f"NVIDIA GB200 data sheet: 2.5 PFLOP/s dense; {_H100_SHARE_SOURCE}, 80%", True
        ),
        copied_bytes_per_s=SourcedValue(
            0.9 * 8e12 / 2, f"NVIDIA GB200 data sheet: 8 TB/s; {_H100_SHARE_SOURCE}, 90%", True
        ),
        intra=Link(
            _NVLINK_MESSAGE_S,
            SourcedValue(900e9, "NVIDIA GB200 NVL72 data sheet: NVLink 1.8 TB/s both ways"),
            SourcedValue(0.77, f"{_DEEPEP_SOURCE}; not measured on a GB200", True),
        ),
        inter=Link(
            _NETWORK_MESSAGE_S,
            SourcedValue(50e9, "NVIDIA DGX GB200 user guide: ConnectX-7, 400 Gb/s"),
            _NETWORK_EFFICIENCY,
        ),
        # Four GPUs per tray; its two BlueField-3 are for storage and management.
        cards=SourcedValue(
            64, "NVIDIA DGX GB200 user guide, compute trays: 4 ConnectX-7 single port 400G for the cluster network"
        ),
    ),
    "p4d-a100": Machine(
        "EC2 p4d.24xlarge, 8 A100 (40 GB) per node, Ethernet (EFA)",
        8,
        "bf16",
        memory_bytes=SourcedValue(40e9, "AWS, P4d instances: 40 GB per A100"),
        flops=SourcedValue(
            0.8 * 3.12e14, f"NVIDIA A100 data sheet: 312 TFLOP/s dense; {_H100_SHARE_SOURCE}, 80%", True
        ),
        copied_bytes_per_s=SourcedValue(
            0.9 * 1.555e12 / 2, f"NVIDIA A100 data sheet: 1,555 GB/s; {_H100_SHARE_SOURCE}, 90%", True
        ),
        intra=Link(
            _NVLINK_MESSAGE_S,
            SourcedValue(300e9, "NVIDIA A100 data sheet: NVLink 600 GB/s both ways"),
            SourcedValue(0.78, f"{_NCCL_SOURCE}: 235 GB/s at most on GPUs of this generation"),
        ),
        inter=Link(
            SourcedValue(5.4e-6, "twice NCCL's value for InfiniBand", True),
            SourcedValue(12.5e9, "AWS, P4d instances: 400 Gb/s, over four cards"),
            SourcedValue(0.86, f"{_DEEPEP_SOURCE}; not measured over EFA", True),
        ),
        cards=SourcedValue(4, "AWS EC2 user guide, EFA: p4d.24xlarge has up to four, one on each network card"),
    ),
    "fsmoe-a": _testbed_machine("A", "FSMoE testbed A: 8 RTX A6000 per node, 200 Gb/s", 25e9, 768e9, 48e9),
    "fsmoe-b": _testbed_machine("B", "FSMoE testbed B: 4 RTX 2080 Ti per node, 100 Gb/s", 12.5e9, 616e9, 11e9),
}


def scaling_ranks(machine: Machine) -> list[int]:
    """Return powers of two from 8 to 4,096 that fill nodes, for a scaling study."""
    found = (8 * 2**power for power in range(10))
    return [ranks for ranks in found if ranks <= machine.ranks_per_node or ranks % machine.ranks_per_node == 0]
