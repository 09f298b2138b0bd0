"""What must be true of a checkpoint before ranks are started on it, and how much each will load.

Only JSON files and the headers of the weight files are read. The ranks would find the same, but
only after Ray has started them, several times over and in a log file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from csps.models.chat_template import read_chat_template
from csps.models.loading import count_parameters
from csps.models.spec import read_spec
from csps.models.tokenizer import Tokenizer
from csps.protocols.errors import ConfigError
from csps.protocols.gang_members import GangRole
from csps.services.launch.settings import Settings


def check_model(settings: Settings) -> None:
    """See that the router can read requests for the model, and that every rank can load it.

    Raises:
        ConfigError: the architecture or a feature of it is not supported, a tensor is missing or
            of another shape, the model cannot be cut into `tp` shares, or a file is damaged.
    """
    with _one_line("model"):
        read_spec(settings.model_dir)
        Tokenizer(settings.model_dir)
        read_chat_template(settings.model_dir)
        count_parameters(settings.model_dir)
    for role in settings.gangs:
        rank_parameters(role, settings)


def rank_parameters(role: GangRole, settings: Settings) -> int:
    """Parameters that one rank of a gang loads.

    Raises:
        ConfigError: it cannot; see `check_model`.
    """
    with _one_line(f"{role}.tp"):
        return count_parameters(settings.model_dir, tp_size=settings.gangs[role].tp)


@contextmanager
def _one_line(setting: str) -> Iterator[None]:
    """What the models room finds wrong, as the operator's mistake in a setting."""
    try:
        yield
    except ValueError as exc:  # CheckpointError, and a `tp` that does not fit
        raise ConfigError(f"{setting}: {' '.join(str(exc).split())}") from None
