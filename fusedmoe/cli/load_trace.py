"""Load traces: how many tokens each rank had for each expert, step by step; the file loads.json and its picture.

The file is JSON with a line for each step, and ends with a digest. The digest is chained from line to line, so that a
job adds steps to a file of any length without reading it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fusedmoe.errors import ConfigError
from fusedmoe.files import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "fusedmoe-loads"
_VERSION = 1
_END = re.compile(r'\n\], "digest": "([0-9a-f]{64})"\}\n\Z')
_END_BYTES = 82

#: Panels in a picture: of more layers, some that are evenly spread.
MOST_PANELS = 12
#: Columns of a panel: of more steps, means of neighbours.
MOST_COLUMNS = 400

_INK, _FAINT, _RULE = "#1a1a1a", "#5c5c5c", "#d8d8d8"
_ACROSS, _DPI = 4, 130


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Counts of tokens by iteration, layer, rank and expert; `source` says where they are from."""

    # [I, L, W, E], the tokens that rank W had for expert E.
    tokens_ILWE: NDArray[np.int64]
    source: str = ""
    # The number of the first iteration, which counts from 1.
    first: int = 1

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens_ILWE)
        # Counts are so small that their sum has room in int64.
        are_counts = tokens.dtype.kind in "iu" and tokens.size and tokens.min() >= 0
        if tokens.ndim != 4 or not are_counts or tokens.sum(dtype=np.float64) >= 2**62:
            raise ConfigError(
                f"load trace: {tokens.dtype} numbers of shape {tokens.shape} are not counts by iteration, layer, rank "
                "and expert"
            )
        if type(self.first) is not int or self.first < 1:
            raise ConfigError(f"load trace: the first iteration is a number from 1, not {self.first!r}")
        object.__setattr__(self, "tokens_ILWE", tokens.astype(np.int64))

    @property
    def load_ILE(self) -> NDArray[np.int64]:
        """[I, L, E]: the tokens of all ranks."""
        load_ILE: NDArray[np.int64] = self.tokens_ILWE.sum(axis=2)
        return load_ILE

    @property
    def layers(self) -> int:
        return self.tokens_ILWE.shape[1]

    @property
    def ranks(self) -> int:
        return self.tokens_ILWE.shape[2]

    @property
    def experts(self) -> int:
        return self.tokens_ILWE.shape[3]

    def __len__(self) -> int:
        """The number of iterations."""
        return len(self.tokens_ILWE)

    def to_json(self) -> str:
        """Returns JSON with a line for each iteration; `from_json` gives the same trace back."""
        head = json.dumps({"format": _FORMAT, "version": _VERSION, "source": self.source, "first": self.first})
        head, lines = f'{head[:-1]}, "tokens": [', self._lines()
        return head + "\n" + ",\n".join(lines) + _end(_chained("", [head, *lines]))

    def append_to(self, path: Path) -> None:
        """Adds these iterations to a file of `to_json`, of the same layers, ranks and experts, without reading it."""
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            end = _END.fullmatch(file.read().decode(errors="replace"))
            if end is None:
                raise ConfigError(f"load trace: {path} was not written by to_json, or was cut; begin a new one")
            lines = self._lines()
            file.seek(size - _END_BYTES)
            file.write("".join([",\n" + line for line in lines] + [_end(_chained(end[1], lines))]).encode())

    def _lines(self) -> list[str]:
        return [json.dumps(tokens, separators=(",", ":")) for tokens in self.tokens_ILWE.tolist()]

    @classmethod
    def from_json(cls, text: str) -> LoadTrace:
        """Returns the trace written by `to_json`. A text without a digest, of an earlier version, is taken as it is."""
        data = parse_json(text, "load trace")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f'load trace: the JSON is not one (no "format": "{_FORMAT}", "version": {_VERSION})')
        if "digest" in data:
            end = _END.search(text)
            lines = [] if end is None else [line.removesuffix(",") for line in text[: end.start()].split("\n")]
            if end is None or end[1] != _chained("", lines):
                raise ConfigError("load trace: the file is damaged: it is not as it was written")
        try:
            tokens, source = np.array(data["tokens"]), str(data["source"])
        except (KeyError, ValueError) as error:
            raise ConfigError(f"load trace: a field is missing, or lists differ in length: {error}") from error
        return cls(tokens, source, data.get("first", 1))

    @classmethod
    def from_cut_json(cls, text: str) -> LoadTrace:
        """Returns the trace as `from_json` does; of a text whose writer was killed, the iterations that are whole."""
        if not text.endswith("}\n"):
            text = text[: text.rfind("]]]") + 3] + "\n]}\n"
        return cls.from_json(text)


