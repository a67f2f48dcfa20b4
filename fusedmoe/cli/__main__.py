"""`python -m fusedmoe.cli`, which is what torchrun starts."""

from __future__ import annotations

import sys

from fusedmoe.cli.main import main

sys.exit(main())
