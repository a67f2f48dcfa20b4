"""Throughputs that others have published for the same layers, TFLOP/s forward and backward, useful FLOP only.

Other GPUs, or other software on the same one: a place to compare with, not a measurement beside ours. An H100 has an
H200's tensor cores and two thirds of its memory's bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """By shape: (forward, backward)."""

    gpu: str
    source: str
    tflops: dict[str, tuple[float, float]]


PUBLISHED = {
    "SonicMoE": Published(
        "H100",
        "Guo et al., SonicMoE (arXiv 2512.14080), its benchmark of MoE layers",
        {
            "1.4B-H256": (338, 366),
            "7B-H256": (364, 405),
            "7B-H1024": (467, 467),
            "30B-H256": (428, 460),
            "30B-H1024": (552, 554),
            "120B-H512": (518, 527),
        },
    ),
    "ScatterMoE": Published(
        "H100",
        "the same table",
        {
            "1.4B-H256": (182, 205),
            "7B-H256": (205, 212),
            "7B-H1024": (265, 280),
            "30B-H256": (261, 238),
            "30B-H1024": (368, 340),
            "120B-H512": (336, 315),
        },
    ),
    "Liger CuTe": Published(
        "H200",
        "Liger-Kernel's CuTe kernels, made for expert parallelism, on one GPU (second-hand)",
        {"Qwen3-30B": (345, 194), "Mixtral": (613, 452)},
    ),
}
