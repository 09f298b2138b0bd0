"""KV in files, where it survives the process that computed it.

A file holds one rank's part of a run of blocks (`SavedRun`)::

    magic (8 bytes)  length of header (4)  header (MessagePack)  zeros up to a multiple of 64
    body  digest of all before (16)

*Never a wrong byte.* A file gets its name when all of it is on the disk: it is written under
another name, synchronized and renamed. Whoever reads it compares the digest, and removes a file
that was changed. Names contain a digest of all that decides what the bytes mean (`KvFiles.layout`).

*Bounded.* All processes that use a folder take its lock before they make room for a file, and a
file has its full size from the start. So the files together, unfinished ones included, never exceed
the limit, and those of one owner never exceed its share. The files that were not read for longest
go first. Unfinished files of dead processes go at once: a process locks the file that it writes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from csps.protocols.core.errors import ProtocolError
from csps.protocols.gang.messages import SavedRun
from csps.protocols.rpc.schema import decode, encode

_log = logging.getLogger(__name__)

MAGIC = b"csps-kv1"
DIGEST_BYTES = 16
_LENGTH_BYTES = 4
_BEFORE_HEADER = len(MAGIC) + _LENGTH_BYTES
_ALIGNED = 64
"""The body begins at a multiple of so many bytes, as numbers in memory do."""
_SUFFIX, _UNFINISHED, _LOCK = ".kv", ".part", "lock"


class UnusableFile(Exception):
    """A file is not there, or not what was written."""


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """Header of a file."""

    layout: str
    rank: int
    run: SavedRun
    body_bytes: int


class KvFile(NamedTuple):
    """Content of a file."""

    run: SavedRun
    body: memoryview
    bytes: int
    """Size of the file."""


class _Found(NamedTuple):
    """File in the folder."""

    path: str
    owner: str
    bytes: int
    used_ns: int


class KvFiles:
    """Files of one rank in a folder that many may share.

    Args:
        path: of the folder.
        most_bytes: limit of all files in it.
        layout: digest of all that decides what the bytes of a rank mean.
    """

    def __init__(self, path: Path, most_bytes: int, *, layout: str, rank: int) -> None:
        self._path, self._most, self._layout, self._rank = path, most_bytes, layout, rank
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- writing ---

    def save(
        self,
        run: SavedRun,
        body: Iterable[memoryview],
        body_bytes: int,
        *,
        owner: str,
        permille: int,
    ) -> int:
        """Write this rank's part of a run.

        Args:
            body: parts of the body, `body_bytes` together.
            owner: name under which the bytes are counted.
            permille: share of the limit that the owner may fill.

        Returns:
            Bytes of the file; 0 if there is no room for it.

        Raises:
            OSError: the disk is full or broken.
        """
        header = encode(
            FileHeader(layout=self._layout, rank=self._rank, run=run, body_bytes=body_bytes)
        )
        start = MAGIC + len(header).to_bytes(_LENGTH_BYTES, "big") + header
        start += bytes(-len(start) % _ALIGNED)
        size = len(start) + body_bytes + DIGEST_BYTES
        name = self._name(run.name, owner)
        unfinished = self._path / f"{name}.{os.getpid()}.{time.monotonic_ns()}{_UNFINISHED}"
        file = self._with_room(unfinished, size, owner, self._most * permille // 1000)
        if file is None:
            return 0
        try:
            with open(file, "wb") as writer:
                digest = blake2b(start, digest_size=DIGEST_BYTES)
                writer.write(start)
                for part in body:
                    digest.update(part)
                    writer.write(part)
                writer.write(digest.digest())
                writer.flush()
                assert writer.tell() == size, f"{writer.tell()} bytes written, {size} announced"
                os.fsync(writer.fileno())
                # Before the lock on it goes with the descriptor: without a lock it counts as dead.
                # While nobody counts the files, who would find it under neither name.
                with self._locked():
                    unfinished.rename(self._path / f"{name}{_SUFFIX}")
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        _synchronize(self._path)
        return size

    def _with_room(self, path: Path, size: int, owner: str, own_most: int) -> int | None:
        """Make room, and open a file of this size that nobody else writes; None without room."""
        tag = owner_tag(owner)
        with self._locked():
            files = sorted(self._files(), key=lambda found: found.used_ns)
            own = [found for found in files if found.owner == tag]
            if not _remove_beyond(own_most - size, own):
                return None
            left = [found for found in files if os.path.exists(found.path)]
            if not _remove_beyond(self._most - size, left):
                return None
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(file, 0, size)
            except BaseException:
                os.close(file)
                path.unlink()
                raise
            return file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def _files(self) -> Iterator[_Found]:
        """Yield all files, and remove what dead processes have not finished."""
        with os.scandir(self._path) as entries:
            for entry in entries:
                if not entry.name.endswith((_SUFFIX, _UNFINISHED)):
                    continue
                try:
                    if entry.name.endswith(_UNFINISHED) and _is_dead(entry.path):
                        os.unlink(entry.path)
                        continue
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                owner = entry.name.split(".")[2]
                # An unfinished file of a living process is not for others to remove.
                used_ns = status.st_mtime_ns if entry.name.endswith(_SUFFIX) else 1 << 63
                yield _Found(entry.path, owner, status.st_size, used_ns)

    def _name(self, run: str, owner: str) -> str:
        return f"{self._layout}.{self._rank}.{owner_tag(owner)}.{run}"

    # --- reading ---

    def runs(self) -> Iterator[SavedRun]:
        """Yield the runs of which this rank has a part. Their bodies are not read."""
        for path in sorted(self._path.glob(f"{self._layout}.{self._rank}.*{_SUFFIX}")):
            try:
                with path.open("rb") as file:
                    first = file.read(_BEFORE_HEADER)
                    header = self._header(first, file.read(_header_bytes(first)))
                    whole = _body_at(first) + header.body_bytes + DIGEST_BYTES
                    if os.fstat(file.fileno()).st_size == whole:
                        yield header.run
            except (OSError, UnusableFile) as error:
                _log.warning("%s is not used: %s", path, error)

    def load(self, run: str) -> KvFile:
        """Return this rank's part of a run, by its name.

        Raises:
            UnusableFile: the file is gone, or was changed and is removed.
        """
        found = next(self._path.glob(f"{self._layout}.{self._rank}.*.{run}{_SUFFIX}"), None)
        if found is None:
            raise UnusableFile("the file is gone")
        try:
            with found.open("rb", buffering=0) as file:
                content = bytearray(os.fstat(file.fileno()).st_size)
                at, view = 0, memoryview(content)
                while more := file.readinto(view[at:]):
                    at += more
            os.utime(found)
        except OSError as error:
            raise UnusableFile(str(error)) from None
        try:
            return self._checked(memoryview(content), run)
        except UnusableFile:
            with suppress(OSError):
                found.unlink()
            raise

    def _checked(self, content: memoryview, run: str) -> KvFile:
        before, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
        if blake2b(before, digest_size=DIGEST_BYTES).digest() != digest:
            raise UnusableFile("the file was changed")
        first = bytes(content[:_BEFORE_HEADER])
        rest = content[_BEFORE_HEADER : _BEFORE_HEADER + _header_bytes(first)]
        header = self._header(first, bytes(rest))
        if header.run.name != run:
            raise UnusableFile("the file has another name")
        return KvFile(header.run, before[_body_at(first) :], len(content))

    def _header(self, first: bytes, rest: bytes) -> FileHeader:
        if len(first) != _BEFORE_HEADER or not first.startswith(MAGIC):
            raise UnusableFile("not a file of this format")
        try:
            header = decode(FileHeader, rest)
        except ProtocolError as error:
            raise UnusableFile(f"its header is unreadable: {error}") from None
        if (header.layout, header.rank) != (self._layout, self._rank):
            raise UnusableFile("the file is another rank's")
        return header


def _header_bytes(first: bytes) -> int:
    return int.from_bytes(first[len(MAGIC) : _BEFORE_HEADER], "big")


def _body_at(first: bytes) -> int:
    at = _BEFORE_HEADER + _header_bytes(first)
    return at + -at % _ALIGNED


def owner_tag(owner: str) -> str:
    """Return an owner in the name of a file."""
    return blake2b(owner.encode(), digest_size=8).hexdigest()


def _remove_beyond(most: int, files: list[_Found]) -> bool:
    """Remove the first of these files until the others fit; return whether they do."""
    left = sum(found.bytes for found in files)
    if most < 0:
        return False
    for found in files:
        if left <= most:
            break
        if found.path.endswith(_SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(found.path)
            left -= found.bytes
    return left <= most


def _is_dead(path: str) -> bool:
    """Return whether nobody writes an unfinished file."""
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _synchronize(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
