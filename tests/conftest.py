"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Before torch is loaded: ranks have a thread each, and there is a worker for each core. Threads
# beyond these wait for one another, which costs more than a third of what attention takes here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from property_examples import ALL
from slow_slices import function_of, in_slice
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Nothing is timed here: a machine that is busy with something else is no failure, and a hang has
# pytest's own limit.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("slow", UNTIMED, max_examples=ALL)
settings.register_profile("quick", UNTIMED, max_examples=20, derandomize=True)
settings.load_profile("quick")


ONE_AT_A_TIME = ("tests/end_to_end/", "tests/testbed/")
"""Folders whose tests need the machine's cores or its network to themselves."""


class ByFile(LoadFileScheduling):
    """Gives a worker whole files, so that their tests' fixtures are made once; some folders have
    one worker for all their files.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next(
            (prefix for prefix in ONE_AT_A_TIME if nodeid.startswith(prefix)), nodeid.split("::")[0]
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Return the scheduler of `pytest -n 2` (`make test`)."""
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-slice`."""
    parser.addoption(
        "--slice", type=int, metavar="COMMITS", help="run the slice of this number of commits"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose a slice if one is asked for, and put the tests that wait most first: deployed
    servers, then the testbed.
    """
    commits = config.getoption("--slice")
    if commits is not None:
        _keep_slice(config, items, commits)
    folders = [prefix.split("/")[1] for prefix in ONE_AT_A_TIME]

    def order(item: pytest.Item) -> int:
        return next(
            (at for at, folder in enumerate(folders) if folder in item.path.parts), len(folders)
        )

    items.sort(key=order)


def _keep_slice(config: pytest.Config, items: list[pytest.Item], commits: int) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    functions = in_slice((item.nodeid for item in slow), commits)
    chosen = [item for item in slow if function_of(item.nodeid) in functions]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that garbage collection before a load test does not search
    them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama with one token a byte and a chat template."""
    # Not above: importing transformers takes seconds, and whoever hands the tests out to workers,
    # who wait for that, needs none of it.
    from tiny_checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
