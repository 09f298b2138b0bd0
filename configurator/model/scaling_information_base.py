"""The scaling information base: measurements of one model on one machine (LoongServe §5.5).

It is a SQLite file with one identity, model and machine. A time measured elsewhere is useless, so a
process that opens the file names its own identity, and another identity is refused. Several
processes may write at once: every write is a short transaction, so an interrupted profile can be
resumed.
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

SCHEMA_VERSION = 5
OLDER = (1, 2, 3, 4)
"""Older schemas, whose files are converted to this one."""
WRITE_S = 10.0
"""Time to wait for other processes' transactions, which take milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Conditions, besides the step, on which measured times depend."""

    weights: str
    """Digest of configuration and weights."""
    dtype: str
    device: str
    """Name of the processor or GPU."""
    cores: int
    """Cores of the machine, which ranks on processors share."""
    torch: str
    ranks_per_core: float
    """Compute threads of all ranks on this machine over its cores; 0 on GPUs."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Measurement of a step, or of a decode iteration."""

    strategy: str
    """Strategy of attention; "decode" is a decode iteration."""
    group_shape: str
    """Instances of the group by server, such as "2" or "4+4"."""
    tp: int
    tokens: int
    """New tokens of each chunk; 1 when decoding."""
    history: int
    """Tokens that each chunk attends to besides its own."""
    batch: int
    """Number of chunks, all equal."""
    seconds: float
    load: float
    """Load average of the machine before the measurement."""
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """Measurement of a message between two ranks."""

    kind: str
    """"inside" a server, or "between" two."""
    sender: str
    """Rack-Server-GPU id; empty, like the receiver's, if it was not recorded."""
    receiver: str
    bytes: int
    seconds: float
    """Time one way."""
    load: float
    date: str


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """Measurement of a phase of a layer on one rank."""

    strategy: str
    group_shape: str
    tp: int
    phase: str
    tokens: int
    keys: int
    """Tokens attended to, if the phase is attention."""
    bytes: int
    """Bytes sent, if the phase is communication."""
    seconds: float
    load: float
    date: str


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """Answers with sparse attention to questions that were also answered with exact attention."""

    kind: str
    """Kind of the questions, such as "multi_key, question first"."""
    tokens: int
    strategy: str
    """"ntp" or "tp"."""
    levels: int
    drop_ratio: float
    """Largest ratio of level 2."""
    drop_ratios: str = ""
    """Ratios of level 2 by layer, as `csa.ratios_text` writes them; empty if all layers that drop
    have `drop_ratio`."""
    importance_layer: str
    importance_window: int
    group_shape: str
    questions: int
    right_exact: int
    right: int
    divergence: float
    """Mean KL divergence from exact attention's next token to this one's, in nats."""
    date: str


@dataclass(frozen=True, kw_only=True)
class SpreadRow:
    """Spread of the attention scores of one KV head, with exact attention (CSPS App. B)."""

    tokens: int
    """Length of the prompts."""
    layer: int
    kv_head: int
    window: int
    """Number of last queries that score."""
    prompts: int
    """Number of prompts of which `spread` is the mean."""
    spread: float
    """Standard deviation of the scores of a prompt's tokens, by which tokens are dropped."""
    date: str


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """Coefficients fitted to the content of the base at that time."""

    name: str
    """Purpose, such as "latency"."""
    digest: str
    """SHA-256 of `canonical`, hexadecimal."""
    canonical: bytes
    """Coefficients in their owner's format."""
    date: str


Measured = StepRow | LinkRow | PhaseRow | AccuracyRow | SpreadRow | FitRow
R = TypeVar("R", StepRow, LinkRow, PhaseRow, AccuracyRow, SpreadRow, FitRow)
_TABLES: dict[type[Any], str] = {
    StepRow: "steps",
    LinkRow: "links",
    PhaseRow: "phases",
    AccuracyRow: "accuracy",
    SpreadRow: "spreads",
    FitRow: "fits",
}
_SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bytes": "BLOB"}


class ScalingInformationBase:
    """An open base; `create` or `read` opens one."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path = path
        self._database = database

    @classmethod
    def create(cls, path: Path, identity: Identity) -> Self:
        """Open for writing; create the file, and its folder, if there is none.

        Raises:
            ConfigError: the file is not a base, or has another schema or identity.
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
        """Open for reading; return None if there is no file.

        Args:
            path: path of the file.
            identity: identity of this process, which must be the file's. None accepts any, for
                users of measurements from elsewhere, such as the simulator.

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
        """Add a measurement.

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
        """Return all rows of a kind, oldest first."""
        names = [field.name for field in fields(kind)]
        with _named(self.path):
            found = self._database.execute(
                f"SELECT {', '.join(names)} FROM {_TABLES[kind]} ORDER BY rowid"
            ).fetchall()
        return [kind(**dict(zip(names, values, strict=True))) for values in found]

    def latest_fit(self, name: str) -> FitRow | None:
        """Return the newest fit of this name, or None."""
        named = [row for row in self.rows(FitRow) if row.name == name]
        return named[-1] if named else None

    # --- identity --------------------------------------------------------------------------

    def _checked(self, prepare: Callable[[], None]) -> Self:
        """Return this base after `prepare`; close it if that fails."""
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
        """Convert an older schema to the present one."""
        if self._version() in OLDER:
            with self._transaction():
                # Another process may have converted it since.
                if (version := self._version()) in OLDER:
                    # Schemas 1 and 2 had fewer columns for accuracy, and no rows; up to 3 the
                    # ranks of a link were not recorded; up to 4 all layers dropped alike.
                    if version < 3:
                        self._database.execute(f"DROP TABLE {_TABLES[AccuracyRow]}")
                        _make_table(self._database, AccuracyRow)
                    else:
                        self._add_text(AccuracyRow, "drop_ratios")
                    if version < 4:
                        self._add_text(LinkRow, "sender")
                        self._add_text(LinkRow, "receiver")
                    _make_table(self._database, SpreadRow)
                    self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _add_text(self, kind: type[Any], column: str) -> None:
        """Add a column of text, which is empty in older rows."""
        self._database.execute(
            f"ALTER TABLE {_TABLES[kind]} ADD COLUMN {column} TEXT NOT NULL DEFAULT ''"
        )

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
                f"{self.path} is not a scaling information base of schema {SCHEMA_VERSION} "
                f"(found schema {version}); profile into another file"
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
    """Connect to a file that exists."""
    # mode=ro would fail: a reader of a write-ahead log may have to create its shared memory.
    uri = f"{path.resolve().as_uri()}?mode=rw"
    database = sqlite3.connect(uri, uri=True, timeout=WRITE_S, isolation_level=None)
    # A machine that crashes may lose the last rows, which can be measured again. In exchange no
    # writer waits for a slow disk while it locks others out.
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _make(path: Path, identity: Identity) -> None:
    """Create a base without rows at `path`, unless another process creates one first."""
    # The file is completed in a folder of its own and then linked. Processes that enable one
    # file's write-ahead log at once are refused as locked immediately, whatever the timeout.
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
    """Convert errors of SQLite to errors of the tree."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise DeadlineExceeded(f"a transaction of {path}", WRITE_S) from None
        raise ConfigError(f"scaling information base {path}: {error}") from None
    except (sqlite3.DatabaseError, OSError) as error:
        raise ConfigError(
            f"scaling information base {path}: {error}; move it away, or name another "
            "(scaling_information_base)"
        ) from None
