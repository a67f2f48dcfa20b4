"""`python -m fusedmoe`: the command."""

from __future__ import annotations

import sys

from fusedmoe.cli.main import main

sys.exit(main())
