"""Compiled functions on disk, and the arithmetic of vector code against fp64."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from csps.kernels import native_code
from csps.kernels.native_code import cache_folder, load_function
from csps.kernels.vector_ir import POINTER, Element, VectorCode

NUMBER = ctypes.POINTER(ctypes.c_int64)


def ir_of(number: int) -> str:
    """Return a function that writes a number."""
    return f"define void @write(ptr %place) {{\n  store i64 {number}, ptr %place\n  ret void\n}}\n"


def written(number: int) -> int:
    place = ctypes.c_int64()
    load_function("write", ir_of(number), [NUMBER])(ctypes.byref(place))
    return place.value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "csps"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each compilation is added."""
    compiled: list[str] = []
    compile_ir = native_code._compile

    def counted(ir: str, machine: object) -> bytes:
        compiled.append(ir)
        return compile_ir(ir, machine)

    monkeypatch.setattr(native_code, "_compile", counted)
    return compiled


def test_a_function_is_compiled_once(folder: Path, compilations: list[str]) -> None:
    assert [written(5), written(5), written(6)] == [5, 5, 6]
    assert compilations == [ir_of(5), ir_of(6)]
    assert len(list(folder.glob("write-*.o"))) == len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_compiled_again(
    damage: str, folder: Path, compilations: list[str]
) -> None:
    written(5)
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes({"cut": bytes(content[:100]), "changed": bytes(content), "empty": b""}[damage])
    assert written(5) == 5
    assert len(compilations) == 2
    assert written(5) == 5
    assert len(compilations) == 2


def test_other_processors_have_other_files(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(5)
    monkeypatch.setattr(native_code.llvm, "get_host_cpu_name", lambda: "x86-64")
    written(5)
    assert len(compilations) == 2


def test_a_folder_that_others_may_write_is_not_used(folder: Path, compilations: list[str]) -> None:
    written(5)
    folder.chmod(0o770)
    assert cache_folder() is None
    assert written(5) == 5
    assert len(compilations) == 2


def test_without_a_place_functions_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() is None
    assert written(5) == 5


def test_a_full_disk_costs_a_compilation_only(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native_code.tempfile, "mkstemp", full)
    assert [written(5), written(5)] == [5, 5]
    assert len(compilations) == 2


def test_processes_that_compile_at_once_agree(folder: Path) -> None:
    """Each compiles several functions over and over, from the same disk."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_native_code import written\n"
        "assert [written(n) for n in [*range(8), *range(8)]] == [*range(8), *range(8)]\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent)]) for _ in range(3)
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(list(folder.iterdir())) == 8


def of_vectors(
    name: str, write: Callable[[VectorCode], None]
) -> Callable[[np.ndarray], np.ndarray]:
    """Compile a function of one vector of 16 numbers."""
    code = VectorCode(name, {"x": POINTER}, lanes=16)
    write(code)
    function = load_function(name, code.text(), [ctypes.c_void_p])

    def run(numbers: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-len(numbers) // 16) * 16, np.float32)
        padded[: len(numbers)] = numbers
        for start in range(0, len(padded), 16):
            function(padded.ctypes.data + 4 * start)
        return padded[: len(numbers)]

    return run


def test_powers_of_two() -> None:
    def write(code: VectorCode) -> None:
        place = code.address("x", Element.FP32)
        place.store(place.vector().exp2())

    run = of_vectors("powers", write)
    x = -np.random.default_rng(0).uniform(0, 126, 10_000).astype(np.float32)
    np.testing.assert_allclose(run(x), np.exp2(x.astype(np.float64)), rtol=3e-7)
    ends = run(np.array([0.0, -126.0, -126.1, -1e6, -1e30, -np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(ends, [1.0, 2.0**-126, 0.0, 0.0, 0.0, 0.0, np.nan])


def test_logarithms() -> None:
    def write(code: VectorCode) -> None:
        place = code.address("x", Element.FP32)
        place.store(place.vector().log2())

    run = of_vectors("logarithms", write)
    random = np.random.default_rng(0)
    x = np.concatenate([random.uniform(0.5, 2, 5_000), 2 ** random.uniform(-125, 60, 5_000)])
    x = x.astype(np.float32)
    np.testing.assert_allclose(run(x), np.log2(x.astype(np.float64)), rtol=3e-7, atol=1e-7)
    ends = run(np.array([1.0, 2.0, 0.0, np.nan], np.float32))
    np.testing.assert_array_equal(ends, [0.0, 1.0, -np.inf, np.nan])


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_sums_over_lanes(count: int) -> None:
    def write(code: VectorCode) -> None:
        place = code.address("x", Element.FP32)
        vectors = [place.vector() * code.fill(2.0**i) for i in range(count)]
        place.store(code.lane_sums(vectors))

    x = np.arange(16, dtype=np.float32)
    expected = [120 * 2.0**i if i < count else 0.0 for i in range(16)]
    np.testing.assert_array_equal(of_vectors(f"sums{count}", write)(x), expected)