def _chained(digest: str, lines: Iterable[str]) -> str:
    """The digest of lines that come after others of this digest."""
    for line in lines:
        digest = hashlib.sha256((digest + line).encode()).hexdigest()
    return digest


def _end(digest: str) -> str:
    return f'\n], "digest": "{digest}"}}\n'


def draw_loads(trace: LoadTrace, path: str | Path, *, title: str) -> None:
    """Writes a picture of the loads; the ending of `path` chooses the format (.png, .svg, .pdf).

    A panel is a layer: each expert's load over the mean, step by step, 1 where loads are even. The last panel has every
    layer's max_vio, how much more than the mean its busiest expert has.
    """
    figure(trace, title=title).savefig(path, dpi=_DPI)


def figure(trace: LoadTrace, *, title: str) -> Figure:
    """Makes the picture as a matplotlib figure, bound to no window."""
    # Imported where it draws: a job that draws nothing does not wait for matplotlib.
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    over_ILE = over_mean(trace)
    vio_IL = _columns(over_ILE.max(axis=2) - 1)
    shown = np.unique(np.linspace(0, trace.layers - 1, min(trace.layers, MOST_PANELS)).round().astype(int))
    across = min(len(shown), _ACROSS)
    rows = math.ceil(len(shown) / across)
    drawn = Figure(figsize=(14, 2.4 * rows + 3), layout="constrained", facecolor="white")
    drawn.suptitle(title, color=_INK, parse_math=False)
    grid = drawn.add_gridspec(rows + 1, across, height_ratios=[1] * rows + [1.1])
    colours = LinearSegmentedColormap.from_list("loads", ["white", "#98b8f8", "#0a2f66"])
    begins, ends = trace.first - 0.5, trace.first + len(trace) - 0.5
    options: dict[str, Any] = {
        "extent": (begins, ends, trace.experts - 0.5, -0.5),
        # A few loads above this one share its colour: a single peak would leave all the rest white.
        "vmax": max(2.0, float(np.quantile(over_ILE, 0.995))),
    }
    options |= {"aspect": "auto", "interpolation": "nearest", "cmap": colours, "vmin": 0}
    panels = [drawn.add_subplot(grid[divmod(place, across)]) for place in range(len(shown))]
    for layer, axes in zip(shown, panels, strict=True):
        picture = axes.imshow(_columns(over_ILE[:, layer]).T, **options)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(f"layer {layer}", size=9, color=_INK)
    for axes in panels[::across]:
        axes.set_ylabel("expert", color=_FAINT)
    drawn.colorbar(picture, ax=panels, label="load over the mean", fraction=0.03)
    uneven = drawn.add_subplot(grid[rows, :])
    middle_I = np.linspace(begins + 0.5, ends - 0.5, len(vio_IL))
    for layer in range(trace.layers):
        colour = colours(0.95 - 0.7 * layer / max(1, trace.layers - 1))
        label = f"layer {layer}" if layer in shown else None
        uneven.plot(middle_I, vio_IL[:, layer], label=label, color=colour, linewidth=1.0)
    uneven.axhline(0, color=_RULE, zorder=0)
    uneven.set(title="max_vio: the busiest expert's load over the mean, less 1")
    uneven.xaxis.set_major_locator(MaxNLocator(integer=True))
    uneven.set(xlabel="step", xlim=(begins, ends), ylim=(0, None))
    uneven.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    for axes in (*panels, uneven):
        axes.tick_params(colors=_FAINT, length=0, labelsize=8)
        axes.spines[:].set_visible(False)
    return drawn


def over_mean(trace: LoadTrace) -> NDArray[np.float64]:
    """[I, L, E]: each expert's load over the mean of its layer's in that step; 1 where a layer had none."""
    load_ILE = trace.load_ILE.astype(np.float64)
    mean_IL1 = load_ILE.mean(axis=2, keepdims=True)
    return np.where(mean_IL1 > 0, load_ILE / np.maximum(mean_IL1, 1e-300), 1.0)


def _columns(value_IX: NDArray[np.float64]) -> NDArray[np.float64]:
    """[at most MOST_COLUMNS, X]: means of neighbouring steps."""
    parts = np.array_split(value_IX, min(len(value_IX), MOST_COLUMNS))
    return np.stack([part.mean(axis=0) for part in parts])
