"""The ranks' work in a campaign: small jobs whose results are known from a world of one."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from fusedmoe.cli.job import StopRequest
from fusedmoe.comm.collectives import all_gather_object, all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.graph import GraphBackend
from fusedmoe.layers.schedule import Schedule
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.runtime.cache import CACHE, cached_profile
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import (
    ShardedExperts,
    broadcast_parameters,
    clip_grad_norm,
    distributed_data_parallel,
    load_checkpoint,
    plan_step,
    save_checkpoint,
    sync_gradients,
)
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival
from tests.chaos.doors import DOORS
from tests.chaos.doors import train as train_door
from tests.chaos.lies import LIES, lying
from tests.graph.models import Steady
from tests.training.placed import DIM, EXPERTS, Model, optimizer_of

CPU = torch.device("cpu")
# Slow links, which give plans with chunks and buckets.
SLOW = CostModel({**{name: Line(0.0, 1e-6) for name in LINES}, "gemm": Line(0.0, 1e-6)}, Contention.between_links(0.9))
PLANS = ("fsmoe", "tutel_improved")


@dataclass(frozen=True)
class Layout:
    """The layout of a job on its ranks.

    Attributes:
        sizes: ep, esp, mp.   shape: of the model, for `placed.Model`.
        wraps: the model is in DistributedDataParallel.   moves: experts move (`ShardedExperts`); "heap": by puts.
        captured: the model is compiled, and its graphs planned (`GraphBackend`).
        door: another model, a name of `DOORS`.   cold: each job measures anew.
        hooked: the experts and gates have module hooks, one of which changes the experts' rows.
    """

    world: int
    sizes: tuple[int, int, int]
    shape: dict[str, Any] = field(default_factory=dict)
    wraps: bool = False
    moves: str = ""
    captured: bool = False
    door: str = ""
    cold: bool = False
    hooked: bool = False

    @property
    def meshes(self) -> bool:
        """Whether the job creates device meshes, which PyTorch keeps until the process ends."""
        return self.door in ("hf", "titan", "megatron")

    @property
    def mp(self) -> int:
        return self.sizes[2]


_CHUNKS = {"schedule": Schedule("fsmoe", degrees=(2, 3))}
_BLOCKS = {"degrees": (2, 2)}

LAYOUTS: dict[str, Layout] = {
    "ep 2": Layout(2, (2, 1, 1)),
    "esp 2": Layout(2, (1, 2, 1)),
    "mp 2": Layout(2, (2, 1, 2)),
    "chunks 2": Layout(2, (2, 1, 1), _CHUNKS),
    "blocks 2": Layout(2, (2, 1, 1), _BLOCKS),
    "ddp 2": Layout(2, (2, 1, 1), wraps=True),
    "fssdp 2": Layout(2, (2, 1, 1), moves="collectives"),
    "fssdp heap 2": Layout(2, (2, 1, 1), moves="heap"),
    "graph 2": Layout(2, (2, 1, 1), captured=True),
    "tuned 2": Layout(2, (2, 1, 1), {"schedule": "auto"}, cold=True),
    "functions 2": Layout(2, (2, 1, 1), door="functions"),
    "tutel 2": Layout(2, (2, 1, 1), door="tutel"),
    "hf 2": Layout(2, (2, 1, 1), door="hf"),
    "titan 2": Layout(2, (2, 1, 1), door="titan"),
    "megatron 2": Layout(2, (2, 1, 1), door="megatron"),
    "hooks 2": Layout(2, (2, 1, 1), hooked=True),
    "hooks chunks 2": Layout(2, (2, 1, 1), _CHUNKS, hooked=True),
    "hooks blocks 2": Layout(2, (2, 1, 1), _BLOCKS, hooked=True),
    "hooks fssdp 2": Layout(2, (2, 1, 1), moves="collectives", hooked=True),
    "functions 4": Layout(4, (4, 1, 1), door="functions"),
    "tutel 4": Layout(4, (4, 1, 1), door="tutel"),
    "ep 4": Layout(4, (4, 1, 1)),
    "ep esp 4": Layout(4, (2, 2, 1)),
    "ep esp mp 4": Layout(4, (2, 2, 2)),
    "copies 4": Layout(4, (2, 1, 1)),
    "2dh 4": Layout(4, (4, 1, 1), {"dispatch": "2dh"}),
    "chunks 4": Layout(4, (2, 2, 1), _CHUNKS),
    "blocks 4": Layout(4, (2, 2, 1), _BLOCKS),
    "ddp 4": Layout(4, (2, 1, 1), wraps=True),
    "fssdp 4": Layout(4, (4, 1, 1), moves="collectives"),
}


@dataclass(frozen=True)
class Spec:
    """A job, the same on every rank.

    Attributes:
        kind: a name of `KINDS`.   layout: of `LAYOUTS`.
        seed: of the tokens.   counts: tokens per rank and step.   skew: all tokens choose the same experts.
        steps, folder: number of steps, and the checkpoints' folder.
        timeout_s: of the topology.   guarded: the user's code is inside `Topology.guard`.
        meets: one rank's input is refused before the second step.   catches: the user catches that error and continues.
    """

    kind: str
    layout: str
    seed: int
    counts: tuple[tuple[int, ...], ...]
    skew: bool = False
    folder: str = ""
    timeout_s: float = 2.5
    guarded: bool = False
    meets: bool = False
    catches: bool = False

    @property
    def steps(self) -> int:
        return len(self.counts[0])

    def tokens(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + rank)
        x_SM = torch.randn(self.counts[rank][step], DIM, generator=generator, dtype=torch.float64)
        return 0.01 * x_SM + 3.0 if self.skew else x_SM + torch.sin(torch.arange(DIM) + step / 4)

    def probe(self) -> Tensor:
        return self.tokens(0, 0)[:0].new_tensor([[(3 * i + j) % 5 - 2.0 for j in range(DIM)] for i in range(7)])


def needs_puts(spec: Spec) -> bool:
    """Whether kernels put bytes into peers' memory."""
    return spec.kind == "one-sided" or LAYOUTS[spec.layout].moves == "heap"


