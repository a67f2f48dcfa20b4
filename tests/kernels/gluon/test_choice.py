"""Timing and choice of the Gluon form, with simulated GPUs and times; and the table of verified configurations."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import gluon_first
from bench.gpu.results import RESULTS
from fusedmoe.kernels.backend import TABLE_SHARED_BYTES, generation
from fusedmoe.kernels.triton.grouped import autotune, configs
from fusedmoe.kernels.triton.grouped.autotune import (
    NUM_OCCUPIED,
    Tuner,
    TuningRecord,
    all_candidates,
    table_candidates,
    untuned_choice,
    verified_candidates,
)
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    VERIFIED,
    Config,
    Gpu,
    HopperConfig,
    Key,
    Variant,
    is_verified,
    name_of,
    order_by_shape,
    with_programs,
)

MULTIPROCESSORS = 132
HOPPER = Gpu((9, 0), 232_448, MULTIPROCESSORS)
OTHERS = (
    Gpu((8, 0), 166_912, MULTIPROCESSORS),
    Gpu((8, 9), 101_376, MULTIPROCESSORS),
    Gpu((10, 0), 232_448, MULTIPROCESSORS),
    Gpu((12, 0), 101_376, MULTIPROCESSORS),
)


def key(operation: str = "down", **changed: Any) -> Key:
    gather, activation = operation not in ("down", "dinput"), "swiglu" if operation in ("up", "dhidden") else ""
    variant = Variant(operation, "bfloat16", "ieee", activation, gather, False, True, True)._replace(**changed)
    return Key(variant, 4096, 1024, 64, 1024)


def gluon(gpu: Gpu, of: Key) -> list[Config]:
    return [config for config in all_candidates(gpu, of) if isinstance(config, HopperConfig)]


def table_of(gpu: Gpu, of: Key) -> list[Config]:
    return order_by_shape(table_candidates(generation(gpu.capability, gpu.shared_bytes), of), of.rows, of.depth)


def test_gluon_candidates_exist_on_hopper_only() -> None:
    for operation in OPERATIONS:
        assert gluon(HOPPER, key(operation))
        for gpu in (*OTHERS, HOPPER):
            table = table_of(gpu, key(operation))
            assert not any(isinstance(config, HopperConfig) for config in table)
            assert all_candidates(gpu, key(operation))[: len(table)] == table
        for gpu in OTHERS:
            assert not gluon(gpu, key(operation))


@pytest.mark.parametrize("changed", [{"dtype": "float32"}, {"even": False, "bulk": False}, {"gather": False}])
def test_unsupported_calls_have_no_gluon_candidates(changed: dict[str, Any]) -> None:
    for operation in ("up", "dhidden", "dw1", "dw2"):
        assert not gluon(HOPPER, key(operation, **changed))


def test_environment_variable_disables_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    assert not gluon(HOPPER, key())
    monkeypatch.setenv("FUSEDMOE_GLUON", "1")
    assert gluon(HOPPER, key())


def test_untuned_choice_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is repeated once a configuration has failed, or once tuning is allowed."""
    looked: list[Key] = []
    usable = Tuner._usable
    monkeypatch.setattr(Tuner, "_usable", lambda self, of, configs: looked.append(of) or usable(self, of, configs))
    fake = FakeTuner()
    fake.allowed = False
    first, count = fake.choose(), len(looked)
    assert fake.choose() == first and len(looked) == count
    with pytest.warns(RuntimeWarning, match="no image"):
        fake.tuner._record_fault(key(), first, "no image")
    assert fake.choose() != first and len(looked) == 2 * count
    fake.allowed = True
    assert isinstance(fake.choose(), HopperConfig)


def test_gluon_is_never_default() -> None:
    """It also keeps the order of the other forms."""
    for operation, rows, gpu in itertools.product(OPERATIONS, (1, 64, 4096), (HOPPER, *OTHERS)):
        of = key(operation)._replace(rows=rows)
        table = table_of(gpu, of)
        for shared in (False, True):
            of = of._replace(shared=shared)
            assert all_candidates(gpu, of)[: len(table)] == table and verified_candidates(gpu, of)[0] == table[0]
            chosen = untuned_choice(generation(gpu.capability, gpu.shared_bytes))(of, pytest.fail)  # type: ignore[arg-type]
            assert chosen == table[0]
    of = key()
    assert untuned_choice(None)(of, pytest.fail) == table_candidates(None, of)[0].config  # type: ignore[arg-type]


