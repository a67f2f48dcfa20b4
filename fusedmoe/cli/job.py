"""A job's parts: parallel sizes, device and process group, model and optimizer, and signals while it trains."""

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

from fusedmoe import Topology
from fusedmoe.cli.data import mix
from fusedmoe.cli.settings import Settings
from fusedmoe.comm import init_process_group
from fusedmoe.comm.group import launch_in_order_of_issue
from fusedmoe.environment import integer
from fusedmoe.errors import ConfigError
from fusedmoe.hooks import WireCast
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.training import ShardedExperts

#: Dtypes that rows travel in, where these are not what they are computed in.
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks, as the launcher (torchrun) says; without a launcher a world of one."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    @classmethod
    def from_environment(cls) -> Launch:
        """Read the launcher's variables.

        Raises:
            ConfigError: a value is no integer, or no place among the ranks.
        """
        ranks, local_ranks = (integer(name, 1, 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return cls(integer("RANK", 0, 0, ranks - 1), ranks, integer("LOCAL_RANK", 0, 0), local_ranks)


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of a job that starts."""

    ranks_per_node: int
    ep: int
    esp: int
    mp: int


def in_words(ranks: int) -> str:
    """Returns "1 rank", "2 ranks"."""
    return f"{ranks} rank{'s' * (ranks > 1)}"


def choose_sizes(settings: Settings, launch: Launch) -> Sizes:
    """Settles the sizes: those asked for, else the paper's layout (FSMoE, F7) as far as the model allows it.

    Experts are spread over the nodes (EP), each expert and the attention are split inside a node (ESP = MP); an axis
    is made smaller where heads, hidden dim or experts do not divide. Ranks beyond that are data parallel. Experts that
    move are spread over all ranks, each one whole.
    """
    model, ranks = settings.model, launch.ranks
    # torchrun knows how many ranks share this host; --ranks-per-node divides a host into pretended nodes.
    per_node = settings.ranks_per_node or launch.local_ranks
    if ranks % per_node:
        raise ConfigError(
            f"{in_words(ranks)} cannot fill nodes of {per_node}; take a multiple of {per_node}, or choose "
            f"--ranks-per-node among the divisors of {ranks}"
        )
    if settings.placement == "ep":
        ep = settings.ep or gcd(ranks // per_node, model.experts or ranks)
    else:
        # Experts that move may be on any rank, so all ranks hold some.
        ep = settings.ep or ranks // (settings.esp or 1)
    esp = settings.esp or gcd(per_node, ranks // min(ep, ranks), model.hidden)
    # gcd(n, 0) is n: without dense blocks only the attention heads bound mp.
    dense = model.hidden if model.moe_every > 1 else 0
    mp = settings.mp or gcd(per_node, model.key_heads, dense)
    for what, need in (("ep · esp", ep * esp), ("mp", mp)):
        if ranks % need:
            raise ConfigError(
                f"{what} = {need} does not divide the {ranks} ranks (ep {ep}, esp {esp}, mp {mp}); "
                "start a multiple of both with torchrun, or choose --ep, --esp and --mp to fit"
            )
    return Sizes(per_node, ep, esp, mp)


def settle(
    settings: Settings, launch: Launch, choose: Callable[[Settings, Launch], Sizes] = choose_sizes
) -> tuple[Sizes, Settings]:
    """Settles the sizes, and with them the number of the model's experts."""
    sizes = choose(settings, launch)
    return sizes, settings.changed({"model": settings.model.with_experts(launch.ranks, sizes.ep)})


def choose_device(settings: Settings, launch: Launch) -> torch.device:
    """Chooses the device of this rank."""
    # A rank without a GPU of its own would share one, and NCCL refuses that.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and settings.device != "cpu" else 0
    if gpus >= launch.local_ranks:
        return torch.device("cuda", launch.local_rank)
    if settings.device == "cuda" or gpus:
        raise ConfigError(
            f"{launch.local_ranks} ranks on this machine, but {gpus} GPUs: start at most as many ranks as GPUs, "
            "or give --device cpu"
        )
    return torch.device("cpu")


@contextmanager
def process_group(launch: Launch, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Holds the job's process group for as long as the block lasts; a world of one has none."""
    if device.type == "cuda":
        # Before the process group: NCCL makes its communicator on the current device.
        torch.cuda.set_device(device)
    if launch.ranks == 1:
        yield
        return
    if device.type == "cuda":
        # Before NCCL's first launch, which reads the setting.
        launch_in_order_of_issue()
        init_process_group("nccl", timeout_s, device_id=device)
    else:
        init_process_group("gloo", timeout_s)
    try:
        yield
    except BaseException:
        # NCCL would wait here for collectives of ranks that have failed; the process ends without it.
        if device.type != "cuda":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def make_topology(sizes: Sizes, timeout_s: float) -> Topology:
    """Makes the topology of these sizes; collective."""
    return Topology.from_sizes(sizes.ep, sizes.esp, sizes.mp, ranks_per_node=sizes.ranks_per_node, timeout_s=timeout_s)


@contextmanager
def ranks_of(settings: Settings, launch: Launch, sizes: Sizes, command: str) -> Iterator[tuple[Topology, torch.device]]:
    """Holds a command's ranks together: process group, topology and device. An error in the block ends all of them."""
    device = choose_device(settings, launch)
    with process_group(launch, device, settings.timeout_s):
        topology = make_topology(sizes, settings.timeout_s)
        with topology.guard(command):
            yield topology, device


def shard_experts(
    model: Transformer, optimizer: torch.optim.Optimizer, topology: Topology, settings: Settings
) -> ShardedExperts | None:
    """Makes what moves the experts by the settings' policy; None where they stay."""
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
    """Makes the model, its parameters drawn from the seed: the same on any number of ranks."""
    # Every rank draws the whole model's numbers in the same order, and keeps its part.
    torch.manual_seed(mix("parameters", settings.seed))
    dtype = torch.float64 if settings.dtype == "fp64" else torch.float32
    wire = WIRE_DTYPES.get(settings.wire_dtype)
    return Transformer(
        model,
        topology,
        dispatch=settings.dispatch,
        hooks=() if wire is None else (WireCast(wire),),
        recompute=settings.recompute,
        placement="ep" if settings.placement == "ep" else "fssdp",
        device=device,
        dtype=dtype,
    )


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Makes AdamW; biases and norms do not decay."""
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # Experts stack their biases to matrices: only the name tells them apart.
        last = name.rpartition(".")[2]
        is_matrix = parameter.dim() > 1 and "bias" not in last and last not in ("b1", "b2")
        (decays if is_matrix else stays).append(parameter)
    groups = [{"params": decays, "weight_decay": settings.weight_decay}, {"params": stays, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=_BETAS, fused=True)


class StopRequest:
    """A context in which SIGINT (Ctrl-C), SIGTERM and SIGHUP only set `wanted`; after it they do what they did before.

    A launcher passes a signal on to every rank, but never at the same moment: the ranks must agree on the step after
    which they stop, so each of them sends its wish along with the loss.
    """

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> StopRequest:
        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
