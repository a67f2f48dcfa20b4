"""Kernels that sort rows, cut them into tiles, copy, sum, activate and pack them."""

from __future__ import annotations

from itertools import product

import torch

from fusedmoe.kernels.triton import activation, gather_sum, layout, wire
from fusedmoe.kernels.triton.jit import MAX_REGISTERS
from fusedmoe.kernels.triton.layout import block_sizes, sort_tiles_kernel, tiles_kernel
from tests.kernels.cases import AotCase


def aot_cases() -> list[AotCase]:
    return [*_of_layouts(), *_of_tiles(), *_of_sums(), *_of_values(), *_of_activations(), *_of_wire_formats()]


def _of_layouts() -> list[AotCase]:
    i32, i64 = torch.int32, torch.int64
    cases = []
    sizes = {"tokens": "i32", "positions": "i32", "length": "i32"}
    kinds = [(experts, 8) for experts in (1, 7, 24, 64, 128, 256, 512, 1024, 2048)] + [(128, 1), (128, 16)]
    for (experts, k), ordered in product(kinds, (False, True)):
        padded, options = layout.sizes(experts)
        shared = {"expert_ptr": i64, "order_ptr": i64 if ordered else None, **sizes, "E": experts, "K": k}
        shared |= {"ORDERED": ordered, "EP": padded}
        outputs = {"counts_ptr": i64, "offsets_ptr": i32, "source_ptr": i64, "pair_ptr": i64, "row_ptr": i64}
        place = {**shared, **outputs, "right_ptr": i32, "capacity": "i32", "bound": "i32", **options}
        name = f"E={experts} K={k}{' by priority' if ordered else ''}"
        kind = {
            "quick": (experts, k, ordered) == (128, 8, False),
            "rare": (experts, k) not in ((7, 8), (128, 8), (512, 8)),
        }
        count = {**shared, "count_ptr": i32, "WIDE": layout.WIDE}
        warps = {"num_warps": layout.WARPS}
        cases += [
            AotCase(f"order count {name}", layout.count_kernel, count, {"num_warps": 4}, **kind),
            AotCase(f"order place {name}", layout.place_kernel, {**place, "count_ptr": i32}, warps, **kind),
            AotCase(f"order alone {name}", layout.place_kernel, {**place, "count_ptr": None}, warps, **kind),
        ]
    return cases


def _of_tiles() -> list[AotCase]:
    def case(experts: int, block_rows: int) -> AotCase:
        padded, block = block_sizes(experts)
        arguments = {"offsets_ptr": torch.int32, "tiles_ptr": torch.int32, "used_ptr": torch.int32}
        sizes = {"n_tiles": "i32", "E": experts}
        return AotCase(
            f"tiles E={experts} BM={block_rows}",
            tiles_kernel,
            {**arguments, **sizes, "BM": block_rows, "BT": block, "EP": padded},
            {"num_warps": 4, "maxnreg": MAX_REGISTERS},
            quick=experts == 128,
        )

    tables = {**dict.fromkeys(("tiles_ptr", "ends_ptr", "sorted_ptr"), torch.int32), "source_ptr": torch.int64}
    sizes = {"n_tiles": "i32", "SIGNALS": "i32", "BM": 128, "ROWS": 128, "BT": 16, "BLOCK": 128}
    sort = AotCase("sort tiles", sort_tiles_kernel, {**tables, **sizes}, {"num_warps": 4}, quick=True)
    return [case(experts, 128) for experts in (1, 7, 128, 256, 512, 2048)] + [case(128, 64), case(128, 32), sort]


