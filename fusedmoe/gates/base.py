"""Base classes of gates, `Gate` and `RouterGate`, and their result, `Routing`.

A gate selects experts for the tokens of one rank. Orders drop and sort the rows later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import gate, router_product
from fusedmoe.construction import Constructed
from fusedmoe.errors import ConfigError
from fusedmoe.gates.choice_override import ChoiceOverride, RouterTap, active_override
from fusedmoe.kernels.backend import require_float_dtype, uses_triton
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.gate import GateChoice, GateRule, fits_kernels, has_kernels
from fusedmoe.losses import Packing, balance_loss_of_sums, z_loss_of_sums
from fusedmoe.sizes import MAX_SIZE, require_elements

# Relative tolerance before rounding up: in floating point 1.1 · 100 / 2 is 55.00000000000001.
_ROUNDING = 1e-12
INIT_STD = 0.02


@dataclass
class Routing:
    """Expert choices of S tokens with K slots each.

    Attributes:
        expert_SK: [S, K] int64 in [0, E), or -1 for an empty slot.
        weight_SK: [S, K] float32 (float64 for float64 input), differentiable: the factor on the expert's output.
        capacity: maximum rows per expert from this rank; None: no limit.
        priority_S: [S] tokens with higher values are kept first; None: token order.
        aux_loss: scalar, the weighted sum of auxiliary losses.
        logits_SE: [S, E] detached router logits, checked for non-finite values; None if there are none.
        bad: int64 scalar, number of tokens with non-finite logits; None: not counted yet.
    """

    expert_SK: Tensor
    weight_SK: Tensor
    capacity: int | None
    priority_S: Tensor | None
    aux_loss: Tensor
    logits_SE: Tensor | None
    bad: Tensor | None = None


@dataclass
class SoftRouting:
    """Mixing weights between S tokens and N = E·slots expert inputs; column n belongs to expert n // slots.

    Attributes:
        dispatch_SN: [S, N], each column sums to one (S > 0): the input of slot n is Σ_s dispatch[s, n] · x[s].
        combine_SN: [S, N], each row sums to one: the output of token s is Σ_n combine[s, n] · out[n].
        slots: slots per expert.
        aux_loss, logits_SE: see `Routing`; logits are [S, N].
    """

    dispatch_SN: Tensor
    combine_SN: Tensor
    slots: int
    aux_loss: Tensor
    logits_SE: Tensor | None


def trait_applies(cls: type, trait: str, methods: Collection[str]) -> bool:
    """Return whether the attribute or method `trait`, which goes with `methods`, is still valid for `cls`.

    False if `cls` inherits the attribute and overrides one of `methods`, or inherits an override from a class in
    between.
    """
    for base in cls.__mro__:
        if trait in vars(base):
            return True
        if not vars(base).keys().isdisjoint(methods):
            return False
    return True


class Gate(Constructed, nn.Module):
    """Base class of all gates: defines and initializes parameters, and routes tokens.

    A custom gate defines `parameter_shapes`, and either `route`, which receives the whole batch; or, for token-wise
    routing, `splits = True`, `score` and `choose` (and `draw` for random numbers), which lets `fusedmoe.pipeline` split
    batches before the gate. Gates on logits x·Wᵀ should subclass `RouterGate`, which provides the matrix and its
    kernels. Equal scores choose the lower expert (`top_experts`). A program that adds the class to
    `fusedmoe.gates.GATES` can select it by name in settings and in the command (`fusedmoe.cli.main.main`). A worked
    example is in docs/guides/contributing.md.

    `MoELayer` calls `setup` with the model dimension. Weights are drawn on the CPU in float32 from torch's default
    generator, so a seed gives the same gate for every device, dtype and world size. When a layer is created, ranks
    compare the gate's constructor arguments and non-tensor attributes, except those in `rank_specific`.

    Args:
        experts: E, total number of experts.
        k: experts per token, 1 ≤ k ≤ E.
        capacity_factor: f > 0 limits each expert to ceil(k·f·S/E) rows of this rank's tokens; None: no limit.
        aux: auxiliary loss name -> coefficient, with names from the class's `losses`; None: the class's default.

    Raises:
        ConfigError: an argument is out of range, or `aux` is no mapping or has a loss that this gate does not define.
    """

    splits: ClassVar[bool] = False
    """True if a batch may be split before the gate: routing is token-wise, by `score` and `choose`. A subclass that
    overrides `route` must set it again."""
    needs_load: ClassVar[bool] = False
    """True if the class defines `update`."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Names of the auxiliary losses this gate defines: "balance", "importance_load", "z"."""
    default_aux: ClassVar[Mapping[str, float]] = {}
    rank_specific: ClassVar[Collection[str]] = ("tap",)
    tap: RouterTap | None = None  # set while choices are recorded or replayed, see `fusedmoe.routing`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # An override of route() or forward(), also of a mixin, may depend on all tokens.
        if not trait_applies(cls, "splits", ("route", "forward")):
            cls.splits = False
        cls.needs_load = cls.update is not Gate.update

    def __init__(
        self, experts: int, k: int = 1, capacity_factor: float | None = None, *, aux: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        check_count(self, "experts", experts)
        check_count(self, "k", k)
        self.require(k <= experts, f"k = {k} is more than its {experts} experts")
        self.require(
            capacity_factor is None or 0 < capacity_factor <= MAX_SIZE,
            f"capacity_factor must be positive and at most {MAX_SIZE}, or None for no capacity; got {capacity_factor}",
        )
        aux = self.default_aux if aux is None else aux
        self.require(
            isinstance(aux, Mapping),
            f"aux must map loss names to coefficients, such as {{'balance': 0.01}}; got {aux!r}",
        )
        for name, coefficient in aux.items():
            self.require(
                name in self.losses,
                f"auxiliary loss {name!r} is not defined by this gate; defined: {', '.join(self.losses) or 'none'}",
            )
            self.require(math.isfinite(coefficient), f"coefficient of {name!r} must be finite, got {coefficient}")
        self.experts = experts
        self.k = k
        self.capacity_factor = capacity_factor
        self.aux = {name: float(coefficient) for name, coefficient in aux.items() if coefficient != 0}
        self.model_dim: int | None = None

    def setup(
        self, model_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the parameters. Repeated calls with the same `model_dim` are no-ops.

        Raises:
            ConfigError: `model_dim` is not positive or differs from the first call; `dtype` is not floating-point.
        """
        check_count(self, "model_dim", model_dim)
        require_float_dtype(type(self).__name__, dtype)
        if self.model_dim is not None:
            self.require(
                model_dim == self.model_dim,
                f"already set up for model_dim = {self.model_dim}, got {model_dim}: use one gate per layer",
            )
            return
        for name, shape in self.parameter_shapes(model_dim).items():
            require_elements(type(self).__name__, name, shape)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.model_dim = model_dim
        self.reset_parameters()

    @property
    def loss_sequence(self) -> int | None:
        """Tokens per sequence of a loss computed per sequence; None: losses are over all tokens."""
        return None

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes, by name, of the parameters that `setup` creates."""
        return {}

    def reset_parameters(self) -> None:
        """Reinitialize the parameters: normal with standard deviation 0.02, unless the class overrides this."""
        for parameter in self.parameters(recurse=False):
            fill_normal(parameter, INIT_STD)

    def forward(self, x_SM: Tensor, packing: Packing | None = None) -> Routing | SoftRouting:
        """Route S ≥ 0 tokens [S, M] of any float dtype, in float32 (float64 for float64) without autocast.

        `packing`: the tokens' sequences, for gates with a loss per packed sequence.

        Raises:
            ConfigError: before `setup`, or if the input is not floating-point [S, model_dim].
        """
        if self.model_dim is None:
            raise self.error("no parameters yet: call setup(model_dim), or pass the gate to MoELayer")
        if x_SM.dim() != 2 or x_SM.shape[1] != self.model_dim or not x_SM.is_floating_point():
            raise self.error(f"input must be floats [tokens, {self.model_dim}], got {x_SM.dtype} {list(x_SM.shape)}")
        # Rounding to half precision would reorder close logits and thus change experts.
        with outside_autocast(x_SM.device.type):
            if self.tap is None:
                return self._route(x_SM, packing)
            with ChoiceOverride(self.experts, self.tap.next_experts) as choice:
                routing = self._route(x_SM, packing)
            assert isinstance(routing, Routing)
            self.tap.record_choice(choice.chosen_TK, routing.expert_SK)
            return routing

    def _route(self, x_SM: Tensor, packing: Packing | None) -> Routing | SoftRouting:
        if packing is None:
            return self.route(x_SM)
        return self.choose_packed(packing, *self.score(x_SM, *self.draw(x_SM)))

    def choose_packed(self, packing: Packing, *scores: Tensor) -> Routing:
        """Route like `choose`, with the balance loss per packed sequence. Optional, next to `choose`."""
        raise NotImplementedError(f"{type(self).__name__} defines no choose_packed()")

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        """Route validated tokens [S, M], without autocast: `draw`, `score`, `choose`."""
        return self.choose(*self.score(x_SM, *self.draw(x_SM)))

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        """Return per-token tensors [S, ...] for `score`, drawn for the whole batch, such as random numbers."""
        return ()

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [S, ...], such as logits, from which `choose` selects experts.

        A token's scores must depend only on the token and its rows of `drawn` (the result of `draw`), as batches may be
        split.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither route() nor score()")

    def choose(self, *scores: Tensor) -> Routing | SoftRouting:
        """Route the tokens with these scores.

        Experts and weights of a token depend on this token alone; capacity and losses are over the given tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither route() nor choose()")

    def routing(
        self,
        expert_SK: Tensor,
        weight_SK: Tensor,
        logits_SE: Tensor | None = None,
        terms: Mapping[str, Callable[[], Tensor]] | None = None,
        bad: Tensor | None = None,
    ) -> Routing:
        """Build the `Routing` of selected experts and weights, with this gate's capacity and losses.

        Args:
            logits_SE: logits used for the selection, to be checked for non-finite values; None: no check.
            terms: for each name in `losses`, a function that computes the loss.
            bad: number of tokens with non-finite logits; None: not counted yet.
        """
        aux_loss = self.weigh(weight_SK, terms or {})
        logits_SE = None if logits_SE is None else logits_SE.detach()
        return Routing(expert_SK, weight_SK, self.row_capacity(expert_SK.shape[0]), None, aux_loss, logits_SE, bad)

    def without_losses(self) -> Self:
        """Return a shallow copy that computes no auxiliary losses."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__ | {"aux": {}})
        return made

    def row_capacity(self, tokens: int) -> int | None:
        """Return the maximum rows per expert for `tokens` tokens of a rank; None: no limit."""
        if self.capacity_factor is None:
            return None
        return rows_per_expert(self.k, self.capacity_factor, tokens, self.experts)

    def mean_rows_per_token(self, tokens: int) -> float:
        """Return the mean rows per token of a rank if all experts are filled to capacity."""
        capacity = self.row_capacity(tokens)
        return self.k if capacity is None else self.experts * capacity / tokens

    def update(self, load_E: Tensor) -> None:
        """Update the gate's state from the step's token counts per expert over all ranks; by default a no-op."""

    def weigh(self, like: Tensor, terms: Mapping[str, Callable[[], Tensor]]) -> Tensor:
        """Return Σ coefficient · loss over `aux`; without losses, zero with the dtype and device of `like`."""
        weighted = [
            terms[name]() * coefficient if coefficient != 1 else terms[name]() for name, coefficient in self.aux.items()
        ]
        return sum(weighted[1:], weighted[0]) if weighted else like.new_zeros(())

    def require(self, condition: bool, text: str) -> None:
        if not condition:
            raise self.error(text)

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} gate: {text}")

    def extra_repr(self) -> str:
        return f"experts={self.experts}, k={self.k}, capacity_factor={self.capacity_factor}, aux={self.aux}"


def check_count(gate: Gate, name: str, value: int) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    gate.require(is_integer and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
    gate.require(value <= MAX_SIZE, f"{name} = {value} is out of bounds; the largest is {MAX_SIZE}")


def rows_per_expert(k: int, factor: float, tokens: int, experts: int) -> int:
    """Return the rows per expert, ceil(k·f·S/E), with f as a decimal: 1·1.1·100/2 is 55, not 56."""
    return math.ceil(k * factor * tokens / experts * (1 - _ROUNDING))


def fill_normal(parameter: Tensor, std: float) -> None:
    """Fill from torch's default CPU generator. Leaves meta tensors unchanged."""
    if parameter.is_meta:
        return
    with torch.no_grad():
        # In float32: bfloat16 parameters are the rounded float32 values.
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float32, device="cpu") * std)


