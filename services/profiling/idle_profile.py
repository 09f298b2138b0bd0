"""Times that nobody has profiled yet, measured by the server itself while its machine is idle.

The commands are those that an operator would type, at the lowest priority and one at a time. Each
begins only when the machine has had little to do for a minute: what computes beside it would be
measured as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import ray
import yaml

from csps.services.settings.settings import Settings

COMMANDS = (("profile", "links"), ("profile", "phases"), ("train",))
IDLE_LOAD = 0.5
"""Load average of a minute over the number of cores, up to which a machine is idle."""
LOOK_S = 30.0
_log = logging.getLogger(__name__)

Run = Callable[[Sequence[str]], Awaitable[str | None]]
"""Runs `csps` with these arguments; what went wrong, if anything did."""


async def profile_when_idle(
    settings: Settings,
    run: Run | None = None,
    load: Callable[[], float] | None = None,
    *,
    name: str = "csps",
) -> bool:
    """Measure and learn what the configurator needs; whether all of it succeeded.

    Args:
        run: in the place of a process.
        load: in the place of the machine's, over its cores.
        name: of the application, whose ranks links are measured between.
    """
    run, load = run or _run, load or _load
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_application(settings, name)))
        for command in COMMANDS:
            while load() > IDLE_LOAD:  # noqa: ASYNC110 (a machine has no event for it)
                await asyncio.sleep(LOOK_S)
            _log.info("the machine is idle: csps %s", " ".join(command))
            if error := await run((*command, "--config", str(config))):
                _log.warning("csps %s failed, attention stays exact: %s", command[0], error)
                return False
    return True


def _application(settings: Settings, name: str) -> dict[str, object]:
    application = {
        "name": name,
        "import_path": "csps.services.app:build",
        "args": settings.model_dump(mode="json", exclude_unset=True),
    }
    return {"applications": [application]}


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


async def _run(arguments: Sequence[str]) -> str | None:
    process = await asyncio.create_subprocess_exec(
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "csps.cli",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_cluster()},
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not process.returncode:
        return None
    return said.decode(errors="replace").strip() or f"status {process.returncode}"


def _cluster() -> dict[str, str]:
    """Where links find the server's ranks: the Ray cluster of this replica."""
    if not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
