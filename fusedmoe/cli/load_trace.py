"""Load traces: tokens per rank and expert in each step, the file loads.json and its figure.

The JSON has one line per step and, at the end, a digest chained over the lines: steps are appended without reading the
file.
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

#: Maximum number of panels; with more layers, evenly spaced layers are drawn.
MAX_PANELS = 12
#: Maximum number of columns per panel; with more steps, each column is a mean of neighbouring steps.
MAX_COLUMNS = 400

_INK, _FAINT, _RULE = "#1a1a1a", "#5c5c5c", "#d8d8d8"
_PANELS_PER_ROW, _DPI = 4, 130
# Beyond ten layers the colours repeat with the next line style.
_COLOURS = (
    "#0a2f66",
    "#f79a1c",
    "#1f7350",
    "#bd559b",
    "#0490b3",
    "#ad380c",
    "#8f1fe8",
    "#87871e",
    "#5e4c47",
    "#98b8f8",
)
_STYLES = ("-", "--", ":")


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Token counts by iteration, layer, rank and expert. `source` describes their origin."""

    # [I, L, W, E] int64: tokens that rank w routed to expert e.
    tokens_ILWE: NDArray[np.int64]
    source: str = ""
    # Number of the first iteration, counting from 1.
    first: int = 1

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens_ILWE)
        # The sum must fit into int64.
        are_counts = tokens.dtype.kind in "iu" and tokens.size and tokens.min() >= 0
        if tokens.ndim != 4 or not are_counts or tokens.sum(dtype=np.float64) >= 2**62:
            raise ConfigError(
                f"load trace: expected non-negative integer counts [iteration, layer, rank, expert], got "
                f"{tokens.dtype} of shape {tokens.shape}"
            )
        if type(self.first) is not int or self.first < 1:
            raise ConfigError(f"load trace: the first iteration must be an integer >= 1, got {self.first!r}")
        object.__setattr__(self, "tokens_ILWE", tokens.astype(np.int64))

    @property
    def load_ILE(self) -> NDArray[np.int64]:
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
        return len(self.tokens_ILWE)

    def to_json(self) -> str:
        head = json.dumps({"format": _FORMAT, "version": _VERSION, "source": self.source, "first": self.first})
        head, lines = f'{head[:-1]}, "tokens": [', self._lines()
        return head + "\n" + ",\n".join(lines) + _format_end(_chain_digest("", [head, *lines]))

    def append_to(self, path: Path) -> None:
        """Append these iterations to a file that `to_json` has written for equal sizes, reading only its end.

        Raises `ConfigError` if that end is damaged.
        """
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            end = _END.fullmatch(file.read().decode(errors="replace"))
            if end is None:
                raise ConfigError(f"load trace: {path} is truncated or was not written by to_json; start a new file")
            lines = self._lines()
            file.seek(size - _END_BYTES)
            file.write("".join([",\n" + line for line in lines] + [_format_end(_chain_digest(end[1], lines))]).encode())

    def _lines(self) -> list[str]:
        return [json.dumps(tokens, separators=(",", ":")) for tokens in self.tokens_ILWE.tolist()]

    @classmethod
    def from_json(cls, text: str) -> LoadTrace:
        """Parse the text written by `to_json`. Verify its digest, which earlier versions did not write."""
        data = parse_json(text, "load trace")
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f'load trace: the JSON lacks "format": "{_FORMAT}", "version": {_VERSION}')
        if "digest" in data:
            end = _END.search(text)
            lines = [] if end is None else [line.removesuffix(",") for line in text[: end.start()].split("\n")]
            if end is None or end[1] != _chain_digest("", lines):
                raise ConfigError("load trace: the file is damaged (digest mismatch)")
        try:
            tokens, source = np.array(data["tokens"]), str(data["source"])
        except (KeyError, ValueError) as error:
            raise ConfigError(f"load trace: missing field or lists of different lengths: {error}") from error
        return cls(tokens, source, data.get("first", 1))

    @classmethod
    def from_truncated_json(cls, text: str) -> LoadTrace:
        """Parse the complete iterations of a file whose writer was killed."""
        if not text.endswith("}\n"):
            text = text[: text.rfind("]]]") + 3] + "\n]}\n"
        return cls.from_json(text)