#: Vectors shorter than this are not normalized: the gradient of the direction grows with 1/length.
MIN_NORM = 1e-4


def unit_vectors(x: Tensor, dim: int) -> Tensor:
    """Normalize vectors along `dim`; vectors shorter than `MIN_NORM` and their gradients are unchanged."""
    is_short = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True) < MIN_NORM
    # The second derivative of a norm is NaN at zero, even if the norm is unused.
    length = torch.linalg.vector_norm(x.masked_fill(is_short, 1.0), dim=dim, keepdim=True)
    return x / length.masked_fill(is_short, 1.0)


def router_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    # The meta device has no autocast; `is_autocast_available` does not work in compiled graphs.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class RouterGate(Gate):
    """Base class of gates that select experts token by token from logits, usually x·Wᵀ.

    A subclass defines `choose` in plain PyTorch, and the same choice as a `rule` for kernels, which are used where they
    support the operands (`has_kernel_for`). With `one_kernel`, one kernel fuses GEMM and selection.

    Parameters: `weight_EM` [E, M], unless overridden.
    """

    splits: ClassVar[bool] = True
    weight_EM: nn.Parameter

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    @property
    def one_kernel(self) -> bool:
        """True if the logits are x·Wᵀ and the routing depends only on them, the rule, and `draw`."""
        return True

    def rule(self) -> GateRule:
        """Return the rule by which kernels map logits to experts and weights."""
        raise NotImplementedError(f"{type(self).__name__} defines no rule()")

    def choice_bias(self) -> Tensor | None:
        """Return the bias [E] added to the scores for the selection only; None: no bias."""
        return None

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        drawn = self.draw(x_SM)
        # The kernel supports neither noise nor jitter. `next(self.parameters())` does not evaluate a parametrized
        # weight.
        if not drawn and self.one_kernel and self.has_kernel_for(x_SM, next(self.parameters())):
            return self.routing_of(gate(x_SM, self.weight_EM, self.rule(), self.choice_bias()))
        return self.choose(*self.score(x_SM, *drawn))

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return (router_logits(x_SM, self.weight_EM),)

    def has_kernel_for(self, *tensors: Tensor) -> bool:
        """Return whether kernels support these operands: tokens and a router matrix, or logits."""
        # Given or recorded choices need PyTorch.
        return (
            uses_triton(tensors[0])
            and fits_kernels(self.experts, self.k)
            and has_kernels(*tensors)
            and active_override() is None
        )

    def make_rule(self, score: str, *, normalize: bool, scale: float = 1.0, sequence: int | None = None) -> GateRule:
        """Return a `GateRule` for this gate's k, with the statistics its auxiliary losses need."""
        balance = "balance" in self.aux
        return GateRule(
            self.k,
            score,
            normalize=normalize,
            scale=scale,
            statistics=balance,
            # Sums per sequence cost kernel writes.
            sequence=sequence if balance else None,
            logsumexp="z" in self.aux,
        )

    def routing_of(self, choice: GateChoice, other_losses: Mapping[str, Callable[[], Tensor]] | None = None) -> Routing:
        """Build the routing of a kernel's choice by this gate's rule. `other_losses`: besides "balance" and "z"."""

        def balance() -> Tensor:
            assert choice.score_BE is not None and choice.count_BE is not None
            return balance_loss_of_sums(choice.score_BE, choice.count_BE, *choice.expert_SK.shape)

        def z() -> Tensor:
            assert choice.logsumexp_S is not None
            return z_loss_of_sums(choice.logsumexp_S)

        terms = {"balance": balance, "z": z, **(other_losses or {})}
        return self.routing(choice.expert_SK, choice.weight_SK, choice.logits_SE, terms, choice.bad)


