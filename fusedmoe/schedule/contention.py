"""When tasks start and end where links disturb each other: both in use, each goes on at a share of its speed."""

from __future__ import annotations

import math
from collections.abc import Sequence


def contended(
    before: Sequence[Sequence[int]], on: Sequence[int], durations: Sequence[float], contention: float
) -> tuple[list[float], list[float]]:
    """Starts and ends, event by event: between two events nothing starts or ends, so all speeds are constant.

    Of a running task three numbers are kept: the work that was left when its speed last changed, when that was, and
    its end if the speed stays. A task that is never slowed down ends at exactly start + duration.

    Args:
        before: of each task what it waits for, the ones before it on its resources included.
        on: 0 for compute, 1 for intra, 2 for inter.
    """
    count = len(durations)
    followers: list[list[int]] = [[] for _ in range(count)]
    waits = [len(found) for found in before]
    for place, found in enumerate(before):
        for one in found:
            followers[one].append(place)
    starts, ends = [0.0] * count, [0.0] * count
    running = [-1, -1, -1]  # the place of each resource's task, or −1
    end = [math.inf] * 3
    left, since = [0.0] * 3, [0.0] * 3
    speed = 1.0  # of both links
    now = 0.0
    ready = [place for place in range(count) if not waits[place]]
    while True:
        for place in ready:
            resource = on[place]
            running[resource], starts[place] = place, now
            left[resource], since[resource] = durations[place], now
            end[resource] = now + (durations[place] if resource == 0 else durations[place] / speed)
        wanted = contention if running[1] >= 0 and running[2] >= 0 else 1.0
        if wanted != speed:
            for link in (1, 2):
                if running[link] >= 0:
                    left[link] = max(0.0, left[link] - (now - since[link]) * speed)
                    since[link], end[link] = now, now + left[link] / wanted
            speed = wanted
        resource = end.index(min(end))
        place = running[resource]
        if place < 0:
            return starts, ends
        now, ready = end[resource], []
        running[resource], end[resource] = -1, math.inf
        ends[place] = now
        for one in followers[place]:
            waits[one] -= 1
            if not waits[one]:
                ready.append(one)
