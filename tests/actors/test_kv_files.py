"""Files of KV: killed writers, changed bytes, limits, and what a rank finds again."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

import kv_file_writer
import pytest
from kv_file_writer import BODY_BYTES, LAYOUT, body_of, run_of, save

from csps.actors.kv_cache.kv_files import KvFiles, UnusableFile

ROOM = 30 * (BODY_BYTES + 1_000)
NUMBERS = {run_of(number).name: number for number in range(40)}


def files_in(path: Path, most_bytes: int = ROOM, *, layout: str = LAYOUT, rank: int = 0) -> KvFiles:
    return KvFiles(path, most_bytes, layout=layout, rank=rank)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def numbers_in(files: KvFiles) -> list[int]:
    """Return the numbers of the runs in files, all of which are as they were written."""
    numbers = [run.start // 64 for run in files.runs()]
    for number in numbers:
        found = files.load(run_of(number).name)
        assert found.run == run_of(number)
        assert bytes(found.body) == body_of(number), f"wrong bytes of run {number}"
    return numbers


def kill_writers(path: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kill so many writers; return how many runs were found whole, and how many parts of runs."""
    chosen, whole, parts = random.Random(seed), set[int](), 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script, limit = Path(kv_file_writer.__file__), str(ROOM)
    with subprocess.Popen(
        [sys.executable, script, path, limit],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        for _ in range(kills):
            print(chosen.randrange(20_000), file=killer.stdin, flush=True)
            assert killer.stdout.readline() == "\n"
            files = files_in(path)
            whole.update(numbers_in(files))
            parts += len(list(path.glob("*.part")))
            assert size_of(path) <= ROOM
        killer.stdin.close()
    save(files_in(path), 7)
    assert not list(path.glob("*.part")), "what dead writers have left stays for ever"
    return len(whole), parts


def test_what_killed_writers_leave_is_whole_or_nothing(tmp_path: Path) -> None:
    whole, parts = kill_writers(tmp_path, 50, seed=1)
    assert whole, "no writer lived long enough"
    assert parts, "no writer was killed while it wrote"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_thousand_killed_writers_leave_is_whole_or_nothing(tmp_path: Path) -> None:
    whole, parts = kill_writers(tmp_path, 1_000, seed=2)
    assert whole > 20
    assert parts > 20


def test_changed_files_are_refused_and_removed(tmp_path: Path) -> None:
    """One bit anywhere, or bytes that are missing or too many at the end."""
    chosen = random.Random(3)
    files = files_in(tmp_path)
    name = run_of(1).name
    for _ in range(200):
        save(files, 1)
        (file,) = tmp_path.glob("*.kv")
        content = bytearray(file.read_bytes())
        match chosen.randrange(3):
            case 0:
                content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
            case 1:
                del content[chosen.randrange(len(content)) :]
            case _:
                content += bytes(chosen.randrange(1, 100))
        file.write_bytes(content)
        with pytest.raises(UnusableFile):
            files.load(name)
        assert not file.exists()
        with pytest.raises(UnusableFile, match="gone"):
            files.load(name)


def test_only_the_same_rank_of_the_same_layout_finds_a_file(tmp_path: Path) -> None:
    save(files_in(tmp_path), 1)
    assert numbers_in(files_in(tmp_path)) == [1]
    for other in (files_in(tmp_path, rank=1), files_in(tmp_path, layout="ffff")):
        assert not list(other.runs())
        with pytest.raises(UnusableFile, match="gone"):
            other.load(run_of(1).name)
    (file,) = tmp_path.glob("*.kv")
    file.rename(tmp_path / file.name.replace(".0.", ".1.", 1))
    with pytest.raises(UnusableFile, match="another rank's"):
        files_in(tmp_path, rank=1).load(run_of(1).name)


def test_what_was_not_read_for_longest_goes_first(tmp_path: Path) -> None:
    files = files_in(tmp_path, 4 * (BODY_BYTES + 300))
    for number in range(4):
        save(files, number)
        (file,) = tmp_path.glob(f"*{run_of(number).name}.kv")
        os.utime(file, ns=(number, number))
    files.load(run_of(0).name)
    save(files, 4)
    assert sorted(numbers_in(files)) == [0, 2, 3, 4]


def test_owners_keep_to_their_share(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    for number in range(10):
        assert save(files, number, owner="greedy", permille=200)
    assert 4 <= len(numbers_in(files)) <= 6
    assert save(files, 20, owner="modest")
    for number in range(10, 20):
        assert save(files, number, owner="greedy", permille=200)
    assert 20 in numbers_in(files)
    assert not save(files, 30, owner="small", permille=1)


def test_a_run_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    files = files_in(tmp_path, BODY_BYTES)
    assert not save(files, 1)
    assert not numbers_in(files)


def test_a_file_that_somebody_writes_is_not_removed(tmp_path: Path) -> None:
    """Its bytes count, so that there is no room for another one."""
    files, others = files_in(tmp_path, 2 * BODY_BYTES), files_in(tmp_path, 2 * BODY_BYTES)

    def parts() -> list[memoryview]:
        assert not save(others, 2)
        return kv_file_writer.parts_of(body_of(1))

    def body() -> object:
        yield from parts()

    assert files.save(run_of(1), body(), BODY_BYTES, owner="", permille=1000)  # type: ignore[arg-type]
    assert numbers_in(files) == [1]


def test_no_file_gets_its_name_while_others_count_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count under neither name, and the limit would be exceeded."""
    rename, refused = Path.rename, list[bool]()

    def watched(self: Path, target: Path) -> Path:
        with (tmp_path / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                refused.append(False)
            except BlockingIOError:
                refused.append(True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    assert save(files_in(tmp_path), 1)
    assert refused == [True]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def body() -> object:
        yield memoryview(bytes(100))
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="gone"):
        files_in(tmp_path).save(run_of(1), body(), 200, owner="", permille=1000)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*.kv")) + list(tmp_path.glob("*.part"))
