"""Model configurations: dimensions and component names, with the models of the papers' experiments by name.

FlowMoE, Table 2: GPT2-Tiny-MoE, BERT-Large-MoE, LLaMA2-MoE, DeepSeek-V2-S. FSMoE, section 6.4: GPT2-XL-MoE and
Mixtral-7B with the dimensions of GPT-2 XL and Mixtral 8x7B; the paper uses one expert per node, here `experts` sets the
number. Head counts not given in a paper follow the family: head dim 64, or 128 for large models. Qwen3-30B-A3B and
DeepSeek-V3 have the experts of their published configurations, without token dropping.

All models read bytes (vocabulary of 256). Simplifications: DeepSeek models use multi-head instead of latent attention;
DeepSeek-V3 has experts in its first three blocks, too. `fusedmoe plan --config` reads exact configurations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fusedmoe.errors import ConfigError
from fusedmoe.names import ACTIVATIONS
from fusedmoe.schedule.workload import DenseWork
from fusedmoe.sizes import require_within

OBJECTIVES = ("causal", "masked")
NORMS = ("layer", "rms")
POSITIONS = ("learned", "rope")
EXPERTS = ("ffn", "swiglu")
_CHOICES: dict[str, Collection[str]] = {"objective": OBJECTIVES, "norm": NORMS, "positions": POSITIONS}
_CHOICES |= {"expert": EXPERTS, "activation": ACTIVATIONS}
_POSITIVE: tuple[str, ...] = ("layers", "model_dim", "heads", "kv_heads", "seq_len", "batch", "hidden", "experts")
_POSITIVE += ("experts_per_rank", "k", "moe_every", "head_dim", "vocab_size", "dense_hidden")
_POSITIVE += ("q_rank", "kv_rank", "rope_dim", "value_dim")
_LATENT = ("kv_rank", "rope_dim", "value_dim", "head_dim")

#: Number of byte values; a masked model has one more symbol, the mask.
BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    """A transformer over bytes with mixture-of-experts layers. `fusedmoe train --help` documents the fields.

    With `kv_rank`, attention is DeepSeek-V2's multi-head latent attention: queries and keys have `head_dim` channels,
    of which the last `rope_dim` are rotated, and values have `value_dim`.
    """

    name: str = "bytes-small"
    objective: str = "causal"
    layers: int = 4
    model_dim: int = 128
    heads: int = 4
    kv_heads: int | None = None  # for grouped-query attention; None: equal to heads
    seq_len: int = 128
    batch: int = 16  # sequences per step and data-parallel replica
    norm: str = "rms"
    positions: str = "rope"
    bias: bool = False
    expert: str = "swiglu"
    activation: str = "gelu"  # of "ffn" experts: a name in `fusedmoe.kernels.activation.ACTIVATIONS`
    hidden: int = 256
    experts: int | None = 8  # over all ranks; None: see `with_experts`
    experts_per_rank: int = 1
    k: int = 2
    capacity_factor: float | None = 1.25  # relative to the even share; None: no token is dropped
    gate: str = "topk"  # a name in `fusedmoe.gates.GATES`
    gate_options: Mapping[str, Any] = field(default_factory=dict)  # its additional arguments
    order: str | None = None  # None: sparse with a capacity, else dropless
    shared_hidden: int = 0  # of an expert shared by all tokens (DeepSeekMoE); 0: none
    # After the leading dense blocks, every n-th block has experts; other blocks have a dense feed-forward.
    moe_every: int = 1
    head_dim: int | None = None  # None: model_dim / heads
    vocab_size: int | None = None  # None: `BYTES`, and the mask of a masked model
    dense_layers: int = 0  # leading blocks without experts
    dense_hidden: int | None = None  # of dense feed-forwards; None: `hidden`
    # Ranks of latent attention (None: projections of full rank), its rotated channels and its channels of a value.
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        sizes = {name: getattr(self, name) for name in (*_POSITIVE, "shared_hidden", "dense_layers", "capacity_factor")}
        require_within(f"the model {self.name}", **sizes)
        if self.shared_hidden < 0:
            raise ConfigError(f"shared_hidden = {self.shared_hidden} must be 0 (no shared expert) or more")
        if self.dense_layers < 0:
            raise ConfigError(f"dense_layers = {self.dense_layers} must be 0 (none) or more")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.kv_rank is not None:
            self._require_latent()
        if self.head_dim is None and self.model_dim % self.heads:
            raise ConfigError(f"model_dim = {self.model_dim} is not divisible by heads = {self.heads}")
        if self.heads % self.key_heads:
            raise ConfigError(f"heads = {self.heads} is not a multiple of kv_heads = {self.key_heads}")
        if self.positions == "rope" and (self.rope_dim if self.kv_rank and self.rope_dim else self.head_size) % 2:
            raise ConfigError(
                f"rotary positions need an even head dim, and model_dim / heads is {self.head_size}; "
                "choose other heads or learned positions"
            )

    @property
    def label(self) -> str:
        """Name of the preset and at most three fields that differ from it: "Mixtral-7B with k=4"."""
        preset = MODELS.get(self.name, self)
        changed = [one.name for one in fields(self) if getattr(self, one.name) != getattr(preset, one.name)]
        # A preset without a number of experts leaves it to the job.
        changed = [name for name in changed if (name, preset.experts) != ("experts", None)]
        named = ", ".join(f"{name}={getattr(self, name)}" for name in changed[:3])
        return self.name + f" with {named}" * bool(changed) + f" and {len(changed) - 3} more" * (len(changed) > 3)

    def require_byte_vocabulary(self) -> None:
        """Raise `ConfigError` if the vocabulary is too small for a model of the command, which reads bytes."""
        if self.vocab_size is not None and self.vocab_size < BYTES + (self.objective == "masked"):
            raise ConfigError(f"vocab_size = {self.vocab_size} is smaller than the {BYTES} bytes and the mask")

    def _require_latent(self) -> None:
        missing = [name for name in _LATENT if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"latent attention (kv_rank = {self.kv_rank}) needs {', '.join(missing)} too")
        assert self.rope_dim is not None and self.head_dim is not None
        if self.positions != "rope" or self.bias or self.key_heads != self.heads or self.rope_dim >= self.head_dim:
            raise ConfigError(
                "latent attention needs rotary positions, no bias, kv_heads equal to heads, and rope_dim below head_dim"
            )

    @property
    def head_size(self) -> int:
        return self.model_dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def dense_size(self) -> int:
        return self.hidden if self.dense_hidden is None else self.dense_hidden

    def has_experts(self, layer: int) -> bool:
        """Return whether a block has experts: after the dense layers, the last of every `moe_every` blocks."""
        return layer >= self.dense_layers and (layer + 1 - self.dense_layers) % self.moe_every == 0

    @property
    def num_moe_layers(self) -> int:
        return sum(map(self.has_experts, range(self.layers)))

    def dense_work(self, layer: int) -> DenseWork:
        """Return the dense matrices of a block: attention's, and the shared expert's or the feed-forward network's."""
        m, d, value = self.model_dim, self.head_size, self.head_size
        if self.kv_rank is None:
            attention = m * d * (2 * self.heads + 2 * self.key_heads)
        else:
            assert self.rope_dim is not None and self.value_dim is not None
            value = self.value_dim
            queries = m * self.heads * d if self.q_rank is None else self.q_rank * (m + self.heads * d)
            keys = m * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (d - self.rope_dim + value)
            attention = queries + keys + m * self.heads * value
        hidden = self.shared_hidden if self.has_experts(layer) else self.dense_size
        return DenseWork(attention, self.num_matrices * m * hidden, self.heads * (d + value) / 2)

    @property
    def num_matrices(self) -> int:
        return 3 if self.expert == "swiglu" else 2

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def nonlinearity(self) -> str:
        """Activation of experts and dense feed-forwards."""
        return "swiglu" if self.expert == "swiglu" else self.activation

    @property
    def vocabulary(self) -> int:
        return BYTES + (self.objective == "masked") if self.vocab_size is None else self.vocab_size

    def with_experts(self, ranks: int, ep: int = 1) -> ModelConfig:
        """Return the config with a definite number of experts: given, or `experts_per_rank` times `ranks`.

        The product is at least k, the number of distinct experts of a token, rounded up to a multiple of `ep`.
        """
        if self.experts is not None:
            return self
        least = max(self.experts_per_rank * ranks, self.k)
        return replace(self, experts=-(-least // ep) * ep)


_GPT2 = ModelConfig(norm="layer", positions="learned", bias=True, expert="ffn")
_LLAMA = ModelConfig(norm="rms", positions="rope", bias=False, expert="swiglu")
_FLOWMOE: dict[str, Any] = {"batch": 4, "experts": None, "capacity_factor": 1.0}
_BERT: dict[str, Any] = {"objective": "masked", "experts_per_rank": 2} | _FLOWMOE
_FSMOE: dict[str, Any] = {"batch": 1, "experts": 8, "capacity_factor": 1.2, "k": 2, "seq_len": 1024}
_PUBLISHED: dict[str, Any] = {"batch": 1, "capacity_factor": None, "seq_len": 4096}
_DEEPSEEK_V3: dict[str, Any] = {"gate": "deepseek_v3", "shared_hidden": 2048} | _PUBLISHED
_DEEPSEEK_V3 |= {"gate_options": {"groups": 8, "groups_kept": 4, "route_scale": 2.5}}


def _make_config(
    family: ModelConfig, name: str, layers: int, model_dim: int, heads: int, hidden: int, **other: Any
) -> ModelConfig:
    return replace(family, name=name, layers=layers, model_dim=model_dim, heads=heads, hidden=hidden, **other)


MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        ModelConfig(),
        _make_config(_GPT2, "GPT2-Tiny-MoE", 12, 256, 4, 512, seq_len=256, k=2, **_FLOWMOE),
        _make_config(_GPT2, "BERT-Large-MoE", 24, 512, 8, 1024, seq_len=512, k=1, **_BERT),
        _make_config(_LLAMA, "LLaMA2-MoE", 32, 1024, 16, 4096, seq_len=512, k=1, **_FLOWMOE),
        _make_config(_LLAMA, "DeepSeek-V2-S", 4, 5120, 40, 1536, seq_len=256, k=8, experts_per_rank=2, **_FLOWMOE),
        _make_config(_GPT2, "GPT2-XL-MoE", 48, 1600, 25, 6400, **_FSMOE),
        _make_config(_LLAMA, "Mixtral-7B", 32, 4096, 32, 14336, kv_heads=8, **_FSMOE),
        _make_config(
            _LLAMA, "Qwen3-30B-A3B", 48, 2048, 32, 768, kv_heads=4, head_dim=128, experts=128, k=8, **_PUBLISHED
        ),
        _make_config(_LLAMA, "DeepSeek-V3", 61, 7168, 128, 2048, experts=256, k=8, **_DEEPSEEK_V3),
    )
}


#: Other names of models. FSMoE calls Mixtral 8x7B "Mixtral-7B".
ALIASES = {"Mixtral-8x7B": "Mixtral-7B"}


def named_model(name: str) -> ModelConfig:
    """Return the model with this name or alias, case-insensitively. Raises `ConfigError` for an unknown name."""
    models = {known.lower(): model for known, model in MODELS.items()}
    models |= {alias.lower(): MODELS[known] for alias, known in ALIASES.items()}
    if name.lower() in models:
        return models[name.lower()]
    raise ConfigError(f"no model is called {name!r}; known: {', '.join((*MODELS, *ALIASES))}")
