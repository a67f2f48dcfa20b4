"""Transformer over bytes: embedding, blocks, head and loss, with sequences split over the MP group."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fusedmoe import MoELayer, PipelinedBlocks, Topology, pipeline
from fusedmoe.blocks.pipeline import Along
from fusedmoe.errors import ConfigError
from fusedmoe.experts import FeedForward
from fusedmoe.experts.networks import require_own_experts
from fusedmoe.gates import GATES, Gate, Hash, SoftMoE
from fusedmoe.hooks import Hooks
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.layers.moe import Placements
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.tensor_parallel import (
    Attention,
    DenseFeedForward,
    LatentAttention,
    ShardedModule,
    TokenSplit,
)
from fusedmoe.orders import ORDERS, Order, Sparse
from fusedmoe.runtime.recorder import Recorder, record_operation
from fusedmoe.schedule import Workload
from fusedmoe.schedule.workload import uniform_share

# Target of ignored positions, cross_entropy's default.
IGNORE = -100
_MODEL_ARGUMENTS = ("experts", "k", "capacity_factor")


def make_gate(config: ModelConfig) -> Gate:
    if config.gate not in GATES:
        raise ConfigError(f"gate = {config.gate!r} is not one of {', '.join(GATES)}")
    if config.experts is None:
        raise ConfigError("the number of experts is not set: pass `experts`, or call with_experts(ranks)")
    kind = GATES[config.gate]
    known = inspect.signature(kind).parameters
    arguments = {name: getattr(config, name) for name in _MODEL_ARGUMENTS if name in known}
    for name in config.gate_options:
        if name in _MODEL_ARGUMENTS:
            raise ConfigError(f"gate option {name!r} is a setting of the model: set it there")
        if name not in known:
            options = ", ".join(option for option in known if option not in _MODEL_ARGUMENTS)
            raise ConfigError(f"gate {config.gate} has no option {name!r}; it has {options}")
    try:
        return kind(**arguments, **config.gate_options)
    except TypeError as error:
        if not config.gate_options:
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in config.gate_options.items())
        raise ConfigError(f"gate {config.gate} does not accept the options {given}: {error}") from error


def make_experts(config: ModelConfig, hidden: int | None = None) -> FeedForward:
    return FeedForward(hidden or config.hidden, config.nonlinearity, config.bias)


def make_order(config: ModelConfig) -> Order | None:
    if config.order is None:
        return None
    if config.order not in ORDERS:
        raise ConfigError(f"order = {config.order!r} is not one of {', '.join(ORDERS)}")
    return ORDERS[config.order]()


class Block(nn.Module):
    """Block x + attention(norm(x)), then x + experts(norm(x)), on this MP rank's slice of each sequence."""

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        layer: int,
        layer_options: Mapping[str, Any],
        **factory_kwargs: Any,
    ) -> None:
        """`layer_options`: further arguments of the `MoELayer`."""
        super().__init__()
        self.attention_norm = make_norm(config, **factory_kwargs)
        # Blocks without experts share the number of the next block with experts.
        number = sum(map(config.has_experts, range(layer)))
        self.attention = (LatentAttention if config.kv_rank else Attention)(config, topology, number, **factory_kwargs)
        self.experts_norm = make_norm(config, **factory_kwargs)
        self.experts: MoELayer | DenseFeedForward
        if config.has_experts(layer):
            self.experts = MoELayer(
                config.model_dim,
                make_gate(config),
                make_experts(config),
                order=make_order(config),
                topology=topology,
                shared=make_experts(config, config.shared_hidden) if config.shared_hidden else None,
                mp_input="split",
                **layer_options,
                **factory_kwargs,
            )
            self.experts.number = number
        else:
            self.experts = DenseFeedForward(config, topology, **factory_kwargs)

    def forward(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Map [B, P, M] -> [B, P, M] and return this rank's part of the auxiliary loss. P: positions per sample."""
        x_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), split)
        if isinstance(self.experts, DenseFeedForward):
            return x_BPM + self.experts(self.experts_norm(x_BPM), split), x_BPM.new_zeros(())
        return x_BPM + self.experts(self.experts_norm(x_BPM)), self.experts.aux_loss


