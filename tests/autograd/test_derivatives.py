"""Higher-order derivatives of every operator and autograd function: correct, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function as PlainFunction
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fusedmoe
from fusedmoe import autograd
from fusedmoe.autograd import exchange_operators, parallel  # noqa: F401, define operators
from fusedmoe.autograd.order import take_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.engine import scheduled_operator  # noqa: F401, defines operators
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.errors import DerivativeError
from fusedmoe.gates.base import router_logits
from fusedmoe.gates.topk import gather_selected
from fusedmoe.hooks import Hooks, apply_start_hooks
from fusedmoe.kernels import derivatives
from fusedmoe.kernels.derivatives import Function, before_backward, linear
from fusedmoe.kernels.experts import Weights
from fusedmoe.runtime.recorder import Recorder, record_operation
from fusedmoe.tutel import moe
from fusedmoe.tutel.gates.top import gate_product
from fusedmoe.tutel.impls.dispatcher import scaled
from tests.cluster import Cluster
from tests.kernels.operator_cases import cases
from tests.marks import slowly

SOURCES = Path(fusedmoe.__file__).parent


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown when a test fails


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# Operators


def all_cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, several in cases(torch.device("cpu")).items():
        yield from ((name, inputs) for inputs in several)
    layout = autograd.order(torch.tensor([[0, 1], [1, 0], [1, 1]]), 2)
    x_SM, weight_EM, logits_SE = torch.randn(3, 4), torch.randn(2, 4), torch.randn(3, 2)
    x_SM, weight_EM, logits_SE = (one.requires_grad_() for one in (x_SM, weight_EM, logits_SE))
    rule, expert_SK = (2, "softmax", True, 1.0, True, None, True), torch.zeros(3, 2, dtype=torch.long)
    weights, w = (torch.randn(2, 5, 4), torch.randn(2, 4, 5), None, None, 0), torch.randn(2, 5, 4)
    yield "gate", (x_SM, weight_EM, None, *rule)
    yield "gate_from_logits", (logits_SE, None, *rule)
    yield "gate_backward", (logits_SE, expert_SK, torch.randn(3, 2).requires_grad_(), None, None, *rule, False)
    yield "router_product", (x_SM, weight_EM)
    yield "router_dx", (logits_SE, weight_EM, torch.float32)
    yield "router_dw", (logits_SE, x_SM, torch.float32, len(weight_EM))
    given = (torch.randn(6, 5), torch.randn(3, 4), None, *weights, layout.tensors)
    yield "experts_backward", (x_SM, *given, "gelu", (True, False, True, True, False, False))
    yield (
        "grouped_linear_backward",
        (torch.randn(6, 5).requires_grad_(), torch.randn(6, 4), w, True, True, layout.tensors),
    )
    factors = torch.randn(2, 2, 4), torch.randn(2, 5, 2), torch.randn(2, 2, 5), torch.randn(2, 4, 2)
    given = (torch.randn(6, 9), torch.randn(3, 4), None, *weights, *factors, [1.0, 1.0], layout.tensors)
    yield "low_rank_experts_backward", (x_SM, *given, "gelu", True, True)
    given = (torch.randn(6, 4), torch.randn(6, 2), w, *factors[:2], 1.0, True, layout.tensors, True)
    yield "low_rank_linear_backward", (torch.randn(6, 5).requires_grad_(), *given)
    for name in ("split_rows", "join_rows"):
        yield name, (x_SM, [3], 0, "nobody")
    yield "clamped_swiglu_backward", (torch.randn(3, 2).requires_grad_(), x_SM, 1.7, 7.0)
    yield "refuse_gradient", (torch.ones(()), torch.randn(3).requires_grad_(), "x", False)
    yield "refuse_gradient_backward", (torch.ones(()).requires_grad_(), torch.ones(()), torch.randn(3), "x")
    *tokens, row_N, code_N = torch.ops.fusedmoe.deduplicate(layout.tensors, 1)
    sizes, sent = (torch.tensor([[3, 3, 3]]), torch.tensor([[[3, 3, 3]]])), (row_N, code_N, 2)
    yield "deduplicate", (layout.tensors, 1)
    yield "exchange_metadata", (torch.tensor([3, 3]), tokens[0], None, torch.float32, 4, 2, torch.float32, WAY.name)
    yield "dispatch", (x_SM, torch.randn(6).requires_grad_(), *sent, *sizes, WAY.name)
    yield "dispatch_backward", (x_SM, torch.randn(6), torch.arange(6), *sent, *sizes, 3, 6, WAY.name)
    yield "combine", (x_SM, *sizes, 3, WAY.name)
    yield "combine_backward", (x_SM, *sizes, 3, WAY.name)
    of_experts = torch.randn(2, 5, 4), torch.randn(2, 4, 5), None, None, 0, "gelu", [True, True, False, False]
    number, met = exchange.handle_number, (*sizes, torch.tensor([1.0, 6.0, 0.5], dtype=torch.float64))
    learning = [one.requires_grad_() if isinstance(one, Tensor) else one for one in of_experts]
    unshared = *(None,) * 5, 0, ""
    yield "scheduled_experts", (x_SM, None, *learning, *unshared, layout.tensors, None, True, 1, 1, number)
    kept = [torch.randn(3, 4), torch.randn(6, 5), torch.empty(0), *torch.zeros(2, 6, dtype=torch.long), *met]
    kept.append(torch.empty(0))
    yield "scheduled_experts_backward", (x_SM, kept, None, *learning, *unshared, None, layout.tensors, number)


exchange = Collectives(fusedmoe.Topology(), make_all_to_all("direct", fusedmoe.Topology()))
WAY = exchange_operators.CollectiveRoute(fusedmoe.Topology(), make_all_to_all("direct", fusedmoe.Topology()))
#: Linear in their inputs, so their gradients do not depend on input values.
LINEAR = {"permute", "unpermute", "take_pairs", "put_pairs", "refuse_gradient"}
LINEAR |= {"dispatch", "dispatch_backward", "combine", "combine_backward", "split_rows", "join_rows"}
#: Only graphs contain these operators, and AOTAutograd refuses to differentiate its graphs twice.
IN_GRAPHS = {"scheduled_experts"}
#: Arguments in which other operators are linear.
LINEAR_IN = {("grouped_linear", 2)}


def test_cases_cover_every_registered_operator() -> None:
    known = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fusedmoe::")}
    tried = {name for name, _ in all_cases()}
    assert known == tried
    assert {overload._schema.name for overload in derivatives._gradients} == {f"fusedmoe::{name}" for name in known}


@pytest.mark.parametrize("graded", [True, *slowly(False)])
def test_operator_double_backward_raises_unless_supported(graded: bool) -> None:
    for name, inputs in all_cases():
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
            found = getattr(torch.ops.fusedmoe, name)(*inputs)
            outputs = [one for one in (found if isinstance(found, tuple) else (found,)) if one.requires_grad]
            leaves = {at: one for at, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad}
            if not outputs:
                assert not leaves, name
                continue
            seeds = [torch.ones_like(one).requires_grad_(graded) for one in outputs]
            if name.startswith(("router_d", "refused")) or (name.endswith("_backward") and name not in LINEAR):
                with pytest.raises(DerivativeError, match=f"fusedmoe::{name} does not support double"):
                    torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=True)
                continue
            grads = torch.autograd.grad(outputs, list(leaves.values()), seeds, create_graph=True)
            total = torch.stack([grad.float().sum() for grad in grads]).sum()
            for at, leaf in leaves.items():
                if name in LINEAR or (name, at) in LINEAR_IN or name in IN_GRAPHS:
                    continue
                with pytest.raises(DerivativeError, match=r"fusedmoe::\w+ does not support double backward"):
                    torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("learns", [True, *slowly(False)])
def test_operator_forward_mode_raises_unless_supported(learns: bool) -> None:
    for name, inputs in all_cases():
        operator = getattr(torch.ops.fusedmoe, name)
        for at, one in enumerate(inputs):
            if not isinstance(one, Tensor) or not one.is_floating_point():
                continue
            plain = one.detach().requires_grad_(learns)

            def call(value: Tensor, operator: Any = operator, inputs: Any = inputs, at: int = at) -> Any:
                return operator(
                    *(one.detach() if isinstance(one, Tensor) else one for one in inputs[:at]), value, *inputs[at + 1 :]
                )

            refused = pytest.raises(DerivativeError, match=f"fusedmoe::{name} does not support forward-mode AD")
            with FakeTensorMode(allow_non_fake_inputs=True), forward_ad.dual_level(), refused:
                call(forward_ad.make_dual(plain, torch.ones_like(plain)))
            with refused:
                torch.func.jvp(call, (plain,), (torch.ones_like(plain),))


def test_vmap_of_experts_works_and_func_grad_raises() -> None:
    layout = autograd.order(torch.tensor([[0, 1], [1, 0], [1, 1]]), 2)
    weights = Weights(torch.randn(2, 5, 4).double(), torch.randn(2, 4, 5).double(), None, None)
    x = torch.randn(3, 4).double()

    def compute(x: Tensor) -> Tensor:
        return autograd.experts(x, layout, None, weights, "gelu")

    several = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(compute)(several), torch.stack([compute(x), compute(2 * x)]))
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(DerivativeError, match="fusedmoe::experts does not support"):
            transform(lambda x: compute(x).sum())(x)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(DerivativeError, match="fusedmoe::permute does not support"):
            transform(lambda x: autograd.permute(x, layout))(x)
    with forward_ad.dual_level():  # without a tangent no derivative can be lost
        assert torch.equal(compute(x), compute(x.clone()))


def test_permute_and_take_pairs_pass_gradgradcheck() -> None:
    layout = autograd.order(torch.tensor([[0, 1], [1, 0], [1, 1]]), 2, 2)
    gradgradcheck(lambda x: autograd.unpermute(autograd.permute(x, layout) ** 3, layout), random(3, 4))
    gradgradcheck(lambda w: take_pairs(w, layout).square(), random(3, 2))


# Functions


class SquaringHooks(Hooks):
    def before_moe_end(self, y: Tensor, context: Any) -> Tensor:
        return y * y if context.direction == "backward" else y


#: Functions with correct higher-order derivatives.
TWICE: dict[str, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "_Linear": lambda: (lambda x: gather_selected(x.sigmoid(), torch.tensor([[1], [0]])), (random(2, 3),)),
    "_RouterLogits": lambda: (lambda x, w: router_logits(x, w).sigmoid(), (random(3, 4), random(2, 4))),
    "_Scaled": lambda: (lambda x, w: scaled(x, w).sigmoid(), (random(3, 4), random(3))),
    "_Ordered": lambda: (lambda x, w: gate_product(x.float(), w.float()).double(), (random(3, 4), random(2, 4))),
    "_TransformGradient": lambda: (lambda x: apply_start_hooks([SquaringHooks()], x).sigmoid(), (random(3, 4),)),
    "record_operation": lambda: (lambda x: record_operation(Recorder(), torch.sigmoid, x, kind="gate"), (random(3),)),
    "before_backward": lambda: (lambda x: before_backward(x, lambda: None, "a call").sigmoid(), (random(3),)),
}


#: Ways to define an operator or function without the rule.
AROUND_IT = (
    r"autograd\.Function\b|custom_op\(|library\.Library\(|once_differentiable|from torch\.autograd.* import .*Function"
)


def subclasses(of: type) -> set[type]:
    return {one for sub in of.__subclasses__() for one in {sub} | subclasses(sub)}


def test_every_autograd_function_declares_double_backward() -> None:
    for path in SOURCES.rglob("*.py"):
        # compat/torch.py recognizes third-party functions and defines none.
        assert path.name in ("derivatives.py", "torch.py") or not re.search(AROUND_IT, path.read_text()), path
    twice = set()
    for function in subclasses(Function):
        assert function.operation
        if function.double_backward:  # type: ignore[attr-defined]
            twice.add(function.__name__)
        else:
            assert hasattr(function.backward, "__wrapped__")  # type: ignore[attr-defined]
    assert {name for name in twice if name != "Cube"} <= TWICE.keys()


@pytest.mark.parametrize("name", TWICE)
def test_double_backward_equals_plain_autograd(name: str) -> None:
    function, inputs = TWICE[name]()
    if name == "_Ordered":
        g = torch.autograd.grad(function(*inputs).sigmoid().sum(), inputs, create_graph=True)
        want = torch.autograd.grad((inputs[0] @ inputs[1].t()).sigmoid().sum(), inputs, create_graph=True)
        pairs = zip(*(torch.autograd.grad(sum(one.sum() for one in of), inputs) for of in (g, want)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    elif name == "_TransformGradient":  # like PyTorch's hooks: each gradient passes through
        (x,) = inputs

        def hooked(x: Tensor) -> Tensor:
            tapped = x.view_as(x)
            tapped.register_hook(lambda grad: grad * grad)
            return tapped.sigmoid()

        (ours, theirs) = (torch.autograd.grad(of(x).sum(), x, create_graph=True)[0] for of in (function, hooked))
        torch.testing.assert_close(ours, theirs)
        ours, theirs = (torch.autograd.grad(one.sum(), x)[0] for one in (ours, theirs))
        torch.testing.assert_close(ours, theirs)
    else:
        assert gradcheck(function, inputs) and gradgradcheck(function, inputs)


class FirstOrderOnly(Function):
    """Save a tensor outside autograd, which allows first derivatives only."""

    operation = "x·y²"

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, other: str) -> tuple[Tensor, None]:
        ctx.kept = x.detach(), y.detach()
        return x * y**2, None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.kept
        return grads[0] * y**2, grads[0] * 2 * x * y, None


def test_first_order_function_rejects_double_backward() -> None:
    x, y, refused = random(3), random(3), pytest.raises(DerivativeError, match="x·y² does not support double backward")
    assert gradcheck(lambda x, y: FirstOrderOnly.apply(x, y, "")[0], (x, y))
    out = FirstOrderOnly.apply(x, y, "")[0]
    dx, dy = torch.autograd.grad(out.sum(), (x, y), create_graph=True)  # first derivatives alone work
    torch.testing.assert_close((dx, dy), (y**2, 2 * x * y))
    for grad, of in ((dx, y), (dy, x), (dy, y)):
        with refused:
            torch.autograd.grad(grad.sum(), of, retain_graph=True, allow_unused=True)
    with refused:
        (out.sum() + dx.square().sum()).backward(retain_graph=True)
    out.sum().backward(create_graph=True)
    torch.testing.assert_close(x.grad, y**2)
    frozen = FirstOrderOnly.apply(x.detach(), y, "")[0]
    with refused:
        torch.autograd.grad(torch.autograd.grad(frozen.sum(), y, create_graph=True)[0].sum(), y)
    seed = random(3)
    with refused:
        torch.autograd.grad(torch.autograd.grad(frozen, y, seed, create_graph=True)[0].sum(), seed)


def test_first_order_function_rejects_jvp_and_transforms() -> None:
    x, y = random(3).detach(), random(3).detach()
    with forward_ad.dual_level():
        for one in (x, x.clone().requires_grad_()):
            with pytest.raises(DerivativeError, match="x·y² does not support forward-mode AD"):
                FirstOrderOnly.apply(forward_ad.make_dual(one, y), y, "")
        learnt = x.clone().requires_grad_()
        out = FirstOrderOnly.apply(learnt, y, "")[0]
        with pytest.raises(DerivativeError, match="x·y² does not support forward-mode AD"):
            torch.autograd.grad(out, learnt, forward_ad.make_dual(y, y))
    for transform in (torch.func.grad, torch.func.vmap, torch.func.hessian, torch.func.jacrev):
        with pytest.raises(DerivativeError, match="x·y² does not support"):
            transform(lambda x: FirstOrderOnly.apply(x, x, "")[0].sum())(x)
    with pytest.raises(DerivativeError, match="a move does not support forward-mode AD"):
        torch.func.jvp(lambda x: linear(x, torch.neg, torch.neg, "a move"), (x,), (y,))


# Layers


def native_layer(topology: fusedmoe.Topology, experts: Any, **options: Any) -> nn.Module:
    gate = fusedmoe.gates.TopK(2, 2, aux={})
    return fusedmoe.MoELayer(4, gate, experts, topology=topology, dtype=torch.float64, **options)


def custom_experts() -> Any:
    def network(dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, 3), nn.Tanh(), nn.Linear(3, dim)).double()

    return fusedmoe.experts.Custom(network)


def tutel_layer(world: int, activation: Any) -> nn.Module:
    experts = {"type": "ffn", "num_experts_per_device": 2 // world, "hidden_size_per_expert": 3}
    gate = {"type": "top", "k": 2, "capacity_factor": 0}
    return moe.moe_layer(gate, 4, {**experts, "activation_fn": activation}).double()


def product_with_hessian(layer: nn.Module, frozen: bool = False) -> str:
    """Return "right" or the refusal's message, for losses that are linear and nonlinear in the layer's output."""
    for parameter in layer.parameters():
        parameter.requires_grad_(not frozen)
    x0, found = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    for loss in (torch.sum, lambda y: y.square().sum()):

        def gradient(at: Tensor, graph: bool = False, loss: Any = loss) -> tuple[Tensor, Tensor]:
            x = at.clone().requires_grad_()
            return x, torch.autograd.grad(loss(layer(x)), x, create_graph=graph)[0]

        want = (gradient(x0 + 1e-5)[1] - gradient(x0 - 1e-5)[1]) / 2e-5
        x, first = gradient(x0, graph=True)
        torch.testing.assert_close(first.detach(), gradient(x0)[1])
        try:
            (second,) = torch.autograd.grad(first.sum(), x)
        except DerivativeError as error:
            found.append(str(error))
        else:
            torch.testing.assert_close(second, want, rtol=1e-5, atol=1e-7)
            found.append("right")
    assert len(set(found)) == 1, found
    return found[0]


def layer_derivatives(rank: int, world: int) -> dict[str, str]:
    topology = fusedmoe.Topology.from_sizes(ep=world) if world > 1 else fusedmoe.Topology()
    torch.manual_seed(0)
    plans = fusedmoe.Schedule("tutel", degrees=(2, 2)) if world > 1 else "off"
    found = {}
    for frozen in (False, True):
        network = fusedmoe.experts.SwiGLU
        tried = {
            "native": native_layer(topology, network(3)),
            "native, plans": native_layer(topology, network(3), schedule=plans),
            "custom": native_layer(topology, custom_experts()),
            "custom, plans": native_layer(topology, custom_experts(), schedule=plans),
            "tutel, relu": tutel_layer(world, torch.nn.functional.relu),
            "tutel, gelu": tutel_layer(world, torch.nn.functional.gelu),
            "tutel, any": tutel_layer(world, lambda x: torch.tanh(x)),
        }
        if world > 1:
            tried["native, fssdp"] = native_layer(topology, network(3), placement="fssdp")
        for name, layer in tried.items():
            found[name + ", frozen" * frozen] = product_with_hessian(layer, frozen)
    return found


def require_correct_or_named_error(found: dict[str, str]) -> None:
    for name, text in found.items():
        if name.startswith(("custom", "tutel, any")) and "plans" not in name:
            assert text == "right", name
        assert text == "right" or "does not support double backward" in text, name
    assert found["native"] != "right"


def test_layer_hessian_is_correct_or_raises() -> None:
    require_correct_or_named_error(layer_derivatives(0, 1))


@pytest.mark.slow
def test_layer_hessian_over_ranks_is_correct_or_raises(cluster: Cluster) -> None:
    for found in cluster.run(2, layer_derivatives):
        require_correct_or_named_error(found)
        assert "dispatch, experts and combine on several ranks" in found["custom, plans"]


def test_pipeline_double_backward_raises() -> None:
    layer = native_layer(fusedmoe.Topology(), fusedmoe.experts.SwiGLU(3))

    class Dense(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.tanh()

    blocks = fusedmoe.pipeline([(Dense(), layer)])
    x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(blocks(x).sum(), x, create_graph=True)
    with pytest.raises(DerivativeError, match="does not support double backward"):
        torch.autograd.grad(first.sum(), x)


def test_plain_backward_skips_first_order_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives, "first_order", None)
    x = random(3, 4)
    native_layer(fusedmoe.Topology(), fusedmoe.experts.SwiGLU(3))(x).sum().backward()
    assert x.grad is not None and issubclass(Function, PlainFunction)
