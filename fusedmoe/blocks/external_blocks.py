"""Micro-batches of another library's decoder blocks: attention of one overlaps with the experts of another.

A block's own `forward` computes its dense part, y, with a stand-in for the experts that records its arguments and
returns zeros. The block's output is then y + experts(u), so it must use the experts' result nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fusedmoe.blocks.cuts import ExternalCall, split_by_phase
from fusedmoe.blocks.dense_part import RoutingDense
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.wire_format import find_wire_format
from fusedmoe.compat.torch import is_compiled, tensor_version
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.module_hooks import find_hook
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts, Place
from fusedmoe.gates.base import Gate, Routing, router_dtype
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.layout import Layout
from fusedmoe.layers.input_checks import InputChecks
from fusedmoe.layers.measure import measure_layer
from fusedmoe.layers.moe import MoELayer
from fusedmoe.layers.schedule import measurement_context
from fusedmoe.layers.scheduled_exchange import EXCHANGE, ExternalExperts, ScheduledExchange
from fusedmoe.runtime.cache import cached_plans
from fusedmoe.runtime.execute import Capabilities, runnable_kinds
from fusedmoe.schedule.candidates import PlanCandidate, family_candidates
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser, PlanSource
from fusedmoe.schedule.policies import micro_batch_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.workload import Workload, costs_of_tokens

#: Attribute of a block that holds its `ExternalPipeline`.
PIPELINE = "fusedmoe_pipeline"
#: Policy that chooses the fastest plan by prediction.
AUTO = "auto"
# Attributes under which blocks hold a shared expert.
_SHARED_NAMES = ("shared_experts", "shared_expert")
# Packages whose hooks on blocks also work with micro-batches, or do nothing there.
_INFRASTRUCTURE = ("fusedmoe", "torch.distributed", "transformers.utils.output_capturing")
# Arguments of a block's experts: tokens [S, M], expert ids [S, K], weights [S, K].
ExpertsInput = tuple[Tensor, Tensor, Tensor]


class ExternalBlock(NamedTuple):
    """A decoder block of another library.

    Attributes:
        owner, attribute: the module that calls the experts, and its attribute that holds them.
    """

    name: str
    module: nn.Module
    owner: nn.Module
    attribute: str
    exchange: ScheduledExchange


class ExternalRouter(Gate):
    """Stand-in for the gate of a `MoELayer`: returns the experts and weights that another library's router chose."""

    splits = True

    def choose(self, *scores: Tensor) -> Routing:
        expert_SK, weight_SK = scores
        # Weights replace the unknown logits in the check: non-finite tokens give non-finite weights.
        return self.routing(expert_SK, weight_SK, weight_SK)


class ExternalBlockExperts(Experts):
    """Makes another library's experts usable by a `MoELayer`. The parameters stay in that library's module."""

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


