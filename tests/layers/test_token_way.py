"""Upper limits on the calls and files of one training step on the token path. Without a schedule they are frozen."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.marks import slowly
from tests.token_way import SETTINGS, Way, way_of

# Slightly above the measured count: a rank's work during a wait differs between runs.
CEILINGS = dict(zip(SETTINGS, (Way(32, 480, 280), Way(37, 660, 370), Way(44, 1040, 580)), strict=True))


@pytest.mark.parametrize("name", [*[*SETTINGS][:2], *slowly(*[*SETTINGS][2:])])
def test_token_path_is_within_call_and_file_limits(cluster: Cluster, name: str) -> None:
    way, ceiling = cluster.run(2, way_of, name)[0], CEILINGS[name]
    assert all(found <= most for found, most in zip(way, ceiling, strict=True)), f"{way} exceeds {ceiling}"
