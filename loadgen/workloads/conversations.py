"""Conversations of several turns, each of which starts with all that was said before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, Request

_BLOCKS_OF_ONE = 1 << 32
"""Hash ids that a conversation has for itself."""
_PARTIAL = 1 << 31
"""Ids of last blocks, which the next turn fills up and so has under another id."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What follows the first turn."""

    count: int = 1
    """Of a conversation, the first one included."""
    added_tokens: int = 128
    """Of each later turn's own text."""
    delay_ns: int = 1_000_000_000
    """From the end of an answer to the next turn."""


def converse(first_turns: Sequence[Request], turns: Turns) -> list[Request]:
    """Each request becomes the first turn of a conversation."""
    if turns.count == 1:
        return list(first_turns)
    return [
        turn for number, first in enumerate(first_turns) for turn in _turns(number, first, turns)
    ]


def _turns(number: int, first: Request, turns: Turns) -> Iterator[Request]:
    length = first.input_length
    for turn in range(turns.count):
        yield replace(
            first,
            input_length=length,
            hash_ids=_hash_ids(number, turn, length),
            conversation=str(number),
            delay_ns=turns.delay_ns if turn else 0,
        )
        length += first.output_length + turns.added_tokens


def _hash_ids(number: int, turn: int, length: int) -> tuple[int, ...]:
    whole, rest = divmod(length, HASH_BLOCK_TOKENS)
    base = (number + 1) * _BLOCKS_OF_ONE
    last = (base + _PARTIAL + turn,) if rest else ()
    return (*range(base, base + whole), *last)
