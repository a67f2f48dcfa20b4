"""Feed-forward experts, y = act(x·W1ᵀ + b1)·W2 + b2, and functions shared by both expert types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fusedmoe.engine.module_hooks import has_hooks
from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError
from fusedmoe.kernels import Weights
from fusedmoe.schedule import Workload
from fusedmoe.sizes import require_elements, require_within
from fusedmoe.tutel.impls.communicate import get_world_rank, topology_of, zero_gather

if TYPE_CHECKING:
    from fusedmoe.tutel.impls.moe_layer import MOELayer


class Shards(NamedTuple):
    """Group of ranks that join their parameters to [experts, …]: whole experts, or larger shards of one.

    `first` is the index of the first joined shard within its expert.
    """

    group: dist.ProcessGroup | None
    members: int
    experts: int
    first: int

    def join(self, parameter: Tensor) -> Tensor:
        """All-gather a parameter; backward reduce-scatters the gradient."""
        if self.members == 1:
            return parameter
        return zero_gather(parameter, group=self.group).view(self.experts, -1, *parameter.shape[2:])

    def join_flat(self, parameter: Tensor, shape: torch.Size) -> Tensor:
        """Join flat parts of blocks of experts, each of this shape without padding at its end."""
        if self.members == 1:
            return parameter.view(shape)
        blocks = zero_gather(parameter, group=self.group).view(self.experts // shape[0], -1)
        return blocks[:, : shape.numel()].reshape(-1, *shape[1:])


def shards_of(ctx: MOELayer, r: int) -> Shards:
    """Return the shards that this rank joins with adaptive degree r: all experts for 0, else 1/r of its experts."""
    s = ctx.sharded_count
    if r == 0:
        return Shards(ctx.group, ctx.world_size, ctx.num_global_experts, 0)
    # The s ranks of an expert form r blocks of s/r ranks; a block joins its shards.
    size = s // r
    place = get_world_rank(ctx.group) % s if s > 1 else 0
    first = place // size * size
    if size == 1:
        return Shards(None, 1, ctx.num_local_experts, first)
    topology = topology_of(ctx.group, s, r)
    start = topology.world.index - place + first
    block = topology.subgroup("shards", topology.world.ranks[start : start + size])
    return Shards(block.handle, size, 1, first)


_KNOWN = {F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu", F.silu: "silu", F.gelu: "gelu"}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


class _FirstOperation(TorchFunctionMode):
    """Mode that records the only torch operation of a function, a known activation of `x`, without executing it.

    Attributes:
        name: name of the activation; "" before the operation.
        result: stands for the operation's result.
    Raises:
        LookupError: an operation that is no known activation, has arguments other than `x`, or is not the first.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x, self.name = x, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = _KNOWN.get(func, "")
        if name == "gelu":
            name = _GELUS.get(options.pop("approximate", "none"), "")
        alone = len(args) == 1 and args[0] is self.x and not options.pop("inplace", False) and not options
        if self.name or not name or not alone:
            raise LookupError("no known activation")
        self.name = name
        # If the function returns this tensor, no further operation followed.
        self.result = torch.empty(0, device="cpu")
        return self.result


def activation_name(function: Callable[[Tensor], Tensor]) -> str | None:
    """Return the function's name in `kernels.activation.ACTIVATIONS`; None if it is not exactly one of these."""
    x = torch.empty(0, device="cpu")
    watch = _FirstOperation(x)
    try:
        with watch:
            result = function(x)
    except Exception:
        return None
    return watch.name if watch.name and result is watch.result else None


Activation = Callable[[Tensor], Tensor]
INITIALISATIONS = ("0.4", "0.3")
# Number of multiply-adds below which a CPU is faster with a batched product over padded blocks: by a quarter at 2²¹,
# equal at 2²⁴, forward and backward.
SMALL = 2**23