@pytest.fixture
def verified_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the version of Triton with which the Gluon form was verified, whichever is installed."""
    monkeypatch.setattr(configs, "TRITON_VERSION", "3.6.0")


# --- The table of verified configurations ---


def test_unverified_gpu_has_single_candidate() -> None:
    for gpu, operation, shared in itertools.product(OTHERS, OPERATIONS, (False, True)):
        of = key(operation)._replace(shared=shared)
        assert verified_candidates(gpu, of) == all_candidates(gpu, of)[:1]
    # Like a Hopper GPU whose blocks have less shared memory.
    assert verified_candidates(HOPPER._replace(shared_bytes=200_000), key()) == table_of(OTHERS[0], key())[:1]


@pytest.mark.usefixtures("verified_triton")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_verified_candidates_on_hopper(operation: str) -> None:
    """Triton's form is timed in all half-precision variants, the Gluon form only in those verified by runs.

    The Gluon form is thus never timed in float16, nor with biases, other activations, sums, or fewer programs.
    Copies that arrive by themselves have not run on a GPU.
    """
    of = key(operation, extra=operation == "dhidden")
    ran = [config for config in all_candidates(HOPPER, of) if not getattr(config, "copies_arrive", False)]
    assert verified_candidates(HOPPER, of) == ran and gluon(HOPPER, of)
    assert (ran != all_candidates(HOPPER, of)) == (operation == "up")
    table = table_of(HOPPER, of)
    assert verified_candidates(HOPPER, of._replace(shared=True)) == table
    changes: list[dict[str, Any]] = [{"dtype": "float16"}, {"extra": operation != "dhidden"}]
    if operation in ("up", "dhidden"):
        changes += [{"activation": name} for name in ("silu", "gelu", "geglu")]
    for changed in changes:
        other = of._replace(variant=of.variant._replace(**changed))
        assert gluon(HOPPER, other) and verified_candidates(HOPPER, other) == table, changed


@pytest.mark.parametrize("version", ["3.6.1", "3.7.0", "4.0.0", "3.6.0+git1"])
def test_gluon_is_not_timed_with_unverified_triton(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(configs, "TRITON_VERSION", version)
    for operation in OPERATIONS:
        of = key(operation, extra=operation == "dhidden")
        assert gluon(HOPPER, of) and verified_candidates(HOPPER, of) == table_of(HOPPER, of)


def test_verified_triton_version_is_installed_version() -> None:
    assert configs.TRITON_VERSION.partition("+")[0] == metadata.version("triton").partition("+")[0]


def test_verified_table_names_existing_candidates() -> None:
    """An entry of a removed configuration is dead, and an entry under a lost name permits nothing."""
    for entry in VERIFIED:
        gpu = Gpu(entry.capability, entry.shared_bytes, MULTIPROCESSORS)
        assert entry.shared_bytes in TABLE_SHARED_BYTES.values()
        for words, names in entry.configs.items():
            operation, dtype, *_ = words.split()
            of = key(operation, dtype=dtype)
            assert {*names} <= {name_of(config) for config in all_candidates(gpu, of)}, words


def test_verified_table_has_evidence_in_results() -> None:
    """In bfloat16 a benchmark's rows contain the times of each configuration, measured after its check."""
    for entry in VERIFIED:
        timed: dict[str, set[str]] = {}
        versions: set[str] = set()
        for name in entry.evidence:
            found = json.loads((RESULTS / name).read_text())
            # In a run of several parts, the first part recorded the GPU.
            told = found if "gpu" in found else json.loads(found["parts"][0]["output"])
            assert told["gpu"]["capability"] == ".".join(map(str, entry.capability))
            versions.add(told["versions"]["triton"])
            for row in found.get("rows", ()):
                timed.setdefault(row["name"].lower(), set()).update(row.get("microseconds", {}))
        assert {*entry.triton} == versions
        for words, names in entry.configs.items():
            operation, dtype, *_ = words.split()
            assert dtype != "bfloat16" or {*names} <= timed[operation], words


@pytest.mark.usefixtures("verified_triton")
def test_verified_names_ignore_program_count() -> None:
    of = key()
    wide, *_ = gluon(HOPPER, of)
    assert is_verified(HOPPER, of.variant, wide) and not is_verified(HOPPER, of.variant, with_programs(wide, 3))
    assert name_of(with_programs(wide, 3)) == name_of(with_programs(wide, 116)) == f"{wide} p"
    # Whole words: a variant with the same prefix is different.
    assert not is_verified(HOPPER, of.variant._replace(dtype="bfloat"), wide)


# --- The tuner on a simulated GPU ---