def _of_sums() -> list[AotCase]:
    half, single, double, long = torch.bfloat16, torch.float32, torch.float64, torch.int64
    cases = []
    for dtype in (half, single, double, torch.uint8, long):
        for dim in (100, 256, 512, 4096):
            block, warps = gather_sum.columns(dim)
            arguments = {
                "x_ptr": dtype,
                "source_ptr": long,
                "kept_ptr": torch.int32,
                "rows_ptr": dtype,
                "M": dim,
                "stride": dim,
                "BLOCK": block,
            }
            name = f"permute {str(dtype)[6:]} M={dim}"
            options, quick, rare = {"num_warps": warps}, (dtype, dim) == (half, 4096), dim != 4096
            cases.append(AotCase(name, gather_sum.gather_rows_kernel, arguments, options, quick=quick, rare=rare))
    sizes = ((100, 1), (100, 3), (256, 8), (512, 2), (4096, 1), (4096, 2), (4096, 8), (4096, 16))
    every_k = tuple((4096, k) for k in range(1, 17))
    for dtype in (half, torch.float16, single, double, long):
        for dim, k in dict.fromkeys(sizes + every_k) if dtype == half else sizes:
            weights = (None, *dict.fromkeys((single, dtype))) if dtype.is_floating_point else (None,)
            for weight in weights:
                block, warps = gather_sum.columns(dim)
                summands = {
                    "rows_ptr": dtype,
                    "row_ptr": long,
                    "weight_ptr": weight,
                    "y_ptr": dtype,
                    "M": dim,
                    "stride": dim,
                    "K": k,
                    "WEIGHTED": weight is not None,
                    "TOTAL": gather_sum.accumulation_dtype(dtype),
                    "BLOCK": block,
                }
                name = f"gather_sum {str(dtype)[6:]} M={dim} K={k}"
                name += "" if weight is None else f" weights {str(weight)[6:]}"
                quick = (dtype, dim, k, weight) == (half, 4096, 8, single)
                rare = (dim, k) not in ((100, 3), (4096, 16)) and not quick
                cases.append(
                    AotCase(name, gather_sum.sum_rows_kernel, summands, {"num_warps": warps}, quick=quick, rare=rare)
                )
    return cases


def _of_values() -> list[AotCase]:
    cases = []
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        bits, quick = str(dtype)[6:], dtype == torch.int32
        value, block = {"value_ptr": dtype, "out_ptr": dtype}, {"BLOCK": gather_sum._VALUES}
        kept = {"kept_ptr": "*i32"}
        take = {**value, **kept, **block, "pair_ptr": torch.int64, "N": "i32"}
        put = {**value, **block, "row_ptr": torch.int64, "pairs": "i32", "stride": "i32"}
        zero = {"value_ptr": dtype, **kept, **block, "N": "i32", "width": "i32"}
        cases += [
            AotCase(f"take_pairs {bits}", gather_sum.take_pairs_kernel, take, {"num_warps": 4}, quick=quick),
            AotCase(f"put_pairs {bits}", gather_sum.put_pairs_kernel, put, {"num_warps": 4}, quick=quick),
            AotCase(f"zero padding {bits}", gather_sum.zero_rows_kernel, zero, {"num_warps": 4}, quick=quick),
        ]
    return cases


def _of_activations() -> list[AotCase]:
    cases = []
    numbers = {"count": "i32", "alpha": "fp32", "limit": "fp32", "BLOCK": activation.BLOCK}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kernels = {
            "": (activation.clamped_swiglu_kernel, ("h_ptr", "a_ptr")),
            " backward": (activation.clamped_swiglu_backward_kernel, ("da_ptr", "h_ptr", "dh_ptr")),
        }
        for which, (kernel, pointers) in kernels.items():
            arguments = {**dict.fromkeys(pointers, dtype), **numbers}
            name, quick = f"clamped swiglu{which} {str(dtype)[6:]}", dtype == torch.bfloat16
            cases.append(AotCase(name, kernel, arguments, {"num_warps": 4}, quick=quick))
    return cases


def _of_wire_formats() -> list[AotCase]:
    cases = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        half, kind = dtype == torch.bfloat16, str(dtype)[6:]
        for dim in (100, 512, 4096, 7168):
            options, blocks = wire.launch_options(dim), wire.num_blocks(dim)
            of_rows = {"x_ptr": dtype, "M": dim, "stride": dim}
            pack = {**of_rows, "blocks": blocks, "out_ptr": torch.uint8, **wire.pack_constants(dim)}
            out = torch.int16 if half else dtype
            unpack = {"packed_ptr": torch.uint8, "out_ptr": out, "M": dim, "blocks": blocks}
            unpack |= {"AS_BF16": half, **wire.block_constants(dim)}
            kernels = (
                ("pack fp8", wire.pack_fp8_kernel, pack),
                ("unpack fp8", wire.unpack_fp8_kernel, unpack),
            )
            for name, kernel, arguments in kernels:
                quick, rare = half and dim == 7168, dim not in (100, 7168)
                cases.append(AotCase(f"{name} {kind} M={dim}", kernel, arguments, options, quick=quick, rare=rare))
    return cases