def steps_of(kind: str, layout: str) -> int:
    """Return the number of steps; experts change owners after five steps."""
    return 7 if LAYOUTS[layout].moves else {"profile": 1, "one-sided": 3, "checkpoint": 3, "survival": 3}.get(kind, 2)


class Rank:
    """A job on one rank.

    Args:
        meddle: a name of `INPUTS`, the defect of this rank's input; "" for none.
        strikes: called at the defect.
    """

    def __init__(
        self,
        rank: int,
        spec: Spec,
        meddle: str = "",
        rng: random.Random | None = None,
        strikes: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.spec, self.meddle, self.strikes = rank, spec, meddle, strikes
        self.rng = rng or random.Random(0)
        self.layout = LAYOUTS[spec.layout]
        self.saved, self.passes = 0, 2
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.buckets: GradientBuckets | None = None
        self.experts: ShardedExperts | None = None

    def run(self) -> dict[str, Any]:
        """Return the results, to be compared with `expected`."""
        with StopRequest() if self.meddle == "signals" else nullcontext():
            return self._run()

    def _run(self) -> dict[str, Any]:
        ep, esp, mp = self.layout.sizes
        per_node = 2 if self.layout.world == 4 else None
        self.topology = Topology.from_sizes(ep, esp, mp, ranks_per_node=per_node, timeout_s=self.spec.timeout_s)
        guard = self.topology.guard("the job") if self.spec.guarded else nullcontext()
        with guard, ExitStack() as self.stack:
            if self.layout.cold:
                self.stack.enter_context(patch.dict(os.environ, {CACHE: f"{self.spec.folder}/cache"}))
            found = self.door() if self.layout.door else KINDS[self.spec.kind](self)
            # Keep every rank alive until all ranks are done.
            all_reduce(self.topology.world, torch.zeros(1), operation="the end of the job")
            return found

    def build(self) -> None:
        layout = self.layout
        other: dict[str, Any] = {"gate": self.rng.choice(OTHER_GATES)} if self.meddle == "part" else {}
        self.model = Model(self.topology, "fssdp" if layout.moves else "ep", **layout.shape, **other)
        if layout.hooked:
            add_hooks(self.model)
        if self.meddle == "hook":
            self._hook_one()
        elif self.meddle == "frozen":
            self.rng.choice([p for n, p in self.model.named_parameters() if ".experts." not in n]).requires_grad_(False)
        if self.meddle == "seed":
            torch.manual_seed(self.rng.randrange(1000))
            self._other_copies()
        self.optimizer = optimizer_of(self.model)
        self.whole: torch.nn.Module = self.model
        if layout.wraps:
            self.whole = distributed_data_parallel(self.model, self.topology)
        else:
            broadcast_parameters(self.model, self.topology)
        if layout.captured:
            torch._dynamo.reset()
            self._capture()
        if layout.moves:
            from fusedmoe.comm.one_sided.heaps import open_heap

            options: dict[str, Any] = {"overlap": 4, "memory": 2, "costs": PlacementCosts(1.0, 8, 100, 200, 1e9, 1e9)}
            if layout.moves == "heap":
                options["heap"] = self.stack.enter_context(open_heap(self.topology.ep, CPU))
            self.experts = ShardedExperts(self.model, self.optimizer, self.topology, **options)
            self.stack.callback(self.experts.close)

    def _capture(self) -> None:
        """Compile both passes without the profile function, which would slow that to a minute."""
        self.whole = torch.compile(self.model, backend=GraphBackend(costs=Steady()))  # type: ignore[assignment]
        watch = sys.getprofile()
        sys.setprofile(None)
        try:
            self.whole(self.spec.tokens(self.rank, 0)).sum().backward()
            self.optimizer.zero_grad()
        finally:
            sys.setprofile(watch)

    def _other_copies(self) -> None:
        """Make replicated parameters differ from rank 0's, to be equalized later."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".experts." not in name:
                    parameter.add_(torch.randn_like(parameter))

    def _hook_one(self) -> None:
        """Add an observing module hook on this rank only."""
        layer = self.rng.choice([*self.model.layers])
        module = self.rng.choice([layer, layer.gate, layer.experts])
        kind = self.rng.choice(["forward", "forward_pre", "full_backward"])
        getattr(module, f"register_{kind}_hook")(lambda *_: None)

    def step(self, step: int) -> None:
        """Run one step; drop its numbers if it is refused and caught."""
        last = self.spec.steps - 1
        self.optimizer.zero_grad()
        x_SM = self.spec.tokens(self.rank, step)
        if step == min(1, last):
            self._meddle(x_SM)
        # The library must name the device of every host tensor it creates.
        with torch.device("meta") if self.meddle == "default device" else nullcontext():
            loss = self._passes(x_SM)
        self.optimizer.step()
        self.losses.append(loss.detach())

    def _passes(self, x_SM: Tensor) -> Tensor:
        """Run forward, backward, synchronization and clipping; return the loss."""
        y_SM = self.whole(x_SM)
        loss: Tensor = y_SM.square().sum() / 50 + sum(layer.aux_loss for layer in self.model.layers)
        if self.buckets is not None:
            self.buckets.open()
        if self.passes == 2:
            loss.backward()
        if not self.layout.wraps:
            sync_gradients(self.model, self.topology, buckets=self.buckets)
        self.norms.append(clip_grad_norm(self.model, self.topology, 1.0))
        return loss

    def _meddle(self, x_SM: Tensor) -> None:
        """Before the step's own forward pass, optionally run another one with wrong input on this rank."""
        if self.meddle in LIES:
            self.stack.enter_context(lying(self.meddle, self.rng, self.strikes))
        if self.meddle in INPUTS:
            self.strikes()
        if self.meddle == "order":
            self._out_of_order(x_SM)
        elif self.meddle == "averager":
            self.strikes()
            self._average()
        elif self.meddle in INPUTS or self.spec.meets:
            first = self.model._pipeline[0] if self.model._pipeline else self.model.layers[0]
            wrong_SM = INPUTS[self.meddle](self.rng, x_SM) if self.meddle in INPUTS else x_SM
            if self.meddle == "nan" and first is not self.model.layers[0]:
                wrong_SM = torch.where(wrong_SM.isfinite(), wrong_SM, torch.nan)  # tanh would make infinity finite
            try:
                first(wrong_SM)
            except Exception:
                if not self.spec.catches:
                    raise
            else:
                if self.meddle:  # peers may have no experts in common with that rank
                    raise WrongNumber("wrong input was not refused")

    def _average(self) -> None:
        """Call a PyTorch utility that treats all ranks' parameters as replicas."""
        parameters = [*self.model.parameters()]
        for parameter in parameters:  # averagers skip parameters without gradients
            parameter.grad = torch.zeros_like(parameter)
        if self.rng.randrange(2):
            PeriodicModelAverager(period=1, warmup_steps=0).average_parameters(parameters)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.0)
            averager = PeriodicModelAverager(period=1, warmup_steps=0)
            PostLocalSGDOptimizer(optimizer, averager).step()
        raise WrongNumber("experts of different ranks were averaged")

    def _out_of_order(self, x_SM: Tensor) -> None:
        """Call an operation that the other ranks do not call, or omit an operation."""
        way, topology = self.rng.randrange(8), self.topology
        if way == 0:
            count = self.rng.choice([1, 3, 1000])
            all_reduce(topology.world, torch.ones(count), operation="a sum of one rank's own")
        elif way == 1:
            self.whole(x_SM)
        elif way == 2:
            sync_gradients(self.model, topology)
        elif way == 3:
            self._probe()  # an evaluation
        elif way == 4:
            save_checkpoint(Path(self.spec.folder, "own"), self.model, self.optimizer, topology)
        elif way == 5:
            topology.close()  # this rank ends early
        elif way == 6:
            self.passes = 1  # no backward pass
        else:
            self.model.layers[1](x_SM)  # a layer out of order

    def train(self) -> dict[str, Any]:
        self.build()
        return self._steps()

    def _steps(self) -> dict[str, Any]:
        for step in range(self.spec.steps):
            self.step(step)
        return self._found()

    def _found(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "probe": self._probe()}

    def _probe(self) -> Tensor:
        with torch.no_grad():
            return self.model(self.spec.probe())

    def checkpoint(self) -> dict[str, Any]:
        """Save twice, the second over the first; then repeat the last step from it with a new model."""
        self.build()
        path = Path(self.spec.folder, "checkpoint")
        if self.meddle == "path":
            path = self.rng.choice(
                [path.with_name("another"), path / "inside", Path(self.spec.folder, "x", "..", "own")]
            )
        last = self.spec.steps - 1
        for step in range(last):
            self.step(step)
            if step >= last - 2:
                extra = {"step": step, "placement": self.experts and self.experts.state_dict()}
                save_checkpoint(path, self.model, self.optimizer, self.topology, extra)
                self.saved = step + 1
        self.step(last)
        before, loss, norm = self._probe(), self.losses.pop(), self.norms.pop()
        self.stack.close()
        torch.manual_seed(11)
        self.build()
        extra = load_checkpoint(path, self.model, self.optimizer, self.topology)
        assert extra["step"] == last - 1, extra
        if self.experts is not None:
            self.experts.load_state_dict(extra["placement"])
        self.step(last)
        after = self._probe()
        if not torch.equal(before, after) or self.losses[-1] != loss or self.norms[-1] != norm:
            raise WrongNumber(f"a step from the checkpoint gives {self.losses[-1]}, without it {loss}")
        return self._found()

    def door(self) -> dict[str, Any]:
        spec = self.spec
        model = DOORS[self.layout.door](self.topology)
        batches = [[spec.tokens(self.rank, step)] for step in range(spec.steps)]
        return {"losses": train_door(model, self.topology, batches, spec.probe())[0]}

    def survival(self) -> dict[str, Any]:
        """Keep steps in the memory of two nodes; then repeat the last step from it with a new model."""
        place = Path(self.spec.folder, f"node-{self.rank % 2}")
        place.mkdir(exist_ok=True)
        memory = NodeMemory(os.getppid(), place)
        self.build()
        kept, last = Survival(self.topology, memory), self.spec.steps - 1
        kept.restore(self.model, self.optimizer)
        for step in range(last):
            self.step(step)
            kept.refresh(step + 1, self.model, self.optimizer, {"step": step})
        self.step(last)
        before, loss, norm = self._probe(), self.losses.pop(), self.norms.pop()
        torch.manual_seed(11)
        self.build()
        extra = Survival(self.topology, memory).restore(self.model, self.optimizer)
        assert extra is not None and extra["step"] == last - 1, extra
        self.step(last)
        if not torch.equal(before, self._probe()) or self.losses[-1] != loss or self.norms[-1] != norm:
            raise WrongNumber(f"a step from the memory of nodes gives {self.losses[-1]}, without it {loss}")
        return self._found()

    def profile(self) -> dict[str, Any]:
        found, _ = cached_profile(self.topology, CPU, dtype=torch.float64, budget_s=0.2, again=True)
        every = all_gather_object(self.topology.world, found.costs.to_json())
        if len(set(every)) > 1:
            raise WrongNumber(f"ranks measure differently: {every}")
        return {}

    def plan(self) -> dict[str, Any]:
        self.build()
        ep, esp, _ = self.layout.sizes
        policy = PLANS[self.spec.seed % len(PLANS)]
        workload = Workload(1, 16, DIM, 6, EXPERTS, k=2, ep=ep, esp=esp)
        _, self.buckets = plan_step(self.model, self.topology, policy, SLOW, workload, limit=4)
        return self._steps()

    def one_sided(self) -> dict[str, Any]:
        """All-to-alls by puts; rank r sends d to rank p in step s bytes that are a function of r, p and s."""
        from fusedmoe.comm.one_sided.heaps import open_heap
        from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll

        heap = self.stack.enter_context(open_heap(self.topology.ep, CPU))
        exchange, ranks = OneSidedAllToAll(heap, rows=2), range(self.layout.world)
        for step in range(self.spec.steps):
            messages = {(a, b): self._message(a, b, step) for a in ranks for b in ranks}
            send = [messages[self.rank, other] for other in ranks]
            come = [messages[other, self.rank] for other in ranks]
            most = max(map(len, messages.values()))
            got = exchange.exchange(torch.cat(send), list(map(len, send)), list(map(len, come)), most, "an exchange")
            if not torch.equal(got, torch.cat(come)):
                raise WrongNumber(f"an exchange by puts brought other bytes in step {step}")
        return {}

    def _message(self, source: int, target: int, step: int) -> Tensor:
        count = 997 * self.spec.counts[source][step] * (target + 1)
        generator = torch.Generator().manual_seed(self.spec.seed + 100 * source + 10 * target + step)
        return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