class DecoderLibrary(Protocol):
    """Interface by which an integration describes the decoder blocks of its library.

    `families`: class names of blocks that add the experts' result to their return value, and use it nowhere else.
    """

    who: str
    families: tuple[str, ...]

    def read(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsInput:
        """Return the arguments of a block's experts in the form of `ExpertsInput`."""
        ...

    def k(self, block: ExternalBlock) -> int:
        """Return the number of experts per token."""
        ...

    def plain_tensors(self, block: ExternalBlock) -> AbstractContextManager[None]:
        """Return a context in which the parameters of a block's experts are plain tensors."""
        ...

    def why_not_split(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        """Return why a block cannot be split in this call, and the fix; None: it can."""
        ...


class _ArgumentRecorder(nn.Module):
    """Stand-in for experts: records their arguments, and returns zeros."""

    def __init__(self, experts: nn.Module, library: DecoderLibrary) -> None:
        super().__init__()
        self._experts, self._library = (experts,), library  # in a tuple, so that it is no submodule
        self.calls: list[ExpertsInput] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._library.read(self._experts[0], args, kwargs)
        self.calls.append(given)
        return torch.zeros_like(args[0] if args else given[0])


class BlockDense(RoutingDense):
    """Dense part of a decoder block: everything before its experts."""

    def __init__(self, external: ExternalBlock, library: DecoderLibrary) -> None:
        super().__init__()
        self.block = external.module
        self._forward, self._external, self._library = external.module.forward, external, library
        self._k = library.k(external)

    @property
    def shared_expert(self) -> nn.Module | None:
        """The block's shared expert, which its dense part computes; None: there is none."""
        return next((child for name, child in self._external.owner.named_children() if name in _SHARED_NAMES), None)

    def forward(self, x: Tensor, arguments: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return y and the experts' input u, both like x, and the ids and weights of each token's experts, [S, K].

        Raises:
            ConfigError: the block does not call its experts exactly once.
        """
        dtype = router_dtype(x)
        if x.numel() == 0:  # `reshape(…, -1)` fails for empty tensors
            none_SK = x.new_zeros(0, self._k, dtype=dtype)
            return x, x, (none_SK.long(), none_SK)
        args, kwargs = arguments
        name, _, owner, attribute, _ = self._external
        experts = owner.get_submodule(attribute)
        stand_in = _ArgumentRecorder(experts, self._library)
        owner.register_module(attribute, stand_in)
        try:
            y = self._forward(x, *args, **kwargs)
        finally:
            owner.register_module(attribute, experts)
        if len(stand_in.calls) != 1:
            times = len(stand_in.calls)
            raise ConfigError(f"{self._library.who}: {name} calls its experts {times} times: use schedule=…")
        u_SM, number_SK, weight_SK = stand_in.calls[0]
        return y, u_SM.reshape(x.shape), (number_SK.long(), weight_SK.to(dtype))


class _NewTensor(Function):
    """Returns its input as a new tensor: FSDP does not allow views of a block's input."""

    operation = "a block whose pipeline begins with it"

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class BlocksSource(PlanSource):
    """Provides a pipeline's plans, of one policy or all. If the pipeline can run none, it keeps its current plans."""

    def __init__(self, blocks: PipelinedBlocks, policy: str, costs: StepCosts, samples: int) -> None:
        self.blocks, self.policy, self.costs, self.samples = blocks, policy, costs, samples

    def candidates(self) -> Sequence[PlanCandidate]:
        costs, samples, topology = self.costs, self.samples, self.blocks.topology
        if self.policy == AUTO:
            every = family_candidates(costs, MAX_DEGREE, samples, lambda done, total: None)
        else:
            plans = cached_plans([self.policy], topology, costs, limit=MAX_DEGREE, samples=samples)
            every = [PlanCandidate(name, plan, True, makespan(plan, costs)) for name, plan in plans.items()]
        return [each for each in every if each.uses_micro_batches and self._can_run(each.plan)] or super().candidates()

    def follow(self, candidate: PlanCandidate) -> None:
        self.blocks.set_plan(split_by_phase(candidate.plan) if len(candidate.plan) else self.blocks.plans)

    def _can_run(self, plan: Plan) -> bool:
        with suppress(ConfigError):
            self.blocks.require_runnable(split_by_phase(plan))
            return True
        return False


class ExternalPipeline:
    """Consecutive decoder blocks of another library's model that run as one `PipelinedBlocks`.

    All blocks but the last record their arguments and return x unchanged; the last runs all of them. FSDP reduces a
    block's gradients once backward has passed its input, when all blocks' gradients are complete.

    Args:
        degrees, recompute, wire: as in `fusedmoe.pipeline`.
        policy: chooses the plan in the first forward; None: the plan follows from `degrees`.
    Raises:
        ConfigError: blocks that `fusedmoe.pipeline` does not support.
        RankError: the ranks have different blocks. Construction is collective.
    """

    def __init__(
        self,
        external: Sequence[ExternalBlock],
        library: DecoderLibrary,
        degrees: tuple[int, int],
        policy: str | None,
        recompute: bool,
        wire: str | None = None,
    ) -> None:
        self._external, self._library, self._policy = external, library, policy
        self._calls: list[ExternalCall] = []
        self._x: Tensor | None = None
        self._has_hooks = False
        with self._gathered_parameters():
            parts = []
            for block in external:
                if wire is not None:
                    block.exchange.set_wire(wire)
                experts = block.exchange.experts
                gate = ExternalRouter(experts.num_experts, library.k(block))
                layer = MoELayer(
                    experts.widths[0], gate, ExternalBlockExperts(experts), topology=external[0].exchange.topology
                )
                layer.checks = InputChecks(layer.topology, library.who, exchange_reports_logits=True)
                layer.plans.wire = block.exchange.plans.wire
                layer.check_wrapper = None  # the model's own framework wraps them correctly
                parts.append((BlockDense(block, library), layer))
            self.blocks = PipelinedBlocks(parts, degrees, recompute=recompute)
        self._original_forwards = [(vars(block.module).get("forward"), block.module.forward) for block in external]
        for number, block in enumerate(external):
            block.module.forward = self._make_forward(number)
            setattr(block.module, PIPELINE, self)

    def __reduce__(self) -> Any:
        # A copied block's forward would run the original blocks.
        raise ConfigError(f"{self._library.who}: blocks in micro-batches cannot be copied; first give degrees=None")

    def restore_forward(self) -> None:
        for block, (replaced, _) in zip(self._external, self._original_forwards, strict=True):
            delattr(block.module, PIPELINE)
            if replaced is None:
                del block.module.forward
            else:
                block.module.forward = replaced

    def _make_forward(self, number: int) -> Callable[..., Any]:
        @torch.compiler.disable
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if number == 0:  # once per pass
                modules = [block.module for block in self._external]
                self._has_hooks = any(find_hook(module, _INFRASTRUCTURE) is not None for module in modules)
            if self._has_hooks or self._is_called_unpipelined(self._external[number], x, kwargs):
                return self._original_forwards[number][1](x, *args, **kwargs)
            return self._record_call(number, x, args, kwargs)

        return forward

    def _is_called_unpipelined(self, block: ExternalBlock, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether the blocks run without micro-batches in this call, as when a model generates.

        Raises:
            ConfigError: in training, if the library, compilation or tensor parallelism prevents micro-batches.
        """
        # Inference tensors have no version counter, which detects operations between blocks.
        if self.blocks.plans is None or torch.is_inference_mode_enabled():
            return True
        why = self._library.why_not_split(block, kwargs)
        if is_compiled(block.module):
            why = "it is compiled; leave compile() of it out"
        elif isinstance(x, DTensor):
            why = "tensor parallelism splits its tokens; leave that out"
        if why is not None and block.module.training:
            raise ConfigError(f"{self._library.who}: {block.name} in micro-batches: {why}, or use schedule=… instead")
        return why is not None

    def _record_call(self, number: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record a block's arguments and return x unchanged; for the last block, run all blocks."""
        block = self._external[number]
        call = ExternalCall(f"{self._library.who}: {block.name}", len(x), args, kwargs)
        call.samples(slice(0, 0))  # fails before anything is sent
        if number == 0:
            self._calls, self._x = [], x
        self._require_unchanged(number, x)
        self._calls.append(call)
        if number + 1 < len(self._external):
            passed: Tensor = _NewTensor.apply(x)
            return passed
        calls, self._calls, self._x = self._calls, [], None
        with self._gathered_parameters():
            if (policy := self._policy) is not None:
                self._policy = None
                self._plan(policy, x)
            z: Tensor = self.blocks(x, calls=calls)
        if z.requires_grad:
            # The passes share the parameters' memory, which FSDP frees and refills.
            z.register_hook(self._gather_parameters)
        return z

    def _plan(self, policy: str, x: Tensor) -> None:
        """Set the plan of a policy, from measured costs, for the largest batch of any rank. Collective."""
        exchange, topology = self._external[0].exchange, self.blocks.topology
        M = x.shape[-1]
        exchange.plans.parts.gate.k = self._library.k(self._external[0])
        # Inside a forward pass, where FSDP has gathered the parameters.
        with measurement_context():
            sizes = all_gather_object(topology.world, tuple(x.shape[:2]), "planning blocks")
            samples, length = (max(1, *each) for each in zip(*sizes, strict=True))
            experts = next(module for module in self.blocks.modules() if isinstance(module, ExternalBlockExperts))
            like = x.new_empty(samples * length, M, dtype=experts.row_dtype(x))
            workload = self.blocks.workload(like.view(samples, length, M))
            costs = costs_of_tokens(measure_layer(exchange.plans, like), workload)
            kinds = runnable_kinds(Capabilities(topology.ep.size, topology.esp.size), "blocks")
            # The other library reduces gradients over data parallelism.
            step = workload.step_costs(costs, [0] * len(self._external), kinds, whole=True)
            PlanChooser(BlocksSource(self.blocks, policy, step, samples), steps=None)

    def _require_unchanged(self, number: int, x: Tensor) -> None:
        first, name, who = self._x, self._external[number].name, self._library.who
        # Compare memory and version: FSDP's hooks create new tensor objects.
        if (
            first is None
            or len(self._calls) != number
            or (x.shape, x.data_ptr(), tensor_version(x)) != (first.shape, first.data_ptr(), tensor_version(first))
        ):
            raise ConfigError(
                f"{who}: {name} is not called with what the block before it returned: its model does more between "
                "blocks than to call them; use schedule=… in place of the pipeline"
            )

    @contextmanager
    def _gathered_parameters(self) -> Iterator[None]:
        """Context in which all blocks' parameters are gathered and experts' parameters are plain tensors."""
        self._gather_parameters()
        try:
            with ExitStack() as stack:
                for block in self._external:
                    stack.enter_context(self._library.plain_tensors(block))
                yield
        finally:
            for module in self._fsdp_modules():
                module.reshard()

    def _gather_parameters(self, _: Tensor | None = None) -> None:
        for module in self._fsdp_modules():
            module.unshard()

    def _fsdp_modules(self) -> list[FSDPModule]:
        modules = (module for block in self._external for module in block.module.modules())
        return [module for module in modules if isinstance(module, FSDPModule)]


def pipeline_external(
    model: nn.Module,
    library: DecoderLibrary,
    degrees: tuple[int, int] | None,
    policy: str | None,
    recompute: bool,
    wire: str | None = None,
) -> list[PipelinedBlocks]:
    """Run the decoder blocks of another library's model in micro-batches, in place of an earlier call's pipelines.

    Args:
        degrees: micro-batches, forward and backward; None: restore the blocks' own forward.
        policy: "auto" (the fastest by prediction) or the name of a policy for whole layers; chooses the plan in the
            first forward, which measures the machine. None: the plan follows from `degrees`.
        recompute, wire: as in `fusedmoe.pipeline`.
    Returns:
        One `PipelinedBlocks` per run of consecutive blocks, for `set_plan`; none on a single rank.
    Raises:
        ConfigError: blocks of an unknown class, or that the integration or `fusedmoe.pipeline` refuses; an unknown
            policy or `wire`.
        RankError: the ranks have different blocks or degrees. Collective.
    """
    find_wire_format(wire)  # refuses unknown formats, also on one rank
    if policy is not None and policy not in (AUTO, *micro_batch_policies()):
        known = ", ".join((AUTO, *micro_batch_policies()))
        raise ConfigError(f"{library.who}: unknown policy {policy!r} for whole layers; choose {known}")
    runs = _find_runs(model, library)
    for module in model.modules():
        if isinstance(before := vars(module).get(PIPELINE), ExternalPipeline):
            before.restore_forward()
    if degrees is None:
        return []
    return [ExternalPipeline(run, library, degrees, policy, recompute, wire).blocks for run in runs]


def _find_runs(model: nn.Module, library: DecoderLibrary) -> list[list[ExternalBlock]]:
    modules, runs, before = dict(model.named_modules()), list[list[ExternalBlock]](), ("", 0)
    for name, module in modules.items():
        # Not `hasattr(module)`: wrappers forward attributes of the wrapped module.
        has_one = EXCHANGE in vars(module) or hasattr(type(module), EXCHANGE)
        exchange = getattr(module, EXCHANGE) if has_one else None
        if not isinstance(exchange, ScheduledExchange) or exchange.topology.size == 1:
            continue
        steps = name.split(".")
        starts = [".".join(steps[:length]) for length in range(1, len(steps))]
        blocks = next((path for path in starts if isinstance(modules[path], nn.ModuleList | nn.ModuleDict)), None)
        if blocks is None:
            raise ConfigError(f"{library.who}: {name} ({type(module).__name__}) is in no list of decoder blocks")
        key = steps[blocks.count(".") + 1]
        owner, _, attribute = name.rpartition(".")
        block = ExternalBlock(f"{blocks}.{key}", modules[f"{blocks}.{key}"], modules[owner], attribute, exchange)
        # FSDP subclasses a model's classes.
        if not any(kind.__name__ in library.families for kind in type(block.module).__mro__):
            raise ConfigError(
                f"{library.who}: {block.name} is a {type(block.module).__name__}; supported: "
                f"{', '.join(library.families)}. Leave out wrappers of blocks (recompute=True replaces activation "
                "checkpoints), or use schedule=… for this model"
            )
        place = blocks, [name for name, _ in modules[blocks].named_children()].index(key)
        if runs and place == (before[0], before[1] + 1):
            runs[-1].append(block)
        else:
            runs.append([block])
        before = place
    return runs
