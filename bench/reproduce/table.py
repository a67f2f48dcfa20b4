"""Tables of a reproduction: what a paper prints, what we get, and why the two differ.

A table is plain data. It goes into a JSON file as it is, and all that shows it reads that file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: How our figures of a table come about.
HOW = {
    "computed": "computed from definitions: nothing is timed, and every run gives the same",
    "simulated": "simulated: schedules and placements of this library under given times and loads, which nothing runs",
    "measured": "measured on the machine of this run",
}

#: Papers, in the order in which they are shown.
PAPERS = ("FSMoE", "Lancet", "FlowMoE", "Hecate")

Figure = float | int | None
"""A figure; None: there is none."""

Progress = Callable[[float, float], None]
"""Told how much is done, of how much, in any unit."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        what: whose it is.
        paper: as typed from the paper, a number; or text where the paper prints a range or several; None: it prints
            none.
        ours: a figure for each of the table's own columns.
        form: how a figure is shown, as `str.format` has it: "{:.2f} ms".
        why: numbers from 1 of the table's reasons that the two differ.
    """

    what: str
    paper: Figure | str
    ours: tuple[Figure, ...]
    form: str = "{:.2f}"
    why: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table of one paper, beside ours.

    Attributes:
        name: to ask for it by.   paper: one of `PAPERS`.   source: the table, figure or section there.
        how: one of `HOW`, of our figures.   columns: names of our figures.
        text: what is done, in a sentence or two.   reasons: why figures differ.
        skipped: why there are no figures here; None: there are.
    Raises:
        ValueError: rows that do not fit the columns, or a reason that is not there.
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
        """Returns the table in plain types; `from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Table:
        """The table of `as_dict`, also as JSON has it. Other keys, of the run, are left out."""
        own = {key: tuple(data[key]) for key in ("columns", "reasons")}
        rows = tuple(Row(**{**row, "ours": tuple(row["ours"]), "why": tuple(row["why"])}) for row in data["rows"])
        names = ("name", "title", "paper", "source", "how", "text", "skipped")
        return cls(rows=rows, **own, **{name: data[name] for name in names})


@dataclass(frozen=True)
class Part:
    """Part of a reproduction that is run in one go: one table or two.

    Attributes:
        takes_s: seconds on two cores, about; for the time left.
        run: makes the tables.
        heads: the tables without rows: names, titles and sources, known before anything runs.
    """

    heads: tuple[Table, ...]
    takes_s: float
    run: Callable[[Progress], Sequence[Table]] = field(repr=False)

    @property
    def name(self) -> str:
        return self.heads[0].name


def cells(row: Row) -> list[str]:
    """A row as it is shown: what, the paper's figure, ours, and the numbers of reasons."""
    return [row.what, shown(row.paper, row.form), *(shown(one, row.form) for one in row.ours), reasons_of(row)]


def shown(figure: Figure | str, form: str) -> str:
    """A figure in its form; a dash where there is none."""
    if figure is None:
        return "–"
    return figure if isinstance(figure, str) else form.format(figure)


def reasons_of(row: Row) -> str:
    """The numbers of its reasons. Where figures differ and nothing is said of it, that is said."""
    if row.why:
        return ", ".join(map(str, row.why))
    paper = shown(row.paper, row.form)
    if row.paper is None or all(shown(one, row.form) in (paper, "–") for one in row.ours):
        return ""
    return "not known"
