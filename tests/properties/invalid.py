"""Valid input with one argument corrupted, for every public operation of one process: each raises ConfigError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fusedmoe
from fusedmoe import autograd
from fusedmoe.autograd import parallel
from fusedmoe.autograd.gate import gate_from_logits as gate_of_logits
from fusedmoe.autograd.moves import all_gather, combine, dispatch, reduce_scatter
from fusedmoe.autograd.order import take_pairs as values_of_pairs
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.gates.base import Gate, Routing
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.gate import GateRule
from fusedmoe.kernels.layout import Layout
from tests.properties.draw import Draw

# A call with all its arguments by name, and ways to corrupt one of them.
Call = Callable[..., Any]
Spoil = Callable[[Draw, Any], Any]
Case = tuple[Call, dict[str, Any], dict[str, list[Spoil]]]


def attempt(make: Callable[[Draw], Case], draw: Draw) -> str:
    """Call with one argument corrupted; return its name, for the failure message."""
    call, given, spoils = make(draw)
    name = draw.one_of(sorted(spoils))
    at = draw.random.randrange(len(spoils[name]))
    given[name] = spoils[name][at](draw, given[name])
    what = f"{name} spoilt in way {at}: {_shown(given[name])}"
    try:
        call(**given)
    except fusedmoe.ConfigError:
        return what
    except Exception as error:
        raise AssertionError(f"{what}: {error!r} instead of ConfigError") from error
    raise AssertionError(f"{what}: accepted")


def _shown(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:200]


# Ways to corrupt a tensor.


def longer(draw: Draw, x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def wider(draw: Draw, x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1)


def deeper(draw: Draw, x: Tensor) -> Tensor:
    return x[None]


def whole(draw: Draw, x: Tensor) -> Tensor:
    return x.detach().long()


def halved(draw: Draw, x: Tensor) -> Tensor:
    return x.half()


def elsewhere(draw: Draw, x: Tensor) -> Tensor:
    return x.to("meta")


def no_tensor(draw: Draw, x: Tensor) -> Any:
    return draw.one_of((None, x.tolist(), "x"))


ROWS: list[Spoil] = [longer, deeper, elsewhere, no_tensor]


def nonsense_count(draw: Draw, value: Any) -> Any:
    return draw.one_of((-1, 2.5, "2", True))


def _strange_choice(draw: Draw, expert_SK: Tensor) -> Tensor:
    """Give at least one token an expert number out of range."""
    one_more = torch.cat([expert_SK.long(), expert_SK.new_zeros(1, expert_SK.shape[1]).long()])
    return _with_one(draw, one_more, draw.one_of((-2, 100, 2**40, -(2**40))))


def _with_one(draw: Draw, expert_SK: Tensor, number: int) -> Tensor:
    """Replace one of the choices."""
    spoilt = expert_SK.long().clone()
    spoilt[draw.random.randrange(spoilt.shape[0]), draw.random.randrange(spoilt.shape[1])] = number
    return spoilt


def order(draw: Draw) -> Case:
    S, K, E = draw.size(), draw.size(1, 4), draw.size(1)
    given = {"expert_SK": draw.choices(S, K, E), "experts": E, "capacity": draw.one_of((None, 2)), "priority_S": None}
    given["priority_S"] = torch.randn(S) if draw.maybe() else None
    spoils: dict[str, list[Spoil]] = {
        "expert_SK": [_strange_choice, deeper, no_tensor, lambda _, x: x.double(), lambda _, x: x > 0],
        "experts": [nonsense_count, lambda _, x: 0],
        "capacity": [nonsense_count],
        "priority_S": [lambda _, x: torch.randn(S + 1), lambda _, x: torch.randn(S, 1), lambda _, x: [1.0] * S],
    }
    spoils["priority_S"].append(lambda _, x: torch.randn(S, device="meta"))
    return autograd.order, given, spoils


def _spoilt_layout(draw: Draw, layout: Layout) -> Any:
    """A hand-made layout with one inconsistent part."""
    parts = dict(zip(("counts_E", "offsets_E1", "source_N", "pair_N", "row_SK"), layout.tensors, strict=True))
    name = draw.one_of(sorted(parts))
    part = parts[name]
    assert part is not None
    ways: list[Callable[[], Any]] = [
        lambda: part.to(torch.int16),
        lambda: part.double(),
        lambda: torch.cat([part, part.new_zeros(1, *part.shape[1:])]),
        lambda: part[None],
        lambda: part.to("meta") if name != "counts_E" else part.tolist(),
    ]
    if part.numel():
        at = tuple(draw.random.randrange(size) for size in part.shape)
        by = draw.one_of((1, -1, 7, -7))

        def moved() -> Tensor:
            other = part.clone()
            other[at] += by
            return other

        # Padding may hold any valid index.
        kept = sum(layout.counts)
        if name not in ("source_N", "pair_N") or at[0] < kept:
            ways += [moved, moved, moved]
    return draw.one_of((Layout(**(parts | {name: draw.one_of(ways)()})),) * 9 + (None,))


def _with_layout(draw: Draw) -> tuple[Layout, Tensor]:
    S, K, E, M = draw.size(), draw.size(1, 3), draw.size(1, 5), draw.size(1, 6)
    return draw.layout(S, K, E), draw.floats(S, M)


def permute(draw: Draw) -> Case:
    layout, x_SM = _with_layout(draw)
    return autograd.permute, {"x_SM": x_SM, "layout": layout}, {"x_SM": ROWS, "layout": [_spoilt_layout]}


def unpermute(draw: Draw) -> Case:
    layout, x_SM = _with_layout(draw)
    given = {"rows_NM": draw.floats(layout.rows, x_SM.shape[1]), "layout": layout}
    return autograd.unpermute, given, {"rows_NM": ROWS, "layout": [_spoilt_layout]}


def take_pairs(draw: Draw) -> Case:
    layout, _ = _with_layout(draw)
    given = {"value_SK": draw.floats(*layout.row_SK.shape), "layout": layout}
    return values_of_pairs, given, {"value_SK": [*ROWS, wider], "layout": [_spoilt_layout]}


def experts(draw: Draw) -> Case:
    layout, x_SM = _with_layout(draw)
    activation = draw.one_of(tuple(ACTIVATIONS))
    weights = draw.weights(layout.experts, x_SM.shape[1], activation)
    given = {
        "x_SM": x_SM,
        "layout": layout,
        "weight_N": values_of_pairs(draw.floats(*layout.row_SK.shape), layout),
        "weights": weights,
        "activation": activation,
    }
    others = [name for name in ACTIVATIONS if ACTIVATIONS[name].gated != ACTIVATIONS[activation].gated]
    spoils: dict[str, list[Spoil]] = {
        "x_SM": [*ROWS, wider, whole, halved],
        "layout": [_spoilt_layout],
        "weight_N": [longer, deeper, whole, elsewhere, lambda _, x: x.tolist()],
        "weights": [_spoilt_weights, lambda _, x: x.w1],
        "activation": [lambda d, _: d.one_of(("swish", "", None, *others))],
    }
    return autograd.experts, given, spoils


def _spoilt_weights(draw: Draw, weights: Weights) -> Weights:
    names = [name for name in ("w1", "w2", "b1", "b2") if getattr(weights, name) is not None]
    name = draw.one_of(names)
    tensor = getattr(weights, name)
    ways: list[Spoil] = [longer, deeper, whole, halved, elsewhere]
    if name != "b2":  # which may be any columns
        ways.append(wider)
    if name == "b2" and draw.maybe(0.3):
        return replace(weights, b2_start=draw.one_of((-1, 100, 0.5)))
    return replace(weights, **{name: draw.one_of(ways)(draw, tensor)})


def gate(draw: Draw) -> Case:
    S, M, E = draw.size(), draw.size(1, 6), draw.size(1)
    rule = GateRule(draw.size(1, E))
    given = {"x_SM": draw.floats(S, M), "weight_EM": draw.floats(E, M), "rule": rule}
    given["bias_E"] = draw.floats(E, grad=False)
    spoils: dict[str, list[Spoil]] = {
        "x_SM": [wider, deeper, whole, elsewhere, no_tensor],
        "weight_EM": [wider, deeper, whole, elsewhere, no_tensor],
        "bias_E": [longer, deeper, whole, elsewhere],
        "rule": [lambda _, x: replace(x, k=E + 1), lambda _, x: replace(x, sequence=S + 1), lambda _, x: 2],
    }
    if S == 0:
        spoils["rule"].pop(1)  # no tokens divide into any sequences
    return autograd.gate, given, spoils


def gate_from_logits(draw: Draw) -> Case:
    S, E = draw.size(), draw.size(1)
    given = {"logits_SE": draw.floats(S, E), "rule": GateRule(E), "bias_E": draw.floats(E, grad=False)}
    spoils: dict[str, list[Spoil]] = {
        "logits_SE": [wider, deeper, whole, elsewhere, no_tensor],
        "bias_E": [longer, deeper, whole, elsewhere],
        "rule": [lambda _, x: replace(x, k=E + 1), lambda _, x: None],
    }
    return gate_of_logits, given, spoils


def rule(draw: Draw) -> Case:
    given = {"k": 2, "score": "softmax", "scale": 1.0, "sequence": None}
    spoils: dict[str, list[Spoil]] = {
        "k": [nonsense_count, lambda _, x: 0],
        "score": [lambda d, _: d.one_of(("tanh", None, 1))],
        "scale": [lambda d, _: d.one_of((float("nan"), float("inf")))],
        "sequence": [nonsense_count, lambda _, x: 0],
    }
    return GateRule, given, spoils


def _alone() -> tuple[Any, Any]:
    topology = Topology()
    return make_all_to_all("direct", topology), topology.esp


def exchange(draw: Draw) -> Case:
    algorithm, esp = _alone()
    given = {"algorithm": algorithm, "esp": esp, "counts_E": torch.randint(0, 4, (draw.size(1, 5),))}
    given["form"] = RowForm(torch.float32, 3, 1, None)
    spoils: dict[str, list[Spoil]] = {
        "counts_E": [deeper, lambda _, x: x.float(), lambda _, x: x - 5, lambda _, x: x[:0]],
        "form": [
            lambda d, form: form._replace(dtype=d.one_of((torch.int32, torch.complex64, torch.float8_e5m2))),
            lambda d, form: form._replace(weights=torch.int32),
        ],
    }
    return exchange_metadata, given, spoils


def moves(draw: Draw) -> Case:
    """Rows whose number differs from the exchange's."""
    counts_E = torch.randint(0, 4, (draw.size(1, 5),))
    met = exchange_metadata(*_alone(), counts_E, RowForm(torch.float64, 3, 1, None))
    move = draw.one_of((all_gather, combine, dispatch, reduce_scatter))
    rows = draw.floats(int(counts_E.sum()), 3)

    def call(rows: Tensor) -> Any:
        return move(rows, met)

    return call, {"rows": rows}, {"rows": [longer, lambda _, x: torch.randn(())]}


