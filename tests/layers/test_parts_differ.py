"""Ranks whose parts were constructed or later changed differently are refused when the layer is constructed."""

from __future__ import annotations

import functools
import itertools
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import experts, gates, hooks, orders
from fusedmoe.construction import describe, describe_part
from tests.cluster import Cluster
from tests.layers.test_refusals import assert_all_ranks_raise

M, E = 6, 4
Options = dict[str, Any]


class Scaled(gates.TopK):
    """User-defined gate that stores its arguments under other names, or not at all."""

    def __init__(self, experts: int, temperature: float = 1.0, prior: Tensor | None = None, **options: Any) -> None:
        super().__init__(experts, 2, **options)
        self._private = [temperature]
        self.register_buffer("prior_E", torch.zeros(experts) if prior is None else prior)


class Hidden(gates.TopK):
    """Arguments equal on all ranks; one rank builds a different gate from them."""

    def __init__(self, changed: bool) -> None:
        super().__init__(E, 2, normalize=not changed)


class Network(experts.Custom):
    def __init__(self, hidden: int) -> None:
        super().__init__(lambda model_dim: nn.Sequential(nn.Linear(model_dim, hidden), nn.Linear(hidden, model_dim)))


class Rows(orders.Sparse):
    def __init__(self, seed: int) -> None:
        self.seed = seed


class Log(hooks.Hooks):
    rank_specific = ("path",)

    def __init__(self, path: str, level: int = 0) -> None:
        self.path, self.level, self.seen = path, level, [random.random()]


@dataclass
class Settings:
    slope: float = 1.0


def with_attributes(gate: gates.Gate, **values: Any) -> gates.Gate:
    for name, value in values.items():
        setattr(gate, name, value)
    return gate


