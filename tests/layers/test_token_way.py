"""A token's way through the library stays as short as it is: ceilings, which fall and never rise."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.marks import slowly
from tests.token_way import SETTINGS, Way, way_of

# A little above what was counted: what a rank does while it waits differs from run to run.
CEILINGS = dict(zip(SETTINGS, (Way(32, 480, 280), Way(36, 640, 350), Way(43, 1030, 570)), strict=True))


@pytest.mark.parametrize("name", [*[*SETTINGS][:2], *slowly(*[*SETTINGS][2:])])
def test_a_token_s_way_grows_no_longer(cluster: Cluster, name: str) -> None:
    way, ceiling = cluster.run(2, way_of, name)[0], CEILINGS[name]
    assert all(found <= most for found, most in zip(way, ceiling, strict=True)), f"{way} exceeds {ceiling}"
