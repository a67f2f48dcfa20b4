"""Measured layers: those of the papers' models, and two widely used ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """S tokens, model dim M, expert hidden dim H, E SwiGLU experts, top K.

    `name`: as in results: the model's size (SonicMoE's benchmark table) and H, or the model. `spread`: also measured
    over virtual ranks (`spread.py`).
    """

    name: str
    S: int
    M: int
    H: int
    E: int
    K: int
    spread: bool = False

    @property
    def rows(self) -> int:
        """R, the number of routed rows."""
        return self.S * self.K

    def flops(self, name: str) -> int:
        """Return the FLOP of the experts' products in a pass, two per multiply-add."""
        forward = 6 * self.rows * self.M * self.H
        return {"forward": forward, "backward": 2 * forward, "both": 3 * forward}[name]


SHAPES: tuple[Shape, ...] = (
    Shape("1.4B-H256", 40960, 768, 256, 128, 8),
    Shape("7B-H256", 24576, 1536, 256, 128, 8),
    Shape("7B-H1024", 24576, 1536, 1024, 32, 2),
    Shape("30B-H256", 32768, 4096, 256, 256, 16),
    Shape("30B-H1024", 32768, 4096, 1024, 64, 4),
    Shape("120B-H512", 32768, 4096, 512, 256, 16),
    Shape("30B-H768", 262144, 4096, 768, 128, 8),
    Shape("Qwen3-30B", 8192, 2048, 768, 128, 8, spread=True),
    Shape("Mixtral", 8192, 4096, 14336, 8, 2, spread=True),
)
