"""When the Gluon form is timed and chosen: by GPUs and times that are made up, and the table of what is verified."""

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
from fusedmoe.kernels.generation import NEEDED, generation
from fusedmoe.kernels.triton.grouped import autotune, verified
from fusedmoe.kernels.triton.grouped.autotune import Record, Tuner, by_table, every_candidate, to_time, untuned
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Config,
    HopperConfig,
    Key,
    Variant,
    by_shape,
    with_programs,
)
from fusedmoe.kernels.triton.grouped.holder import HELD
from fusedmoe.kernels.triton.grouped.verified import VERIFIED, Gpu, is_verified, name_of

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
    return [config for config in every_candidate(gpu, of) if isinstance(config, HopperConfig)]


def table_of(gpu: Gpu, of: Key) -> list[Config]:
    return by_shape(by_table(generation(gpu.capability, gpu.shared_bytes), of), of.rows, of.depth)


def test_on_hopper_alone() -> None:
    for operation in OPERATIONS:
        assert gluon(HOPPER, key(operation))
        for gpu in (*OTHERS, HOPPER):
            table = table_of(gpu, key(operation))
            assert not any(isinstance(config, HopperConfig) for config in table)
            assert every_candidate(gpu, key(operation))[: len(table)] == table
        for gpu in OTHERS:
            assert not gluon(gpu, key(operation))


@pytest.mark.parametrize("changed", [{"dtype": "float32"}, {"even": False, "bulk": False}, {"gather": False}])
def test_not_of_calls_that_have_no_such_form(changed: dict[str, Any]) -> None:
    for operation in ("up", "dhidden", "dw1", "dw2"):
        assert not gluon(HOPPER, key(operation, **changed))


def test_the_environment_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    assert not gluon(HOPPER, key())
    monkeypatch.setenv("FUSEDMOE_GLUON", "1")
    assert gluon(HOPPER, key())


def test_a_choice_without_tuning_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once a configuration has failed, or once tuning is allowed."""
    looked: list[Key] = []
    usable = Tuner._usable
    monkeypatch.setattr(Tuner, "_usable", lambda self, of, configs: looked.append(of) or usable(self, of, configs))
    fake = Fake()
    fake.allowed = False
    first, count = fake.choose(), len(looked)
    assert fake.choose() == first and len(looked) == count
    with pytest.warns(RuntimeWarning, match="no image"):
        fake.tuner._write_down(key(), first, "no image")
    assert fake.choose() != first and len(looked) == 2 * count
    fake.allowed = True
    assert isinstance(fake.choose(), HopperConfig)


def test_it_is_nobodys_default() -> None:
    """Nor does it change the order of the others."""
    for operation, rows, gpu in itertools.product(OPERATIONS, (1, 64, 4096), (HOPPER, *OTHERS)):
        of = key(operation)._replace(rows=rows)
        table = table_of(gpu, of)
        for shared in (False, True):
            of = of._replace(shared=shared)
            assert every_candidate(gpu, of)[: len(table)] == table and to_time(gpu, of)[0] == table[0]
            chosen = untuned(generation(gpu.capability, gpu.shared_bytes))(of, pytest.fail)  # type: ignore[arg-type]
            assert chosen == table[0]
    of = key()
    assert untuned(None)(of, pytest.fail) == by_table(None, of)[0].config  # type: ignore[arg-type]


@pytest.fixture
def verified_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of Triton that the Gluon form was verified with, whichever is installed."""
    monkeypatch.setattr(verified, "TRITON_VERSION", "3.6.0")


# --- The table of what is verified ---


def test_where_nothing_is_verified_nothing_is_timed() -> None:
    for gpu, operation, shared in itertools.product(OTHERS, OPERATIONS, (False, True)):
        of = key(operation)._replace(shared=shared)
        assert to_time(gpu, of) == every_candidate(gpu, of)[:1]
    # As is a Hopper GPU whose blocks have less shared memory.
    assert to_time(HOPPER._replace(shared_bytes=200_000), key()) == table_of(OTHERS[0], key())[:1]


