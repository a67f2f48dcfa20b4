"""Parts of a training job: parallel sizes, device, process group, model, optimizer and stop signals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn

from fusedmoe import MoELayer, Topology
from fusedmoe.cli.data import hash_seed
from fusedmoe.cli.settings import Settings
from fusedmoe.comm import init_process_group
from fusedmoe.comm.group import set_nccl_launch_order
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError
from fusedmoe.hooks import WireCast
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.names import FP8_WIRES
from fusedmoe.training import ShardedExperts

#: Dtypes of `--wire-dtype` that differ from the compute dtype.
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Launch:
    """Rank and world size set by the launcher (torchrun); a world of one without a launcher."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    @classmethod
    def from_environment(cls) -> Launch:
        ranks, local_ranks = (read_integer(name, 1, 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return cls(read_integer("RANK", 0, 0, ranks - 1), ranks, read_integer("LOCAL_RANK", 0, 0), local_ranks)


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of a job."""

    ranks_per_node: int
    ep: int
    esp: int
    mp: int


def format_ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def choose_sizes(settings: Settings, launch: Launch) -> Sizes:
    """Choose the parallel sizes that the settings leave open, as in FSMoE's layout.

    EP spans the nodes; ESP and MP span the ranks of a node. An axis shrinks until it divides the heads, hidden
    dimension or experts. With a dynamic placement, EP spans all ranks. Remaining ranks are data parallel. Raises
    `ConfigError` if the sizes do not divide the ranks.
    """
    model, ranks = settings.model, launch.ranks
    # --ranks-per-node splits a host into virtual nodes.
    per_node = settings.ranks_per_node or launch.local_ranks
    if ranks % per_node:
        raise ConfigError(
            f"{format_ranks(ranks)} cannot be split into nodes of {per_node}; start a multiple of {per_node} ranks, or "
            f"set --ranks-per-node to a divisor of {ranks}"
        )
    if settings.placement == "ep":
        ep = settings.ep or gcd(ranks // per_node, model.experts or ranks)
    else:
        ep = settings.ep or ranks // (settings.esp or 1)
    esp = settings.esp or gcd(per_node, ranks // min(ep, ranks), model.hidden)
    # gcd(n, 0) is n: without dense blocks only the number of heads limits mp.
    dense = model.dense_size if model.num_moe_layers < model.layers else 0
    mp = settings.mp or gcd(per_node, model.key_heads, dense)
    for what, need in (("ep · esp", ep * esp), ("mp", mp)):
        if ranks % need:
            raise ConfigError(
                f"{what} = {need} does not divide the {ranks} ranks (ep {ep}, esp {esp}, mp {mp}); "
                "start a multiple of both with torchrun, or change --ep, --esp and --mp"
            )
    return Sizes(per_node, ep, esp, mp)


def resolve_sizes(
    settings: Settings, launch: Launch, choose: Callable[[Settings, Launch], Sizes] = choose_sizes
) -> tuple[Sizes, Settings]:
    """Return the parallel sizes, and the settings with the number of experts."""
    sizes = choose(settings, launch)
    return sizes, settings.changed({"model": settings.model.with_experts(launch.ranks, sizes.ep)})


def choose_device(settings: Settings, launch: Launch) -> torch.device:
    # NCCL rejects two ranks on one GPU.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and settings.device != "cpu" else 0
    if gpus >= launch.local_ranks:
        return torch.device("cuda", launch.local_rank)
    if settings.device == "cuda" or gpus:
        raise ConfigError(
            f"{launch.local_ranks} ranks but {gpus} GPUs on this machine: start at most one rank per GPU, "
            "or use --device cpu"
        )
    return torch.device("cpu")


@contextmanager
def process_group(launch: Launch, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Context with the job's process group and CUDA device; a world of one has no group."""
    if device.type == "cuda":  # NCCL creates its communicator on the current device
        torch.cuda.set_device(device)
    if launch.ranks == 1:
        yield
        return
    if device.type == "cuda":
        set_nccl_launch_order()  # NCCL reads it at its first launch
        init_process_group("nccl", timeout_s, device_id=device)
    else:
        init_process_group("gloo", timeout_s)
    try:
        yield
    except BaseException:
        # NCCL would wait for collectives of failed ranks.
        if device.type != "cuda":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def make_topology(sizes: Sizes, timeout_s: float, duplex: bool = False) -> Topology:
    ranks_per_node, ep, esp, mp = sizes.ranks_per_node, sizes.ep, sizes.esp, sizes.mp
    return Topology.from_sizes(ep, esp, mp, ranks_per_node=ranks_per_node, timeout_s=timeout_s, duplex=duplex)


@contextmanager
def command_group(
    settings: Settings, launch: Launch, sizes: Sizes, command: str, duplex: bool = False
) -> Iterator[tuple[Topology, torch.device]]:
    """Context with a command's process group, topology and device. All ranks raise an exception inside."""
    device = choose_device(settings, launch)
    with process_group(launch, device, settings.timeout_s):
        topology = make_topology(sizes, settings.timeout_s, duplex)
        with topology.guard(command):
            yield topology, device


def shard_experts(
    model: Transformer, optimizer: torch.optim.Optimizer, topology: Topology, settings: Settings
) -> ShardedExperts | None:
    """Return the dynamic expert placement of the settings, or None if experts are static."""
    if settings.placement == "ep":
        return None
    return ShardedExperts(
        model,
        optimizer,
        topology,
        policy="hecate" if settings.placement == "fssdp" else settings.placement,
        memory=settings.placement_memory,
        overlap=settings.placement_overlap,
        balance=settings.placement_balance,
        rematerialises=settings.rematerialise,
    )


def make_model(settings: Settings, model: ModelConfig, topology: Topology, device: torch.device) -> Transformer:
    """Create the model. Its parameters depend on the seed only, not on the number of ranks."""
    torch.manual_seed(hash_seed("parameters", settings.seed))
    dtype = torch.float64 if settings.dtype == "fp64" else torch.float32
    wire = WIRE_DTYPES.get(settings.wire_dtype)
    made = Transformer(
        model,
        topology,
        dispatch=settings.dispatch,
        hooks=() if wire is None else (WireCast(wire),),
        recompute=settings.recompute,
        placement="ep" if settings.placement == "ep" else "fssdp",
        device=device,
        dtype=dtype,
    )
    if settings.wire_dtype in FP8_WIRES:
        for layer in made.modules():
            if isinstance(layer, MoELayer):
                layer.set_wire(settings.wire_dtype)
    return made


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # Weight decay for matrices only. Experts stack their biases into matrices: only the name identifies a bias.
        last = name.rpartition(".")[2]
        is_matrix = parameter.dim() > 1 and "bias" not in last and last not in ("b1", "b2")
        (decays if is_matrix else stays).append(parameter)
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": stays, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=_BETAS, fused=True)


class StopRequest:
    """Context in which SIGINT, SIGTERM and SIGHUP only set `is_requested`. Earlier handlers are restored at exit.

    Each rank sends `is_requested` along with the loss, so that all ranks stop after the same step.
    """

    def __init__(self) -> None:
        self.is_requested = False

    def __enter__(self) -> StopRequest:
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._previous_handlers = {number: signal.signal(number, self._request_stop) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
