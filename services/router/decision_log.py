"""The decision log of a live router, with the cost tables that it names.

`scheduling: {log: FILE}` enables it. `FILE` contains what the scheduler was told, round by round;
`FILE.tables/` contains each table under its digest, so that `replayed` needs nothing else. The
router that starts next moves both to `FILE.1` and `FILE.1.tables/`, and so on.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from csps.configurator.costs.cost_table import Costs, CostTable, read_stored, stored
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.core.decision_log import DecisionLogHeader, LogWriter, replay
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.events import AnyEvent
from csps.services.scheduling.policies.registry import make_policy

_log = logging.getLogger(__name__)

FORMER_LOGS = 4
"""Logs of former routers that stay. The one before shows why it ended; the others survive a router
that ends several times at its start."""
MAX_TABLE_BYTES = 256 << 20
"""Size of a log's cost tables at which it ends, because a replay needs all of them. A table every
ten seconds reaches it in a day."""


class DecisionLog:
    """Writes the log while the router runs; a context manager that closes the file.

    A log that can no longer be written ends with a warning: requests do not depend on it.
    """

    def __init__(self, path: Path, header: DecisionLogHeader, table: CostTable) -> None:
        """Begin a log beside those of former routers.

        Args:
            table: in force at the start.

        Raises:
            OSError: the file cannot be written.
        """
        _rotate(path)
        tables = _tables_beside(path)
        tables.mkdir(parents=True)
        self._path, self._table_bytes = path, 0
        self._file = path.open("wb")
        try:
            # A router that drains writes on to files that its successor has renamed.
            self._tables = os.open(tables, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self._file.close()
            raise
        self._writer: LogWriter | None = LogWriter(self._file, header)
        self.store_table(table)

    def record(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """Append a batch of events that the scheduler is about to handle."""
        if self._writer is None:
            return
        try:
            self._writer.append(now_ns, events)
        except OSError as error:
            self._end(str(error))

    def store_table(self, table: CostTable) -> None:
        """Store a table before it is in force."""
        if self._writer is None:
            return
        content = stored(table)
        self._table_bytes += len(content)
        if self._table_bytes > MAX_TABLE_BYTES:
            self.flush()
            self._end(f"its cost tables exceed {MAX_TABLE_BYTES} bytes")
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(os.open(table.digest, flags, 0o644, dir_fd=self._tables), "wb") as file:
                file.write(content)
        except OSError as error:
            self._end(str(error))

    def flush(self) -> None:
        """Write what is buffered: the router is about to be replaced."""
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        _log.warning("the decision log %s ends: %s", self._path, reason)
        self._writer = None
        with suppress(OSError):  # what is buffered cannot be written either
            self._file.close()

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        self.flush()
        if self._writer is not None:
            self._writer = None
            self._file.close()
        if self._tables >= 0:
            os.close(self._tables)
            self._tables = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _rotate(path: Path) -> None:
    """Make room for a new log: number those before it, and delete the oldest."""
    oldest = _former(path, FORMER_LOGS)
    oldest.unlink(missing_ok=True)
    shutil.rmtree(_tables_beside(oldest), ignore_errors=True)
    for number in range(FORMER_LOGS, 0, -1):
        log, former = _former(path, number - 1), _former(path, number)
        for old, new in ((log, former), (_tables_beside(log), _tables_beside(former))):
            with suppress(FileNotFoundError):
                old.rename(new)


def _former(path: Path, number: int) -> Path:
    """Return where the log of the router before so many others lies."""
    return path.with_name(f"{path.name}.{number}") if number else path


def replayed(path: Path) -> bytes:
    """Replay a logged run and return its commands (`scheduling.core.decision_log.replay`).

    Raises:
        ConfigError: the file is no decision log, or a table that it names is missing.
    """
    store = {file.name: read_stored(file) for file in _tables_beside(path).iterdir()}

    def scheduler(header: DecisionLogHeader) -> Scheduler:
        if header.table_digest not in store:
            raise ConfigError(
                f"{path}: {_tables_beside(path)} lacks the cost table {header.table_digest}"
            )
        return Scheduler(
            make_policy(header.policy, header.options),
            Costs(store[header.table_digest], store),
            limits=header.limits,
            deadlines=header.deadlines,
            reuse=header.reuse,
        )

    return replay(path, scheduler)


def _tables_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tables")
