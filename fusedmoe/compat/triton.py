"""Private names of Triton, checked against 3.6 to 3.9. Importing it imports Triton."""

from __future__ import annotations

from triton.experimental.gluon._runtime import GluonJITFunction as GluonJITFunction
