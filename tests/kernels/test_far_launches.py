"""Launchers that put, wait and signal launch only kernels compiled ahead of time, for near and remote peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bench.gpu import returned_rows
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.one_sided import Addresses, Bounds, Faults, Network, PeerSignal, Put, ReceiveBuffer
from fusedmoe.kernels.triton.one_sided import network, put, receive, remote
from tests.kernels.cases import AotCase, one_sided
from tests.kernels.test_grouped_aot import LIBRARIES, Launch, Recorder

PEERS, CAPACITY, WIDTH, TILE = 8, 4096, 4096, 128
KERNELS = {
    put: ("put_rows_kernel", "credit_kernel", "send_faults_kernel", "put_values_kernel"),
    returned_rows: ("return_rows_kernel",),
    remote: ("wait_metadata_kernel", "wait_signals_kernel"),
    network: ("signal_far_kernel",),
    receive: ("receive_kernel",),
}
I32, I64, F32, BF16 = torch.int32, torch.int64, torch.float32, torch.bfloat16


def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def window(width: int, capacity: int, dtype: torch.dtype, tile: int, leads: Network | None) -> ReceiveBuffer:
    rows, table = empty(2, PEERS, capacity, width, dtype=dtype), empty(PEERS, dtype=I64)
    signals = empty(2, PEERS, capacity // tile, dtype=I64)
    staging = None if leads is None else rows
    credits, epochs = empty(2, PEERS, dtype=I64), [empty(PEERS, dtype=I64)] * 2
    return ReceiveBuffer(rows, table, signals, table, tile, credits, table, epochs, 3, leads, staging)


@pytest.fixture
def cases() -> dict[str, AotCase]:
    return {case.name: case for case in one_sided.aot_cases()}


@pytest.fixture
def launches(cases: dict[str, AotCase], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record all launches instead of running them. The cases are those of the real kernels."""
    found: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    return found


@pytest.mark.parametrize("far", [False, True])
def test_sending_launches_are_compiled_ahead_of_time(
    far: bool, launches: list[Launch], cases: dict[str, AotCase]
) -> None:
    leads = Network(empty(PEERS, dtype=I32), empty(1, dtype=I64), LIBRARIES) if far else None
    bounds = Bounds(empty(1, dtype=I64), empty(4, dtype=I64), 10**9)
    tokens = window(WIDTH, CAPACITY, BF16, TILE, leads)
    metadata = window(2, 65536, I32, 1024, leads)
    peer_N, target_N = empty(500, dtype=I32), empty(500, dtype=I64) if far else None
    addresses = Addresses(peer_N, empty(500, dtype=I64), target_N, leads)
    mark = PeerSignal(empty(2, PEERS, 8, dtype=I64), 5, empty(PEERS, dtype=I64))
    num_rows_W, signal_W = empty(PEERS, dtype=I32), empty(PEERS, dtype=I64)
    results = Put(empty(1, WIDTH, dtype=BF16), addresses, None, num_rows_W, num_rows_W, signal_W, signal_W, mark)
    faults = Faults(empty(1, dtype=I64), signal_W, signal_W, bounds)
    x_SM, source_WC, count = empty(9, WIDTH, dtype=BF16), empty(PEERS, CAPACITY, dtype=I32), empty(1, dtype=I32)
    sent = put.SentRows(x_SM, source_WC, num_rows_W, tokens, 1)
    lines = put.SentRows(empty(9, 2, dtype=I32), empty(PEERS, 65536, dtype=I32), num_rows_W, metadata, 1)
    for name, run in (
        ("put rows bfloat16 128x4096", lambda: put.put_rows(bounds, sent)),
        ("put metadata and rows bfloat16 128x4096", lambda: put.put_rows(bounds, lines, sent)),
        ("wait metadata", lambda: remote.wait_metadata(metadata, 32, 1, bounds)),
        ("wait metadata and credits", lambda: remote.wait_metadata(metadata, 32, 1, bounds, (tokens, 0))),
        ("wait 256", lambda: remote.wait_signals(mark.signals, empty(200, dtype=I32), signal_W, bounds, leads)),
        ("credit 1", lambda: put.give_credit(tokens, 1)),
        ("credit 2 told", lambda: put.give_credit(tokens, 1, (metadata, 0), faults=faults)),
        ("credit 3", lambda: put.give_credit(tokens, 1, (metadata, 0), (tokens, 1))),
        ("tell faults", lambda: put.send_faults(faults, 3, leads)),
        ("put values", lambda: put.put_values(empty(500, dtype=F32), addresses, count)),
        ("return rows bfloat16 4096", lambda: returned_rows.return_rows(empty(500, WIDTH, dtype=BF16), count, results)),
    ):
        launches.clear()
        run()
        expected = [name + " nvshmem" * far, *(["signal far nvshmem"] if far and "return" in name else [])]
        assert len(launches) == len(expected), name
        for launch, of in zip(launches, expected, strict=True):
            case = cases[of]
            assert launch.is_case(case), (of, launch.arguments, case.arguments, launch.options, case.options)


@pytest.mark.parametrize("far", [False, True])
def test_receiving_launches_are_compiled_ahead_of_time(
    far: bool, launches: list[Launch], cases: dict[str, AotCase]
) -> None:
    """Over a network, credit is a separate launch."""
    leads = Network(empty(PEERS, dtype=I32), empty(1, dtype=I64), LIBRARIES) if far else None
    tokens, results = window(WIDTH, CAPACITY, BF16, TILE, leads), window(WIDTH, CAPACITY, BF16, TILE, leads)
    words = empty(PEERS, dtype=I64)
    faults = Faults(empty(1, dtype=I64), words, words, Bounds(empty(1, dtype=I64), empty(4, dtype=I64), 10**9))
    row_SK, number = empty(9, 8, dtype=I64), empty(72, dtype=I64)
    layout = Layout(number, empty(73, dtype=I32), number, number, row_SK)
    for value_R, read, told, credit in (
        (None, [(tokens, 1)] * 2 + [(results, 0)], faults, "3 told"),
        (empty(72, dtype=F32), [(tokens, 1), (results, 0)], None, "2"),
    ):
        launches.clear()
        receive.receive(empty(72, WIDTH, dtype=BF16), layout, value_R, empty(1, dtype=I32), read, told)
        name, valued = "receive bfloat16 4096 K=8 credit", " values" * (value_R is not None)
        expected = [f"{name} 0{valued}", f"credit {credit} nvshmem"] if far else [f"{name} {credit}{valued}"]
        assert len(launches) == len(expected)
        for launch, of in zip(launches, expected, strict=True):
            assert launch.is_case(cases[of]), (of, launch.arguments, cases[of].arguments, launch.options)


def test_credit_wait_never_queries_nvshmem(launches: list[Launch]) -> None:
    """A wait for credits only permits writing, so it does not query NVSHMEM."""
    bounds: Any = Bounds(empty(1, dtype=I64), empty(4, dtype=I64), 10**9)
    remote.wait_signals(empty(PEERS, dtype=I64), empty(PEERS, dtype=I32), empty(PEERS, dtype=I64), bounds)
    (launch,) = launches
    assert launch.arguments["NVSHMEM"] is False and not launch.libraries
