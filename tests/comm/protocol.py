"""A model of the signal protocol of kernels/triton/one_sided/remote.py, and an exhaustive search of its states.

Two ranks put tiles into each other's slots, exchange after exchange. A rank's producer and its reader run independently
(on separate streams). The network delivers each tile in two steps, rows and signal; tiles arrive in any order. A reader
sees a tile's signal, reads the rows later, and gives credit at the end. The search covers all interleavings of these
steps. Kernels and model change together: each step here is a line there.

`Model` has a switch for every rule; the tests disable each rule to show the fault it prevents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

_State = TypeVar("_State")

# The number of an exchange before the error: any number greater than the new ones.
_LONG_AGO = 99


def explore(first: _State, look: Callable[[_State], str | Iterable[_State]], most: int = 2_000_000) -> tuple[str, int]:
    """Search all states reachable from the first; return the first fault ("" for none) and the number of states.

    `look`: returns a fault in words, or the successor states.
    """
    seen, queue = {first}, [first]
    while queue:
        found = look(queue.pop())
        if isinstance(found, str):
            return found, len(seen)
        for after in found:
            if after not in seen:
                seen.add(after)
                queue.append(after)
        assert len(seen) < most, "more states than a test should look at"
    return "", len(seen)


class Rank(NamedTuple):
    """One rank: its producer, its reader, and its received tiles.

    `send`: the producer's (exchange, tile). `read`: the reader's (exchange, tile, whether its signal has been seen).
    `rows`, `signals`: by slot and tile. `credit`: by slot, this rank's last exchange that the peer has read.
    `ended`: "", "dead", or "told" of the peer's death.
    """

    send: tuple[int, int]
    read: tuple[int, int, bool]
    rows: tuple[int, ...]
    signals: tuple[int, ...]
    credit: tuple[int, ...]
    ended: str


class State(NamedTuple):
    """Both ranks and the messages in flight.

    `tiles`: in flight, (to, place, exchange, its number, rows written). `credits`: in flight, (to, slot, number).
    `staged`: per rank, by slot and tile, the exchange whose rows are in staging.
    """

    ranks: tuple[Rank, Rank]
    tiles: tuple[tuple[int, int, int, int, bool], ...]
    credits: tuple[tuple[int, int, int], ...]
    staged: tuple[tuple[int, ...], ...] = ((), ())


@dataclass(frozen=True)
class Model:
    """The protocol between two ranks, with a switch for each rule.

    `exchanges`: their number. `uses`: the slots they use, cyclically, as a graph's replays do; a slot's exchanges are
    numbered from 1. `empty`: a rank without rows, which signals only its first tile.

    Rules: `credit`: a producer waits for it. `release`: signals follow their rows. `counted`: the device counts the
    numbers, instead of reusing the first round's. `in_order`: a rank gives credit, which counts, after its own puts,
    and starts the slot's next exchange after that. `signal_empty`: the first tile is always signalled. `fresh`: nothing
    from before an error is in flight. `dies`: rank 1 may die, at any time. `bounded`: a rank that waits for a dead peer
    gets an error.

    Over a network: `staging`, the number of staging slots, from which rows are read on delivery; 0 for direct stores.
    Credits may arrive out of order: a slot's next credit is given when its last one has arrived.
    """

    exchanges: int = 3
    tiles: int = 2
    uses: tuple[int, ...] = (0, 1)
    empty: int | None = None
    credit: bool = True
    release: bool = True
    counted: bool = True
    in_order: bool = True
    signal_empty: bool = True
    fresh: bool = True
    dies: bool = False
    bounded: bool = True
    staging: int = 0

    def search(self, most: int = 2_000_000) -> tuple[str, int]:
        """Return the first fault ("" for none), and the number of states."""
        slots = len({*self.uses})
        places = slots * self.tiles
        rank = Rank((1, 0), (1, 0, False), (0,) * places, (0,) * places, (0,) * slots, "")
        staged = ((0,) * self.staging * self.tiles,) * 2
        first = State((rank, rank), () if self.fresh else ((0, 0, _LONG_AGO, _LONG_AGO, False),), (), staged)

        def look(state: State) -> str | list[State]:
            found = []
            for fault, after in self._steps(state):
                if fault:
                    return fault
                found.append(after)
            if not found and not all(self._done(state, r) for r in (0, 1)):
                return "waits for ever"
            return found

        return explore(first, look, most)

    def _done(self, state: State, r: int) -> bool:
        rank = state.ranks[r]
        return bool(rank.ended) or (rank.send[0] > self.exchanges and rank.read[0] > self.exchanges)

    def _tiles_of(self, r: int) -> int:
        """Number of tiles that rank r signals in an exchange."""
        if r == self.empty:
            return 1 if self.signal_empty else 0
        return self.tiles

    def _slot(self, exchange: int) -> int:
        return self.uses[(exchange - 1) % len(self.uses)]

    def _place(self, exchange: int, tile: int) -> int:
        return self._slot(exchange) * self.tiles + tile

    def _staged(self, exchange: int, tile: int) -> int:
        return self._slot(exchange) % self.staging * self.tiles + tile

    def _number(self, exchange: int, read: int) -> int:
        """The number launches use for an exchange, once this rank has credited the exchanges before `read`."""
        first = 1 if self.counted else exchange - (exchange - 1) % len(self.uses)
        last = read if self.counted else exchange
        return 1 + sum(self._slot(other) == self._slot(exchange) for other in range(first, last))

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        for r in (0, 1):
            rank = state.ranks[r]
            if rank.ended:
                continue
            yield from self._produce(state, r, rank)
            yield from self._read(state, r, rank)
            if self.dies and r == 1:
                yield "", self._with(state, r, rank._replace(ended="dead"))
            if self.bounded and state.ranks[1 - r].ended == "dead" and not self._done(state, r):
                yield "", self._with(state, r, rank._replace(ended="told"))
        yield from self._deliver(state)

    def _produce(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        exchange, tile = rank.send
        slot, number = self._slot(exchange), self._number(exchange, rank.read[0])
        if exchange > self.exchanges or (self.credit and rank.credit[slot] < number - 1):
            return
        if self.in_order and slot in map(self._slot, range(rank.read[0], exchange)):
            return
        last = tile + 1 >= self._tiles_of(r)
        moved = rank._replace(send=(exchange + 1, 0) if last else (exchange, tile + 1))
        after = self._with(state, r, moved)
        if self._tiles_of(r):
            under_way = (1 - r, self._place(exchange, tile), exchange, number, False)
            after = after._replace(tiles=tuple(sorted((*after.tiles, under_way))))
            if self.staging:
                rows = _set(state.staged[r], self._staged(exchange, tile), exchange)
                after = after._replace(staged=(rows, state.staged[1]) if r == 0 else (state.staged[0], rows))
        yield "", after

    def _read(self, state: State, r: int, rank: Rank) -> Iterator[tuple[str, State]]:
        exchange, tile, seen = rank.read
        if exchange > self.exchanges:
            return
        if tile == self._tiles_of(1 - r):  # all read
            if self.in_order and rank.send[0] <= exchange:
                return
            moved = self._with(state, r, rank._replace(read=(exchange + 1, 0, False)))
            credit = (1 - r, self._slot(exchange), self._number(exchange, exchange))
            yield "", moved._replace(credits=tuple(sorted((*moved.credits, credit))))
            return
        place = self._place(exchange, tile)
        if not seen:
            if rank.signals[place] >= self._number(exchange, exchange):
                yield "", self._with(state, r, rank._replace(read=(exchange, tile, True)))
            return
        if rank.rows[place] != exchange:
            found = "overwritten" if rank.rows[place] > exchange else "stale"
            yield f"a row is {found} when it is read", state
            return
        yield "", self._with(state, r, rank._replace(read=(exchange, tile + 1, False)))

    def _deliver(self, state: State) -> Iterator[tuple[str, State]]:
        for i, (to, place, exchange, number, written) in enumerate(state.tiles):
            rank, rest = state.ranks[to], state.tiles[:i] + state.tiles[i + 1 :]
            if any(other[:2] == (to, place) and other[2] < exchange for other in rest):
                continue  # puts to one place are ordered
            content = state.staged[1 - to][self._staged(exchange, place % self.tiles)] if self.staging else exchange
            rows, signals = _set(rank.rows, place, content), _set(rank.signals, place, number)
            if written:
                change = rank._replace(signals=signals) if self.release else rank._replace(rows=rows)
                yield "", self._with(state, to, change)._replace(tiles=rest)
            else:
                change = rank._replace(rows=rows) if self.release else rank._replace(signals=signals)
                half = tuple(sorted((*rest, (to, place, exchange, number, True))))
                yield "", self._with(state, to, change)._replace(tiles=half)
        for i, (to, slot, number) in enumerate(state.credits):
            rank, rest = state.ranks[to], state.credits[:i] + state.credits[i + 1 :]
            change = rank._replace(credit=_set(rank.credit, slot, number))
            yield "", self._with(state, to, change)._replace(credits=rest)

    def _with(self, state: State, r: int, rank: Rank) -> State:
        return state._replace(ranks=(rank, state.ranks[1]) if r == 0 else (state.ranks[0], rank))


def _set(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


@dataclass(frozen=True)
class Tiles:
    """Several programs of a tile: each writes its part and counts, and the last one signals (`signal_peers`).

    `release`: a program increments the count after its part is visible. `beyond`: parts of rows without room, which no
    program writes but the last program still waits for.
    """

    programs: int = 3
    release: bool = True
    beyond: int = 0

    def search(self) -> tuple[str, int]:
        """As `Model.search`."""
        # Of each program (begun, written, counted); then the count, and the signal.
        return explore((((False, False, False),) * self.programs, 0, False), self._look)

    def _look(self, state: tuple[_Programs, int, bool]) -> str | list[tuple[_Programs, int, bool]]:
        programs, count, signalled = state
        if signalled and not all(written for _, written, _ in programs):
            return "a row is stale when it is read"
        steps = []
        for i, (begun, written, counted) in enumerate(programs):
            if not begun:
                steps.append((_put(programs, i, (True, False, False)), count, signalled))
            elif not written:
                steps.append((_put(programs, i, (True, True, counted)), count, signalled))
            if begun and not counted and (written or not self.release):
                now = _put(programs, i, (begun, written, True))
                steps.append((now, count + 1, signalled or count + 1 == self.programs + self.beyond))
        return steps if steps or signalled else "waits for ever"


_Programs = tuple[tuple[bool, bool, bool], ...]


def _put(programs: _Programs, i: int, program: tuple[bool, bool, bool]) -> _Programs:
    return (*programs[:i], program, *programs[i + 1 :])


@dataclass(frozen=True)
class Network:
    """A tile over a network: programs store rows, the last one puts, a later launch signals, a reader queries.

    Rules: `counted`: only the last program to store puts. `behind`: the signal is launched after all puts are issued.
    `fence`: the signal follows earlier puts. `asks`: the reader queries before it reads.
    """

    tiles: int = 2
    programs: int = 2
    counted: bool = True
    behind: bool = True
    fence: bool = True
    asks: bool = True

    def search(self) -> tuple[str, int]:
        """As `Model.search`."""
        # Of each tile: programs that have stored, the number that had stored at the put (-1 before it), and its state:
        # "", in flight, "come", or "seen" by the reader's GPU. Then the signal: "", in flight, "come"; and the
        # reader's progress: "", "looked", "asked".
        return explore((((0, -1, ""),) * self.tiles, "", ""), self._look)

    def _look(self, state: tuple[_Tiles, str, str]) -> str | list[tuple[_Tiles, str, str]]:
        tiles, signal, reader = state
        if reader == ("asked" if self.asks else "looked"):
            # The reader reads. An arrived tile becomes visible eventually, but possibly not yet.
            fresh = all(rows == self.programs and where == "seen" for _, rows, where in tiles)
            return [] if fresh else "a row is stale when it is read"
        return [*self._steps(tiles, signal, reader)] or "waits for ever"

    def _steps(self, tiles: _Tiles, signal: str, reader: str) -> Iterator[tuple[_Tiles, str, str]]:
        for i, (stored, rows, where) in enumerate(tiles):
            others = (tiles[:i], tiles[i + 1 :])
            if stored < self.programs:
                yield (*others[0], (stored + 1, rows, where), *others[1]), signal, reader
            if rows < 0 and stored and (stored == self.programs or not self.counted):
                yield (*others[0], (stored, stored, "under way"), *others[1]), signal, reader
            if where in ("under way", "come"):
                onward = "come" if where == "under way" else "seen"
                yield (*others[0], (stored, rows, onward), *others[1]), signal, reader
        issued = all(rows >= 0 for _, rows, _ in tiles)
        if signal == "" and (issued or not self.behind):
            yield tiles, "under way", reader
        if signal == "under way" and (not self.fence or all(where != "under way" for _, _, where in tiles)):
            yield tiles, "come", reader
        if signal == "come" and reader == "":
            yield tiles, signal, "looked"
        if reader == "looked" and self.asks:
            shown = tuple((stored, rows, "seen" if where == "come" else where) for stored, rows, where in tiles)
            yield shown, signal, "asked"


_Tiles = tuple[tuple[int, int, str], ...]
