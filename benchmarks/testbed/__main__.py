"""`python benchmarks/testbed COMMAND` (see `cli`)."""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a folder, the module path starts inside it, where `testbed` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from testbed.cli import main

if __name__ == "__main__":
    sys.exit(main())
