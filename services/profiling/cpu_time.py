"""CPU time of other processes and their threads.

With more ranks than cores, wall-clock time counts the neighbours' work too; CPU time does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Seconds on a core of a process so far; subtract two of them."""

    process_s: float
    """All threads, ended ones included."""
    threads_s: Mapping[int, float]
    """Each living thread, by its id."""

    @classmethod
    def of(cls, pid: int) -> CpuTime:
        """What a process has used until now."""
        # The clock's number as clock_getcpuclockid(3) builds it, which Python does not offer.
        clock = ~pid << 3 | _CPUCLOCK_SCHED
        return cls(process_s=time.clock_gettime(clock), threads_s=_threads_s(pid))

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(
            process_s=self.process_s - earlier.process_s,
            threads_s={
                thread: seconds - earlier.threads_s.get(thread, 0.0)
                for thread, seconds in self.threads_s.items()
            },
        )

    def busiest_s(self, threads: int = 1) -> float:
        """Seconds of so many threads: of a rank, those that compute."""
        return sum(sorted(self.threads_s.values())[-threads:])


def _threads_s(pid: int) -> dict[int, float]:
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            # schedstat: nanoseconds on a core, nanoseconds waiting for one, time slices.
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds
