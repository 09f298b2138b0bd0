"""What LightGBM is told so that the same rows give the same model, whatever the machine does."""

from __future__ import annotations

REPRODUCIBLE = {
    "feature_pre_filter": False,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "seed": 0,
    "verbose": -1,
}
