"""Copy published measurements of `csps profile accuracy` into a scaling information base.

The base then continues them, for example with longer prompts, and `csps train` learns from both:

    python benchmarks/accuracy_rows.py --sib accuracy.sqlite
    csps profile accuracy --sib accuracy.sqlite --lengths 32768 --groups 2 --bounds 0 0.01
    csps train --sib accuracy.sqlite --out FOLDER

The divergence of the next token was not published, and is stored as 0.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from csps.configurator.model.scaling_information_base import AccuracyRow, ScalingInformationBase
from csps.services.launch.deploy_config import read_config
from csps.services.measured.identity import identity_of

PUBLISHED = Path(__file__).with_name("results") / "accuracy-2026-11-22.csv"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; `argv` replaces the process's own arguments."""
    arguments = parse(argv)
    settings = read_config(arguments.config).settings
    rows = list(published(arguments.csv, arguments.date))
    with ScalingInformationBase.create(arguments.sib, identity_of(settings)) as base:
        if base.rows(AccuracyRow):
            raise SystemExit(f"{arguments.sib} has measurements of accuracy already")
        for row in rows:
            base.add(row)
    print(f"{len(rows)} rows, in {arguments.sib}")


def published(path: Path, date: str) -> Iterator[AccuracyRow]:
    """Yield the rows of a published table."""
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            yield AccuracyRow(
                kind=line["kind"],
                tokens=int(line["tokens"]),
                strategy=line["strategy"],
                levels=int(line["levels"]),
                drop_ratio=float(line["drop_ratio"]),
                importance_layer=line["importance_layer"],
                importance_window=int(line["importance_window"]),
                group_shape=line["group_shape"],
                questions=int(line["questions"]),
                right_exact=int(line["right_exact"]),
                right=int(line["right"]),
                divergence=0.0,
                date=date,
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="accuracy_rows", description=__doc__)
    parser.add_argument("--csv", type=Path, default=PUBLISHED)
    parser.add_argument("--date", default="2026-11-22", help="when they were measured")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="names the model")
    parser.add_argument("--sib", type=Path, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
