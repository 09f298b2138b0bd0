"""A strategy with all that it is told, under one name.

The cost table, plans and the scheduler's log know what they choose from by such names. Alone, a
strategy goes by the engine's name (`actors/engine/choice.py`); with settings of its own they stand
behind it, so that whoever launches a step needs nothing else.

>>> half = CsaSettings(levels=2, drop_ratios=((0.5,),))
>>> option_name("csa", half)
'csa#{"drop_ratios":[[0.5]],"levels":2}'
>>> parse_option(option_name("csa", half)) == ("csa", half)
True
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import msgspec

from csps.protocols.csa_settings import CsaSettings

SETTINGS = "#"
"""What stands behind it are the settings."""
KNOWN_OPTIONS = 4_096
"""Names that are read only once."""


class Option(NamedTuple):
    """What a name says."""

    strategy: str
    """By the engine's name."""
    csa: CsaSettings | None
    """None: as the request says."""


def option_name(strategy: str, csa: CsaSettings | None) -> str:
    """The name of a strategy with these settings."""
    if csa is None:
        return strategy
    usual = CsaSettings()
    told = {
        it.name: getattr(csa, it.name)
        for it in fields(csa)
        if getattr(csa, it.name) != getattr(usual, it.name)
    }
    return strategy + SETTINGS + msgspec.json.encode(told, order="deterministic").decode()


@lru_cache(KNOWN_OPTIONS)
def parse_option(name: str) -> Option:
    """The strategy and the settings of a name."""
    strategy, told, settings = name.partition(SETTINGS)
    csa = msgspec.json.decode(settings, type=CsaSettings) if told else None
    return Option(strategy, csa)
