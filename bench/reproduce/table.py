"""Tables of a reproduction: printed figures, our figures, and reasons for differences.

A table is plain data, stored unchanged in a JSON file, from which all output is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Origin of our figures.
HOW = {
    "computed": "computed from definitions: deterministic, nothing is timed",
    "simulated": "simulated: plans and placements of this library with given times and loads",
    "measured": "measured on the machine of this run",
}

#: Papers in display order, then public reports of whole training steps.
PAPERS = ("FSMoE", "Lancet", "FlowMoE", "Hecate", "End-to-end")

Figure = float | int | None
"""A figure; None: there is none."""

Progress = Callable[[float, float], None]
"""Told how much is done, of how much, in any unit."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: label.
        paper: the printed number; text if the paper prints a range or several numbers; None: not printed.
        ours: a figure for each of the table's columns.
        form: format of the figures for `str.format`: "{:.2f} ms".
        why: numbers, from 1, of the table's reasons for the difference.
    """

    what: str
    paper: Figure | str
    ours: tuple[Figure, ...]
    form: str = "{:.2f}"
    why: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of one paper and our figures.

    Attributes:
        name: for selection.   paper: one of `PAPERS`.   source: table, figure or section.
        how: origin of our figures, one of `HOW`.   columns: names of our figures.
        text: description in a sentence or two.   reasons: for differences.
        skipped: why our figures are missing; None: present.
    Raises:
        ValueError: rows that do not fit the columns, or a missing reason.
    """

    name: str
    title: str
    paper: str
    source: str
    how: str
    columns: tuple[str, ...] = ("ours",)
    rows: tuple[Row, ...] = ()
    text: str = ""
    reasons: tuple[str, ...] = ()
    skipped: str | None = None

    def __post_init__(self) -> None:
        if self.how not in HOW or self.paper not in PAPERS:
            raise ValueError(f"table {self.name}: no {self.how!r} figures, or no paper {self.paper!r}")
        for row in self.rows:
            if len(row.ours) != len(self.columns):
                raise ValueError(
                    f"table {self.name}, {row.what}: {len(row.ours)} figures for {len(self.columns)} columns"
                )
            if any(not 1 <= number <= len(self.reasons) for number in row.why):
                raise ValueError(f"table {self.name}, {row.what}: a reason that is not there")

    def as_dict(self) -> dict[str, Any]:
        """Return the table as JSON; inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Table:
        """Return the table of `as_dict`. Other keys, which describe the run, are ignored."""
        own = {key: tuple(data[key]) for key in ("columns", "reasons")}
        rows = tuple(Row(**{**row, "ours": tuple(row["ours"]), "why": tuple(row["why"])}) for row in data["rows"])
        names = ("name", "title", "paper", "source", "how", "text", "skipped")
        return cls(rows=rows, **own, **{name: data[name] for name in names})


@dataclass(frozen=True)
class Part:
    """Part of a reproduction that runs as a unit and yields one or two tables.

    Attributes:
        takes_s: approximate seconds on two cores, for estimates.
        run: computes the tables.
        heads: tables without rows: names, titles and sources, known in advance.
    """

    heads: tuple[Table, ...]
    takes_s: float
    run: Callable[[Progress], Sequence[Table]] = field(repr=False)

    @property
    def name(self) -> str:
        return self.heads[0].name


def cells(row: Row) -> list[str]:
    return [row.what, shown(row.paper, row.form), *(shown(one, row.form) for one in row.ours), reasons_of(row)]


def shown(figure: Figure | str, form: str) -> str:
    if figure is None:
        return "–"
    return figure if isinstance(figure, str) else form.format(figure)


def reasons_of(row: Row) -> str:
    """Return the numbers of a row's reasons, or a note if figures differ without a reason."""
    if row.why:
        return ", ".join(map(str, row.why))
    paper = shown(row.paper, row.form)
    if row.paper is None or all(shown(one, row.form) in (paper, "–") for one in row.ours):
        return ""
    return "not known"
