"""Stand-ins for a GPU and for published layers, for rehearsals and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.gpu.clock import Step, Times
from bench.gpu.part import Place
from bench.gpu.shapes import SHAPES, Shape

TINY = (Shape("tiny", 24, 32, 16, 6, 2), Shape("odd", 13, 48, 40, 5, 3))


class FakeClock:
    """Runs every step once and reports `times_ms` cyclically."""

    def __init__(self, *times_ms: float) -> None:
        self.times_ms = times_ms or (1.0,)
        self.results: dict[str, object] = {}
        self.means = 0
        self.conditions: Mapping[str, object] = {}

    def measure(self, steps: Sequence[Step], seconds: float) -> dict[str, Times]:
        times = {}
        for place, step in enumerate(steps):
            self.results[step.name] = step.run(step.before())
            ms = self.times_ms[place % len(self.times_ms)]
            times[step.name] = Times(ms, 0.9 * ms, 1.1 * ms, 7)
        return times

    def mean_ms(self, run: Callable[[], object]) -> float:
        run()
        self.means += 1
        return self.means * self.times_ms[0]


def shapes_of(place: Place) -> Sequence[Shape]:
    return TINY if place.rehearsal else SHAPES


def pretending(place: Place, suite: str = "") -> Mapping[str, str]:
    """Return the environment that makes the CPU pass for a GPU. The products need Triton's interpreter."""
    if not place.rehearsal:
        return {}
    return {"PYTEST_ADDOPTS": "-p bench.gpu.pretend", "TRITON_INTERPRET": "1" if suite == "kernels" else "0"}
