"""Private names of PyTorch, checked against 2.11 to 2.15."""

from __future__ import annotations

CHECKED = "2.11 to 2.15"
