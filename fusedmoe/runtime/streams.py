"""The CUDA streams that a plan runs on, one for each resource."""

from __future__ import annotations

import torch


class Streams:
    """Made on first use, and kept; copies and pickles make their own."""

    _links: dict[str, torch.cuda.Stream] | None = None

    def on(self, device: torch.device) -> dict[str, torch.cuda.Stream] | None:
        """For work that begins on the current stream of a CUDA device; None elsewhere."""
        if device.type != "cuda":
            return None
        if self._links is None:
            self._links = {link: torch.cuda.Stream(device) for link in ("intra", "inter")}
        return {"compute": torch.cuda.current_stream(device), **self._links}

    def __getstate__(self) -> dict[str, object]:
        return {}
