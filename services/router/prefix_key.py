"""Names of prompts' beginnings, by which kept KV is found again.

A chain hash of a block names all tokens up to its end, who may use their KV (API key and
`cache_salt`), and that it is exact, or within which bounds it is. So KV never goes from one key,
salt or bound to another: equal names would take two texts of one BLAKE2b digest of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


@dataclass(frozen=True)
class PrefixKey:
    """Whose KV it is, and what blocks are hashed.

    Args:
        seed: what the first block's hash begins with.
        block: tokens of one.
    """

    seed: bytes
    block: int

    @classmethod
    def of(cls, *, owner: bytes, salt: str | None, block: int, bounds: str = "") -> PrefixKey:
        """Of requests with the same API key (its digest, or nothing where none is needed) and the
        same salt; none is another one than an empty one.

        Args:
            bounds: within which KV was computed that may not be exact.
        """
        seed = blake2b(digest_size=DIGEST_BYTES)
        salted = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
        for part in (owner, salted, *((bounds.encode(),) if bounds else ())):
            seed.update(len(part).to_bytes(8, "little") + part)
        return cls(seed.digest(), block)

    def hashes(self, tokens: NDArray[np.int32], known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Of all whole blocks but those that are known already."""
        last = known[-1] if known else self.seed
        data, size = tokens.astype("<i4", copy=False).tobytes(), self.block * 4
        found: list[bytes] = []
        for start in range(len(known) * size, len(data) - size + 1, size):
            last = blake2b(last + data[start : start + size], digest_size=DIGEST_BYTES).digest()
            found.append(last)
        return tuple(found)
