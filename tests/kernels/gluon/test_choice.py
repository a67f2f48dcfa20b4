"""When the Gluon form is tried and chosen: by a capability, checks and times that are made up."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import gluon_first
from fusedmoe.kernels.triton.grouped import autotune
from fusedmoe.kernels.triton.grouped.autotune import Record, Tuner, by_table, to_try, untuned
from fusedmoe.kernels.triton.grouped.configs import (
    OPERATIONS,
    Capability,
    Config,
    HopperConfig,
    Key,
    Variant,
    by_shape,
    with_programs,
)
from fusedmoe.kernels.triton.grouped.holder import HELD

HOPPER, MULTIPROCESSORS = (9, 0), 132
OTHERS = ((8, 0), (8, 9), (10, 0), (12, 0), None)


def key(operation: str = "down", **changed: Any) -> Key:
    gather, activation = operation not in ("down", "dinput"), "swiglu" if operation in ("up", "dhidden") else ""
    variant = Variant(operation, "bfloat16", "ieee", activation, gather, False, True, True)._replace(**changed)
    return Key(variant, 4096, 1024, 64, 1024)


def gluon(capability: Capability | None, of: Key) -> list[Config]:
    return [one.config for one in to_try(capability, MULTIPROCESSORS, of) if isinstance(one.config, HopperConfig)]


def test_on_hopper_alone() -> None:
    for operation in OPERATIONS:
        assert gluon(HOPPER, key(operation))
        for capability in (*OTHERS, HOPPER):
            table = by_table(capability, key(operation))
            assert not any(isinstance(one.config, HopperConfig) for one in table)
            assert [*to_try(capability, MULTIPROCESSORS, key(operation))][: len(table)] == [*table]
        for capability in OTHERS:
            assert not gluon(capability, key(operation))


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
    """And again once there are other verdicts, or once tuning is allowed."""
    looked: list[Key] = []
    passing = Tuner._untuned
    monkeypatch.setattr(Tuner, "_untuned", lambda self, of, configs: looked.append(of) or passing(self, of, configs))
    fake = Fake()
    fake.allowed = False
    first = fake.choose()
    assert fake.choose() == first and len(looked) == 1
    with pytest.warns(RuntimeWarning, match="wrong"):
        fake.tuner._write_down(key(), first, "wrong")
    assert fake.choose() != first and len(looked) == 2
    fake.allowed = True
    assert isinstance(fake.choose(), HopperConfig) and len(looked) == 2


def test_it_is_nobodys_default() -> None:
    """Nor does it change the order of the others."""
    for operation, rows, capability in itertools.product(OPERATIONS, (1, 64, 4096), (HOPPER, *OTHERS)):
        of = key(operation)._replace(rows=rows)
        table = by_shape(by_table(capability, of), rows, of.depth)
        for shared in (False, True):
            of = of._replace(shared=shared)
            assert by_shape(to_try(capability, MULTIPROCESSORS, of), rows, of.depth)[: len(table)] == table
            assert untuned(capability)(of, pytest.fail) == table[0]  # type: ignore[arg-type]


# --- The tuner on a GPU that is made up ---


class Fake:
    """A tuner of a Hopper GPU on which the Gluon form is faster. `verdicts` of the other process, in turn."""

    def __init__(self, file: Path | None = None, verdicts: Sequence[str | None] = ("", "", "")) -> None:
        self.checked: list[Config] = []
        self.apart: list[list[HopperConfig]] = []
        self.checking = 0
        self.timed: list[Config] = []
        self.allowed = True
        self._verdicts = verdicts
        self.tuner = Tuner(self._to_try, self._check, self._measure, Record(file), lambda: self.allowed, self._apart)

    def choose(self, of: Key | None = None) -> Config:
        return self.tuner.choose(of or key(), self.timed.append)

    @staticmethod
    def _to_try(of: Key) -> Any:
        return to_try(HOPPER, MULTIPROCESSORS, of)

    def _check(self, variant: Variant, config: Config) -> str:
        self.checked.append(config)
        return ""

    def _apart(self, variant: Variant, configs: Sequence[HopperConfig]) -> Iterator[tuple[HopperConfig, str | None]]:
        self.apart.append([*configs])
        self.checking = len(configs)
        return self._verdict(configs)

    def _verdict(self, configs: Sequence[HopperConfig]) -> Iterator[tuple[HopperConfig, str | None]]:
        for verdict in zip(configs, self._verdicts, strict=True):
            self.checking -= 1
            yield verdict

    def _measure(self, run: Callable[[], object], shared: bool) -> Callable[[], float]:
        assert not self.checking, "another process has the GPU, too"
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


def test_it_is_checked_apart_and_then_timed(file: Path) -> None:
    fake = Fake(file)
    expected = gluon(HOPPER, key())
    assert fake.choose() == expected[0]
    assert fake.apart == [expected] and not set(expected) & set(fake.checked)
    assert fake.timed[-len(expected) :] == expected, "last, in the order of the table"
    again = Fake(file)
    assert again.choose() == expected[0] and not again.apart and not again.timed


def test_beside_communication_it_has_fewer_programs(file: Path) -> None:
    """Where it is faster then. What was found right alone is so with any number of programs."""
    fake, shared = Fake(file), key()._replace(shared=True)
    alone = fake.choose()
    beside = fake.choose(shared)
    assert isinstance(alone, HopperConfig) and beside == with_programs(alone, MULTIPROCESSORS - HELD) != alone
    assert len(fake.apart) == 1 and not any(isinstance(one, HopperConfig) for one in fake.checked)
    assert fake.tuner.times(key()).keys() != fake.tuner.times(shared).keys()
    again = Fake(file)
    assert (again.choose(shared), again.choose()) == (beside, alone) and not again.apart and not again.timed


def test_a_fault_found_beside_communication_holds_alone(file: Path) -> None:
    first, *_ = gluon(HOPPER, key())
    fake = Fake(file, ["has hung", "", ""])
    with pytest.warns(RuntimeWarning, match="has hung"):
        assert fake.choose(key()._replace(shared=True)) != with_programs(first, MULTIPROCESSORS - HELD)
    assert fake.choose() != first and first not in fake.timed and len(fake.apart) == 1


def test_beside_communication_nothing_is_tried_on_a_gpu_that_is_held_whole() -> None:
    for multiprocessors in (HELD, 7):
        for operation in OPERATIONS:
            of = key(operation)._replace(shared=True)
            assert [*to_try(HOPPER, multiprocessors, of)] == [*by_table(HOPPER, of)]
    one = to_try(HOPPER, HELD + 1, key()._replace(shared=True))[-1].config
    assert isinstance(one, HopperConfig) and one.programs == 1, "and not 0, which stands for all"


def test_one_that_is_wrong_is_not_run(file: Path) -> None:
    first, second, _ = gluon(HOPPER, key())
    fake = Fake(file, ["has hung", "", ""])
    with pytest.warns(RuntimeWarning, match=f"{first} is not used: has hung"):
        assert fake.choose() == second
    assert first not in fake.timed
    assert Fake(file, []).choose() == second, "what is written down is not checked again"


def test_without_memory_for_the_other_process_the_choice_is_for_one_run(file: Path) -> None:
    fake = Fake(file, [None, None, None])
    assert not isinstance(fake.choose(), HopperConfig) and not isinstance(fake.choose(), HopperConfig)
    assert len(fake.apart) == 1
    assert isinstance(Fake(file).choose(), HopperConfig), "another run asks again"


def test_a_choice_without_it_is_made_again_with_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    fake = Fake(file)
    chosen = fake.choose()
    assert not isinstance(chosen, HopperConfig) and not fake.apart
    monkeypatch.delenv("FUSEDMOE_GLUON")
    assert isinstance(Fake(file).choose(), HopperConfig)
    monkeypatch.setenv("FUSEDMOE_GLUON", "0")
    assert Fake(file).choose() == chosen


def test_what_nobody_has_tried_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under graph capture, without tuning, and where all others are wrong."""
    fake = Fake()
    fake.allowed = False
    for shared in (False, True):
        assert not isinstance(fake.choose(key()._replace(shared=shared)), HopperConfig)
    for one in by_table(HOPPER, key()):
        with pytest.warns(RuntimeWarning, match="wrong"):
            fake.tuner._write_down(key(), one.config, "wrong")
    with pytest.raises(RuntimeError, match="every configuration"):
        fake.choose()
    monkeypatch.setenv("FUSEDMOE_AUTOTUNE", "0")
    assert not isinstance(Fake().choose(), HopperConfig) and not fake.apart


