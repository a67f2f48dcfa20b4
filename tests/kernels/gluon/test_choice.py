"""When the Gluon form is tried and chosen: by a capability, checks and times that are made up."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

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
)

HOPPER = (9, 0)
OTHERS = ((8, 0), (8, 9), (10, 0), (12, 0), None)


def key(operation: str = "down", **changed: Any) -> Key:
    gather, activation = operation not in ("down", "dinput"), "swiglu" if operation in ("up", "dhidden") else ""
    variant = Variant(operation, "bfloat16", "ieee", activation, gather, False, True, True)._replace(**changed)
    return Key(variant, 4096, 1024, 64, 1024)


def gluon(capability: Capability | None, of: Key) -> list[Config]:
    return [one.config for one in to_try(capability, of) if isinstance(one.config, HopperConfig)]


def test_on_hopper_alone() -> None:
    for operation in OPERATIONS:
        assert gluon(HOPPER, key(operation))
        for capability in (*OTHERS, HOPPER):
            table = by_table(capability, key(operation))
            assert not any(isinstance(one.config, HopperConfig) for one in table)
            assert [*to_try(capability, key(operation))][: len(table)] == [*table]
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
    fake.tuner.record.faults[f"{key().variant}, {first}"] = "wrong"
    assert fake.choose() != first and len(looked) == 2
    fake.allowed = True
    assert isinstance(fake.choose(), HopperConfig) and len(looked) == 2


def test_it_is_nobodys_default() -> None:
    """Nor does it change the order of the others."""
    for operation, rows, capability in itertools.product(OPERATIONS, (1, 64, 4096), (HOPPER, *OTHERS)):
        of = key(operation)._replace(rows=rows)
        table = by_shape(by_table(capability, of), rows, of.depth)
        assert by_shape(to_try(capability, of), rows, of.depth)[: len(table)] == table
        assert untuned(capability)(of, pytest.fail) == table[0]  # type: ignore[arg-type]


# --- The tuner on a GPU that is made up ---


class Fake:
    """A tuner of a Hopper GPU on which the Gluon form is faster. `verdicts` of the other process, in turn."""

    def __init__(self, file: Path | None = None, verdicts: Sequence[str | None] = ("", "", "")) -> None:
        self.checked: list[Config] = []
        self.apart: list[list[HopperConfig]] = []
        self.timed: list[Config] = []
        self.allowed = True
        self._verdicts = verdicts
        self.tuner = Tuner(self._to_try, self._check, self._measure, Record(file), lambda: self.allowed, self._apart)

    def choose(self, of: Key | None = None) -> Config:
        return self.tuner.choose(of or key(), self.timed.append)

    @staticmethod
    def _to_try(of: Key) -> Any:
        return to_try(HOPPER, of)

    def _check(self, variant: Variant, config: Config) -> str:
        self.checked.append(config)
        return ""

    def _apart(self, variant: Variant, configs: Sequence[HopperConfig]) -> list[tuple[HopperConfig, str | None]]:
        assert not self.timed, "another process comes before anything is timed"
        self.apart.append([*configs])
        return [*zip(configs, self._verdicts, strict=True)]

    def _measure(self, run: Callable[[], object], seconds: float) -> float:
        run()
        return 1e-4 if isinstance(self.timed[-1], HopperConfig) else 1e-3


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
    assert not isinstance(fake.choose(), HopperConfig)
    for one in by_table(HOPPER, key()):
        fake.tuner.record.faults[f"{key().variant}, {one.config}"] = "wrong"
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
        autotune._measure(torch.device("cpu"), lambda: None, 1.0)


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
    assert to_try(capability, key) and untuned(capability)(key, print)
found = [name for name in sys.modules if name.startswith("fusedmoe.kernels.gluon")]
assert not found, found
"""


@pytest.mark.slow
def test_it_is_not_imported_before_it_is_launched() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_IMPORTED], capture_output=True, timeout=100, text=True)
    assert done.returncode == 0, done.stderr
