"""Profile what nobody has measured yet, by the server itself, while its machine is idle.

It runs the commands that an operator would type, at the lowest priority and one at a time. Each
starts only after the machine was idle for a minute, because other work would be measured as well.
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
"""Function that runs `csps` with these arguments and returns the error, if any."""


async def profile_when_idle(
    settings: Settings,
    run: Run | None = None,
    load: Callable[[], float] | None = None,
    *,
    name: str = "csps",
) -> bool:
    """Measure and learn what the configurator needs; return True if all commands succeeded.

    Args:
        run: replaces the run of a process.
        load: replaces the machine's load over its cores.
        name: name of the application, between whose ranks links are measured.
    """
    run, load = run or _run, load or _load
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_application(settings, name)))
        for command in COMMANDS:
            while load() > IDLE_LOAD:  # noqa: ASYNC110 (a machine has no event for idleness)
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
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not process.returncode:
        return None
    return stderr.decode(errors="replace").strip() or f"status {process.returncode}"


def _cluster() -> dict[str, str]:
    """Return the address of this replica's Ray cluster, whose ranks links are measured between."""
    if not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
