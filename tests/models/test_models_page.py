"""The page of served models is the one that the code writes, and names what the tests hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tiny_checkpoints import FAMILIES, make_checkpoint

from csps.models.checkpoints.models_page import models_page
from csps.models.network.spec import ARCHITECTURES, REFUSED

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"


def test_the_page_is_generated() -> None:
    """Write it again: `python -m csps.models.checkpoints.models_page >docs/models.md`."""
    assert PAGE.read_text() == models_page()


def test_the_readme_names_every_family_of_the_page() -> None:
    served = PAGE.read_text().split("## Served")[1].split("##")[0]
    rows = [line.split("|")[2] for line in served.splitlines() if line.startswith("| `")]
    assert len(rows) == len(ARCHITECTURES)
    families = {re.split(r"[^A-Za-z]", row.strip())[0] for row in rows}
    (named,) = re.findall(r"It serves (.*) \(\[classes", (ROOT / "README.md").read_text())
    assert not {family for family in families if family not in named}


def test_every_served_class_is_held_to_transformers(tmp_path: Path) -> None:
    made = set()
    for family in FAMILIES:
        config = json.loads(
            (make_checkpoint(tmp_path / family, family) / "config.json").read_text()
        )
        made.update(config["architectures"])
    assert made == set(ARCHITECTURES)
    assert not made & set(REFUSED)
