"""Initialisation of the default process group, with errors that name rank and address."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fusedmoe import environment
from fusedmoe.errors import ConfigError, RankError

# A new host may not be in DNS yet, for example in Kubernetes.
_DNS_TIMEOUT_S = 10.0
_ENV_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(
    backend: str,
    timeout_s: float,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    port: int | None = None,
    **options: Any,
) -> None:
    """Initialise `torch.distributed`. Collective over all ranks of the job.

    Args:
        rank, world_size, address, port: None reads RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT.
        options: passed to `torch.distributed.init_process_group`.
    Raises:
        ConfigError: a variable is missing or invalid.
        RankError: the address cannot be resolved or reached, the port is in use, or a rank did not connect within
            `timeout_s`.
    """
    given = dict(zip(_ENV_VARIABLES, (rank, world_size, address, port), strict=True))
    missing = [name for name, value in given.items() if value is None and not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} must be set in the environment; torchrun does, or set {', '.join(_ENV_VARIABLES)}"
        )
    size = environment.read_integer("WORLD_SIZE", 1, 1) if world_size is None else world_size
    own_rank = environment.read_integer("RANK", 0, 0, size - 1) if rank is None else rank
    port = environment.read_integer("MASTER_PORT", 0, 0, 65535) if port is None else port
    address = os.environ["MASTER_ADDR"] if address is None else address
    _wait_for_dns(own_rank, address, port, timeout_s)
    init_method = "env://" if None in (rank, world_size) else f"tcp://{_bracket_ipv6(address)}:{port}"
    rank_options: dict[str, Any] = {} if init_method == "env://" else {"rank": own_rank, "world_size": size}
    try:
        dist.init_process_group(
            backend, init_method=init_method, timeout=timedelta(seconds=timeout_s), **rank_options, **options
        )
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        raise RankError(
            _describe_connection_failure(own_rank, size, f"{address}:{port}", str(error), timeout_s)
        ) from error


def _wait_for_dns(rank: int, address: str, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + min(timeout_s, _DNS_TIMEOUT_S)
    while True:
        try:
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {rank}: the host MASTER_ADDR={address!r} cannot be resolved ({error}). Set it to the name "
                    "or address of rank 0's host, as seen from this host"
                ) from error
            time.sleep(0.5)


def _describe_connection_failure(rank: int, size: int, address: str, reason: str, timeout_s: float) -> str:
    first = " ".join(reason.split("\n")[0].split())
    if "EADDRINUSE" in reason or "already in use" in reason.lower():
        return (
            f"rank {rank}: cannot host the job's store at {address}: the port is in use. Choose another MASTER_PORT or "
            "end the process that listens on it"
        )
    return (
        f"rank {rank}: the {size} ranks did not connect to {address} within {timeout_s:g} s. Check that rank 0 runs "
        f"there, that WORLD_SIZE is the number of ranks, and that no firewall blocks the port ({first})"
    )


def _bracket_ipv6(address: str) -> str:
    return f"[{address}]" if ":" in address else address
