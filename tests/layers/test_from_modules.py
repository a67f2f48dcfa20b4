"""`experts.from_modules`: trained experts of other models, compared with their modules on one and several ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts import from_modules
from tests.cluster import Cluster

E, M, H = 4, 6, 10


class Gated(nn.Module):
    def __init__(self, names: tuple[str, str, str], act: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name, out, into in zip(names, (H, H, M), (M, M, H), strict=True):
            self.add_module(name, nn.Linear(into, out, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(self.act(gate(x)) * up(x))


class Plain(nn.Module):
    def __init__(
        self, names: tuple[str, str], act: Callable[[Tensor], Tensor], bias: bool = True, p: float = 0.0
    ) -> None:
        super().__init__()
        self.names, self.act = names, act
        self.dropout = nn.Dropout(p)
        for name, out, into in zip(names, (H, M), (M, H), strict=True):
            self.add_module(name, nn.Linear(into, out, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (self.get_submodule(name) for name in self.names)
        return self.dropout(down(self.act(up(x))))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))


MAKERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: Gated(("gate_proj", "up_proj", "down_proj"), F.silu), "swiglu"),
    "short names": (lambda: Gated(("gate", "up", "down"), F.silu), "swiglu"),
    "mixtral": (lambda: Gated(("w1", "w3", "w2"), F.silu), "swiglu"),
    "t5": (lambda: Gated(("wi_0", "wi_1", "wo"), F.gelu, bias=True), "geglu"),
    "sequential": (sequential, "gelu"),
    "deepspeed": (lambda: Plain(("dense_h_to_4h", "dense_4h_to_h"), partial_gelu), "gelu_tanh"),
    "fc": (lambda: Plain(("fc1", "fc2"), F.relu, bias=False), "relu"),
    "own names": (lambda: Plain(("into", "out"), F.silu), "silu"),
}


def partial_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def make(name: str, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(MAKERS[name][0]() for _ in range(E)).double()


def reference(experts: Any, weight_EM: Tensor, x_SM: Tensor) -> Tensor:
    """Top-2 of the experts, softmax over their logits."""
    weight_SK, expert_SK = (x_SM @ weight_EM.T).topk(2)
    weight_SK = weight_SK.softmax(-1)
    for each in experts:
        each.eval()
    rows = torch.stack([each(x_SM) for each in experts], 1)
    return (rows.gather(1, expert_SK[..., None].expand(-1, -1, M)) * weight_SK[..., None]).sum(1)


def layer_of(source: Any, topology: Topology | None = None, **options: Any) -> fusedmoe.MoELayer:
    gate = fusedmoe.gates.TopK(experts=E, k=2)
    given = from_modules(source, **options)
    return fusedmoe.MoELayer(M, gate, given, topology=topology or Topology(), dtype=torch.float64)


def check(layer: fusedmoe.MoELayer, experts: Any, seed: int = 0) -> None:
    """Compare outputs and the gradient of the input with the source's modules."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, M, generator=generator, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), reference(experts, layer.gate.weight_EM, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(9, M, generator=generator, dtype=torch.float64)
    got, want = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_modules_of_every_layout_compute_the_same(name: str) -> None:
    """The activation is found by comparison; training mode of the source is restored."""
    experts = make(name)
    layer = layer_of(experts)
    assert layer.experts.activation == MAKERS[name][1]
    assert all(module.training for module in experts.modules())
    check(layer, experts)


@pytest.mark.parametrize("name", ["llama", "sequential", "deepspeed"])
def test_state_dict_equals_modules(name: str) -> None:
    experts = make(name)
    holder = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"experts": experts})])})
    check(layer_of(holder.state_dict(), activation=MAKERS[name][1]), experts)
    with pytest.raises(ConfigError, match="pass activation="):
        from_modules(experts.state_dict())