#: Gate settings that differ from the other ranks' settings.
OTHER_GATES: list[dict[str, Any]] = [
    {"normalize": False},
    {"noise": 0.5},
    {"aux": {"balance": 0.5}},
    {"aux": {"z": 0.1}},
    {"capacity_factor": 9.0},
]


def add_hooks(model: Model) -> None:
    """Module hooks on gates and experts: one observes, one doubles the experts' rows."""
    for layer in model.layers:
        layer.gate.register_forward_hook(lambda *_: None)
        layer.experts.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))


class WrongNumber(AssertionError):
    """The job's own comparison failed."""


KINDS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "train": Rank.train,
    "checkpoint": Rank.checkpoint,
    "survival": Rank.survival,
    "profile": Rank.profile,
    "plan": Rank.plan,
    "one-sided": Rank.one_sided,
}


def _not_finite(rng: random.Random, x_SM: Tensor) -> Tensor:
    x_SM = x_SM.clone() if len(x_SM) else x_SM.new_zeros(3, DIM)
    x_SM[rng.randrange(len(x_SM)), rng.randrange(DIM)] = rng.choice([float("nan"), float("inf"), -float("inf")])
    return x_SM


def _other_shape(rng: random.Random, x_SM: Tensor) -> Tensor:
    wider = x_SM.new_zeros(len(x_SM), DIM + rng.choice([-1, 1, DIM]))
    return rng.choice([wider, x_SM.new_zeros(()), x_SM.new_zeros(DIM - 1)])


