"""`python tests/campaign`: faults on deployed servers (`campaign_runner.py`)."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in conftest.py, before torch is loaded
TESTS = Path(__file__).resolve().parent.parent
sys.path += [str(TESTS), str(TESTS / "end_to_end")]

from campaign_runner import main  # noqa: E402 (found by the line above)

sys.exit(main())
