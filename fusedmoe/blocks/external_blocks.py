"""Decoder blocks of another library's model in micro-batches: attention of some samples beside the experts of others.

The library's own code computes a block's dense part: the block's `forward` runs with a stand-in for its experts, which
notes what they are called with and returns zeros. What the block gives is then y, and y + experts(u) its output; so it
must add what the experts give to what it returns, and do nothing else with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fusedmoe.blocks.cuts import ExternalCall, passes_of
from fusedmoe.blocks.moe_block import RoutingDense
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.compat.torch import is_compiled, version_of
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.module_hooks import first_hook
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts, Place
from fusedmoe.gates.base import Gate, Routing, router_dtype
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.measure import measure_layer
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import undisturbed
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange
from fusedmoe.runtime.cache import cached_plans
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.candidates import PlanCandidate, family_candidates
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser, PlanSource
from fusedmoe.schedule.policies import whole_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.workload import Workload, costs_of_tokens

#: The attribute by which a block has its `ExternalPipeline`.
PIPELINE = "fusedmoe_pipeline"
#: The policy that takes the plan that is the fastest by prediction.
AUTO = "auto"
# Packages whose hooks on blocks serve micro-batches as whole batches, or do nothing while blocks go in these.
_INFRASTRUCTURE = ("fusedmoe", "torch.distributed", "transformers.utils.output_capturing")
# What the experts of a block are called with: tokens [S, M], numbers of all experts [S, K], weights [S, K].
ExpertsInput = tuple[Tensor, Tensor, Tensor]


class ExternalBlock(NamedTuple):
    """A decoder block of another library.

    Attributes:
        name, module: the block.
        owner, attribute: the module that calls the experts, and the name by which it has them.
        exchange: of the experts.
    """

    name: str
    module: nn.Module
    owner: nn.Module
    attribute: str
    exchange: ScheduledExchange


class RouterOutside(Gate):
    """Stand-in for another library's router: takes the experts and the weights that it has chosen."""

    splits = True

    def choose(self, *scores: Tensor) -> Routing:
        expert_SK, weight_SK = scores
        # Weights stand for the logits, which nobody has: tokens that are not finite make weights that are not.
        return self.routing(expert_SK, weight_SK, weight_SK)


