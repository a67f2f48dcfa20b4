"""The bases of gates, and what they return: `Gate`, and `RouterGate` for gates by logits.

A gate reads the tokens of one rank and says which experts see them. It decides nothing about placement: dropping and
ordering follow later, from `Routing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.autograd.gate import GateChoice, GateRule, gate, router_product
from fusedmoe.construction import Constructed
from fusedmoe.errors import ConfigError
from fusedmoe.gates.choosing import Choosing, RouterTap, choosing
from fusedmoe.kernels.backend import require_floats, uses_triton
from fusedmoe.kernels.derivatives import Function
from fusedmoe.kernels.gate import fits_kernels, has_kernels
from fusedmoe.losses import Packing, balance_loss_of_sums, z_loss_of_sums
from fusedmoe.sizes import MOST, require_room

# Shortens the product before it is rounded up: floats say 55.00000000000001 for 1.1 · 100 / 2.
_ROUNDING = 1e-12
INIT_STD = 0.02


@dataclass
class Routing:
    """The choice of experts for S tokens, K slots each.

    Attributes:
        expert_SK: [S, K] int64 in [0, E), or -1 where a slot holds no expert.
        weight_SK: [S, K] float32 (float64 for float64 input), differentiable: the factor on the expert's output.
        capacity: rows an expert accepts from this rank, None for no limit.
        priority_S: [S] the token with the higher value is placed first; None for token order.
        aux_loss: scalar, auxiliary losses already multiplied by their coefficients.
        logits_SE: [S, E] detached router logits, for the check on non-finite values; None if there are none.
        bad: tokens whose logits that check refuses, an int64 scalar; None: to be counted yet.
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
        dispatch_SN: [S, N] each column sums to one (S > 0): slot n's input is Σ_s dispatch[s, n] · x[s].
        combine_SN: [S, N] each row sums to one: token s's output is Σ_n combine[s, n] · out[n].
        slots: slots per expert.
        aux_loss: scalar, auxiliary losses already multiplied by their coefficients.
        logits_SE: [S, N] detached logits, for the check on non-finite values.
    """

    dispatch_SN: Tensor
    combine_SN: Tensor
    slots: int
    aux_loss: Tensor
    logits_SE: Tensor | None


def said_beside(cls: type, trait: str, methods: Collection[str]) -> bool:
    """Returns whether the class that says a trait is not behind one that defines any of these methods anew."""
    for base in cls.__mro__:
        if trait in vars(base):
            return True
        if not vars(base).keys().isdisjoint(methods):
            return False
    return True


class Gate(Constructed, nn.Module):
    """Base of all gates: names its parameters, fills them and routes tokens.

    A gate of your own is a subclass that says `parameter_shapes` and then one of two things. Either it defines `route`,
    and looks at whole batches. Or it routes token by token: it says `splits = True` and defines `score` and `choose`
    (and `draw`, where it draws random numbers), and `fusedmoe.pipeline` may split batches before it. A gate by logits
    x·Wᵀ derives from `RouterGate` (`gates/base.py`), which has the matrix and its kernels. For settings and the
    command, `GATES` in `gates/__init__.py` has its name.

    Worked example, a gate that sends a token to the k experts whose vectors are nearest to it:

        class Nearest(Gate):
            splits = True

            def parameter_shapes(self, model_dim):
                return {"center_EM": (self.experts, model_dim)}

            def score(self, x_SM, *drawn):
                return (-torch.cdist(x_SM.float(), self.center_EM.float()),)

            def choose(self, logits_SE):
                expert_SK = top_experts(logits_SE, self.k)
                return self.routing(expert_SK, logits_SE.gather(1, expert_SK).softmax(1), logits_SE)

    Ranks compare the arguments that a gate was made with and its attributes without tensors when a layer is made;
    `rank_specific` names those that may differ.

    A gate is made without the model dimension; `MoELayer` calls `setup` once. Weights are drawn on the CPU in float32
    from torch's default generator and then copied, so that a seed gives the same gate on every device, in every dtype
    and in every world.

    Args:
        experts: E, number of experts in all.
        k: experts per token, 1 ≤ k ≤ E.
        capacity_factor: f > 0 gives each expert ceil(k·f·S/E) rows of this rank's tokens; None: no limit.
        aux: name of an auxiliary loss -> coefficient, out of the class's `losses`; None: the class's default.

    Raises:
        ConfigError: an argument is out of range, or `aux` is no mapping or names a loss that this gate does not define.
    """

    splits: ClassVar[bool] = False
    """True where a batch may be split before the gate: each token's route depends on that token alone, and the gate
    defines `score` and `choose`. A class with a `route` of its own that does not say so again cannot be split.
    """
    balances: ClassVar[bool] = False
    """True where the gate does something with the load that `update` gives it."""
    packs: ClassVar[bool] = False
    """True where the gate defines `choose_packed`, which takes the balance loss in each packed sequence."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Names of the auxiliary losses that this gate defines: "balance", "importance_load", "z"."""
    default_aux: ClassVar[Mapping[str, float]] = {}
    rank_specific: ClassVar[Collection[str]] = ("tap",)
    tap: RouterTap | None = None  # while choices are recorded or replayed, see `fusedmoe.routing`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A new route() or forward(), a mixin's too, may look at all tokens, and a pipeline calls neither.
        if not said_beside(cls, "splits", ("route", "forward")):
            cls.splits = False
        if "balances" not in vars(cls):
            # A gate that defines `update` wants the load, without saying so.
            cls.balances = cls.update is not Gate.update

    def __init__(
        self, experts: int, k: int = 1, capacity_factor: float | None = None, *, aux: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        check_count(self, "experts", experts)
        check_count(self, "k", k)
        self.require(k <= experts, f"k = {k} is more than its {experts} experts")
        self.require(
            capacity_factor is None or 0 < capacity_factor <= MOST,
            f"capacity_factor must be positive and at most {MOST}, or None for no capacity; got {capacity_factor}",
        )
        # {} turns the class's default losses off; None leaves them.
        aux = self.default_aux if aux is None else aux
        self.require(
            isinstance(aux, Mapping), f"aux must give each loss a coefficient, {{'balance': 0.01}}, not {aux!r}"
        )
        for name, coefficient in aux.items():
            self.require(
                name in self.losses,
                f"auxiliary loss {name!r} is not defined here; defined: {', '.join(self.losses) or 'none'}",
            )
            self.require(math.isfinite(coefficient), f"coefficient of {name!r} must be finite, got {coefficient}")
        self.experts = experts
        self.k = k
        self.capacity_factor = capacity_factor
        # A coefficient of 0 is as good as none: the loss is not computed.
        self.aux = {name: float(coefficient) for name, coefficient in aux.items() if coefficient != 0}
        self.model_dim: int | None = None

    def setup(
        self, model_dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Creates the parameters. A second call with the same `model_dim` changes nothing.

        Raises:
            ConfigError: `model_dim` is not positive, or not that of the first call; a dtype that is none of floats.
        """
        check_count(self, "model_dim", model_dim)
        require_floats(type(self).__name__, dtype)
        if self.model_dim is not None:
            self.require(
                model_dim == self.model_dim,
                f"already set up for model_dim = {self.model_dim}, asked for {model_dim}: one gate a layer",
            )
            return
        # Made empty, on any device, then filled: `reset_parameters` also serves modules made on "meta".
        for name, shape in self.parameter_shapes(model_dim).items():
            require_room(type(self).__name__, name, shape)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.model_dim = model_dim
        self.reset_parameters()

    @property
    def loss_sequence(self) -> int | None:
        """Tokens of a sequence, where a loss is taken in each of them; None: losses are over all tokens."""
        return None

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters that `setup` makes."""
        return {}

    def reset_parameters(self) -> None:
        """Draws the parameters anew: normal, standard deviation 0.02, unless the class says otherwise."""
        for parameter in self.parameters(recurse=False):
            fill_normal(parameter, INIT_STD)

    def forward(self, x_SM: Tensor, packing: Packing | None = None) -> Routing | SoftRouting:
        """Routes S ≥ 0 tokens [S, M] of any float dtype, in float32 (float64 for float64), never autocast.

        `packing`: the tokens' sequences, where the gate takes its loss in each of them.

        Raises:
            ConfigError: before `setup`, or when the input is not [S, model_dim] floats.
        """
        if self.model_dim is None:
            raise self.error("no parameters yet: call setup(model_dim), or hand the gate to MoELayer")
        if x_SM.dim() != 2 or x_SM.shape[1] != self.model_dim or not x_SM.is_floating_point():
            raise self.error(f"input must be floats [tokens, {self.model_dim}], got {x_SM.dtype} {list(x_SM.shape)}")
        # In half precision near logits would change places, and with them the experts of a token.
        with outside_autocast(x_SM.device.type):
            if self.tap is None:
                return self._route(x_SM, packing)
            with Choosing(self.experts, self.tap.give) as choice:
                routing = self._route(x_SM, packing)
            assert isinstance(routing, Routing)
            self.tap.note(choice.chosen_TK, routing.expert_SK)
            return routing

    def _route(self, x_SM: Tensor, packing: Packing | None) -> Routing | SoftRouting:
        if packing is None:
            return self.route(x_SM)
        return self.choose_packed(packing, *self.score(x_SM, *self.draw(x_SM)))

    def choose_packed(self, packing: Packing, *scores: Tensor) -> Routing:
        """Routes as `choose` does, with the balance loss taken in each packed sequence."""
        raise NotImplementedError(f"{type(self).__name__} defines no choose_packed()")

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        """Routes checked tokens [S, M], outside autocast: the three steps one after the other."""
        return self.choose(*self.score(x_SM, *self.draw(x_SM)))

    def draw(self, x_SM: Tensor) -> tuple[Tensor, ...]:
        """Draws what belongs to the tokens of a whole batch beside x, random numbers above all: [S, ...] each."""
        return ()

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        """Returns what the choice depends on, [S, ...] each, of every token by itself: some of the tokens, with what
        was drawn for them, have the scores that they have in the whole batch."""
        raise NotImplementedError(f"{type(self).__name__} defines neither route() nor score()")

    def choose(self, *scores: Tensor) -> Routing | SoftRouting:
        """Routes the tokens with these scores. Experts and weights depend on each token alone; capacity and losses are
        those of these tokens."""
        raise NotImplementedError(f"{type(self).__name__} defines neither route() nor choose()")

    def routing(
        self,
        expert_SK: Tensor,
        weight_SK: Tensor,
        logits_SE: Tensor | None = None,
        terms: Mapping[str, Callable[[], Tensor]] | None = None,
        bad: Tensor | None = None,
    ) -> Routing:
        """Makes the `Routing` of chosen experts and their weights, with this gate's capacity and losses.

        Args:
            logits_SE: what the experts were chosen by; None: nothing that a check could look at.
            terms: how each auxiliary loss of the class's `losses` is computed.
            bad: tokens whose logits are not finite, where they have been counted (`Routing.bad`).
        """
        aux_loss = self.weigh(weight_SK, terms or {})
        logits_SE = None if logits_SE is None else logits_SE.detach()
        return Routing(expert_SK, weight_SK, self.row_capacity(expert_SK.shape[0]), None, aux_loss, logits_SE, bad)

    def row_capacity(self, tokens: int) -> int | None:
        """Rows that one expert accepts from `tokens` tokens of a rank: ceil(k·f·tokens/E); None: no limit.

        The product is taken with f as written: k = 1, f = 1.1, 100 tokens on 2 experts are 55 rows, not 56.
        """
        if self.capacity_factor is None:
            return None
        return share_of_rows(self.k, self.capacity_factor, tokens, self.experts)

    def rows_per_token(self, tokens: int) -> float:
        """Rows that each of `tokens` tokens of a rank becomes where all experts are as full as they may be."""
        capacity = self.row_capacity(tokens)
        return self.k if capacity is None else self.experts * capacity / tokens

    def update(self, load_E: Tensor) -> None:
        """Takes, after an optimizer step, the tokens of all ranks per expert; by default it does nothing."""

    def weigh(self, like: Tensor, terms: Mapping[str, Callable[[], Tensor]]) -> Tensor:
        """Σ coefficient · loss over `aux`; a loss that is not asked for is not computed."""
        weighted = [
            terms[name]() * coefficient if coefficient != 1 else terms[name]() for name, coefficient in self.aux.items()
        ]
        # A tensor also without losses, so that callers can add it up without asking.
        return sum(weighted[1:], weighted[0]) if weighted else like.new_zeros(())

    def require(self, condition: bool, text: str) -> None:
        """Raises ConfigError with the gate's name unless `condition` holds."""
        if not condition:
            raise self.error(text)

    def error(self, text: str) -> ConfigError:
        """Makes an error that begins with the gate's name."""
        return ConfigError(f"{type(self).__name__} gate: {text}")

    def extra_repr(self) -> str:
        return f"experts={self.experts}, k={self.k}, capacity_factor={self.capacity_factor}, aux={self.aux}"


def check_count(gate: Gate, name: str, value: int) -> None:
    """Raises ConfigError unless `value` is an integer of at least one, and at most `MOST`."""
    # True is an integer to Python; as a number of experts it is a mistake.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    gate.require(is_integer and value >= 1, f"{name} must be an integer of at least 1, got {value!r}")
    gate.require(value <= MOST, f"{name} = {value} is out of bounds; the largest is {MOST}")


def share_of_rows(k: int, factor: float, tokens: int, experts: int) -> int:
    """Rows of one expert: ceil(k·f·S/E), with f meant as it is written."""
    # With f as written: k = 1, f = 1.1, 100 tokens on 2 experts are 55 rows, not 56.
    return math.ceil(k * factor * tokens / experts * (1 - _ROUNDING))


def fill_normal(parameter: Tensor, std: float) -> None:
    """Fills from torch's default CPU generator, whatever the device and the dtype; leaves meta tensors."""
    if parameter.is_meta:
        return
    with torch.no_grad():
        # Drawn in float32 whatever the parameter's dtype, so that bfloat16 has the rounded numbers of float32.
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float32, device="cpu") * std)


