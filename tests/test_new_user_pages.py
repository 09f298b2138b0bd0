"""The pages for new users say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from documented_commands import ROOT, commands

from csps.services.settings.settings import Settings
from csps.services.settings.vllm_options import ALIASES, IGNORED, OURS, REFUSED, canonical

DOCS = ROOT / "docs"
OPTION = re.compile(r"`(--[a-z-]+)`")
SIZE = re.compile(r"^\| [\w. -]+ \| (\d+) \| (\d+) \| (\d+) \| \d+ GiB \| (\d+) KiB \|$", re.M)


def test_the_quickstart_has_ten_commands() -> None:
    assert sum(one.where.startswith("docs/quickstart") for one in commands()) == 10


def test_options_on_the_page_for_vllms_users_are_vllms() -> None:
    table = (DOCS / "vllm.md").read_text().split("| option of vLLM |")[1].split("\n\n")[0]
    known = {*OURS, *IGNORED, *REFUSED, *map(canonical, ALIASES.values())}
    options = {canonical(name) for name in OPTION.findall(table)}
    assert len(options) > 10
    assert options <= known


def test_settings_on_the_page_for_vllms_users_are_settings() -> None:
    for row in (DOCS / "vllm.md").read_text().splitlines():
        if not row.startswith("| `--"):
            continue
        for name in re.findall(r"`([a-z_.]+)`", row.split("|")[2]):
            section, _, key = name.partition(".")
            if section == "scheduling" or key:
                section_type = Settings.model_fields[section].annotation
                assert section_type is not None
            else:
                assert section in {*Settings.model_fields, "tp", "config.yaml"}, name


def test_kv_of_a_token_follows_from_the_models_shape() -> None:
    rows = SIZE.findall((DOCS / "gpu-sizing.md").read_text())
    assert len(rows) == 5
    for layers, heads, dim, kib in rows:
        assert 2 * int(layers) * int(heads) * int(dim) * 2 == int(kib) * 1024


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in readme]
    assert missing == []


def test_files_of_the_project_exist() -> None:
    for name in ("SECURITY.md", "ROADMAP.md", "NOTICE", "LICENSE"):
        assert Path(ROOT / name).stat().st_size