@pytest.mark.usefixtures("verified_triton")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_timed_on_hopper(operation: str) -> None:
    """Triton's form in every variant of half precision; the Gluon form where runs have checked it, and so neither in
    float16, with biases, other activations, sums, nor with fewer programs."""
    of = key(operation, extra=operation == "dhidden")
    assert to_time(HOPPER, of) == every_candidate(HOPPER, of) and gluon(HOPPER, of)
    table = table_of(HOPPER, of)
    assert to_time(HOPPER, of._replace(shared=True)) == table
    changes: list[dict[str, Any]] = [{"dtype": "float16"}, {"extra": operation != "dhidden"}]
    if operation in ("up", "dhidden"):
        changes += [{"activation": name} for name in ("silu", "gelu", "geglu")]
    for changed in changes:
        other = of._replace(variant=of.variant._replace(**changed))
        assert gluon(HOPPER, other) and to_time(HOPPER, other) == table, changed


@pytest.mark.parametrize("version", ["3.6.1", "3.7.0", "4.0.0", "3.6.0+git1"])
def test_with_another_triton_the_gluon_form_is_not_timed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(verified, "TRITON_VERSION", version)
    for operation in OPERATIONS:
        of = key(operation, extra=operation == "dhidden")
        assert gluon(HOPPER, of) and to_time(HOPPER, of) == table_of(HOPPER, of)


def test_the_version_of_triton_is_the_installed_one() -> None:
    assert verified.TRITON_VERSION.partition("+")[0] == metadata.version("triton").partition("+")[0]


def test_the_table_names_candidates_that_there_are() -> None:
    """An entry of one that is gone is dead; a name that a configuration has no longer allows nothing."""
    for entry in VERIFIED:
        gpu = Gpu(entry.capability, entry.shared_bytes, MULTIPROCESSORS)
        assert entry.shared_bytes in NEEDED.values()
        for words, names in entry.configs.items():
            operation, dtype, *_ = words.split()
            of = key(operation, dtype=dtype)
            assert {*names} <= {name_of(config) for config in every_candidate(gpu, of)}, words


def test_the_table_names_what_runs_have_shown() -> None:
    """In bfloat16 the rows of a benchmark have the times of each configuration, which came after its check."""
    for entry in VERIFIED:
        timed: dict[str, set[str]] = {}
        versions: set[str] = set()
        for name in entry.evidence:
            found = json.loads((RESULTS / name).read_text())
            # Where a run has parts, the first of them wrote what GPU it is.
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
def test_names_of_the_table() -> None:
    of = key()
    wide, *_ = gluon(HOPPER, of)
    assert is_verified(HOPPER, of.variant, wide) and not is_verified(HOPPER, of.variant, with_programs(wide, 3))
    assert name_of(with_programs(wide, 3)) == name_of(with_programs(wide, 116)) == f"{wide} p"
    # Whole words: a variant that only begins alike is another.
    assert not is_verified(HOPPER, of.variant._replace(dtype="bfloat"), wide)


# --- The tuner on a GPU that is made up ---