def through_experts(draw: Draw) -> Case:
    counts_E = torch.randint(0, 4, (draw.size(1, 5),))
    met, N = exchange_metadata(*_alone(), counts_E, RowForm(torch.float64, 3, 1, None)), int(counts_E.sum())
    given = {"rows_NM": draw.floats(N, 3), "weight_N": draw.floats(N), "exchange": met, "compute": _identity}
    spoils: dict[str, list[Spoil]] = {
        "rows_NM": [longer, deeper, no_tensor],
        "weight_N": [longer, deeper, elsewhere, lambda _, x: x.tolist()],
        "compute": [lambda _, x: lambda rows, layout, weight: rows.sum(0), lambda _, x: lambda *_: None],
    }
    return autograd.through_experts, given, spoils


def _identity(rows: Tensor, layout: Layout, weight_N: Tensor | None) -> Tensor:
    return rows


def rows_over_a_group(draw: Draw) -> Case:
    N, group = draw.size(), Topology().mp
    move = draw.one_of((parallel.gather_rows, parallel.reduce_scatter_rows, parallel.split_rows, parallel.join_rows))
    spoils: dict[str, list[Spoil]] = {
        "x_SM": [longer, no_tensor],
        "counts": [lambda _, x: [N + 1], lambda _, x: [N, 0], lambda _, x: [], lambda _, x: [-1], lambda _, x: ["1"]],
    }
    return move, {"x_SM": draw.floats(N, 3), "group": group, "counts": [N]}, spoils


