"""`fusedmoe doctor`: which transports work on this machine, and what to do about those that do not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

import fusedmoe
from fusedmoe.cli.settings import add_parser
from fusedmoe.ranks import BACKENDS, no_gpu, not_for_torch, nvshmem_packages
from fusedmoe.threads import Helper

SUMMARY = "say which transports work on this machine, and why others do not"

DESCRIPTION = """\
Tries every way in which ranks can exchange rows here, and says of each whether it works; where
it does not, why, and what to do.

Collectives are PyTorch's process groups. They carry every plan: Gloo between CPUs, NCCL between
GPUs. Symmetric memory is for kernels that write into the memory of other ranks by themselves:
  host     processes of this host, with the kernels in Triton's interpreter (for tests)
  local    virtual ranks of one process
  symm     the GPUs of one node
  nvshmem  GPUs of several nodes; optional, built by make nvshmem
Where no symmetric memory works, collectives are used, and nothing else changes.

Nothing is changed on the machine, and no other rank is asked. Each probe ends within 10 s.
"""

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


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "doctor", SUMMARY, DESCRIPTION, EXAMPLES, run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Looks, and shows what was found."""
    found = examine()
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _show(found)
    return 0 if any(answer.works for answer in found.transports) else 1


@dataclass(frozen=True)
class TransportProbe:
    """A way between ranks. `why_not`: a probe that says why it does not work here, and what to do; "" where it does."""

    name: str
    kind: str
    carries: str
    why_not: Callable[[], str]


@dataclass(frozen=True)
class Answer:
    """What was found of a transport. `reason`: why it does not work, and what to do; "" where it works."""

    name: str
    kind: str
    carries: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Gpu:
    """A GPU, and with which of the others it shares memory."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    reaches: list[int]


@dataclass(frozen=True)
class Findings:
    """What there is on this machine. A version is None where the thing is not there.

    `shared_memory`: sizes of /dev/shm in bytes, where NCCL runs, which may take it between GPUs of a node.
    """

    host: str
    versions: dict[str, str | None]
    gpus: list[Gpu]
    shared_memory: dict[str, int] | None
    transports: list[Answer]


def examine() -> Findings:
    """Looks at everything, one thing after the other."""
    answers = []
    for one in TRANSPORTS:
        reason = bounded(one.why_not)
        answers.append(Answer(one.name, one.kind, one.carries, not reason, reason))
    nccl = any(answer.works for answer in answers if answer.name == "nccl")
    return Findings(platform.node(), versions(), gpus(), shared_memory() if nccl else None, answers)


def bounded(probe: Callable[[], str], limit_s: float = PROBE_S) -> str:
    """The probe's reason; a probe that raises, or does not end, gives one as well."""
    answer = Helper("fusedmoe doctor").begin(probe)
    try:
        return answer.result(limit_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if answer.done() else f"the probe did not end within {limit_s:g} s"


def why_not_gloo() -> str:
    """A sum over a world of one: it needs a network interface."""
    if not dist.is_gloo_available():
        return "this PyTorch is a build without Gloo; install one with"
    try:
        alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=PROBE_S / 2))
        alone.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        return f"{error}; GLOO_SOCKET_IFNAME names the network interface to use"
    return ""


def why_not_nccl() -> str:
    if reason := no_gpu() or not_for_torch():
        return reason
    return "" if dist.is_nccl_available() else "this PyTorch is a build without NCCL; install one with"


def why_not_local() -> str:
    """Memory of this process, which it always has."""
    return ""


def why_no_heap(backend: str, device: str) -> str:
    return BACKENDS[backend].why_not(torch.device(device))


COLLECTIVES, SYMMETRIC = "collectives", "symmetric memory"

TRANSPORTS = (
    TransportProbe("gloo", COLLECTIVES, "CPUs, of any nodes", why_not_gloo),
    TransportProbe("nccl", COLLECTIVES, "GPUs, of any nodes", why_not_nccl),
    TransportProbe("host", SYMMETRIC, "processes of this host", partial(why_no_heap, "host", "cpu")),
    TransportProbe("local", SYMMETRIC, "virtual ranks of one process", why_not_local),
    TransportProbe("symm", SYMMETRIC, "GPUs of one node", partial(why_no_heap, "symm", "cuda")),
    TransportProbe("nvshmem", SYMMETRIC, "GPUs of several nodes", partial(why_no_heap, "nvshmem", "cuda")),
)


def versions() -> dict[str, str | None]:
    """The versions of what transports depend on."""
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


def gpus() -> list[Gpu]:
    """The GPUs that PyTorch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for index in range(count):
        what = torch.cuda.get_device_properties(index)
        reaches = [
            other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        found.append(Gpu(index, what.name, f"{what.major}.{what.minor}", what.total_memory, reaches))
    return found


def shared_memory() -> dict[str, int] | None:
    """The sizes of /dev/shm, None where there is none."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"size": usage.total, "free": usage.free}


def _show(found: Findings) -> None:
    console = Console(highlight=False)
    console.print(found.host, markup=False)
    console.print(_versions_table(found))
    console.print(_transports_table(found))
    if not any(answer.works for answer in found.transports):
        console.print("Nothing works here: only a world of one rank can run.")


def _versions_table(found: Findings) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in found.versions.items():
        table.add_row(name, Text(version or "not there"))
    for gpu in found.gpus:
        others = [str(other) for other in gpu.reaches]
        reach = f", reaches {', '.join(others)}" if others else ", reaches no other" if len(found.gpus) > 1 else ""
        text = f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 2**30:.0f} GiB{reach}"
        table.add_row(f"GPU {gpu.index}", Text(text))
    if not found.gpus:
        table.add_row("GPUs", "none")
    if sizes := found.shared_memory:
        free = f"{sizes['size'] / 2**30:.3g} GiB, {sizes['free'] / 2**30:.3g} GiB free"
        table.add_row(f"{SHARED_MEMORY} (NCCL)", free)
    return table


def _transports_table(found: Findings) -> Table:
    table = Table(title="transports", title_justify="left")
    for column in ("", "between", "works", "why not, and what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "works"))
    kind = ""
    for answer in found.transports:
        if answer.kind != kind:
            kind = answer.kind
            table.add_section()
            table.add_row(Text(kind, style="bold"))
        table.add_row(answer.name, answer.carries, "yes" if answer.works else "no", Text(answer.reason))
    return table