class Fake:
    """A tuner of a Hopper GPU on which the Gluon form is faster, and every candidate is verified."""

    def __init__(self, file: Path | None = None) -> None:
        self.timed: list[Config] = []
        self.allowed = True
        self.tuner = Tuner(partial(every_candidate, HOPPER), self._measure, Record(file), lambda: self.allowed)

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
        # Tiles are dealt out before: they take as long as the program that has the most, and wait where it is held.
        tiles = 1200 // (config.programs or MULTIPROCESSORS)
        return 1e-4 * tiles * (2 if shared and not config.programs else 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "grouped.json"


def test_the_choice_is_kept(file: Path) -> None:
    fake = Fake(file)
    expected = gluon(HOPPER, key())
    assert fake.choose() == expected[0]
    assert fake.timed[-len(expected) :] == expected, "last, in the order of the table"
    again = Fake(file)
    assert again.choose() == expected[0] and not again.timed


def test_beside_communication_it_has_fewer_programs(file: Path) -> None:
    """Where it is faster then."""
    fake, shared = Fake(file), key()._replace(shared=True)
    alone = fake.choose()
    beside = fake.choose(shared)
    assert isinstance(alone, HopperConfig) and beside == with_programs(alone, MULTIPROCESSORS - HELD) != alone
    assert fake.tuner.times(key()).keys() != fake.tuner.times(shared).keys()
    again = Fake(file)
    assert (again.choose(shared), again.choose()) == (beside, alone) and not again.timed


def test_beside_communication_nothing_is_tried_on_a_gpu_that_is_held_whole() -> None:
    for multiprocessors, operation in itertools.product((HELD, 7), OPERATIONS):
        of, gpu = key(operation)._replace(shared=True), HOPPER._replace(multiprocessors=multiprocessors)
        assert every_candidate(gpu, of) == table_of(gpu, of)
    one = every_candidate(HOPPER._replace(multiprocessors=HELD + 1), key()._replace(shared=True))[-1]
    assert isinstance(one, HopperConfig) and one.programs == 1, "and not 0, which stands for all"


def test_a_choice_without_it_is_made_again_with_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    fake = Fake(file)
    chosen = fake.choose()
    assert not isinstance(chosen, HopperConfig)
    monkeypatch.delenv("FUSEDMOE_GLUON")
    assert isinstance(Fake(file).choose(), HopperConfig)
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    assert Fake(file).choose() == chosen


def test_without_tuning_it_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor under graph capture."""
    fake = Fake()
    fake.allowed = False
    for shared in (False, True):
        assert not isinstance(fake.choose(key()._replace(shared=shared)), HopperConfig)
    monkeypatch.setenv("FUSEDMOE_AUTOTUNE", "0")
    fake = Fake()
    assert not isinstance(fake.choose(), HopperConfig) and not fake.timed


def test_a_launch_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is timed: a check has seen it at small sizes only."""

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"L2_cache_size": 1}))
    monkeypatch.setattr(autotune, "_MOST_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="has not ended"):
        autotune._prepare(torch.device("cpu"), lambda: None, None)


def test_the_first_minutes_time_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each, and that in Gluon with the number of programs that is asked for."""
    fake, device = Fake(), torch.device("cuda", 0)
    monkeypatch.setattr(autotune, "gpu_of", lambda of: HOPPER)
    monkeypatch.setattr(gluon_first, "tuner_of_all", lambda of: fake.tuner)
    one, *_ = gluon(HOPPER, key())
    for programs in (0, 116):
        assert gluon_first.fastest(device, programs, key(), fake.timed.append) == with_programs(one, programs)
    assert not isinstance(gluon_first.fastest(device, None, key(), fake.timed.append), HopperConfig)
    small = key()._replace(rows=1, experts=1)
    assert gluon_first.fastest(device, 0, small, fake.timed.append) == fake.choose(small), "which is not tuned"


def test_the_first_minutes_time_what_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    device, of = torch.device("cuda", 0), key(dtype="float16")
    monkeypatch.setattr(autotune, "gpu_of", lambda of: HOPPER)
    found = gluon_first.tuner_of_all.__wrapped__(device)._candidates(of)
    assert found == every_candidate(HOPPER, of) != to_time(HOPPER, of)


NOT_IMPORTED = """
import sys
import torch
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import experts_forward
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.kernels.triton import experts
from fusedmoe.kernels.triton.grouped.autotune import every_candidate, tuner, untuned
from fusedmoe.kernels.triton.grouped.configs import Key, Variant
from fusedmoe.kernels.triton.grouped.verified import Gpu
from fusedmoe.kernels.experts import Weights

layout = contiguous_layout(torch.tensor([3, 0]), 3)
weights = Weights(torch.randn(2, 2, 32, 32), torch.randn(2, 32, 32))
experts_forward(torch.randn(3, 32), layout, None, weights, ACTIVATIONS["swiglu"])
key = Key(Variant("down", "bfloat16", "ieee", "", False, False, True, True), 4096, 1024, 64, 1024)
for capability in ((8, 0), (9, 0), (10, 0), None):
    assert capability is None or every_candidate(Gpu(capability, 232_448, 132), key)
    assert untuned(capability)(key, print)
found = [name for name in sys.modules if name.startswith("fusedmoe.kernels.gluon")]
assert not found, found
"""


@pytest.mark.slow
def test_it_is_not_imported_before_it_is_launched() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_IMPORTED], capture_output=True, timeout=100, text=True)
    assert done.returncode == 0, done.stderr
