"""The decision log of a live router, with the cost tables that it names.

`scheduling: {log: FILE}` enables it. `FILE` contains what the scheduler was told, round by round;
`FILE.tables/` contains each table under its digest, so that `replayed` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from csps.configurator.costs.cost_table import Costs, CostTable, read_stored, stored
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.core.decision_log import DecisionLogHeader, LogWriter, replay
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.events import AnyEvent
from csps.services.scheduling.policies.registry import make_policy


class DecisionLog:
    """Writes the log while the router runs; a context manager that closes the file."""

    def __init__(self, path: Path, header: DecisionLogHeader, table: CostTable) -> None:
        """Begin a log, overwriting an existing file.

        Args:
            table: in force at the start.
        """
        self._tables = _tables_beside(path)
        self._tables.mkdir(parents=True, exist_ok=True)
        self.store_table(table)
        self._file = path.open("wb")
        self._writer = LogWriter(self._file, header)

    def record(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """Append a batch of events that the scheduler is about to handle."""
        self._writer.append(now_ns, events)

    def store_table(self, table: CostTable) -> None:
        """Store a table before it is in force."""
        (self._tables / table.digest).write_bytes(stored(table))

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        if not self._file.closed:
            self._writer.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
