"""`fusedmoe doctor`: versions, processors, measured costs and transports, and settings that limit overlap."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fusedmoe
from fusedmoe.comm.one_sided.heap import no_gpu_reason, no_torch_cuda_reason
from fusedmoe.comm.one_sided.heaps import BACKENDS
from fusedmoe.environment import single_queue_warning
from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import cache_dir, read_text
from fusedmoe.kernels.libraries import nvshmem_packages
from fusedmoe.schedule.cost import CostModel
from fusedmoe.threads import WorkerThread

PROBE_TIMEOUT_S = 10.0
SHARED_MEMORY = "/dev/shm"
# Newest files of measured costs in the table; the JSON has all.
_MAX_SHOWN_FILES = 8


def run(arguments: argparse.Namespace) -> int:
    facts = examine()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0 if any(transport["works"] for transport in facts["transports"]) else 1


class TransportProbe(NamedTuple):
    """Transport whose `unavailable_reason` probes it and returns why it does not work, with the fix, or ""."""

    name: str
    kind: str
    carries: str
    unavailable_reason: Callable[[], str]


def examine() -> dict[str, Any]:
    """Probe every transport and return the report.

    Versions of missing packages are None. `shared_memory` has the sizes of /dev/shm if NCCL works, which may use it
    between GPUs of a node.
    """
    transports: list[dict[str, Any]] = []
    for name, kind, carries, unavailable_reason in TRANSPORTS:
        reason = run_probe(unavailable_reason)
        transports.append({"name": name, "kind": kind, "carries": carries, "works": not reason, "reason": reason})
    nccl = any(transport["works"] for transport in transports if transport["name"] == "nccl")
    return {
        "host": platform.node(),
        "versions": versions(),
        "gpus": gpus(),
        "cpu": {
            "cores": os.cpu_count(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "torch_threads": torch.get_num_threads(),
        },
        "cache": {"folder": str(cache_dir()), "costs": measured_costs_files()},
        "shared_memory": shared_memory() if nccl else None,
        "transports": transports,
        "warnings": [text for text in (single_queue_warning(),) if text],
    }


def run_probe(probe: Callable[[], str], limit_s: float = PROBE_TIMEOUT_S) -> str:
    """Run a probe for at most `limit_s` seconds. Return its result, or the exception or time-out as a text."""
    answer = WorkerThread("fusedmoe doctor").submit(probe)
    try:
        return answer.result(limit_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if answer.done() else f"the probe timed out after {limit_s:g} s"


def no_gloo_reason() -> str:
    """Probe Gloo with an all-reduce over a world of one; return why it failed, with the fix, or ""."""
    if not dist.is_gloo_available():
        return "this PyTorch build lacks Gloo; install one that includes it"
    try:
        alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=PROBE_TIMEOUT_S / 2))
        alone.allreduce([torch.ones(1, device="cpu")]).wait()
    except RuntimeError as error:
        return f"{error}; set GLOO_SOCKET_IFNAME to the network interface to use"
    return ""


def no_nccl_reason() -> str:
    if reason := no_gpu_reason() or no_torch_cuda_reason():
        return reason
    return "" if dist.is_nccl_available() else "this PyTorch build lacks NCCL; install one that includes it"


def no_heap_reason(backend: str, device: str) -> str:
    return BACKENDS[backend].unavailable_reason(torch.device(device))


COLLECTIVES, SYMMETRIC = "collectives", "symmetric memory"

TRANSPORTS = (
    TransportProbe("gloo", COLLECTIVES, "CPUs of any nodes", no_gloo_reason),
    TransportProbe("nccl", COLLECTIVES, "GPUs of any nodes", no_nccl_reason),
    TransportProbe("host", SYMMETRIC, "processes of this host", partial(no_heap_reason, "host", "cpu")),
    TransportProbe("symm", SYMMETRIC, "GPUs of one node", partial(no_heap_reason, "symm", "cuda")),
    TransportProbe("nvshmem", SYMMETRIC, "GPUs of several nodes", partial(no_heap_reason, "nvshmem", "cuda")),
)


def versions() -> dict[str, str | None]:
    cuda = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None
    packages = nvshmem_packages()
    return {
        "fusedmoe": fusedmoe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda of torch": torch.version.cuda,
        "driver": _driver_version(),
        "nccl": nccl,
        "nvshmem": ", ".join(f"{version} (CUDA {of})" for of, version in packages.items()) or None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs visible to PyTorch. `reaches`: indices of GPUs with peer-to-peer access."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        known = torch.cuda.get_device_properties(index)
        reaches = [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        facts = {"index": index, "name": known.name, "capability": f"{known.major}.{known.minor}"}
        gpus.append(facts | {"memory_bytes": known.total_memory, "reaches": reaches})
    return gpus


def measured_costs_files() -> list[dict[str, Any]]:
    """Return the measured costs in the cache folder, newest first: layout, age, and name and r² of the worst fit."""
    files = []
    with suppress(OSError):
        for path in cache_dir().glob("costs-*.json"):
            with suppress(ConfigError):
                costs = CostModel.from_json(read_text(path))
                worst = min(
                    ((line.r2, name) for name, line in costs.lines.items() if line.r2 is not None), default=None
                )
                facts = {"file": path.name, "layout": costs.machine, "age_s": time.time() - path.stat().st_mtime}
                files.append(facts | {"worst_line": worst and worst[1], "worst_r2": worst and worst[0]})
    return sorted(files, key=itemgetter("age_s"))


def shared_memory() -> dict[str, int] | None:
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"size": usage.total, "free": usage.free}


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(facts["host"], markup=False)
    console.print(_versions_table(facts))
    console.print(_costs_table(facts["cache"]["costs"]))
    console.print(_transports_table(facts["transports"]))
    if not any(transport["works"] for transport in facts["transports"]):
        console.print("No transport works: only a single rank can run.")
    for text in facts["warnings"]:
        console.print(f"Warning: {text}", markup=False)


def _versions_table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    # rich would parse brackets in device names as markup; `Text` prints them.
    for name, version in facts["versions"].items():
        table.add_row(name, Text(version or "not installed"))
    for gpu in facts["gpus"]:
        peers = ", ".join(map(str, gpu["reaches"]))
        reach = f", peer access to {peers}" if peers else ", no peer access" if len(facts["gpus"]) > 1 else ""
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB{reach}"
        table.add_row(f"GPU {gpu['index']}", Text(f"{gpu['name']}, compute capability {gpu['capability']}, {memory}"))
    if not facts["gpus"]:
        table.add_row("GPUs", "none")
    cpu = facts["cpu"]
    table.add_row("CPU cores", str(cpu["cores"]))
    given = f"OMP_NUM_THREADS {'not set' if cpu['omp_num_threads'] is None else cpu['omp_num_threads']}"
    table.add_row("threads of torch", Text(f"{cpu['torch_threads']} ({given})"))
    table.add_row("cache folder", Text(printable(facts["cache"]["folder"])))
    if sizes := facts["shared_memory"]:
        free = f"{sizes['size'] / 2**30:.3g} GiB, {sizes['free'] / 2**30:.3g} GiB free"
        table.add_row(f"{SHARED_MEMORY} (NCCL)", free)
    return table


def _costs_table(files: list[dict[str, Any]]) -> Table:
    table = Table(title="measured costs", title_justify="left")
    for column in ("file", "layout", "age", "worst r²"):
        table.add_column(column, overflow="fold", no_wrap=column == "age")
    for file in files[:_MAX_SHOWN_FILES]:
        worst = "" if file["worst_r2"] is None else f"{file['worst_r2']:.2f} ({file['worst_line']})"
        table.add_row(Text(file["file"]), Text(printable(file["layout"])), _format_age(file["age_s"]), worst)
    if not files:
        table.add_row("none", "measure them with fusedmoe profile", "", "")
    elif len(files) > _MAX_SHOWN_FILES:
        table.add_row(f"{len(files) - _MAX_SHOWN_FILES} older files", "", "", "")
    return table


def _format_age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _transports_table(transports: list[dict[str, Any]]) -> Table:
    table = Table(title="transports", title_justify="left")
    for column in ("", "between", "works", "reason and fix"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "works"))
    for kind, alike in groupby(transports, key=itemgetter("kind")):
        table.add_section()
        table.add_row(Text(kind, style="bold"))
        for transport in alike:
            works = "yes" if transport["works"] else "no"
            table.add_row(transport["name"], transport["carries"], works, Text(transport["reason"]))
    return table