def make_norm(config: ModelConfig, **factory_kwargs: Any) -> nn.Module:
    return (nn.LayerNorm if config.norm == "layer" else nn.RMSNorm)(config.model_dim, **factory_kwargs)


class DenseUntilExperts(nn.Module):
    """Blocks without experts, if any, and the attention of the following block with experts."""

    # Set before each batch: the pipeline passes only rows.
    split: TokenSplit

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        *dense, last = blocks
        self.before = nn.ModuleList(dense)
        self.attention_norm, self.attention, self.experts_norm = last.attention_norm, last.attention, last.experts_norm

    def forward(self, x_BPM: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.before:
            x_BPM, _ = block(x_BPM, self.split)
        y_BPM = x_BPM + self.attention(self.attention_norm(x_BPM), self.split)
        return y_BPM, self.experts_norm(y_BPM)


class DenseUntilExpertsInPositions(DenseUntilExperts):
    """`DenseUntilExperts` for some positions of all samples, on one MP rank, with keys and values for later ones."""

    def forward(  # type: ignore[override]
        self, x_BPM: Tensor, past: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        own: list[Tensor] = []

        def attend(norm: nn.Module, attention: Attention) -> Tensor:
            at = len(own)
            y_BPM, found = attention.forward_with_past(norm(x_BPM), [(of[at], of[at + 1]) for of in past])
            own.extend(found)
            return x_BPM + y_BPM

        positions = x_BPM.shape[1]
        part = TokenSplit(positions, (positions,), 0, positions)
        for block in self.before:
            assert isinstance(block, Block) and isinstance(block.experts, DenseFeedForward)
            x_BPM = attend(block.attention_norm, block.attention)
            x_BPM = x_BPM + block.experts(block.experts_norm(x_BPM), part)
        x_BPM = attend(self.attention_norm, self.attention)
        return x_BPM, self.experts_norm(x_BPM), tuple(own)


class BlockPipeline:
    """Blocks up to the last block with experts, as one pipeline that shares their parameters, and `trailing_blocks`."""

    def __init__(self, blocks: Sequence[Block], recompute: bool, along: Along) -> None:
        # Each group ends with a block with experts.
        groups, group = list[list[Block]](), list[Block]()
        for block in blocks:
            group.append(block)
            if isinstance(block.experts, MoELayer):
                groups.append(group)
                group = []
        if not groups:
            raise ConfigError("micro-batches: the model has no experts, so there is nothing to overlap")
        attention = groups[0][-1].attention
        if along == "positions" and (attention.config.objective != "causal" or attention.topology.mp.size > 1):
            raise ConfigError(
                "micro-batches along positions require a causal model and whole sequences per rank (mp=1)"
            )
        kind = DenseUntilExperts if along == "samples" else DenseUntilExpertsInPositions
        self._parts = [kind(blocks) for blocks in groups]
        experts: list[Any] = [blocks[-1].experts for blocks in groups]
        parts = list(zip(self._parts, experts, strict=True))
        self.pipelined: PipelinedBlocks = pipeline(parts, along=along, recompute=recompute)
        self.trailing_blocks = group

    def __call__(self, x_BPM: Tensor, split: TokenSplit) -> tuple[Tensor, Tensor]:
        """Return the last block's output, and this rank's part of all auxiliary losses."""
        for part in self._parts:
            part.split = split
        y_BPM = self.pipelined(x_BPM)
        aux = x_BPM.new_zeros(())
        for layer in self.pipelined.experts:
            assert isinstance(layer, MoELayer)
            aux = aux + layer.aux_loss
        return y_BPM, aux


@dataclass(frozen=True)
class Loss:
    """This rank's part of the loss of its replica's batch; the parts of an MP group sum to it."""

    nats: Tensor  # scalar, cross-entropy of this rank's tokens divided by `targets`
    aux: Tensor  # scalar, the gates' auxiliary losses of this rank's tokens, summed over layers
    targets: int  # in the whole batch


class Transformer(ShardedModule):
    """Causal (GPT, LLaMA, Mixtral) or masked (BERT) transformer with mixture-of-experts layers.

    Ranks of an MP group pass the same batch, ranks of a DP group different batches. Each rank embeds, normalizes,
    routes and evaluates its slice of every sequence (`TokenSplit`); attention and dense feed-forwards gather whole
    sequences.

    Args:
        config: `config.experts` must be set (`with_experts`).
        dispatch, hooks, placement: passed to every `MoELayer`.
        recompute: activation checkpointing: save only the blocks' inputs for backward.
    """

    symbol_weight: nn.Parameter
    position_weight: nn.Parameter | None
    head_weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology | None = None,
        *,
        dispatch: str = "direct",
        hooks: Sequence[Hooks] = (),
        recompute: bool = False,
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype | None):
            raise ConfigError(f"Transformer: dtype = {dtype!r}; give a dtype of PyTorch, say torch.bfloat16")
        self.config = config
        self.topology = Topology() if topology is None else topology
        self.recompute = recompute
        self.recorder: Recorder | None = None
        self._block_pipeline: BlockPipeline | None = None
        dim = config.model_dim
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        layer_options = {"dispatch": dispatch, "hooks": hooks, "placement": placement}
        # Embeddings and head as in GPT-2.
        symbols = ((config.vocabulary, dim), 0.02)
        positions = ((config.seq_len, dim), 0.02) if config.positions == "learned" else None
        self.register_parameters({"symbol_weight": symbols, "position_weight": positions}, **factory_kwargs)
        self.blocks = nn.ModuleList(
            Block(config, self.topology, layer, layer_options, **factory_kwargs) for layer in range(config.layers)
        )
        self.norm = make_norm(config, **factory_kwargs)
        self.register_parameters({"head_weight": symbols}, **factory_kwargs)
        self.register_load_state_dict_pre_hook(require_own_experts)

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor) -> Loss:
        """Return the loss of a batch, [B, L] int64, equal on all ranks of the MP group. Collective over all ranks.

        Targets of `IGNORE` do not count.
        """
        if tokens_BL.shape != targets_BL.shape:
            raise ConfigError(f"tokens are {list(tokens_BL.shape)}, targets {list(targets_BL.shape)}: they must agree")
        y_BPM, aux, split = self._run_blocks(tokens_BL)
        targets_S = targets_BL[:, split.start : split.stop].flatten()
        targets = int((targets_BL != IGNORE).sum())

        def compute_loss(y_BPM: Tensor) -> Tensor:
            logits_SV = F.linear(self.norm(y_BPM), self.head_weight).flatten(0, 1)
            # Under autocast the head's GEMM returns bfloat16.
            logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
            nats = F.cross_entropy(logits_SV, targets_S, ignore_index=IGNORE, reduction="sum")
            return nats / max(1, targets)

        return Loss(record_operation(self.recorder, compute_loss, y_BPM, kind="loss"), aux, targets)

    def logits(self, tokens_BL: Tensor) -> Tensor:
        """Return the logits of this rank's P positions of each sequence, [B, P, vocabulary]; collective."""
        y_BPM, _, _ = self._run_blocks(tokens_BL)
        return F.linear(self.norm(y_BPM), self.head_weight)

    def moe_layers(self) -> Iterator[MoELayer]:
        return (block.experts for block in self.blocks if isinstance(block.experts, MoELayer))

    def pipeline_blocks(self, along: Along = "samples") -> PipelinedBlocks:
        """Run the blocks in micro-batches from now on; return the pipelined blocks, which hold the plans. Collective.

        `along` is "samples", or for causal models with mp = 1 "positions" of each sequence, which needs only one
        sample.
        """
        self._block_pipeline = BlockPipeline(list(self.blocks), self.recompute, along)  # type: ignore[arg-type]
        return self._block_pipeline.pipelined

    def dense_parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters outside experts by MoE layer: of its blocks, gate and shared expert.

        Embedding, head and blocks after the last MoE layer belong to no layer.
        """
        layers, before = list[list[nn.Parameter]](), list[nn.Parameter]()
        for block in self.blocks:
            assert isinstance(block, Block)
            if isinstance(block.experts, MoELayer):
                of_experts = {id(parameter) for parameter in block.experts.experts.parameters()}
                layers.append([*before, *(one for one in block.parameters() if id(one) not in of_experts)])
                before = []
            else:
                before += block.parameters()
        return layers

    def update_gates(self) -> None:
        """Update the gates' non-gradient state; call it after each optimizer step."""
        for layer in self.moe_layers():
            layer.update_gate()

    def record(self, recorder: Recorder | None) -> None:
        """Record spans of the whole model from now on; None stops."""
        self.recorder = recorder
        modules: Iterable[nn.Module] = self.modules()
        if self._block_pipeline is not None:
            self._block_pipeline.pipelined.recorder = recorder
            # A plan records its tasks, which include their modules: recording both would count twice.
            if recorder is not None and self._block_pipeline.pipelined.plans is not None:
                modules = (module for block in self._block_pipeline.trailing_blocks for module in block.modules())
        for module in modules:
            if isinstance(module, (Attention, DenseFeedForward, MoELayer)):
                module.recorder = recorder

    def _run_blocks(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor, TokenSplit]:
        """Return the last block's output [B, P, M], this rank's part of the auxiliary loss, and the token split."""
        length = tokens_BL.shape[1]
        split = TokenSplit.from_length(length, self.topology)
        tokens_BP = tokens_BL[:, split.start : split.stop]
        x_BPM = F.embedding(tokens_BP, self.symbol_weight)
        if self.position_weight is not None:
            if length > self.config.seq_len:
                raise ConfigError(f"sequences of {length} tokens exceed the {self.config.seq_len} learned positions")
            x_BPM = x_BPM + self.position_weight[split.start : split.stop]
        for layer in self.moe_layers():
            if isinstance(layer.gate, Hash):
                layer.gate.token_ids = tokens_BP
        aux, blocks = x_BPM.new_zeros(()), list(self.blocks)
        if self._block_pipeline is not None:
            x_BPM, aux = self._block_pipeline(x_BPM, split)
            blocks = list(self._block_pipeline.trailing_blocks)
        for block in blocks:
            if self.recompute and torch.is_grad_enabled():
                # Blocks communicate: all ranks must recompute to the same point.
                with set_checkpoint_early_stop(False):
                    x_BPM, own = checkpoint(block, x_BPM, split, use_reentrant=False)
            else:
                x_BPM, own = block(x_BPM, split)
            aux = aux + own
        return x_BPM, aux, split


