"""Writes what users and stored files depend on, as it is now, into the files beside this one, and
the settings into their JSON schema and into that of the chart's values.

`python tests/frozen_surface/record.py` rewrites the files; with `--print` it prints the same
instead, for `test_frozen_surface.py`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent


def main() -> None:
    """Compute all sections in this process, which does nothing else."""
    # Commands that are run on the way print what they found.
    with redirect_stdout(sys.stderr):
        from surface import SECTIONS

        if "--print" in sys.argv[1:]:
            printed = json.dumps({name: _tried(compute) for name, compute in SECTIONS.items()})
        else:
            sections = {name: compute() for name, compute in SECTIONS.items()}
            printed = ""
    if printed:
        print(printed)
        return
    for name, section in sections.items():
        text = json.dumps(section, indent=1, sort_keys=True, ensure_ascii=False)
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    from csps.services.settings.config_schema import write_schema

    write_schema()
    sys.path.append(str(HERE.parent / "helm"))
    import chart_schema

    chart_schema.write()


def _tried(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A section, or why it cannot be computed: the others are compared nevertheless."""
    try:
        return compute()
    except Exception:
        return {"cannot be computed": traceback.format_exc()}


if __name__ == "__main__":
    main()