class FusedExpertsNetwork(nn.Module):
    """Feed-forward experts of a rank, or its shard of one. H: hidden dimension of an expert; s: ranks that share it.

    Parameters of e local experts: batched_fc1_w [e, H/s, D], batched_fc2_w [e, H/s, D_out], batched_fc1_bias [e, H/s],
    and batched_fc2_bias [e, ⌈D_out/s⌉], this rank's columns. An absent bias is None and has no key in state_dict.

    Args:
        activation_fn, activation_fn_with_self: act(x), or act(x, these experts); ReLU by default.
        output_dim: D_out, by default D.
        init: "0.4", uniform, W1 in ±1/√D and W2 in ±1/√(H/s), with zero biases, as in Tutel 0.4; or "0.3", as
            `nn.Linear`, expert by expert, as in Tutel 0.3.3.
    """

    batched_fc1_w: nn.Parameter
    batched_fc2_w: nn.Parameter
    batched_fc1_bias: nn.Parameter | None
    batched_fc2_bias: nn.Parameter | None

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int = 1,
        sharded_count: int = 1,
        activation_fn: Activation | None = None,
        activation_fn_with_self: Callable[[Tensor, nn.Module], Tensor] | None = None,
        output_dim: int | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
        init: str = "0.4",
    ) -> None:
        super().__init__()
        require_within("ffn experts", hidden_size_per_expert=hidden_size_per_expert, output_dim=output_dim)
        require_elements("ffn experts", "weights", (num_experts_per_device, hidden_size_per_expert, model_dim))
        if hidden_size_per_expert % sharded_count:
            text = f"hidden_size_per_expert = {hidden_size_per_expert} cannot be split over {sharded_count} ranks"
            raise ConfigError(f"{text}; choose a multiple")
        if activation_fn is not None and activation_fn_with_self is not None:
            raise ConfigError("give activation_fn or activation_fn_with_self, not both")
        if init not in INITIALISATIONS:
            raise ConfigError(f"unknown initialisation {init!r}; choose {' or '.join(INITIALISATIONS)}")
        self.skip_expert = read_integer("SKIP_EXPERT", 0) != 0
        self.model_dim, self.hidden_size_per_expert = model_dim, hidden_size_per_expert
        self.local_experts, self.sharded_count = num_experts_per_device, sharded_count
        self.hidden_size = hidden_size_per_expert // sharded_count
        self.output_dim = output_dim or model_dim
        self.init = init
        with_self = activation_fn_with_self
        plain = activation_fn or nn.functional.relu
        self.activation_fn: Activation = plain if with_self is None else lambda x: with_self(x, self)
        e, H = num_experts_per_device, self.hidden_size
        self.batched_fc1_w = nn.Parameter(torch.empty(e, H, model_dim, device=None))
        self.batched_fc2_w = nn.Parameter(torch.empty(e, H, self.output_dim, device=None))
        b1 = nn.Parameter(torch.empty(e, H, device=None)) if has_fc1_bias else None
        b2 = nn.Parameter(torch.empty(e, -(-self.output_dim // sharded_count), device=None)) if has_fc2_bias else None
        self.register_parameter("batched_fc1_bias", b1)
        self.register_parameter("batched_fc2_bias", b2)
        self.shardings = {name: {"ep": 0, "esp": 1} for name, _ in self.named_parameters()}
        self.unpadded = {"batched_fc2_bias": {1: self.output_dim}}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        w1, w2, b1, b2 = self.batched_fc1_w, self.batched_fc2_w, self.batched_fc1_bias, self.batched_fc2_bias
        for i in range(self.local_experts):
            if self.init == "0.3":
                up = nn.Linear(self.model_dim, self.hidden_size, bias=b1 is not None)
                down = nn.Linear(self.hidden_size, self.output_dim, bias=b2 is not None)
                w1[i], w2[i] = up.weight, down.weight.t()
                if b1 is not None:
                    b1[i] = up.bias
                if b2 is not None:
                    b2[i] = down.bias[: b2.shape[1]]
            else:
                for w, inputs in ((w1[i], self.model_dim), (w2[i], self.hidden_size)):
                    # Tutel's order of operations; other orders differ in the last bits.
                    bound = 1 / math.sqrt(inputs)
                    w.copy_(torch.rand(w.shape, dtype=torch.float32, device=w.device) * (bound + bound) - bound)
                for b in (b1, b2):
                    if b is not None:
                        b[i].zero_()

    def weights(self, ctx: MOELayer) -> Weights:
        shards = shards_of(ctx, ctx.adaptive_degree)
        w1, w2 = shards.join(self.batched_fc1_w), shards.join(self.batched_fc2_w)
        b1 = None if self.batched_fc1_bias is None else shards.join(self.batched_fc1_bias)
        b2, start = None, 0
        if self.batched_fc2_bias is not None:
            b2 = shards.join(self.batched_fc2_bias)
            # Results are summed over ranks, so each rank adds other columns of the bias.
            start = min(shards.first * self.batched_fc2_bias.shape[1], self.output_dim)
            b2 = b2[:, : self.output_dim - start]
        return Weights(w1, w2.transpose(1, 2), b1, b2, start)

    def fused(self, ctx: MOELayer, x_SM: Tensor, rows: int) -> tuple[Weights, str] | None:
        """Return weights in x's dtype and the activation for fusedmoe's kernels; None if `forward` must be used."""
        # A subclass's forward may compute something else.
        if type(self).forward is not FusedExpertsNetwork.forward or self.skip_expert:
            return None
        # The GPU kernels return rows of the input's width.
        has_other_width = x_SM.is_cuda and self.output_dim != self.model_dim
        if has_other_width or not can_use_kernels(self, x_SM, rows * self.hidden_size):
            return None
        name = activation_name(self.activation_fn)
        return None if name is None else (cast_weights(self.weights(ctx), x_SM), name)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        """Return the workload of a pass in which each rank sends `rows` rows."""
        D, H, E = self.model_dim, self.hidden_size * self.sharded_count, self.local_experts * ep
        matrices = (("w1", "batched_fc1_w"), ("w2", "batched_fc2_w"))
        trained = tuple(name for name, matrix in matrices if is_trained(self, matrix))
        return Workload(1, rows * esp, D, H, E, 1, ep=ep, esp=esp, itemsize=itemsize, trained=trained)

    def join(self, ctx: MOELayer) -> tuple[Any, ...] | None:
        """Gather the weights for all chunks of a call; None for a subclass's `forward` or SKIP_EXPERT. Collective."""
        if type(self).forward is not FusedExpertsNetwork.forward or self.skip_expert:
            return None
        weights = self.weights(ctx)
        return weights.w1, weights.w2, weights.b1, weights.b2, weights.b2_start

    def forward(self, x: Tensor, ctx: MOELayer, joined: tuple[Any, ...] | None = None) -> Tensor:
        """Compute [e, rows, D_out] from [e, rows, D]; with shards, this rank's summand.

        `joined` is the result of `join`; None gathers the weights in this call, which is then collective.
        """
        if self.skip_expert:
            return x
        weights = self.weights(ctx) if joined is None else Weights(*joined)
        h = x @ weights.w1.transpose(1, 2)
        if weights.b1 is not None:
            h = h + weights.b1[:, None]
        y = self.activation_fn(h) @ weights.w2.transpose(1, 2)
        if weights.b2 is not None:
            after = self.output_dim - weights.b2_start - weights.b2.shape[1]
            y = y + nn.functional.pad(weights.b2, (weights.b2_start, after))[:, None]
        return y

    def extra_repr(self) -> str:
        sizes = f"model_dim={self.model_dim}, hidden_size={self.hidden_size}, output_dim={self.output_dim}"
        biases = f"has_fc1_bias={self.batched_fc1_bias is not None}, has_fc2_bias={self.batched_fc2_bias is not None}"
        return f"{sizes}, num_experts_per_device={self.local_experts}, {biases}"


def is_trained(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is trained, without evaluating a parametrization."""
    return any(one.requires_grad for path, one in module.named_parameters() if name in path.split("."))


def can_use_kernels(module: nn.Module, x_SM: Tensor, hidden: int) -> bool:
    """Return whether fusedmoe's kernels may replace `module` for `hidden` hidden elements (rows x H) and are faster."""
    if has_hooks(module):
        return False
    # On a CPU, only `forward` rounds half precision as Tutel does.
    return x_SM.is_cuda or x_SM.dtype.itemsize >= 4 and hidden * x_SM.shape[1] >= SMALL


def cast_weights(weights: Weights, x_SM: Tensor) -> Weights:
    """Convert weights to the dtype of the rows, and W2 on GPUs to contiguous memory, as the kernels require."""
    w1, w2, b1, b2 = (None if t is None else t.to(x_SM.dtype) for t in (weights.w1, weights.w2, weights.b1, weights.b2))
    assert w1 is not None and w2 is not None
    return Weights(w1, w2.contiguous() if x_SM.is_cuda else w2, b1, b2, weights.b2_start)


ExpertModule = FusedExpertsNetwork
