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
    """Looks at the machine and shows what works; returns the exit code."""
    findings = examine()
    if arguments.json:
        print(json.dumps(asdict(findings), indent=2))
    else:
        _show(findings)
    return 0 if any(answer.works for answer in findings.transports) else 1


@dataclass(frozen=True)
class TransportProbe:
    """A way between ranks. `why_not`: tries it, and returns why it does not work here and what to do, or ""."""

    name: str
    kind: str
    carries: str
    why_not: Callable[[], str]


@dataclass(frozen=True)
class Answer:
    """The result of a probe. `reason`: why the transport does not work, and what to do; "" where it works."""

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
    """Everything that was found on this machine. A version is None where the thing is not installed.

    `shared_memory`: sizes of /dev/shm in bytes, where NCCL runs, which may take it between GPUs of a node.
    """

    host: str
    versions: dict[str, str | None]
    gpus: list[Gpu]
    shared_memory: dict[str, int] | None
    transports: list[Answer]


def examine() -> Findings:
    """Probes every transport, one after the other."""
    answers = []
    for probe in TRANSPORTS:
        reason = bounded(probe.why_not)
        answers.append(Answer(probe.name, probe.kind, probe.carries, not reason, reason))
    nccl = any(answer.works for answer in answers if answer.name == "nccl")
    return Findings(platform.node(), versions(), gpus(), shared_memory() if nccl else None, answers)


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
    """Returns nothing against it: virtual ranks need memory of this process alone."""
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


def gpus() -> list[Gpu]:
    """Returns the GPUs that PyTorch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for index in range(count):
        known = torch.cuda.get_device_properties(index)
        reaches = [peer for peer in range(count) if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        gpus.append(Gpu(index, known.name, f"{known.major}.{known.minor}", known.total_memory, reaches))
    return gpus


def shared_memory() -> dict[str, int] | None:
    """Returns the sizes of /dev/shm in bytes; None where there is no such folder."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"size": usage.total, "free": usage.free}


def _show(findings: Findings) -> None:
    console = Console(highlight=False)
    console.print(findings.host, markup=False)
    console.print(_versions_table(findings))
    console.print(_transports_table(findings))
    if not any(answer.works for answer in findings.transports):
        console.print("Nothing works here: only a world of one rank can run.")


def _versions_table(findings: Findings) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in findings.versions.items():
        table.add_row(name, Text(version or "not there"))
    for gpu in findings.gpus:
        peers = ", ".join(map(str, gpu.reaches))
        reach = f", reaches {peers}" if peers else ", reaches no other" if len(findings.gpus) > 1 else ""
        text = f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 2**30:.0f} GiB{reach}"
        table.add_row(f"GPU {gpu.index}", Text(text))
    if not findings.gpus:
        table.add_row("GPUs", "none")
    if sizes := findings.shared_memory:
        free = f"{sizes['size'] / 2**30:.3g} GiB, {sizes['free'] / 2**30:.3g} GiB free"
        table.add_row(f"{SHARED_MEMORY} (NCCL)", free)
    return table


def _transports_table(findings: Findings) -> Table:
    table = Table(title="transports", title_justify="left")
    for column in ("", "between", "works", "why not, and what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "works"))
    kind = ""
    for answer in findings.transports:
        if answer.kind != kind:
            kind = answer.kind
            table.add_section()
            table.add_row(Text(kind, style="bold"))
        table.add_row(answer.name, answer.carries, "yes" if answer.works else "no", Text(answer.reason))
    return table
