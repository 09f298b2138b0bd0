"""The scaling information base: identity, schema, and several processes at once."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from csps.configurator.model import scaling_information_base
from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    FitRow,
    Identity,
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
    SpreadRow,
    StepRow,
)
from csps.protocols.core.errors import ConfigError, DeadlineExceeded

HERE = Identity(
    weights="w1", dtype="float32", device="cpu", cores=2, torch="2.13", ranks_per_core=2.0
)
STEP = StepRow(
    strategy="ulysses",
    group_shape="2",
    tp=1,
    tokens=1024,
    history=0,
    batch=1,
    seconds=0.05,
    load=0.5,
    date="2026-11-22T03:00:00+00:00",
)
ROWS = [
    STEP,
    LinkRow(
        kind="between", sender="0-0-0", receiver="0-1-0", bytes=8, seconds=1e-4, load=0.0, date="d",
    ),
    PhaseRow(
        strategy="csa", group_shape="2", tp=1, phase="attention", tokens=8, keys=16, bytes=0,
        seconds=1e-3, load=0.0, date="d",
    ),
    AccuracyRow(
        kind="two_hop", tokens=4096, strategy="ntp", levels=2, drop_ratio=0.25,
        importance_layer="same", importance_window=64, group_shape="2", questions=50,
        right_exact=49, right=48, divergence=0.25, date="d",
    ),
    FitRow(name="latency", digest="ab", canonical=b"\x00{}", date="d"),
    SpreadRow(tokens=4096, layer=1, kv_head=0, window=64, prompts=6, spread=1e-3, date="d"),
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "sib.sqlite"


def test_rows_of_every_kind_come_back_as_they_were(path: Path) -> None:
    with ScalingInformationBase.create(path, HERE) as base:
        for row in ROWS:
            base.add(row)
    again = ScalingInformationBase.read(path, HERE)
    assert again is not None
    with again:
        for row in ROWS:
            assert again.rows(type(row)) == [row]


def test_a_missing_file_is_no_error_for_a_reader_and_is_not_made(path: Path) -> None:
    assert ScalingInformationBase.read(path, HERE) is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "w2"),
        ("dtype", "bfloat16"),
        ("device", "another processor"),
        ("cores", 4),
        ("torch", "2.12"),
        ("ranks_per_core", 1.0),
    ],
)
def test_another_identity_is_refused_in_one_line_that_names_the_difference(
    path: Path, field: str, value: object
) -> None:
    ScalingInformationBase.create(path, HERE).close()
    other = replace(HERE, **{field: value})  # type: ignore[arg-type]
    for opening in (ScalingInformationBase.create, ScalingInformationBase.read):
        with pytest.raises(ConfigError, match=f"{field} .*here it is {value}") as error:
            opening(path, other)
        assert "\n" not in str(error.value)


def test_the_latest_fit_of_a_name_counts(path: Path) -> None:
    with ScalingInformationBase.create(path, HERE) as base:
        assert base.latest_fit("latency") is None
        for digest in ("first", "last"):
            base.add(FitRow(name="latency", digest=digest, canonical=b"", date="d"))
        base.add(FitRow(name="other", digest="x", canonical=b"", date="d"))
        found = base.latest_fit("latency")
        assert found is not None
        assert found.digest == "last"


def test_another_schema_is_refused(path: Path) -> None:
    ScalingInformationBase.create(path, HERE).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=r"schema 5 \(found schema 99\)"):
        ScalingInformationBase.read(path, HERE)


@pytest.mark.parametrize("schema", [1, 2, 3, 4])
def test_a_base_of_an_older_schema_keeps_its_measurements(path: Path, schema: int) -> None:
    _, link, _, accuracy, *_ = ROWS
    with ScalingInformationBase.create(path, HERE) as base:
        for row in ROWS:
            base.add(row)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE spreads")
        database.execute("ALTER TABLE accuracy DROP COLUMN drop_ratios")
        if schema < 4:
            database.execute("ALTER TABLE links DROP COLUMN sender")
            database.execute("ALTER TABLE links DROP COLUMN receiver")
        if schema < 3:
            database.execute("DROP TABLE accuracy")
            database.execute("CREATE TABLE accuracy (tokens INTEGER NOT NULL)")
        database.execute(f"PRAGMA user_version = {schema}")
    for opening in (ScalingInformationBase.read, ScalingInformationBase.create):
        again = opening(path, HERE)
        assert again is not None
        with again:
            assert again.rows(StepRow) == [STEP]
            assert again.rows(AccuracyRow) == ([] if schema < 3 else [accuracy])
            assert isinstance(link, LinkRow)
            unknown = {"sender": "", "receiver": ""} if schema < 4 else {}
            assert again.rows(LinkRow) == [replace(link, **unknown)]
            assert again.rows(SpreadRow) == []


def test_files_of_something_else_are_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and long enough to be read as the header of one " * 20)
    before = text.read_bytes()
    with pytest.raises(ConfigError, match="not a database"):
        ScalingInformationBase.create(text, HERE)
    assert text.read_bytes() == before
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE theirs (x)")
    with pytest.raises(ConfigError, match="not a scaling information base"):
        ScalingInformationBase.create(other, HERE)
    with sqlite3.connect(other) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_folder_is_not_a_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        ScalingInformationBase.create(tmp_path, HERE)


def test_a_base_locked_by_another_process_ends_in_a_deadline(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling_information_base, "WRITE_S", 0.05)
    ScalingInformationBase.create(path, HERE).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with (
        ScalingInformationBase.create(path, HERE) as base,
        pytest.raises(DeadlineExceeded, match=r"transaction of .*sib\.sqlite"),
    ):
        base.add(STEP)
    assert base.path == path
    holder.execute("ROLLBACK")
    holder.close()


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_scaling_information_base import BASES, HERE, STEP
from csps.configurator.model.scaling_information_base import ScalingInformationBase
print("ready", flush=True)
sys.stdin.readline()
for base in BASES:
    with ScalingInformationBase.create(Path(sys.argv[1], base), HERE) as base:
        for number in range(5):
            base.add(replace(STEP, tokens=number, batch=int(sys.argv[2])))
"""
BASES = [f"{number}.sqlite" for number in range(20)]


def test_processes_that_create_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(made), str(number), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        writer.stdout.close()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    # Beside one that two left at the same moment SQLite leaves its log for who opens it next.
    left = {path.name.removesuffix("-wal").removesuffix("-shm") for path in made.iterdir()}
    assert left == set(BASES)
    for base_name in BASES:
        with ScalingInformationBase.create(made / base_name, HERE) as base:
            rows = base.rows(StepRow)
        for number in range(3):
            assert [row.tokens for row in rows if row.batch == number] == list(range(5))
