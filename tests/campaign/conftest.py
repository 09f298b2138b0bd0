"""Trials use what the tests of deployed servers have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "end_to_end"))
