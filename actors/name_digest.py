"""Names where only int64 words travel."""

from __future__ import annotations

import hashlib


def name_digest(name: str) -> int:
    """63 bits that stand for a name: never negative, so that they fit into an int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