class _RouterLogits(Function):
    # F.linear on a cast copy would keep this copy, S·M·4 bytes, alive until backward.

    operation, double_backward = "router_logits, the product of a gate", True

    @staticmethod
    def forward(ctx: Any, x_SM: Tensor, weight_EM: Tensor) -> Tensor:
        ctx.save_for_backward(x_SM, weight_EM)
        dtype = router_dtype(x_SM)
        return x_SM.to(dtype) @ weight_EM.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_SE,) = grads
        x_SM, weight_EM = ctx.saved_tensors
        dtype = grad_SE.dtype
        grad_x = grad_weight = None
        with outside_autocast(grad_SE.device.type):
            if ctx.needs_input_grad[0]:
                grad_x = (grad_SE @ weight_EM.to(dtype)).to(x_SM.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_SE.t() @ x_SM.to(dtype)).to(weight_EM.dtype)
        return grad_x, grad_weight


def router_logits(x_SM: Tensor, weight_EM: Tensor) -> Tensor:
    """Compute x·weightᵀ in `router_dtype(x)`: [S, M] and [E, M] of any float dtypes give [S, E].

    Saves its inputs for backward, without cast copies. Gradients have the inputs' dtypes. Supports double backward in
    plain PyTorch, but not in Triton.
    """
    if uses_triton(x_SM) and has_kernels(x_SM, weight_EM):
        return router_product(x_SM, weight_EM)
    return _RouterLogits.apply(x_SM, weight_EM)
