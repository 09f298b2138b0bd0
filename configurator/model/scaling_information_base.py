"""The scaling information base: what was measured on one machine with one model (LoongServe §5.5).

A SQLite file. It belongs to one identity, model and machine, because a time measured elsewhere is
no measurement at all: whoever opens it says what it runs on, and another identity is refused.
Several processes may write at once; every write is a short transaction of its own, so that a
profile that was interrupted goes on where it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

from csps.protocols.core.errors import ConfigError, DeadlineExceeded

SCHEMA_VERSION = 4
OLDER = (1, 2, 3)
"""Schemas of files that are made into this one."""
WRITE_S = 10.0
"""For other processes to end their transactions, which take milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What measured times depend on besides the step that was measured."""

    weights: str
    """Digest of configuration and weights."""
    dtype: str
    device: str
    """Name of the processor or GPU."""
    cores: int
    """Of the machine, for ranks on processors they are what is shared."""
    torch: str
    ranks_per_core: float
    """Compute threads of all ranks on this machine over its cores; 0 on GPUs."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A step, or an iteration of decoding, and what it took."""

    strategy: str
    """Of attention; "decode" is an iteration of decoding."""
    group_shape: str
    """Instances of the group by server, such as "2" or "4+4"."""
    tp: int
    tokens: int
    """New tokens of each piece; 1 when decoding."""
    history: int
    """Tokens that each piece attends to besides its own."""
    batch: int
    """Pieces, all alike."""
    seconds: float
    load: float
    """The machine's load average before the measurement."""
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """A message between two ranks and what it took."""

    kind: str
    """"inside" a server or "between" two."""
    sender: str
    """Rack-Server-GPU id; empty, like the receiver's, where nobody has noted it."""
    receiver: str
    bytes: int
    seconds: float
    """One way."""
    load: float
    date: str


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """A phase of a layer on one rank and what it took."""

    strategy: str
    group_shape: str
    tp: int
    phase: str
    tokens: int
    keys: int
    """Tokens attended to, where the phase is attention."""
    bytes: int
    """Sent, where the phase is communication."""
    seconds: float
    load: float
    date: str


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """Answers with sparse attention to questions that exact attention was asked as well."""

    kind: str
    """Of the questions, such as "multi_key, question first"."""
    tokens: int
    strategy: str
    """"ntp" or "tp"."""
    levels: int
    drop_ratio: float
    """Of level 2, in all layers that drop."""
    importance_layer: str
    importance_window: int
    group_shape: str
    questions: int
    right_exact: int
    right: int
    divergence: float
    """KL divergence from exact attention's next token to this one's, nats, mean."""
    date: str


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """Coefficients fitted to what was in the base then."""

    name: str
    """What they are for, such as "latency"."""
    digest: str
    """SHA-256 of `canonical`, hexadecimal."""
    canonical: bytes
    """The table, as its owner writes it."""
    date: str


Measured = StepRow | LinkRow | PhaseRow | AccuracyRow | FitRow
R = TypeVar("R", StepRow, LinkRow, PhaseRow, AccuracyRow, FitRow)
_TABLES: dict[type[Any], str] = {
    StepRow: "steps",
    LinkRow: "links",
    PhaseRow: "phases",
    AccuracyRow: "accuracy",
    FitRow: "fits",
}
_SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bytes": "BLOB"}