def block_workload(config: ModelConfig, ep: int, esp: int, mp: int, itemsize: int) -> Workload:
    """Return the workload of one rank in one block with experts, for the tokens of all `esp` ranks that shard them.

    Each rank has 1/mp of its replica's batch. `itemsize`: bytes per element sent.
    """
    assert config.experts is not None
    batch = max(1, config.batch * esp // mp)
    tokens = max(1, batch * config.seq_len // esp)
    # From the created gate and order: some use one expert per token or no capacity, whatever the config.
    gate, order = make_gate(config), make_order(config) or Sparse()
    rows = order.mean_rows_per_token(gate, tokens)
    # Rows that mix tokens cannot be deduplicated.
    copies = order.copies and not isinstance(gate, SoftMoE)
    # Presets without `head_dim` keep the dense part of FSMoE's Table 1.
    dense = None if config.head_dim is None else config.dense_work(config.dense_layers + config.moe_every - 1)
    return Workload(
        batch=batch,
        seq_len=config.seq_len,
        model_dim=config.model_dim,
        hidden=config.hidden,
        experts=config.experts,
        k=1,
        capacity_factor=rows,
        expert="swiglu" if ACTIVATIONS[config.nonlinearity].gated else "ffn",
        ep=ep,
        esp=esp,
        itemsize=itemsize,
        share=uniform_share(config.experts, gate.k, ep) if copies else 1.0,
        dense=dense,
    )
