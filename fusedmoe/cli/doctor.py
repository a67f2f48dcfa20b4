"""Say which transports work on this machine, and why others do not.

Tries every way in which ranks can exchange rows here, and says of each whether it works; where
it does not, why, and what to do.

Collectives are PyTorch's process groups. They carry every plan: Gloo between CPUs, NCCL between
GPUs. Symmetric memory is for kernels that write into the memory of other ranks by themselves:
  host     processes of this host, with the kernels in Triton's interpreter (for tests)
  symm     the GPUs of one node
  nvshmem  GPUs of several nodes; optional, built by make nvshmem
Where no symmetric memory works, collectives are used, and nothing else changes.

Nothing is changed on the machine, and no other rank is asked. Each probe ends within 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fusedmoe
from fusedmoe.cli.settings import Commands, add_parser
from fusedmoe.comm.one_sided.heap import no_gpu, not_for_torch
from fusedmoe.comm.one_sided.heaps import BACKENDS
from fusedmoe.kernels.libraries import nvshmem_packages
from fusedmoe.threads import Helper

EXAMPLES = """\
examples:
  this machine:
    fusedmoe doctor
  every node of a job, under Slurm:
    srun --ntasks-per-node=1 fusedmoe doctor
  for a script: the exit code is 0 where any transport works, 1 where none does
    fusedmoe doctor --json | jq '.transports[] | select(.works) | .name'
"""

PROBE_S = 10.0
SHARED_MEMORY = "/dev/shm"


def add_command(commands: Commands) -> None:
    """Adds `doctor` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "doctor", __doc__, EXAMPLES, run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Looks at the machine and shows what works; returns the exit code."""
    facts = examine()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0 if any(transport["works"] for transport in facts["transports"]) else 1


@dataclass(frozen=True)
class TransportProbe:
    """A way between ranks. `why_not`: tries it, and returns why it does not work here and what to do, or ""."""

    name: str
    kind: str
    carries: str
    why_not: Callable[[], str]


def examine() -> dict[str, Any]:
    """Probes every transport, one after the other; returns everything that was found on this machine.

    A version is None where the thing is not installed. `shared_memory` has sizes of /dev/shm in bytes, where NCCL runs,
    which may take it between GPUs of a node.
    """
    transports = []
    for probe in TRANSPORTS:
        reason = bounded(probe.why_not)
        facts = {"name": probe.name, "kind": probe.kind, "carries": probe.carries}
        transports.append(facts | {"works": not reason, "reason": reason})
    nccl = any(transport["works"] for transport in transports if transport["name"] == "nccl")
    return {
        "host": platform.node(),
        "versions": versions(),
        "gpus": gpus(),
        "shared_memory": shared_memory() if nccl else None,
        "transports": transports,
    }


def bounded(probe: Callable[[], str], limit_s: float = PROBE_S) -> str:
    """Returns a probe's reason; a probe that raises, or does not end, gives one as well."""
    answer = Helper("fusedmoe doctor").begin(probe)
    try:
        return answer.result(limit_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if answer.done() else f"the probe did not end within {limit_s:g} s"


def why_not_gloo() -> str:
    """Tries a sum over a world of one, for which Gloo needs a network interface."""
    if not dist.is_gloo_available():
        return "this PyTorch is built without Gloo: install one that has it"
    try:
        alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=PROBE_S / 2))
        alone.allreduce([torch.ones(1, device="cpu")]).wait()
    except RuntimeError as error:
        return f"{error}; GLOO_SOCKET_IFNAME names the network interface to use"
    return ""


def why_not_nccl() -> str:
    if reason := no_gpu() or not_for_torch():
        return reason
    return "" if dist.is_nccl_available() else "this PyTorch is built without NCCL: install one that has it"


def why_no_heap(backend: str, device: str) -> str:
    return BACKENDS[backend].why_not(torch.device(device))


COLLECTIVES, SYMMETRIC = "collectives", "symmetric memory"

TRANSPORTS = (
    TransportProbe("gloo", COLLECTIVES, "CPUs, of any nodes", why_not_gloo),
    TransportProbe("nccl", COLLECTIVES, "GPUs, of any nodes", why_not_nccl),
    TransportProbe("host", SYMMETRIC, "processes of this host", partial(why_no_heap, "host", "cpu")),
    TransportProbe("symm", SYMMETRIC, "GPUs of one node", partial(why_no_heap, "symm", "cuda")),
    TransportProbe("nvshmem", SYMMETRIC, "GPUs of several nodes", partial(why_no_heap, "nvshmem", "cuda")),
)


def versions() -> dict[str, str | None]:
    """Returns the versions of the software that transports depend on."""
    cuda = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None
    packages = nvshmem_packages()
    return {
        "fusedmoe": fusedmoe.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda of torch": torch.version.cuda,
        "driver": _driver(),
        "nccl": nccl,
        "nvshmem": ", ".join(f"{version} (CUDA {of})" for of, version in packages.items()) or None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
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
    """Returns the GPUs that PyTorch sees; a GPU reaches those with which it shares memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        known = torch.cuda.get_device_properties(index)
        reaches = [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        facts = {"index": index, "name": known.name, "capability": f"{known.major}.{known.minor}"}
        gpus.append(facts | {"memory_bytes": known.total_memory, "reaches": reaches})
    return gpus


def shared_memory() -> dict[str, int] | None:
    """Returns the sizes of /dev/shm in bytes; None where there is no such folder."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"size": usage.total, "free": usage.free}


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(facts["host"], markup=False)
    console.print(_versions_table(facts))
    console.print(_transports_table(facts["transports"]))
    if not any(transport["works"] for transport in facts["transports"]):
        console.print("Nothing works here: only a world of one rank can run.")


def _versions_table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    # Texts of the machine are no markup of rich: a name may have brackets.
    for name, version in facts["versions"].items():
        table.add_row(name, Text(version or "not there"))
    for gpu in facts["gpus"]:
        peers = ", ".join(map(str, gpu["reaches"]))
        reach = f", reaches {peers}" if peers else ", reaches no other" if len(facts["gpus"]) > 1 else ""
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB{reach}"
        table.add_row(f"GPU {gpu['index']}", Text(f"{gpu['name']}, compute capability {gpu['capability']}, {memory}"))
    if not facts["gpus"]:
        table.add_row("GPUs", "none")
    if sizes := facts["shared_memory"]:
        free = f"{sizes['size'] / 2**30:.3g} GiB, {sizes['free'] / 2**30:.3g} GiB free"
        table.add_row(f"{SHARED_MEMORY} (NCCL)", free)
    return table


def _transports_table(transports: list[dict[str, Any]]) -> Table:
    table = Table(title="transports", title_justify="left")
    for column in ("", "between", "works", "why not, and what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "works"))
    for kind, alike in groupby(transports, key=itemgetter("kind")):
        table.add_section()
        table.add_row(Text(kind, style="bold"))
        for transport in alike:
            works = "yes" if transport["works"] else "no"
            table.add_row(transport["name"], transport["carries"], works, Text(transport["reason"]))
    return table