class FakeTuner:
    """Tuner of a Hopper GPU on which the Gluon form is faster and every candidate is verified."""

    def __init__(self, file: Path | None = None) -> None:
        self.timed: list[Config] = []
        self.allowed = True
        self.tuner = Tuner(partial(all_candidates, HOPPER), self._measure, TuningRecord(file), lambda: self.allowed)

    def choose(self, of: Key | None = None) -> Config:
        return self.tuner.choose(of or key(), self.timed.append)

    def _measure(self, run: Callable[[], object], shared: bool) -> Callable[[], float]:
        run()
        config = self.timed[-1]
        return lambda: self._seconds(config, shared)

    @staticmethod
    def _seconds(config: Config, shared: bool) -> float:
        if not isinstance(config, HopperConfig):
            return 1.1e-3 if shared else 1e-3
        # Tiles are assigned statically: the time is that of the program with the most tiles, and a held multiprocessor
        # delays it.
        tiles = 1200 // (config.programs or MULTIPROCESSORS)
        return 1e-4 * tiles * (2 if shared and not config.programs else 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "grouped.json"


def test_gluon_choice_is_cached(file: Path) -> None:
    fake = FakeTuner(file)
    expected = gluon(HOPPER, key())
    assert fake.choose() == expected[0]
    assert fake.timed[-len(expected) :] == expected, "last, in the order of the table"
    again = FakeTuner(file)
    assert again.choose() == expected[0] and not again.timed


def test_gluon_uses_fewer_programs_during_communication(file: Path) -> None:
    """Fewer programs are faster during communication."""
    fake, shared = FakeTuner(file), key()._replace(shared=True)
    alone = fake.choose()
    beside = fake.choose(shared)
    assert isinstance(alone, HopperConfig) and beside == with_programs(alone, MULTIPROCESSORS - NUM_OCCUPIED) != alone
    assert fake.tuner.tuning_times_us(key()).keys() != fake.tuner.tuning_times_us(shared).keys()
    again = FakeTuner(file)
    assert (again.choose(shared), again.choose()) == (beside, alone) and not again.timed


def test_fully_held_gpu_has_no_gluon_candidates() -> None:
    for multiprocessors, operation in itertools.product((NUM_OCCUPIED, 7), OPERATIONS):
        of, gpu = key(operation)._replace(shared=True), HOPPER._replace(multiprocessors=multiprocessors)
        assert all_candidates(gpu, of) == table_of(gpu, of)
    one = all_candidates(HOPPER._replace(multiprocessors=NUM_OCCUPIED + 1), key()._replace(shared=True))[-1]
    assert isinstance(one, HopperConfig) and one.programs == 1, "and not 0, which stands for all"


def test_enabling_gluon_triggers_retuning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    fake = FakeTuner(file)
    chosen = fake.choose()
    assert not isinstance(chosen, HopperConfig)
    monkeypatch.delenv("FUSEDMOE_GLUON")
    assert isinstance(FakeTuner(file).choose(), HopperConfig)
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    assert FakeTuner(file).choose() == chosen


def test_gluon_is_not_used_without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run under graph capture, either."""
    fake = FakeTuner()
    fake.allowed = False
    for shared in (False, True):
        assert not isinstance(fake.choose(key()._replace(shared=shared)), HopperConfig)
    monkeypatch.setenv("FUSEDMOE_AUTOTUNE", "0")
    fake = FakeTuner()
    assert not isinstance(fake.choose(), HopperConfig) and not fake.timed


def test_hanging_launch_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may hang during timing, because its check ran at small sizes only."""

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(autotune, "_HANG_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match="has not ended"):
        autotune._prepare_timer(torch.device("cpu"), lambda: None, None)


def test_first_benchmark_selects_fastest_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the fastest of each form, and the fastest Gluon configuration with the requested number of programs."""
    fake, device = FakeTuner(), torch.device("cuda", 0)
    monkeypatch.setattr(autotune, "gpu_of", lambda of: HOPPER)
    monkeypatch.setattr(gluon_first, "tuner_of_all", lambda of: fake.tuner)
    one, *_ = gluon(HOPPER, key())
    for programs in (0, 116):
        assert gluon_first.fastest(device, programs, key(), fake.timed.append) == with_programs(one, programs)
    assert not isinstance(gluon_first.fastest(device, None, key(), fake.timed.append), HopperConfig)
    small = key()._replace(rows=1, experts=1)
    assert gluon_first.fastest(device, 0, small, fake.timed.append) == fake.choose(small), "which is not tuned"


def test_first_benchmark_includes_unverified_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    device, of = torch.device("cuda", 0), key(dtype="float16")
    monkeypatch.setattr(autotune, "gpu_of", lambda of: HOPPER)
    found = gluon_first.tuner_of_all.__wrapped__(device)._candidates(of)
    assert found == all_candidates(HOPPER, of) != verified_candidates(HOPPER, of)


NOT_IMPORTED = """
import sys
import torch
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import experts_forward
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.kernels.triton import experts
from fusedmoe.kernels.triton.grouped.autotune import all_candidates, tuner, untuned_choice
from fusedmoe.kernels.triton.grouped.configs import Key, Variant
from fusedmoe.kernels.triton.grouped.configs import Gpu
from fusedmoe.kernels.experts import Weights

layout = contiguous_layout(torch.tensor([3, 0]), 3)
weights = Weights(torch.randn(2, 2, 32, 32), torch.randn(2, 32, 32))
experts_forward(torch.randn(3, 32), layout, None, weights, ACTIVATIONS["swiglu"])
key = Key(Variant("down", "bfloat16", "ieee", "", False, False, True, True), 4096, 1024, 64, 1024)
for capability in ((8, 0), (9, 0), (10, 0), None):
    assert capability is None or all_candidates(Gpu(capability, 232_448, 132), key)
    assert untuned_choice(capability)(key, print)
found = [name for name in sys.modules if name.startswith("fusedmoe.kernels.gluon")]
assert not found, found
"""


@pytest.mark.slow
def test_gluon_is_imported_on_first_launch() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_IMPORTED], capture_output=True, timeout=100, text=True)
    assert done.returncode == 0, done.stderr