def layer_input(draw: Draw) -> Case:
    M = draw.size(1, 6)
    made = fusedmoe.MoELayer(M, fusedmoe.gates.TopK(4, 2), fusedmoe.experts.SwiGLU(3), dtype=torch.float64)

    def not_finite(d: Draw, x: Tensor) -> Tensor:
        x = longer(d, x.detach())
        x[d.random.randrange(len(x)), d.random.randrange(M)] = torch.nan
        return x

    return made, {"x": draw.floats(draw.size(), M)}, {"x": [wider, whole, halved, elsewhere, no_tensor, not_finite]}


class Users(Gate):
    """A user's gate that returns the given values."""

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {}

    def route(self, x_SM: Tensor) -> Any:
        return self.gives


def gate_of_the_users(draw: Draw) -> Case:
    S, E, M = draw.size(1), draw.size(1, 5), 3
    K = draw.size(1, E)
    gate, order = Users(E, K), draw.one_of((None, fusedmoe.orders.Sparse(), fusedmoe.orders.Einsum()))
    made = fusedmoe.MoELayer(M, gate, fusedmoe.experts.FeedForward(2), order=order, dtype=torch.float64)
    expert_SK, weight_SK = draw.choices(S, K, E), draw.floats(S, K)
    given = Routing(expert_SK, weight_SK, draw.one_of((None, 2)), None, torch.zeros(()), None)
    spoils: list[Spoil] = [
        lambda d, r: replace(r, expert_SK=_with_one(d, expert_SK, d.one_of((E, -2, 2**40)))),
        lambda d, r: replace(r, expert_SK=_with_one(d, expert_SK, E)),
        lambda d, r: replace(r, expert_SK=d.one_of((longer, deeper, elsewhere, halved))(d, expert_SK)),
        lambda d, r: replace(r, weight_SK=d.one_of((longer, wider, whole, elsewhere, deeper))(d, weight_SK)),
        lambda d, r: replace(r, expert_SK=longer(d, expert_SK), weight_SK=longer(d, weight_SK)),
        lambda d, r: replace(r, capacity=d.one_of((-1, 1.5, "1"))),
        lambda d, r: replace(r, priority_S=d.one_of((torch.randn(S + 1), torch.randn(S, 1)))),
        lambda d, r: replace(r, aux_loss=d.one_of((0.0, torch.zeros(1)))),
        lambda d, r: d.one_of((None, (expert_SK, weight_SK))),
    ]

    def call(routing: Any) -> Any:
        gate.gives = routing
        return made(torch.randn(S, M, dtype=torch.float64))

    return call, {"routing": given}, {"routing": spoils}