def stacked(**given: Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in given.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


def test_stacked_parameters_equal_modules() -> None:
    """torchtitan, transformers and Tutel, as modules and as state dicts."""
    experts: Any = make("mixtral")
    w1, w3, w2 = (torch.stack([getattr(each, name).weight.detach() for each in experts]) for name in ("w1", "w3", "w2"))
    for source in (stacked(w1=w1, w2=w2, w3=w3), stacked(gate_up_proj=torch.cat([w1, w3], 1), down_proj=w2)):
        check(layer_of(source, activation="swiglu"), experts)
        state = {f"experts.{name}": value for name, value in source.state_dict().items()}
        check(layer_of(state, activation="swiglu"), experts)
    plain: Any = make("deepspeed")
    up, down = ([each.get_submodule(name) for each in plain] for name in ("dense_h_to_4h", "dense_4h_to_h"))
    tutel = stacked(
        batched_fc1_w=torch.stack([one.weight.detach() for one in up]),
        batched_fc2_w=torch.stack([one.weight.detach().T for one in down]),
        batched_fc1_bias=torch.stack([one.bias.detach() for one in up])[:, None],
        batched_fc2_bias=torch.stack([one.bias.detach() for one in down])[:, None],
    )
    check(layer_of(tutel, activation="gelu_tanh"), plain)


def test_experts_of_transformers() -> None:
    """`gate_up_proj` modules are called with expert 0, so their activation is found."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = transformers.MixtralConfig(hidden_size=M, intermediate_size=H, num_local_experts=E, num_attention_heads=2)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = modeling.MixtralExperts(config).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    layer = layer_of(module)
    assert layer.experts.activation == "swiglu"
    x = torch.randn(5, M, dtype=torch.float64)
    weight_SK, expert_SK = (x @ layer.gate.weight_EM.T).topk(2)
    torch.testing.assert_close(layer(x), module(x, expert_SK, weight_SK.softmax(-1)), rtol=1e-11, atol=1e-11)


def test_tutel_layer_is_unwrapped() -> None:
    from fusedmoe.tutel import moe

    torch.manual_seed(0)
    options = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": H, "activation_fn": F.gelu}
    source = moe.moe_layer(gate_type={"type": "top", "k": 2}, model_dim=M, experts=options)
    layer = layer_of(source.double(), activation="gelu")
    x = torch.randn(5, M, dtype=torch.float64)
    ffn: Any = source.experts
    for number in range(E):
        h = F.gelu(x @ ffn.batched_fc1_w[number].T + ffn.batched_fc1_bias[number])
        expected = h @ ffn.batched_fc2_w[number] + ffn.batched_fc2_bias[number]
        weights = layer.experts.weights(None)
        found = F.gelu(x @ weights.w1[number].T + weights.b1[number]) @ weights.w2[number].T + weights.b2[number]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Watched(Mapping[str, Tensor]):
    """A state dict that records which tensors are read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state, self.read = state, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return self.state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def on_ranks(rank: int, world: int, ep: int, esp: int, name: str) -> None:
    topology = Topology.from_sizes(ep=ep, esp=esp, timeout_s=60)
    experts = make(name)
    state = Watched(experts.state_dict())
    activation = MAKERS[name][1]
    torch.manual_seed(1)
    layer = layer_of(state, topology, activation=activation)
    own = {str(number) for number in layer.experts.own_numbers}
    assert {key.partition(".")[0] for key in state.read} == own | {"0"}
    check(layer, experts, seed=rank // esp)
    # A source of this rank's experts only.
    torch.manual_seed(1)
    local = [experts[number] for number in layer.experts.own_numbers]
    part = layer_of(local, topology, first=layer.experts.own_numbers[0])
    for found, expected in zip(part.parameters(), layer.parameters(), strict=True):
        assert torch.equal(found, expected)
    if ep > 1:
        with pytest.raises(ConfigError, match="this rank needs expert"):
            layer_of(local, topology, first=(layer.experts.own_numbers[0] + 1) % E)


@pytest.mark.parametrize("name", ["llama", "deepspeed"])
@pytest.mark.parametrize(("ep", "esp"), [(2, 1), (1, 2), (2, 2)])
def test_each_rank_reads_its_own_experts_and_shards(cluster: Cluster, ep: int, esp: int, name: str) -> None:
    cluster.run(ep * esp, on_ranks, ep, esp, name)


def test_meta_layers_take_the_weights_when_they_are_reset() -> None:
    experts = make("llama")
    with torch.device("meta"):
        layer = layer_of(experts)
    layer = copy.deepcopy(layer).to_empty(device="cpu")
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    check(layer, experts)


def test_layers_are_independent_of_the_source() -> None:
    experts = make("llama")
    layer = layer_of(experts)
    expected = copy.deepcopy(experts)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.zero_()
    check(layer, expected)
    check(pickle.loads(pickle.dumps(layer)), expected)
    assert layer.experts.source is None
    low = from_modules(make("llama").bfloat16())
    assert fusedmoe.MoELayer(M, fusedmoe.gates.TopK(experts=E), low).experts.w1.dtype == torch.float32


def gate_with_bias() -> dict[str, Tensor]:
    shapes = {"gate_proj": (H, M), "up_proj": (H, M), "down_proj": (M, H)}
    state = {f"0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    return state | {"0.gate_proj.bias": torch.ones(H), "0.down_proj.bias": torch.ones(M)}


class Scaled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Raising(Plain):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("needs a mask")


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        (lambda: [Scaled(("fc1", "fc2"), F.gelu)], {}, "first expert is no silu or gelu or .* network"),
        (lambda: [Scaled(("fc1", "fc2"), F.gelu)], {"activation": "gelu"}, "first expert is no gelu network"),
        (lambda: [sequential()], {"activation": "relu"}, "first expert is no relu network"),
        (lambda: [Plain(("fc1", "fc2"), F.gelu, p=0.1)], {}, "in training, the first expert is no network .* dropout"),
        (lambda: [sequential()], {"activation": "swiglu"}, "source has no gate; .*choose silu, gelu"),
        (lambda: [sequential()], {"activation": "tanh"}, "unknown activation 'tanh'"),
        (lambda: [Raising(("fc1", "fc2"), F.gelu)], {}, "pass activation=, one of .* needs a mask"),
        (list, {}, "no experts"),
        (lambda: 3, {}, "int is no module"),
        (lambda: nn.Linear(2, 2), {}, "weight|known names"),
        (
            lambda: [nn.Sequential(nn.Linear(M, H), nn.Linear(H, H), nn.Linear(H, M))],
            {},
            "known names, .*gate_proj, up_proj, down_proj.* pass a state dict",
        ),
        (
            lambda: {"experts.1.fc1.weight": torch.ones(H, M), "experts.1.fc2.weight": torch.ones(M, H)},
            {},
            "experts .1.",
        ),
        (lambda: {"0.fc1.weight": torch.ones(H, M), "0.fc2.weight": torch.ones(H, M)}, {}, "nn.Linear stores"),
        (lambda: {f"{block}.experts.0.fc1.weight": torch.ones(H, M) for block in "ab"}, {}, "of one layer"),
        (lambda: {f"{block}.experts.w1": torch.ones(E, H, M) for block in "ab"}, {}, "of one layer"),
        (gate_with_bias, {"activation": "swiglu"}, "biases in some projections only"),
        (lambda: {"0.fc1.weight": torch.ones(H, M).char(), "0.fc2.weight": torch.ones(M, H)}, {}, "fc1 .* quantised"),
    ],
)
def test_unsupported_sources_raise(source: Callable[[], Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_modules(source(), **options)


def test_layer_rejects_other_sizes() -> None:
    with pytest.raises(ConfigError, match="source has 4 experts, the gate selects from 8"):
        fusedmoe.MoELayer(M, fusedmoe.gates.TopK(experts=8), from_modules(make("llama")))
    with pytest.raises(ConfigError, match="model_dim differs"):
        fusedmoe.MoELayer(M + 1, fusedmoe.gates.TopK(experts=4), from_modules(make("llama")))
    experts: Any = make("llama")
    experts[2].up_proj = nn.Linear(M, H + 2, bias=False).double()
    with pytest.raises(ConfigError, match="expert 2 has .*must have one shape"):
        fusedmoe.MoELayer(M, fusedmoe.gates.TopK(experts=4), from_modules(experts))
    experts[2] = Gated(("gate_proj", "up_proj", "down_proj"), F.silu, bias=True)
    with pytest.raises(ConfigError, match="expert 2 has shapes .* expert 0 has"):
        fusedmoe.MoELayer(M, fusedmoe.gates.TopK(experts=4), from_modules(experts))


def test_modules_for_inference_only_are_compared_in_evaluation_mode() -> None:
    class ForInference(Plain):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("inference only")
            return super().forward(x)

    module = ForInference(("fc1", "fc2"), F.gelu)
    assert fusedmoe.experts.from_modules([module]).activation == "gelu"
    with pytest.raises(ConfigError, match="no relu network"):
        fusedmoe.experts.from_modules([module], activation="relu")


def test_modes_and_random_state_are_kept() -> None:
    module = Plain(("fc1", "fc2"), F.gelu).eval()
    module.dropout.train()
    state = torch.get_rng_state()
    fusedmoe.experts.from_modules([module])
    assert not module.training and module.dropout.training and torch.equal(torch.get_rng_state(), state)


def test_experts_that_share_weights_raise() -> None:
    """The source trains one network, the copies would train apart."""
    experts: Any = make("llama")
    with pytest.raises(ConfigError, match="experts 0 and 1 share weights"):
        from_modules([experts[0]] * 4)
    experts[3].up_proj.weight.data = experts[1].up_proj.weight.data
    with pytest.raises(ConfigError, match="experts 1 and 3 share weights"):
        from_modules(experts)


def test_state_dict_starts_all_experts_from_one_network() -> None:
    network = nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))
    state = {f"{number}.{name}": value for number in range(E) for name, value in network.state_dict().items()}
    layer = fusedmoe.MoELayer(M, fusedmoe.gates.TopK(experts=E), from_modules(state, activation="gelu"))
    x_SM = torch.randn(5, M)
    torch.testing.assert_close(layer(x_SM), network(x_SM))
