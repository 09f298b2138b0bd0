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


def test_the_readme_names_the_families_of_the_page_and_no_other() -> None:
    served = PAGE.read_text().split("## Served")[1].split("##")[0]
    rows = [line.split("|")[2] for line in served.splitlines() if line.startswith("| `")]
    assert len(rows) == len(ARCHITECTURES)
    (listed,) = re.findall(r"It serves (.*) \(\[classes", (ROOT / "README.md").read_text())
    named = re.split(r", | and ", re.sub(r" \(.*?\)", "", listed))

    def names(name: str, model: str) -> bool:
        return re.match(rf"{re.escape(name)}(?![\w.])", model) is not None

    firsts = [row.strip().split(",")[0] for row in rows]
    assert [row for row in firsts if not any(names(name, row) for name in named)] == []
    models = [model.strip() for row in rows for model in row.split(",")]
    assert [name for name in named if not any(names(name, model) for model in models)] == []


def test_every_served_class_is_held_to_transformers(tmp_path: Path) -> None:
    made = set()
    for family in FAMILIES:
        config = json.loads(
            (make_checkpoint(tmp_path / family, family) / "config.json").read_text()
        )
        made.update(config["architectures"])
    assert made == set(ARCHITECTURES)
    assert not made & set(REFUSED)