def experts_of_the_users(draw: Draw) -> Case:
    """Modules that return rows of another shape than their input."""

    class Wrong(torch.nn.Module):
        def forward(self, rows: Tensor) -> Any:
            return draw.one_of((rows[..., :-1], torch.cat([rows, rows[:1]]), rows.sum(0)))

    def call(S: int) -> Any:
        made = fusedmoe.MoELayer(3, fusedmoe.gates.TopK(1), fusedmoe.experts.Custom(lambda dim: Wrong()))
        return made(torch.randn(S, 3))

    return call, {"S": 0}, {"S": [lambda d, _: d.size(2)]}


def layer_parts(draw: Draw) -> Case:
    given: dict[str, Any] = {"model_dim": 4, "experts": 4, "k": 2, "hidden": 3, "activation": "gelu"}
    given |= {"capacity_factor": 1.0, "dispatch": "direct", "mp_input": "split", "schedule": "off", "placement": "ep"}

    def call(**parts: Any) -> Any:
        gate = fusedmoe.gates.TopK(parts["experts"], parts["k"], parts["capacity_factor"])
        network = fusedmoe.experts.FeedForward(parts["hidden"], parts["activation"])
        rest = {name: parts[name] for name in ("dispatch", "mp_input", "schedule", "placement")}
        return fusedmoe.MoELayer(parts["model_dim"], gate, network, **rest)

    bad_name: list[Spoil] = [lambda d, _: d.one_of(("", "best", "3dh"))]
    spoils = {name: [nonsense_count, lambda _, x: 0] for name in ("model_dim", "experts", "k", "hidden")}
    spoils |= {name: bad_name for name in ("activation", "dispatch", "mp_input", "schedule", "placement")}
    spoils["capacity_factor"] = [lambda d, _: d.one_of((0, -1.0, float("nan"), float("inf")))]
    spoils["k"] = [*spoils["k"], lambda _, x: 5]
    return call, given, spoils


CASES: dict[str, Callable[[Draw], Case]] = {
    "order": order,
    "permute": permute,
    "unpermute": unpermute,
    "take_pairs": take_pairs,
    "experts": experts,
    "gate": gate,
    "gate_from_logits": gate_from_logits,
    "rule": rule,
    "exchange": exchange,
    "moves": moves,
    "through_experts": through_experts,
    "rows_over_a_group": rows_over_a_group,
    "layer_input": layer_input,
    "gate_of_the_users": gate_of_the_users,
    "experts_of_the_users": experts_of_the_users,
    "layer_parts": layer_parts,
}
