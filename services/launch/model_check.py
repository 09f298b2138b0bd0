"""What must be true of a checkpoint before ranks are started on it, and how much each will load.

Only JSON files and the headers of the weight files are read. The ranks would find the same, but
only after Ray has started them, several times over and in a log file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from csps.actors.kv_transfer.header import entry_bytes
from csps.models.chat_template import read_chat_template
from csps.models.loading import count_parameters
from csps.models.spec import read_spec, share_of
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
    if len(settings.gangs) > 1:
        _check_in_flight(settings)


def _check_in_flight(settings: Settings) -> None:
    """What a rank may have on its way to each rank of the other gang has room for one token."""
    spec, dtype = read_spec(settings.model_dir), getattr(torch, settings.dtype)
    heads = min(len(share_of(spec, 0, gang.tp).kv_heads) for gang in settings.gangs.values())
    token_bytes = heads * entry_bytes(dtype, spec.head_dim)
    peers = max(gang.ranks for gang in settings.gangs.values())
    if settings.kv_transfer.in_flight_bytes // peers < token_bytes:
        raise ConfigError(
            f"kv_transfer.in_flight_mib: {peers} ranks share it, and {token_bytes} bytes are the "
            "KV of one token in one layer"
        )


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
