"""Kernels that put rows into other ranks' memory, signal, and wait: near peers only, and through the network.

A stand-in kernel serves for timing other operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import returned_rows
from fusedmoe.comm.one_sided.receive_buffers import SLOTS
from fusedmoe.kernels.libraries import nvshmem_bitcode
from fusedmoe.kernels.triton.gather_sum import accumulation_dtype, columns
from fusedmoe.kernels.triton.grouped import autotune
from fusedmoe.kernels.triton.jit import MAX_REGISTERS
from fusedmoe.kernels.triton.layout import block_sizes
from fusedmoe.kernels.triton.one_sided import network, plan, put, receive, remote
from tests.kernels.cases import AotCase


def aot_cases() -> list[AotCase]:
    return [*_of_puts(), *_of_waits(), *_of_signals(), *_of_plans(), _held()]


def _of_puts() -> list[AotCase]:
    i32, i64 = torch.int32, torch.int64
    stop = {"stop_ptr": i64, "record_ptr": i64, "limit_ns": "i64"}
    ends = {"counter_ptr": i32, "num_rows_ptr": i32, "signal_ptr": i64, "epoch_ptr": i64}
    cases = []

    def add(
        name: str,
        kernel: Any,
        arguments: dict[str, Any],
        far: dict[str, Any],
        options: Callable[[bool], dict[str, int]] = lambda nvshmem: {},
        quick: bool = False,
    ) -> None:
        """Add both kinds of cases: near peers only, and through the network."""
        near = {**arguments, **dict.fromkeys(far), "NVSHMEM": False}
        cases.append(AotCase(name, kernel, near, options(False), quick=quick))
        arguments = {**arguments, **far, "NVSHMEM": True}
        cases.append(AotCase(f"{name} nvshmem", kernel, arguments, options(True), libraries=nvshmem_bitcode))

    def always_long(_: bool) -> dict[str, int]:
        return put.launch_options(True)

    common: dict[str, Any] = {"W": 8, "me": "i32", **stop, "INTERPRET": False}

    def sent(dtype: torch.dtype, tile: int, width: int, second: bool = False) -> dict[str, Any]:
        """Arguments of sent rows, except their staging."""
        tables = {"rows_ptr": dtype, "row_table_ptr": i64, "signals_ptr": i64, "signal_table_ptr": i64}
        more = {"x_ptr": dtype, "source_row_ptr": i32, "used_ptr": i32, "credits_ptr": i64, "epoch_ptr": i64}
        found = {**more, **tables, "slot": "i32", "C": 4096, "T": 32, "M": width}
        constants = {"TILE": tile, **put.columns(width, tile)}
        if not second:
            return {**found, **constants}
        return {f"second_{of}": kind for of, kind in found.items()} | {
            f"SECOND_{of}": size for of, size in constants.items()
        }

    nothing = {of: None if of.endswith("ptr") else 0 for of in sent(i32, 1024, 2, True)}
    nothing |= {"second_slot": "i32", "second_staging_ptr": None}
    for dtype, tile, width in (
        *((torch.bfloat16, 128, width) for width in (512, 4096, 7168)),
        *((torch.bfloat16, tile, 4096) for tile in (16, 64)),
        (torch.float16, 128, 4096),
        (torch.float32, 128, 4096),
        (torch.float32, 128, 100),
        (torch.int32, 1024, 2),
    ):
        name = f"{str(dtype)[6:]} {tile}x{width}"
        far = {"staging_ptr": dtype, "pe_ptr": i32, "dummy_ptr": i64}
        quick = name == "bfloat16 128x4096"
        arguments = {**sent(dtype, tile, width), **nothing, **common}
        rows = torch.empty((0, width), dtype=dtype)
        options = always_long if put.has_long_rows_code(rows, tile) else put.launch_options
        add(f"put rows {name}", put.put_rows_kernel, arguments, far, options, quick=quick)
        if tile == 128:
            arguments = {**sent(i32, 1024, 2), "C": 65536, "T": 64, **sent(dtype, tile, width, second=True), **common}
            far_too = {**far, "staging_ptr": i32, "second_staging_ptr": dtype}
            add(
                f"put metadata and rows {name}",
                put.put_rows_kernel,
                arguments,
                far_too,
                always_long,
            )
        if dtype != torch.int32 and tile == 128:
            back = {"x_ptr": dtype, "rows_ptr": i32, "address_ptr": i64, "peer_ptr": i32, **ends, "W": 8, "M": width}
            back |= {"TILE": returned_rows.TILE, **put.columns(width, returned_rows.TILE)}
            far = {"target_ptr": i64, "pe_ptr": i32}
            add(
                f"return rows {str(dtype)[6:]} {width}", returned_rows.return_rows_kernel, back, far, put.launch_options
            )
    credit = {"credits_ptr": i64, "credit_table_ptr": i64, "epoch_ptr": i64, "slot": "i32", "me": "i32"}
    pointers = {"pe_ptr": i32, "dummy_ptr": i64}
    for count in (1, 2, 3):
        for number, name in enumerate(("second", "third"), 2):
            pointer = i64 if number <= count else None
            credit |= dict.fromkeys((f"{name}_{of}_ptr" for of in ("credits", "table", "epoch")), pointer)
            credit |= {f"{name}_slot": "i32"}
        for told in (None, i64):
            heard = dict.fromkeys(("received_ptr", "stop_ptr", "record_ptr"), told)
            name = f"credit {count}" + " told" * (told is not None)
            add(name, put.credit_kernel, {**credit, **heard}, pointers, put.credit_options)
    faults = {"fault_ptr": i64, "received_ptr": i64, "received_table_ptr": i64, "me": "i32"}
    add("tell faults", put.send_faults_kernel, faults, pointers, put.credit_options)
    cases += _of_receiving()
    values = {"x_ptr": torch.float32, "address_ptr": i64, "rows_ptr": i32, "peer_ptr": i32, "BLOCK": 256}
    add("put values", put.put_values_kernel, values, {"target_ptr": i64, "pe_ptr": i32})
    return cases


def _of_receiving() -> list[AotCase]:
    """With credit in two and three buffers (the former also with pair counts); and without credit."""
    i32, i64, cases = torch.int32, torch.int64, []
    for dtype, width, k in (
        *((torch.bfloat16, 4096, k) for k in (1, 2, 8)),
        (torch.float16, 4096, 8),
        (torch.float32, 4096, 8),
        (torch.float32, 100, 3),
    ):
        block, warps = columns(width)
        summed = {"rows_ptr": dtype, "row_ptr": i64, "y_ptr": dtype, "S": "i32", "M": width, "K": k, "BLOCK": block}
        summed |= {"TOTAL": accumulation_dtype(dtype), "slot": "i32", "me": "i32", "W": 8}
        for credited, told in ((0, None), (2, None), (2, i64), (3, None), (3, i64)):
            for valued in (False, True) if credited == 0 else (credited == 2,):
                given: dict[str, Any] = {"done_ptr": i32 if credited else None}
                given |= dict.fromkeys(("value_ptr", "own_value_ptr"), torch.float32 if valued else None)
                given |= dict.fromkeys(("credits_ptr", "credit_table_ptr", "epoch_ptr"), i64 if credited else None)
                for number, of in enumerate(("second", "third"), 2):
                    pointer = i64 if number <= credited else None
                    given |= dict.fromkeys((f"{of}_{one}_ptr" for one in ("credits", "table", "epoch")), pointer)
                    given |= {f"{of}_slot": "i32"}
                given |= dict.fromkeys(("received_ptr", "stop_ptr", "record_ptr"), told)
                name = f"receive {str(dtype)[6:]} {width} K={k} credit {credited}"
                name += " told" * (told is not None) + " values" * valued
                cases.append(AotCase(name, receive.receive_kernel, {**summed, **given}, {"num_warps": warps}))
    return cases


def _of_waits() -> list[AotCase]:
    i32, i64 = torch.int32, torch.int64
    stop = {"stop_ptr": i64, "record_ptr": i64, "limit_ns": "i64"}
    metadata = {"metadata_ptr": i32, "signals_ptr": i64, "epoch_ptr": i64, **stop, "slot": "i32", "W": 8}
    credits = {"credits_ptr": i64, "credit_epoch_ptr": i64}
    metadata |= {**dict.fromkeys(credits), "credit_slot": "i32"}
    shape = {"C": 65536, "T": 64, "E": 32, "TILE": 1024, "TILES": 64, "EP": 32, "INTERPRET": False}
    some = {"signals_ptr": i64, "index_ptr": i32, "epoch_ptr": i64, **stop, "behind": "i32", "count": "i32"}
    some["INTERPRET"] = False
    wide = {"maxnreg": MAX_REGISTERS}
    kernels: list[tuple[str, Any, dict[str, Any], dict[str, int]]] = [
        ("wait metadata", remote.wait_metadata_kernel, {**metadata, **shape}, wide),
        ("wait metadata and credits", remote.wait_metadata_kernel, {**metadata, **shape, **credits}, wide),
    ]
    kernels += [
        (f"wait {block}", remote.wait_signals_kernel, {**some, "BLOCK": block}, {}) for block in (16, 256, 1024)
    ]
    return [
        case
        for name, kernel, arguments, options in kernels
        for case in (
            AotCase(name, kernel, {**arguments, "NVSHMEM": False}, options),
            AotCase(f"{name} nvshmem", kernel, {**arguments, "NVSHMEM": True}, options, libraries=nvshmem_bitcode),
        )
    ]


def _of_signals() -> list[AotCase]:
    long = torch.int64
    arguments = {
        "signals_ptr": long,
        "signal_index": "i32",
        "table_ptr": long,
        "pe_ptr": torch.int32,
        "dummy_ptr": long,
    }
    case = AotCase(
        "signal far nvshmem",
        network.signal_far_kernel,
        {**arguments, "epoch_ptr": long},
        {"num_warps": 1},
        libraries=nvshmem_bitcode,
    )
    return [case]


def _of_plans() -> list[AotCase]:
    """By local experts, peers, chunks and blocks of tokens, as powers of two."""
    i32, i64 = torch.int32, torch.int64
    cases = []
    for experts, peers, chunks, blocks in ((1, 2, 1, 1), (16, 8, 2, 64), (32, 64, 8, 256)):
        name = f"{experts} experts {peers} peers {chunks} chunks"
        sizes = {"S": "i32", "K": 8, "W": peers, "local": experts, "degree": "i32", "tiles": "i32"}
        tables = {"row_ptr": i64, "offsets_ptr": i32, "first_ptr": i32, "counts_ptr": i32}
        made = dict.fromkeys(("token_ptr", "token_used_ptr", "metadata_ptr", "line_ptr", "line_used_ptr"), i32)
        powers = {"BLOCK": plan.TOKENS, "LP": experts, "DP": chunks}
        cases.append(AotCase(f"count chunks {name}", plan.count_chunks_kernel, {**tables, **sizes, **powers}))
        for weight in (torch.float32, None):
            more = {"weight_ptr": weight, **made, "C": "i32", "L": "i32", "TP": blocks, "WEIGHTED": weight is not None}
            title = f"place tokens {name}" + " weighted" * (weight is not None)
            options = {"maxnreg": MAX_REGISTERS}
            cases.append(AotCase(title, plan.place_tokens_kernel, {**tables, **more, **sizes, **powers}, options))
            # Few tokens, which this kernel counts.
            more |= {"first_ptr": None, "counts_ptr": None, "TP": 1}
            alone = {**tables, **more, **sizes, **powers}
            cases.append(AotCase(f"{title} alone", plan.place_tokens_kernel, alone, options))
        cases += [_of_reading(name, experts, peers, far, most) for far in (False, True) for most in (False, True)]
        cases += [_of_reading(name, experts, peers, False, most, by_arrival=True) for most in (False, True)]
        sizes = {"L": "i32", "local": experts, "W": peers, "bound": "i32", "LP": experts, "WP": peers}
        for tokens in (16, 128):
            tables = {"metadata_ptr": i32, "position_ptr": i32, "TILE": 128, "TP": tokens, "BLOCK": 512, "OWN": 64}
            cases.append(
                AotCase(
                    f"sort rows {experts} experts {peers} peers {tokens} tiles",
                    plan.sort_rows_kernel,
                    {**tables, **sizes},
                )
            )
    for dtype in (torch.bfloat16, torch.float32):
        rows = {"x_ptr": dtype, "source_ptr": i64, "peer_ptr": i32, "rows_ptr": dtype, "M": 4096}
        block, warps = columns(4096)
        case = AotCase(
            f"take rows {str(dtype)[6:]}", plan.take_rows_kernel, {**rows, "BLOCK": block}, {"num_warps": warps}
        )
        cases.append(case)
    return cases


def _of_reading(name: str, experts: int, peers: int, far: bool, limited: bool, by_arrival: bool = False) -> AotCase:
    i32, i64, rows, numbers = torch.int32, torch.int64, torch.bfloat16, torch.float32
    short = ("metadata_ptr", "offsets_ptr", "peer_ptr", "num_rows_ptr", "counter_ptr", "later_counter_ptr")
    read = {**dict.fromkeys(short, i32), "weight_ptr": numbers}
    read |= dict.fromkeys(("count_ptr", "source_ptr", "place_ptr", "pair_ptr"), i64)
    for way, dtype in (("result", rows), ("value", numbers)):
        read |= {f"{way}_table_ptr": i64, f"{way}_ptr": i64, f"{way}_target_ptr": i64 if far else None}
        read |= dict.fromkeys((f"{way}_own_ptr", f"{way}_staged_ptr"), dtype if far else None)
    read |= {"fault_ptr": i64 if limited else None, "most": "i32", "number": "i32"}
    read |= {"L": "i32", "C": "i32", "local": experts, "W": peers, "degree": "i32", "bound": "i32", "tiles": "i32"}
    read |= {"tiles_ptr": i32, "LOWEST": 64, "HEIGHTS": 2, "BT": block_sizes(experts)[1]}
    read |= {"places": "i32", "result_bytes": "i32", "value_bytes": 4, "SLOTS": SLOTS, "FAR": far}
    read |= {"BLOCK": plan.num_rows_per_program(experts * peers), "LP": experts, "WP": peers}
    read |= {"position_ptr": i32 if by_arrival else None}
    words = " far" * far + " limited" * limited + " by arrival" * by_arrival
    return AotCase(f"read metadata {name}{words}", plan.read_metadata_kernel, read)


def _held() -> AotCase:
    arguments = {"flag_ptr": torch.int32, "sink_ptr": torch.int32, "epoch": "i32", "max_polls": "i32"}
    arguments["NUMBERS"] = autotune.NUMBERS
    return AotCase("hold multiprocessors", autotune.hold_kernel, arguments, {"num_warps": autotune.HOLDER_WARPS})
