"""The two clusters of the FSMoE paper as machines: coefficients of its Fig. 5, in seconds for each byte and FLOP.

As printed they are in milliseconds; in n of fp32 elements on testbed A and of bytes on B; for matrix products n is
4·MAC = 2·FLOP on both. The exponents of A's all-to-all and all-gather are swapped in print: these units and this swap
give the times of the paper's Table 2. The contention is no number of the paper's: with it, simulation meets Table 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusedmoe.schedule.cost import CostModel, Line


@dataclass(frozen=True)
class Testbed:
    """A cluster: `nodes` of `gpus` each as the paper's groups see them (N_EP and N_ESP = N_MP)."""

    __test__ = False  # no test case, whatever its name

    costs: CostModel
    nodes: int
    gpus: int
    seq_lens: tuple[int, ...]


def _line(alpha_ms: float, beta_ms: float, units: float) -> Line:
    """`units`: how many of the printed units are in one byte or FLOP."""
    return Line(alpha_ms * 1e-3, beta_ms * 1e-3 * units)


_ELEMENTS = 0.25  # of four bytes
_BYTES = 1.0
_FOUR_MAC = 2.0  # a MAC is two FLOP

TESTBEDS = {
    "A": Testbed(
        CostModel(
            {
                "all-to-all/ep": _line(2.87e-1, 2.21e-6, _ELEMENTS),
                "all-gather/esp": _line(3.37e-1, 2.32e-7, _ELEMENTS),
                "reduce-scatter/esp": _line(3.95e-1, 2.34e-7, _ELEMENTS),
                "all-reduce/dp": _line(5.11e-1, 4.95e-6, _ELEMENTS),
                "gemm": _line(4.26e-2, 2.29e-11, _FOUR_MAC),
            },
            contention=0.65,
            machine="FSMoE testbed A: 6 nodes, RTX A6000, NVLink and PCIe 4.0, 200 Gb/s",
        ),
        nodes=6,
        gpus=8,
        seq_lens=(512, 1024, 2048),
    ),
    "B": Testbed(
        CostModel(
            {
                "all-to-all/ep": _line(1.75e-1, 3.06e-7, _BYTES),
                "all-gather/esp": _line(3.20e-2, 1.68e-7, _BYTES),
                "reduce-scatter/esp": _line(3.91e-2, 1.67e-7, _BYTES),
                "all-reduce/dp": _line(8.37e-2, 5.99e-7, _BYTES),
                "gemm": _line(9.24e-2, 4.42e-11, _FOUR_MAC),
            },
            contention=0.75,
            machine="FSMoE testbed B: 8 nodes, RTX 2080 Ti, PCIe 3.0, 100 Gb/s",
        ),
        nodes=8,
        gpus=4,
        seq_lens=(256, 512, 1024),
    ),
}