def _chain_digest(digest: str, lines: Iterable[str]) -> str:
    for line in lines:
        digest = hashlib.sha256((digest + line).encode()).hexdigest()
    return digest


def _format_end(digest: str) -> str:
    return f'\n], "digest": "{digest}"}}\n'


def plot_loads(trace: LoadTrace, *, title: str) -> Figure:
    """Return a figure of the loads.

    One panel per layer shows each expert's load relative to the mean over experts. The last panel shows max_vio of
    every layer.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    relative_ILE = relative_load(trace)
    vio_IL = _downsample(relative_ILE.max(axis=2) - 1)
    shown = np.unique(np.linspace(0, trace.layers - 1, min(trace.layers, MAX_PANELS)).round().astype(int))
    across = min(len(shown), _PANELS_PER_ROW)
    rows = math.ceil(len(shown) / across)
    drawn = Figure(figsize=(14, 2.4 * rows + 3), dpi=_DPI, layout="constrained", facecolor="white")
    drawn.suptitle(title, color=_INK, parse_math=False)
    grid = drawn.add_gridspec(rows + 1, across, height_ratios=[1] * rows + [1.1])
    colours = LinearSegmentedColormap.from_list("loads", ["white", "#98b8f8", "#0a2f66"])
    begins, ends = trace.first - 0.5, trace.first + len(trace) - 0.5
    options: dict[str, Any] = {
        "extent": (begins, ends, trace.experts - 0.5, -0.5),
        # A single peak would otherwise leave the rest white.
        "vmax": max(2.0, float(np.quantile(relative_ILE, 0.995))),
    }
    options |= {"aspect": "auto", "interpolation": "nearest", "cmap": colours, "vmin": 0}
    panels = [drawn.add_subplot(grid[divmod(place, across)]) for place in range(len(shown))]
    for layer, axes in zip(shown, panels, strict=True):
        picture = axes.imshow(_downsample(relative_ILE[:, layer]).T, **options)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_title(f"layer {layer}", size=9, color=_INK)
    for axes in panels[::across]:
        axes.set_ylabel("expert", color=_FAINT)
    for axes in panels[-across:]:
        axes.set_xlabel("step", color=_FAINT)
    drawn.colorbar(picture, ax=panels, label="load / mean load", fraction=0.03)
    max_vio_axes = drawn.add_subplot(grid[rows, :])
    middle_I = np.linspace(begins + 0.5, ends - 0.5, len(vio_IL))
    for layer in range(trace.layers):
        repeated, number = divmod(layer, len(_COLOURS))
        look: dict[str, Any] = {"color": _COLOURS[number], "linestyle": _STYLES[repeated % len(_STYLES)]}
        label = f"layer {layer}" if layer in shown else None
        max_vio_axes.plot(middle_I, vio_IL[:, layer], label=label, linewidth=1.0, **look)
    max_vio_axes.axhline(0, color=_RULE, zorder=0)
    max_vio_axes.set(title="max_vio: largest expert load / mean load − 1")
    max_vio_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    max_vio_axes.set(xlim=(begins, ends), ylim=(0, None))
    max_vio_axes.set_xlabel("step", color=_FAINT)
    max_vio_axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
    for axes in (*panels, max_vio_axes):
        axes.tick_params(colors=_FAINT, length=0, labelsize=8)
        axes.spines[:].set_visible(False)
    return drawn


def relative_load(trace: LoadTrace) -> NDArray[np.float64]:
    """Return each expert's load [I, L, E] over its layer's mean load in that step; 1 if the layer has no load."""
    load_ILE = trace.load_ILE.astype(np.float64)
    mean_IL1 = load_ILE.mean(axis=2, keepdims=True)
    return np.where(mean_IL1 > 0, load_ILE / np.maximum(mean_IL1, 1e-300), 1.0)


def _downsample(value_IX: NDArray[np.float64]) -> NDArray[np.float64]:
    parts = np.array_split(value_IX, min(len(value_IX), MAX_COLUMNS))
    return np.stack([part.mean(axis=0) for part in parts])
