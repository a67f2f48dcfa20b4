"""Memory of a rank, and the parallel sizes of a job that fit a machine's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from fusedmoe.cli.job import Sizes
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.step_plans import (
    PlannedJob,
    compute_dtype,
    expert_bytes,
    machine_costs,
    require_moe_layers,
    step_workload,
)
from fusedmoe.errors import ConfigError
from fusedmoe.experts.sharding import parameter_shardings
from fusedmoe.models.external_job import ExternalJob, TrainingState
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule.machines import PREDICTION_ERROR, Machine
from fusedmoe.schedule.task import PHASES

_RESIDUAL_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank during a step, without buffers of collectives and fragmentation.

    `activations`: tensors saved for the backward pass, with uniform expert loads. `workspace`: the logits' gradient,
    and the bfloat16 copies of the parameters under autocast, or the blocks that FSDP gathers.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


@lru_cache(maxsize=2)
def _dense_elements(meta: Transformer) -> tuple[int, int]:
    """Return the numbers of elements outside experts that are split over MP, and that are replicated."""
    shardings, numbers = parameter_shardings(meta), [0, 0]
    of_experts = {id(parameter) for layer in meta.moe_layers() for parameter in layer.experts.parameters()}
    for name, parameter in meta.named_parameters():
        if id(parameter) not in of_experts:
            numbers["mp" not in shardings.get(name, {})] += parameter.numel()
    return numbers[0], numbers[1]


def rank_memory(
    settings: Settings, ranks: int, sizes: Sizes, meta: Transformer, state: TrainingState | None = None
) -> RankMemory:
    """Return the memory of one rank for a model made by `make_meta_model`.

    `state`: bytes per parameter; None: those of `fusedmoe train`, with parameters, gradients and AdamW moments in
    float32 (dtype fp64: float64).
    """
    item = 8 if settings.dtype == "fp64" else 4
    state = state or TrainingState(item, item, 2 * item)
    split, replicated = _dense_elements(meta)
    split //= sizes.mp
    assert settings.model.experts is not None
    experts = expert_bytes(settings, sizes) / item * settings.model.experts / sizes.ep * settings.model.num_moe_layers
    total = split + replicated + experts
    # Elements per rank if the ranks that hold equal elements shard them.
    shards = replicated / ranks + split * sizes.mp / ranks
    shards += experts * sizes.ep * sizes.esp / ranks
    optimizer = shards if state.sharded != "none" else total
    rest = shards if state.sharded == "all" else total
    saved, logits = _saved_bytes(settings, sizes)
    # FSDP gathers the parameters of this block and the next, and reduces the gradients of one.
    gathered = (2 * compute_dtype(settings).itemsize + state.gradient) * total / settings.model.layers
    copies = 2 * total if settings.dtype == "bf16" and state.parameter == 4 and state.sharded != "all" else 0
    return RankMemory(
        state.parameter * rest,
        state.gradient * rest,
        state.optimizer * optimizer,
        state.in_flight * saved + logits,
        logits + (gathered if state.sharded == "all" else copies),
    )


def _saved_bytes(settings: Settings, sizes: Sizes) -> tuple[float, float]:
    """Return the bytes that a step's blocks save for the backward pass, and the bytes of the logits.

    The residual stream and the norms are float32 under autocast. Per token, blocks of this library save

        every block     x, norm(x) and their casts for attention and experts; queries, keys, values and attention's sum
        experts         received rows and pre-activations (`Workload.saved_elements`), the rows' sums
        dense           pre-activations, activations and their product

    With recomputation, a block saves x; one block at a time saves the rest.
    """
    model, work = settings.model, step_workload(settings, sizes.ep, sizes.esp, sizes.mp)
    item = compute_dtype(settings).itemsize
    residual = max(_RESIDUAL_BYTES, item)
    tokens = model.batch * model.seq_len / sizes.mp
    casts = 4 * item if item < residual else 0
    common = tokens * model.model_dim * (4 * residual + casts)
    # Attention has the normalized rows of all MP ranks.
    common += tokens * model.model_dim * item * (sizes.mp - 1)
    value = model.head_size if model.value_dim is None else model.value_dim
    common += tokens * item * (model.head_size + value) * (2 * model.heads + 1.5 * model.key_heads)
    sums = work.share * work.rows / sizes.esp * model.model_dim
    shared = (model.num_matrices - 1) * model.shared_hidden
    moe = common + item * (work.saved_elements() + sums + tokens * shared) + 4 * tokens * (model.experts or 0)
    dense = common + tokens * model.model_dim * item * (sizes.mp - 1) + tokens * item * 5 * model.dense_size
    count = model.num_moe_layers
    saved = count * moe + (model.layers - count) * dense
    if settings.recompute:
        saved = model.layers * tokens * model.model_dim * residual + max(moe, dense if count < model.layers else 0.0)
    outer = tokens * model.model_dim * (2 * residual + item)
    return saved + outer, tokens * model.vocabulary * residual


class ParallelLayout(NamedTuple):
    """Parallel sizes, their memory, and the seconds per token of all replicas without overlap."""

    sizes: Sizes
    memory: RankMemory
    token_s: float


def layouts(
    settings: Settings, ranks: int, machine: Machine, job: ExternalJob, meta: Transformer
) -> list[ParallelLayout]:
    """Return the layouts of a job that fit a machine's memory, fastest per token first.

    If none fits, returns all layouts, least memory first. EP divides the experts. ESP and MP are 1 unless the settings
    state them: no integration splits experts, and times with tensor parallelism are rough. Raises `ConfigError` if
    there is no layout or no MoE layer.
    """
    require_moe_layers(settings.model)
    candidates = list[ParallelLayout]()
    room = None if machine.memory_bytes is None else machine.memory_bytes.value
    for sizes in _candidate_sizes(settings, ranks, machine.node(ranks)):
        try:
            costs = machine_costs(machine, settings, sizes, ranks)
            planned = PlannedJob(settings, ranks, sizes, costs, meta, machine, is_external=True)
            step, after_s = planned.step_costs(), sum(planned.gradients_s.values())
        except ConfigError:
            continue  # groups that are not spread evenly over nodes
        alone_s = {
            id(layer): sum(
                layer.dense_total_s(phase) + sum(part.seconds(1) for part in layer.chunks[phase].values())
                for phase in (*PHASES, *PHASES[: settings.recompute])
            )
            for layer in step.layers
        }
        replica_batch = settings.model.batch * (ranks // sizes.mp)
        after_s /= max(1, (job.global_batch or 0) / replica_batch)  # per micro-batch
        step_s = sum(alone_s[id(layer)] for layer in step.layers) + after_s + planned.head_s
        memory = rank_memory(settings, ranks, sizes, meta, job.state)
        candidates.append(ParallelLayout(sizes, memory, step_s / planned.tokens))
    if not candidates:
        raise ConfigError(f"no parallel sizes split this model over {ranks} ranks; set --ep, --esp and --mp")
    fits = [layout for layout in candidates if room is None or layout.memory.total <= room]
    if not fits:
        return sorted(candidates, key=lambda layout: layout.memory.total)
    return sorted(fits, key=lambda layout: layout.token_s)


def _candidate_sizes(settings: Settings, ranks: int, per_node: int) -> Iterator[Sizes]:
    experts, esp, mp = settings.model.experts, settings.esp or 1, settings.mp or 1
    assert experts is not None
    for ep in range(1, experts + 1) if settings.ep is None else [settings.ep]:
        if experts % ep == 0 and ranks % (ep * esp) == 0 and ranks % mp == 0:
            yield Sizes(per_node, ep, esp, mp)


def chosen_settings(settings: Settings, found: Sequence[ParallelLayout]) -> Settings:
    """Return the settings with the sizes of the `layouts` found that need least memory.

    Layouts slower than the fastest by more than the error of predictions are not considered.
    """
    limit_s = found[0].token_s * (1 + PREDICTION_ERROR.value)
    sizes = min((one for one in found if one.token_s <= limit_s), key=lambda layout: layout.memory.total).sizes
    return replace(settings, **vars(sizes))


def _is_even(machine: Machine | None, settings: Settings, sizes: Sizes, ranks: int) -> bool:
    """Return whether the groups are spread evenly over nodes; True without a machine."""
    if machine is None:
        return True
    with suppress(ConfigError):
        machine_costs(machine, settings, sizes, ranks)
        return True
    return False


def find_remedy(
    settings: Settings,
    ranks: int,
    sizes: Sizes,
    meta: Transformer,
    state: TrainingState,
    room: float,
    machine: Machine | None = None,
) -> dict[str, Any] | None:
    """Return the first `changes` after which a rank fits `room` bytes, and its `total`; None: there are none.

    Tried in this order: recomputation, a smaller batch, a larger EP size, training state sharded over all ranks.
    """
    batch = settings.model.batch
    batches = [batch >> halvings for halvings in range(batch.bit_length()) if batch % (1 << halvings) == 0]
    candidates = _candidate_sizes(replace(settings, **vars(sizes) | {"ep": None}), ranks, sizes.ranks_per_node)
    larger = [one.ep for one in candidates if one.ep > sizes.ep and _is_even(machine, settings, one, ranks)]
    states = {"": state}
    if state.sharded != "all":
        states["state sharded over all ranks (FSDP)"] = replace(state, sharded="all")
    for (sharding, sharded), ep, few, recompute in product(
        states.items(), (sizes.ep, *larger), batches, dict.fromkeys((settings.recompute, True))
    ):
        changed = replace(settings.changed({"model.batch": few}), recompute=recompute)
        total = rank_memory(changed, ranks, replace(sizes, ep=ep), meta, sharded).total
        if total <= room:
            changes = {
                "--recompute": recompute != settings.recompute,
                f"--batch {few}": few != batch,
                f"--ep {ep}": ep != sizes.ep,
                sharding: bool(sharding),
            }
            words = ", ".join(words for words, is_changed in changes.items() if is_changed)
            return {"changes": words, "total": total}
    return None