class ExpertsOutside(Experts):
    """Another library's experts as those of a `MoELayer`: their parameters stay in their module."""

    def __init__(self, external: ExternalExperts) -> None:
        super().__init__()
        self.module, self.external = external.module, external
        self.shardings = {name: {"ep": 0} for name, _ in self.named_parameters()}

    def setup(self, model_dim: int, place: Place, **_: Any) -> None:
        self.place, self.model_dim = place, model_dim

    def describe(self) -> str:
        return self.external.describe()

    def in_chunks(self, x_SM: Tensor) -> ChunkExperts:
        return self.external.in_chunks(x_SM)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        return self.external.workload(rows, itemsize, ep, esp)

    def forward(self, x_SM: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
        return self.external(x_SM, layout, weight_N)


class DecoderDoor(Protocol):
    """Knowledge of a library's decoder blocks, which its door has.

    Attributes:
        who: asks, for messages.
        families: names of classes of blocks that add what experts give to what they return, and do nothing else with
            it.
    """

    who: str
    families: tuple[str, ...]

    def read(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsInput:
        """Names what the experts of a block are called with."""
        ...

    def k(self, block: ExternalBlock) -> int:
        """Returns the number of experts of a token."""
        ...

    def plain_tensors(self, block: ExternalBlock) -> AbstractContextManager[None]:
        """Returns a context in which the parameters of a block's experts are plain tensors."""
        ...

    def refuses(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        """Says why a block cannot be split as it is called now, and the cure; None: it can."""
        ...


class _StandIn(nn.Module):
    """Notes what experts are called with, and returns zeros."""

    def __init__(self, experts: nn.Module, door: DecoderDoor) -> None:
        super().__init__()
        self._experts, self._door = (experts,), door  # in a tuple, so as not to be a part of this module
        self.calls: list[ExpertsInput] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._door.read(self._experts[0], args, kwargs)
        self.calls.append(given)
        return torch.zeros_like(args[0] if args else given[0])


class BlockDense(RoutingDense):
    """A decoder block up to its experts."""

    def __init__(self, external: ExternalBlock, door: DecoderDoor) -> None:
        super().__init__()
        self.block = external.module
        # The block's own forward: its object is given another one.
        self._forward, self._external, self._door, self._k = external.module.forward, external, door, door.k(external)

    def forward(self, x: Tensor, beside: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Returns y and u, like x, and numbers and weights of each token's experts, [S, K]."""
        dtype = router_dtype(x)
        if x.numel() == 0:  # reshape(…, -1) in other libraries refuses to guess a size of no numbers
            none_SK = x.new_zeros(0, self._k, dtype=dtype)
            return x, x, (none_SK.long(), none_SK)
        args, kwargs = beside
        name, _, owner, attribute, _ = self._external
        experts = owner.get_submodule(attribute)
        stand_in = _StandIn(experts, self._door)
        owner.register_module(attribute, stand_in)
        try:
            y = self._forward(x, *args, **kwargs)
        finally:
            owner.register_module(attribute, experts)
        if len(stand_in.calls) != 1:
            raise ConfigError(f"{self._door.who}: {name} calls its experts {len(stand_in.calls)} times: use schedule=…")
        u_SM, number_SK, weight_SK = stand_in.calls[0]
        return y, u_SM.reshape(x.shape), (number_SK.long(), weight_SK.to(dtype))


class _Passed(Function):
    """Gives on what came, as a tensor of its own: FSDP wants no view of what it gave a block."""

    operation = "a block whose pipeline begins with it"

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class BlocksSource(PlanSource):
    """Plans of blocks in micro-batches, by prediction. Without a plan that the blocks can run they keep theirs."""

    def __init__(self, blocks: PipelinedBlocks, policy: str, costs: StepCosts, samples: int) -> None:
        self.blocks, self.policy, self.costs, self.samples = blocks, policy, costs, samples

    def candidates(self) -> Sequence[PlanCandidate]:
        costs, samples, topology = self.costs, self.samples, self.blocks.topology
        if self.policy == AUTO:
            every = family_candidates(costs, MAX_DEGREE, samples, lambda done, total: None)
        else:
            plans = cached_plans([self.policy], topology, costs, limit=MAX_DEGREE, samples=samples)
            every = [PlanCandidate(name, plan, True, makespan(plan, costs)) for name, plan in plans.items()]
        return [each for each in every if each.whole and self._runs(each.plan)] or super().candidates()

    def follow(self, candidate: PlanCandidate) -> None:
        self.blocks.set_plan(passes_of(candidate.plan) if len(candidate.plan) else self.blocks.plans)

    def _runs(self, plan: Plan) -> bool:
        with suppress(ConfigError):
            self.blocks.require_runnable(passes_of(plan))
            return True
        return False


class ExternalPipeline:
    """Decoder blocks of another library's model, one after the other, that run as one `PipelinedBlocks`.

    Their model calls them one by one. All but the last note what they are called with, and give x on as it came; the
    last one runs all. FSDP reduces a block's gradients where the backward pass has come through its input, so that all
    blocks' are there by then.

    Args:
        external: blocks that follow each other, each with its experts over the same ranks.
        degrees, recompute: as of `fusedmoe.pipeline`.
        policy: chooses the plan in the first forward pass; None: it is that of the degrees.
    Attributes:
        blocks: that run.
    Raises:
        ConfigError: blocks that `fusedmoe.pipeline` does not take.
        RankError: ranks with different ones. Making one is collective.
    """

    def __init__(
        self,
        external: Sequence[ExternalBlock],
        door: DecoderDoor,
        degrees: tuple[int, int],
        policy: str | None,
        recompute: bool,
    ) -> None:
        self._external, self._door, self._policy = external, door, policy
        self._calls: list[ExternalCall] = []
        self._x: Tensor | None = None
        self._hooked = False
        with self._at_hand():
            parts = []
            for block in external:
                experts = block.exchange.experts
                gate = RouterOutside(experts.num_experts, door.k(block))
                layer = MoELayer(
                    experts.widths[0], gate, ExpertsOutside(experts), topology=external[0].exchange.topology
                )
                layer.checks = InputChecks(layer.topology, door.who, carried=True)
                layer.require_wrapper = None  # the model's own framework has wrapped them, and knows which are whose
                parts.append((BlockDense(block, door), layer))
            self.blocks = PipelinedBlocks(parts, degrees, recompute=recompute)
        self._own = [(vars(block.module).get("forward"), block.module.forward) for block in external]
        for number, block in enumerate(external):
            block.module.forward = self._forward_of(number)
            setattr(block.module, PIPELINE, self)

    def __reduce__(self) -> Any:
        # The forward of a copied block would run the blocks that it is a copy of.
        raise ConfigError(f"{self._door.who}: blocks in micro-batches cannot be copied; give degrees=None before that")

    def end(self) -> None:
        """Has the blocks go one after the other again, by themselves."""
        for block, (replaced, _) in zip(self._external, self._own, strict=True):
            delattr(block.module, PIPELINE)
            if replaced is None:
                del block.module.forward
            else:
                block.module.forward = replaced

    def _forward_of(self, number: int) -> Callable[..., Any]:
        @torch.compiler.disable
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if number == 0:  # once for all blocks
                modules = [block.module for block in self._external]
                self._hooked = any(first_hook(module, _INFRASTRUCTURE) is not None for module in modules)
            if self._hooked or self._goes_plainly(self._external[number], x, kwargs):
                return self._own[number][1](x, *args, **kwargs)
            return self._take(number, x, args, kwargs)

        return forward

    def _goes_plainly(self, block: ExternalBlock, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Tells whether the blocks go one after the other in this call, as where a model generates.

        Raises:
            ConfigError: in training, where nobody would see that nothing overlaps.
        """
        # Tensors of inference mode do not count their changes, which tell whether blocks follow each other.
        if self.blocks.plans is None or torch.is_inference_mode_enabled():
            return True
        why = self._door.refuses(block, kwargs)
        if is_compiled(block.module):
            why = "it is compiled; leave compile() of it out"
        elif isinstance(x, DTensor):
            why = "tensor parallelism splits its tokens; leave that out"
        if why is not None and block.module.training:
            raise ConfigError(f"{self._door.who}: {block.name} in micro-batches: {why}, or use schedule=… instead")
        return why is not None

    def _take(self, number: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Takes what a block is called with; the last one runs all."""
        block = self._external[number]
        call = ExternalCall(f"{self._door.who}: {block.name}", len(x), args, kwargs)
        call.samples(slice(0, 0))  # what cannot be split is refused before anything travels
        if number == 0:
            self._calls, self._x = [], x
        self._require_unchanged(number, x)
        self._calls.append(call)
        if number + 1 < len(self._external):
            passed: Tensor = _Passed.apply(x)
            return passed
        calls, self._calls, self._x = self._calls, [], None
        with self._at_hand():
            if (policy := self._policy) is not None:
                self._policy = None
                self._plan(policy, x)
            z: Tensor = self.blocks(x, calls=calls)
        if z.requires_grad:
            # What the passes share is the parameters' own memory, which FSDP frees and fills again.
            z.register_hook(self._gather)
        return z

    def _plan(self, policy: str, x: Tensor) -> None:
        """Has the blocks follow the plan of a policy, by what this machine costs, for batches like x of the rank that
        has most. Collective over all ranks."""
        exchange, topology = self._external[0].exchange, self.blocks.topology
        M = x.shape[-1]
        exchange.plans.parts.gate.k = self._door.k(self._external[0])
        # In the midst of a forward pass, since elsewhere FSDP's parameters are not whole.
        with undisturbed():
            sizes = all_gather_object(topology.world, tuple(x.shape[:2]), "planning blocks")
            samples, length = (max(1, *each) for each in zip(*sizes, strict=True))
            experts = next(module for module in self.blocks.modules() if isinstance(module, ExpertsOutside))
            like = x.new_empty(samples * length, M, dtype=experts.row_dtype(x))
            workload = self.blocks.workload(like.view(samples, length, M))
            costs = costs_of_tokens(measure_layer(exchange.plans, like), workload)
            kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "blocks")
            # Gradients over data parallelism are the other library's to reduce.
            step = workload.step_costs(costs, [0] * len(self._external), kinds, whole=True)
            PlanChooser(BlocksSource(self.blocks, policy, step, samples), steps=None)

    def _require_unchanged(self, number: int, x: Tensor) -> None:
        """Refuses models that do something between one block and the next."""
        first, name, who = self._x, self._external[number].name, self._door.who
        # The same memory, in the same number of changes: FSDP's hooks make new objects of it.
        if (
            first is None
            or len(self._calls) != number
            or (x.shape, x.data_ptr(), version_of(x)) != (first.shape, first.data_ptr(), version_of(first))
        ):
            raise ConfigError(
                f"{who}: {name} is not called with what the block before it returned: its model does more between "
                "blocks than to call them; use schedule=… in place of the pipeline"
            )

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """A context in which all blocks' parameters are whole, and experts' plain tensors."""
        self._gather()
        try:
            with ExitStack() as stack:
                for block in self._external:
                    stack.enter_context(self._door.plain_tensors(block))
                yield
        finally:
            for module in self._sharded():
                module.reshard()

    def _gather(self, _: Tensor | None = None) -> None:
        """Has FSDP gather the blocks' parameters."""
        for module in self._sharded():
            module.unshard()

    def _sharded(self) -> list[FSDPModule]:
        modules = (module for block in self._external for module in block.module.modules())
        return [module for module in modules if isinstance(module, FSDPModule)]


def pipeline_external(
    model: nn.Module, door: DecoderDoor, degrees: tuple[int, int] | None, policy: str | None, recompute: bool
) -> list[PipelinedBlocks]:
    """Has the decoder blocks of another library's model go in micro-batches, whose experts' tokens this library sends.

    Args:
        degrees: micro-batches forward and backward; None: blocks go one after the other again.
        policy: "auto", the best by prediction, or the name of a policy for whole layers, chooses the plan in the first
            forward pass, which then measures the machine, and keeps that on disk. Without a plan that these blocks can
            follow it is that of the degrees.
        recompute: as of `fusedmoe.pipeline`.
    Returns:
        The blocks that follow each other, which `set_plan` gives other plans; none where nothing travels.
    Raises:
        ConfigError: blocks of another class, or that the door or `fusedmoe.pipeline` refuses; an unknown policy.
        RankError: ranks with different blocks or degrees. Collective.
    """
    if policy is not None and policy not in (AUTO, *whole_policies()):
        known = ", ".join((AUTO, *whole_policies()))
        raise ConfigError(f"{door.who}: unknown policy {policy!r} for whole layers; choose {known}")
    runs = _runs(model, door)
    for module in model.modules():
        if isinstance(before := vars(module).get(PIPELINE), ExternalPipeline):
            before.end()
    if degrees is None:
        return []
    return [ExternalPipeline(run, door, degrees, policy, recompute).blocks for run in runs]


def _runs(model: nn.Module, door: DecoderDoor) -> list[list[ExternalBlock]]:
    """Finds the blocks that follow each other in a list of a model, and have experts over ranks."""
    modules, runs, before = dict(model.named_modules()), list[list[ExternalBlock]](), ("", 0)
    for name, module in modules.items():
        # In the object, or a property of its class: wrappers answer for what they wrap, and are not meant.
        has_one = EXCHANGE in vars(module) or hasattr(type(module), EXCHANGE)
        exchange = getattr(module, EXCHANGE) if has_one else None
        if not isinstance(exchange, ScheduledExchange) or exchange.topology.size == 1:
            continue
        steps = name.split(".")
        starts = [".".join(steps[:length]) for length in range(1, len(steps))]
        blocks = next((path for path in starts if isinstance(modules[path], nn.ModuleList | nn.ModuleDict)), None)
        if blocks is None:
            raise ConfigError(f"{door.who}: {name} ({type(module).__name__}) is in no list of decoder blocks")
        key = steps[blocks.count(".") + 1]
        owner, _, attribute = name.rpartition(".")
        block = ExternalBlock(f"{blocks}.{key}", modules[f"{blocks}.{key}"], modules[owner], attribute, exchange)
        # FSDP derives classes from a model's.
        if not any(kind.__name__ in door.families for kind in type(block.module).__mro__):
            raise ConfigError(
                f"{door.who}: {block.name} is a {type(block.module).__name__}; known are {', '.join(door.families)}. "
                "Leave what wraps blocks out (in place of activation checkpoints give recompute=True), or use "
                "schedule=… for this model"
            )
        place = blocks, [name for name, _ in modules[blocks].named_children()].index(key)
        if runs and place == (before[0], before[1] + 1):
            runs[-1].append(block)
        else:
            runs.append([block])
        before = place
    return runs
