"""Seconds of a kernel. What is fitted to measurements and what is assumed stands here, and nowhere else.

The Triton form takes, for each tile and one after the other, its steps, and to read and write what the end of a tile
needs at its share of the memory's rate: a program that stores does not multiply, and it is alone on its multiprocessor.
That fits what an H100 took (`python -m bench.forecast --check`).

The Gluon form has never run. Its stores are on their way while the next tile is multiplied, so that memory's rate
bounds the whole and no single tile; a tile's end costs what the multiprocessor itself does then: the result goes
through shared memory and out, activations are computed. Loads of the next tile begin meanwhile, and its products too
where two groups of warps take tiles by turns.

Clusters of two programs that share what they load would take traffic off the L2 cache. By this model they do not pay:
tiles of 128x256 are not bound by it.
"""

from __future__ import annotations

import math

from bench.forecast.machine import Gpu
from bench.forecast.work import Tile, Work
from bench.gpu.costs import Cost
from fusedmoe.kernels.triton.grouped.configs import HopperConfig

_HALF, _FULL = 2, 4  # bytes of bfloat16 and float32
# Fitted to the Triton form on an H100: how much longer than the tensor cores need a step takes, and seconds a tile
# takes besides. Its tiles are those that it is fastest in at most of the shapes.
TRITON_TILE = Tile(128, 256, 64)
STEP_FACTOR = {"up": 1.065, "down": 1.026, "dhidden": 1.03, "dinput": 1.026, "dW1": 1.36, "dW2": 1.48}
TILE_S = {"dhidden": 7e-6}
# Fitted, too: sums and copies of rows take their share of the memory's rate, sorting a start and a time for each pair.
MEMORY_SHARE = 0.96
ORDER_S, ORDER_PAIR_S = 38e-6, 0.295e-9

# Assumed of the Gluon form. Handing stages over costs of a step:
_RING_FACTOR = 1.02
# Seconds from the last product to the end of a tile and to the first of the next, and of a launch with its first loads.
_TURN_S, _START_S = 0.3e-6, 4e-6
# Of a multiprocessor in each cycle: bytes of shared memory, bytes stored, and operations such as exp and division.
_SHARED_BYTES, _STORED_BYTES, _SPECIAL = 128, 64, 16
_SPECIAL_OF_ACTIVATION = 2


def triton_s(of: Work, cost: Cost, gpu: Gpu) -> float:
    """Of the Triton form. `cost`: what it has to do at the least."""
    share = gpu.bytes_per_s / gpu.multiprocessors
    end = TRITON_TILE.rows * TRITON_TILE.columns * of.epilogue_bytes / share
    step = STEP_FACTOR[of.operation] * _multiply_s(TRITON_TILE, gpu)
    tile = of.steps(TRITON_TILE) * step + end + TILE_S.get(of.operation, 0.0)
    return max(_waves(of, TRITON_TILE, gpu) * tile, cost.bytes / gpu.bytes_per_s)


def gluon_s(of: Work, cost: Cost, config: HopperConfig, gpu: Gpu) -> float:
    """Of the Gluon form in one of its candidates."""
    tile = Tile(config.bm, config.bn, config.bk)
    loaded = (tile.rows + tile.columns) * tile.depth * _HALF * gpu.multiprocessors
    step = _RING_FACTOR * max(_multiply_s(tile, gpu), loaded / gpu.cache_bytes_per_s)
    steps, end = of.steps(tile) * step, _end_s(of, tile, gpu) + _TURN_S
    if config.pingpong:
        # Two tiles in the time of both products, or of one and its end where that takes longer.
        product = _waves(of, tile, gpu) * max(steps, (steps + end) / 2) + end
    else:
        product = _waves(of, tile, gpu) * (steps + end)
    return max(product + _START_S, cost.bytes / (MEMORY_SHARE * gpu.bytes_per_s))


def other_s(name: str, cost: Cost, pairs: int, gpu: Gpu) -> float:
    """Of a kernel that is no product: the order of rows, or a sum of them. `pairs`: of a token and an expert."""
    if name == "order":
        return ORDER_S + ORDER_PAIR_S * pairs
    return cost.bytes / (MEMORY_SHARE * gpu.bytes_per_s)


def _multiply_s(tile: Tile, gpu: Gpu) -> float:
    """Of a step, by the tensor cores of one multiprocessor."""
    return 2 * tile.rows * tile.columns * tile.depth * gpu.multiprocessors / gpu.flops_per_s


def _waves(of: Work, tile: Tile, gpu: Gpu) -> int:
    """Tiles of the multiprocessor that has most."""
    return math.ceil(of.tiles(tile) / gpu.multiprocessors)


def _end_s(of: Work, tile: Tile, gpu: Gpu) -> float:
    elements = tile.rows * tile.columns
    # Into shared memory and out of it again, narrowed before where nothing is to be computed.
    shared = 2 * elements * (_FULL if of.activation else _HALF) / _SHARED_BYTES
    stored = elements * of.epilogue_bytes / _STORED_BYTES
    special = elements / 2 * _SPECIAL_OF_ACTIVATION / _SPECIAL if of.activation else 0.0
    return (shared + stored + special) / gpu.clock_hz