# By name: constructors for the differing rank and for the rest, and the beginning of the error.
CASES: dict[str, tuple[Callable[[bool], Options], str]] = {
    "route_scale": (
        lambda b: {"gate": gates.DeepSeekV3(E, 2, route_scale=2.5 if b else 1.0)},
        "gate argument route_scale",
    ),
    "bias_rate": (lambda b: {"gate": gates.DeepSeekV3(E, 2, bias_rate=0.1 if b else 0.001)}, "gate argument bias_rate"),
    "groups": (lambda b: {"gate": gates.DeepSeekV3(E, 1, groups=2 if b else 4)}, "gate argument groups"),
    "sequence": (lambda b: {"gate": gates.DeepSeekV3(E, 1, sequence=2 if b else None)}, "gate argument sequence"),
    "normalize": (lambda b: {"gate": gates.TopK(E, 2, normalize=b)}, "gate argument normalize"),
    "noise": (lambda b: {"gate": gates.BatchPrioritised(E, 2, noise=float(b))}, "gate argument noise"),
    "aux": (lambda b: {"gate": gates.TopK(E, 2, aux={"balance": 0.1 + 1e-16 * b, "z": 0.1 + b})}, "gate argument aux"),
    "seed": (lambda b: {"gate": gates.Hash(E, seed=int(b))}, "gate argument seed"),
    "factor": (lambda b: {"gate": gates.ExpertChoice(E, 2, 1.0 + b)}, "gate argument capacity_factor"),
    "jitter": (lambda b: {"gate": gates.Switch(E, jitter=0.1 * b)}, "gate argument jitter"),
    "slots": (lambda b: {"gate": gates.SoftMoE(E, 1 + b)}, "gate argument slots"),
    "temperature": (lambda b: {"gate": gates.XMoE(E, temperature=0.3 + b)}, "gate argument temperature"),
    "class": (lambda b: {"gate": (gates.TopK if b else gates.BatchPrioritised)(E, 2)}, "gate is fusedmoe"),
    "a user's gate": (lambda b: {"gate": Scaled(E, 1.0 + b)}, "gate argument temperature is"),
    "a tensor": (lambda b: {"gate": Scaled(E, prior=torch.full((E,), float(b)))}, "gate argument prior is tensor of"),
    "an argument changed on its way": (lambda b: {"gate": Hidden(b)}, "gate argument changed"),
    "set later": (
        lambda b: {"gate": with_attributes(gates.TopK(E), capacity_factor=1.0 + b)},
        "gate.capacity_factor is",
    ),
    "set later, private": (lambda b: {"gate": with_attributes(Scaled(E), _private=[b])}, "gate._private is"),
    "experts": (lambda b: {"experts": experts.FeedForward(8, "relu" if b else "gelu")}, "experts argument activation"),
    "a factory": (lambda b: {"experts": Network(8 + b)}, "experts argument hidden is"),
    "a closure": (
        lambda b: {"experts": experts.Custom((lambda hidden: lambda m: nn.Linear(hidden * m // hidden, m))(1 + b))},
        "experts argument factory",
    ),
    "shared": (lambda b: {"shared": experts.SwiGLU(8, bias=b)}, "shared argument bias"),
    "no shared": (lambda b: {"shared": experts.SwiGLU(8) if b else None}, "shared is"),
    "order": (lambda b: {"order": Rows(int(b))}, "order argument seed"),
    "hook": (lambda b: {"hooks": [Log("x", 1 + b)]}, r"hooks\[0\] argument level"),
    "hooks": (lambda b: {"hooks": [Log("x")] * (1 + b)}, "hooks is"),
    "wire": (
        lambda b: {"hooks": [hooks.WireCast(torch.float16 if b else torch.bfloat16)]},
        r"hooks\[0\] argument dtype",
    ),
    "mp_input": (lambda b: {"mp_input": "split" if b else "partial"}, "mp_input is"),
}


def make(options: Options, topology: fusedmoe.Topology) -> fusedmoe.MoELayer:
    given: Options = {"gate": gates.TopK(E), "experts": experts.SwiGLU(8)} | options
    return fusedmoe.MoELayer(M, topology=topology, **given)


def errors_of_all_cases(rank: int, world: int) -> dict[str, str]:
    found = {}
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    for name, (options, _) in CASES.items():
        try:
            make(options(rank == 1), topology)
            found[name] = "no error"
        except fusedmoe.RankError as error:
            found[name] = str(error)
    return found


def test_different_settings_across_ranks_are_rejected(cluster: Cluster) -> None:
    of_ranks = cluster.run(2, errors_of_all_cases)
    assert of_ranks[0] == of_ranks[1]
    for name, (_, begin) in CASES.items():
        text = of_ranks[0][name]
        assert text.startswith("MoELayer: ") and re.search(begin, text), (name, text)
        assert "on ranks [0] and " in text and " on ranks [1]. " in text, (name, text)


def check_allowed_differences(rank: int, world: int) -> None:
    """Differences between ranks that must not matter."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=60)
    torch.manual_seed(rank)
    log = Log(f"rank{rank}.txt")
    activation = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))

    class Own(gates.TopK):
        def __init__(self, **given: Any) -> None:
            super().__init__(E, 2, aux={"z": 0.1, "balance": 0.2} if rank else {"balance": 0.2, "z": 0.1})
            self.kept = given
            self.lock, self.generator = threading.Lock(), torch.Generator().manual_seed(rank)
            self.buffer = torch.randn(4 + rank)

    names = {"alpha", "beta", "gamma", f"{'delta'}"}
    gate = Own(
        device=torch.device("cuda", rank), names=names, module=activation, action=log.before_dispatch,
        topology=topology, namespace=SimpleNamespace(k=2), settings=Settings(),
        part=functools.partial(describe, 1), path=Path("x"),
        each=object(),
    )  # fmt: skip
    layer = make({"gate": gate, "hooks": [log], "experts": experts.Custom(lambda m: nn.Linear(m, m))}, topology)
    layer(torch.randn(3, M)).sum().backward()
    # Another layer can be built from a gate that was called and a hook that has state.
    log.seen.append(rank)
    make({"gate": gate, "hooks": [log]}, topology)


def test_rank_specific_settings_are_allowed(cluster: Cluster) -> None:
    cluster.run(2, check_allowed_differences)


def test_part_descriptions_are_unique_and_stable() -> None:
    def plus(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    different = [
        1, 1.0, True, None, "1", 0.1, 0.1 + 2e-17 + 1e-16, float("nan"), torch.float32, torch.float64,
        [1, 2], [2, 1], {1, 2},
        {"a": 1}, {"a": 2}, torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.int64),
        nn.Linear(2, 3), nn.Linear(2, 3, bias=False),
        nn.Dropout(0.1), nn.Dropout(0.2), plus(1), plus(2), lambda x: x * 2, lambda x: x * 3, functools.partial(max, 1),
        functools.partial(max, 2), Settings(1.0), Settings(2.0), SimpleNamespace(a=1), SimpleNamespace(a=2),
        Path("a"), Path("b"), max, min, torch.relu, torch.nn.functional.silu, Settings, threading.Lock(),
        list(range(1000)), list(range(1001)),
    ]  # fmt: skip
    for one, other in itertools.combinations(map(describe, different), 2):
        assert one != other
    assert describe(plus(1)) == describe(plus(1)) and describe(object()) == describe(object())
    assert describe(torch.device("cuda:0")) == describe(torch.device("cuda:1")) != describe(torch.device("cpu"))
    loop: list[Any] = [1]
    loop.append(loop)
    assert "0x" not in describe(loop) + describe(threading.Lock()) + describe(different)
    assert all(len(describe(each)) < 250 for each in different)


def test_copies_keep_constructor_arguments() -> None:
    import copy
    import pickle

    gate = Scaled(E, 2.0)
    for made in (copy.copy(gate), copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert describe_part(made, "gate") == describe_part(gate, "gate")


def test_different_gate_on_one_rank_raises_on_all(cluster: Cluster) -> None:
    assert_all_ranks_raise(
        cluster,
        "RankError",
        r"gate argument normalize is .* on ranks \[0, 2, 3\] and .* on ranks \[1\]",
        make_different_layer_on_rank_1,
    )


def make_different_layer_on_rank_1(rank: int, world: int) -> None:
    make({"gate": gates.TopK(E, normalize=rank != 1)}, fusedmoe.Topology.from_sizes(ep=4, timeout_s=60))