def test_a_launch_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is timed: the other process has seen it at small sizes only."""

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
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: gpu)
    monkeypatch.setattr(autotune, "tuner", lambda of: fake.tuner)
    one, *_ = gluon(HOPPER, key())
    for programs in (0, 116):
        assert gluon_first.fastest(device, programs, key(), fake.timed.append) == with_programs(one, programs)
    assert not isinstance(gluon_first.fastest(device, None, key(), fake.timed.append), HopperConfig)
    small = key()._replace(rows=1, experts=1)
    assert gluon_first.fastest(device, 0, small, fake.timed.append) == fake.choose(small), "which is not tuned"


NOT_IMPORTED = """
import sys
import torch
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.experts import experts_forward
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.kernels.triton import experts
from fusedmoe.kernels.triton.grouped.autotune import to_try, tuner, untuned
from fusedmoe.kernels.triton.grouped.configs import Key, Variant
from fusedmoe.kernels.experts import Weights

layout = contiguous_layout(torch.tensor([3, 0]), 3)
weights = Weights(torch.randn(2, 2, 32, 32), torch.randn(2, 32, 32))
experts_forward(torch.randn(3, 32), layout, None, weights, ACTIVATIONS["swiglu"])
key = Key(Variant("down", "bfloat16", "ieee", "", False, False, True, True), 4096, 1024, 64, 1024)
for capability in ((8, 0), (9, 0), (10, 0), None):
    assert to_try(capability, 132, key) and untuned(capability)(key, print)
found = [name for name in sys.modules if name.startswith("fusedmoe.kernels.gluon")]
assert not found, found
"""


@pytest.mark.slow
def test_it_is_not_imported_before_it_is_launched() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_IMPORTED], capture_output=True, timeout=100, text=True)
    assert done.returncode == 0, done.stderr