class ScalingInformationBase:
    """An open base; make it with `create` or `read`."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self._database = database

    @classmethod
    def create(cls, path: Path, identity: Identity) -> Self:
        """Open for writing; makes the file, and its folder, where there is none.

        Raises:
            ConfigError: the file is no base, of another schema, or of another identity.
            DeadlineExceeded: another process keeps it locked.
        """
        with _named(path):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _make(path, identity)
            base = cls(path, _connect(path))
            return base._checked(lambda: base._open(identity))

    @classmethod
    def read(cls, path: Path, identity: Identity | None) -> Self | None:
        """Open for reading; None where there is no file.

        Args:
            path: of the file.
            identity: of this process, which must be the file's; None for who only wants to know
                what was measured elsewhere, such as the simulator.

        Raises:
            ConfigError, DeadlineExceeded: as `create`.
        """
        if not path.is_file():
            return None
        with _named(path):
            base = cls(path, _connect(path))
            return base._checked(lambda: base._open(identity))

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- rows ------------------------------------------------------------------------------

    def add(self, row: Measured) -> None:
        """Keep a measurement.

        Raises:
            DeadlineExceeded: another process keeps the base locked.
        """
        names = [field.name for field in fields(row)]
        with _named(self.path):
            self._database.execute(
                f"INSERT INTO {_TABLES[type(row)]} ({', '.join(names)}) "
                f"VALUES ({', '.join('?' * len(names))})",
                astuple(row),
            )

    def rows(self, kind: type[R]) -> list[R]:
        """All rows of a kind, oldest first."""
        names = [field.name for field in fields(kind)]
        with _named(self.path):
            found = self._database.execute(
                f"SELECT {', '.join(names)} FROM {_TABLES[kind]} ORDER BY rowid"
            ).fetchall()
        return [kind(**dict(zip(names, values, strict=True))) for values in found]

    def latest_fit(self, name: str) -> FitRow | None:
        """The fit of this name that was added last."""
        named = [row for row in self.rows(FitRow) if row.name == name]
        return named[-1] if named else None

    # --- identity --------------------------------------------------------------------------

    def _checked(self, prepare: Callable[[], None]) -> Self:
        """This base after `prepare`, or closed and an error."""
        try:
            prepare()
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, identity: Identity | None) -> None:
        self._renew()
        self._check(identity)

    def _renew(self) -> None:
        """Schemas 1 and 2 had fewer columns for accuracy, of which nothing had been measured; up to
        3 nobody noted which ranks a link was between."""
        if self._version() in OLDER:
            with self._transaction():
                # Read again: another process may have been quicker.
                if (version := self._version()) in OLDER:
                    if version < 3:
                        self._database.execute(f"DROP TABLE {_TABLES[AccuracyRow]}")
                        _make_table(self._database, AccuracyRow)
                    for rank in ("sender", "receiver"):
                        self._database.execute(
                            f"ALTER TABLE {_TABLES[LinkRow]} "
                            f"ADD COLUMN {rank} TEXT NOT NULL DEFAULT ''"
                        )
                    self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _check(self, identity: Identity | None) -> None:
        version = self._version()
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{self.path} is no scaling information base of schema {SCHEMA_VERSION} "
                f"(found {version}); profile into another file"
            )
        found = dict(self._database.execute("SELECT name, value FROM identity"))
        expected = {} if identity is None else asdict(identity)
        for name, value in expected.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{self.path} was measured with {name} {found.get(name)}, here it is {value}; "
                    f"profile into another file"
                )

    def _version(self) -> int:
        version: int = self._database.execute("PRAGMA user_version").fetchone()[0]
        return version


def _connect(path: Path) -> sqlite3.Connection:
    """To a file that exists."""
    # Not mode=ro: a reader of a write-ahead log may have to make its shared memory.
    uri = f"{path.resolve().as_uri()}?mode=rw"
    database = sqlite3.connect(uri, uri=True, timeout=WRITE_S, isolation_level=None)
    # A machine that stops may lose the last rows, which are measured again; whoever writes them
    # holds up the others for no disk that is slow.
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _make(path: Path, identity: Identity) -> None:
    """A base without rows at `path`, unless another process makes one there first.

    Made whole beside it and then linked: processes that turn one file's write-ahead log on at
    once are told at once that it is locked, whatever the timeout (SQLite would wait in a circle).
    """
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        with closing(sqlite3.connect(made, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            for kind in _TABLES:
                _make_table(database, kind)
            database.execute("CREATE TABLE identity (name TEXT PRIMARY KEY, value NOT NULL)")
            database.executemany(
                "INSERT INTO identity VALUES (?, ?)", list(asdict(identity).items())
            )
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        with suppress(FileExistsError):
            path.hardlink_to(made)


def _make_table(database: sqlite3.Connection, kind: type[Any]) -> None:
    columns = ", ".join(
        f"{field.name} {_SQL_TYPES[str(field.type)]} NOT NULL" for field in fields(kind)
    )
    database.execute(f"CREATE TABLE {_TABLES[kind]} ({columns})")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What SQLite finds wrong, as errors of the tree."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise DeadlineExceeded(f"a transaction of {path}", WRITE_S) from None
        raise ConfigError(f"scaling information base {path}: {error}") from None
    except (sqlite3.DatabaseError, OSError) as error:
        raise ConfigError(f"scaling information base {path}: {error}") from None