def _other_dtype(rng: random.Random, x_SM: Tensor) -> Tensor:
    return x_SM.to(rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.complex128]))


#: Defects of a rank's input; "order": a call that the other ranks do not make.
INPUTS: dict[str, Callable[[random.Random, Tensor], Tensor]] = {
    "nan": _not_finite,
    "shape": _other_shape,
    "dtype": _other_dtype,
    "order": lambda rng, x_SM: x_SM,
}


def expected(spec: Spec) -> list[dict[str, Any]]:
    """Compute each rank's expected results in one process with the whole model and every rank's tokens."""
    layout = LAYOUTS[spec.layout]
    if spec.kind in ("profile", "one-sided"):
        return [{} for _ in range(layout.world)]
    if layout.door:
        batches = [[spec.tokens(rank, step) for rank in range(layout.world)] for step in range(spec.steps)]
        found = train_door(DOORS[layout.door](Topology()), Topology(), batches, spec.probe())
        return [{"losses": of} for of in found]
    model = Model(Topology(), "ep")
    if layout.hooked:
        add_hooks(model)
    optimizer = optimizer_of(model)
    losses: list[list[Tensor]] = [[] for _ in range(layout.world)]
    norms: list[Tensor] = []
    probes = []
    for step in range(spec.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank, found in enumerate(losses):
            y_SM = model(spec.tokens(rank, step))
            aux = sum((layer.aux_loss for layer in model.layers), torch.zeros(()))
            loss = y_SM.square().sum() / 50 + aux / layout.mp
            found.append(loss.detach())
            total = total + loss / (layout.world // layout.mp)
        total.backward()
        norms.append(clip_grad_norm(model, Topology(), 1.0))
        optimizer.step()
        with torch.no_grad():
            probes.append(model(spec.probe()))
    return [{"losses": of, "norms": norms, "probe": probes[-1], "probes": probes} for of in losses]


def probe_of_checkpoint(spec: Spec) -> Tensor:
    """Probe a job's checkpoint in a world of one."""
    model = Model(Topology(), "ep")
    load_checkpoint(Path(spec.folder, "checkpoint"), model, optimizer_of(model), Topology())
    with torch.no_grad():
        return model(spec.probe())