#: A shorter vector counts as one of length one where it is normalised: the gradient of its direction, which grows with
#: 1/length, would drown the gradients of all others.
LEAST_LENGTH = 1e-4


def unit_vectors(x: Tensor, dim: int) -> Tensor:
    """Divide vectors along `dim` by their length; vectors shorter than `LEAST_LENGTH` stay as they are.

    A zero vector stays zero and receives the gradient of its result unchanged, as a vector of length one nearly does.
    """
    is_short = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True) < LEAST_LENGTH
    # The second derivative of a length is NaN at zero, even where the length is not used.
    length = torch.linalg.vector_norm(x.masked_fill(is_short, 1.0), dim=dim, keepdim=True)
    return x / length.masked_fill(is_short, 1.0)


def router_dtype(x: Tensor) -> torch.dtype:
    """The dtype of router maths: float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


def outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context in which autocast does not lower the precision of operations on `device_type`."""
    # Only meta tensors have no autocast. (`is_autocast_available` would say so, too, but not in a compiled graph.)
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


class RouterGate(Gate):
    """Base of gates that choose experts by logits, token by token; most by x·Wᵀ.

    A subclass defines `choose` in plain torch, and says with `rule` how the experts follow from the logits: where
    kernels serve (`serves`), they make the choice. Where logits are x·Wᵀ and nothing else enters (`one_kernel`), one
    kernel does product and choice.

    Parameters: `weight_EM` [E, M], unless the class says otherwise.
    """

    splits: ClassVar[bool] = True
    weight_EM: nn.Parameter

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight_EM": (self.experts, model_dim)}

    @property
    def one_kernel(self) -> bool:
        """True where x, W and the rule are all that the routing depends on, but for what `draw` gives."""
        return True

    def rule(self) -> GateRule:
        """Returns how experts and weights follow from logits, for `fusedmoe.autograd.gate`."""
        raise NotImplementedError(f"{type(self).__name__} defines no rule()")

    def choice_bias(self) -> Tensor | None:
        """Returns what is added to the scores for the choice alone, [E]; None: nothing."""
        return None

    def route(self, x_SM: Tensor) -> Routing | SoftRouting:
        drawn = self.draw(x_SM)
        # The kernel makes neither noise nor jitter: with any, it chooses from logits that are made here (`choose`).
        # A parametrised weight is like what it is made of, and is evaluated once.
        if not drawn and self.one_kernel and self.serves(x_SM, next(self.parameters())):
            return self.routing_of(gate(x_SM, self.weight_EM, self.rule(), self.choice_bias()))
        return self.choose(*self.score(x_SM, *drawn))

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return (router_logits(x_SM, self.weight_EM),)

    def serves(self, *tensors: Tensor) -> bool:
        """Returns whether kernels serve these operands: tokens and a matrix like the gate's, or logits."""
        # Kernels choose by themselves: where experts are given, or noted, plain torch does.
        return (
            uses_triton(tensors[0])
            and fits_kernels(self.experts, self.k)
            and has_kernels(*tensors)
            and choosing() is None
        )

    def make_rule(self, score: str, *, normalize: bool, scale: float = 1.0, sequence: int | None = None) -> GateRule:
        """Makes a `GateRule` for this gate's k, with the sums that its auxiliary losses need."""
        balance = "balance" in self.aux
        return GateRule(
            self.k,
            score,
            normalize=normalize,
            scale=scale,
            statistics=balance,
            # Sums per sequence are asked for only where a loss needs them: the kernel writes them for each.
            sequence=sequence if balance else None,
            logsumexp="z" in self.aux,
        )

    def routing_of(self, choice: GateChoice, other_losses: Mapping[str, Callable[[], Tensor]] | None = None) -> Routing:
        """Makes the routing of a choice that `fusedmoe.autograd.gate` made by this gate's rule."""

        def balance() -> Tensor:
            assert choice.score_BE is not None and choice.count_BE is not None
            return balance_loss_of_sums(choice.score_BE, choice.count_BE, *choice.expert_SK.shape)

        def z() -> Tensor:
            assert choice.logsumexp_S is not None
            return z_loss_of_sums(choice.logsumexp_S)

        terms = {"balance": balance, "z": z, **(other_losses or {})}
        return self.routing(choice.expert_SK, choice.weight_SK, choice.logits_SE, terms, choice.bad)


class _RouterLogits(Function):
    # nn.functional.linear on a cast copy would keep that copy, S·M·4 bytes, alive until backward.

    operation, twice = "router_logits, the product of a gate", True

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
    """x · weightᵀ in `router_dtype(x)`: [S, M] and [E, M], each of any float dtype, give [S, E].

    Saves `x_SM` and `weight_EM` themselves for backward, no cast copies. Gradients come in the inputs' dtypes.
    Differentiable twice where plain torch serves, once where Triton does.
    """
    if uses_triton(x_SM) and has_kernels(x_SM, weight_EM):
        return router_product(x_SM, weight_EM)
    return _RouterLogits.apply(x_SM, weight_EM)
