"""Build the source archive and the wheel of a release: the same bytes from the same commit.

    python tools/release.py dist

Wheels take their times from SOURCE_DATE_EPOCH. The archive that setuptools packs has the times and
the owner of the files, so it is packed again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

EPOCH = "SOURCE_DATE_EPOCH"
BUILD = "from setuptools import build_meta; import sys; build_meta.build_{kind}(sys.argv[1])"


def release(tree: Path, out: Path, epoch: int) -> list[Path]:
    """Build both into `out`; return their paths.

    Args:
        epoch: time of all files, in seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        for kind in ("sdist", "wheel"):
            subprocess.run(
                [sys.executable, "-c", BUILD.format(kind=kind), made],
                cwd=tree,
                env={**os.environ, EPOCH: str(epoch)},
                stdout=subprocess.DEVNULL,
                check=True,
            )
        (archive,) = Path(made).glob("*.tar.gz")
        (wheel,) = Path(made).glob("*.whl")
        (out / archive.name).write_bytes(repacked(archive.read_bytes(), epoch))
        (out / wheel.name).write_bytes(wheel.read_bytes())
        return [out / archive.name, out / wheel.name]


def repacked(archive: bytes, epoch: int) -> bytes:
    """Return a tar.gz with its files in order, of one time and of nobody."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid = epoch, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def main() -> None:
    """Build from this checkout, with the time of its last commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for both files")
    arguments = parser.parse_args()
    tree = Path(__file__).resolve().parents[1]
    committed = ["git", "-C", str(tree), "log", "-1", "--format=%ct"]
    epoch = os.environ.get(EPOCH) or subprocess.check_output(committed, text=True)
    for path in release(tree, arguments.out, int(epoch)):
        print(path)


if __name__ == "__main__":
    main()
