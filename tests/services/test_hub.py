"""Models of the Hugging Face Hub: downloaded from a Hub on this machine, found in the cache, and
what is said where neither works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import COMMIT, LocalHub, local_hub

sys.path.append(str(Path(__file__).resolve().parents[1] / "helm"))

from rendered_chart import environment, render

from csps.protocols.core.errors import ConfigError
from csps.services.settings.hub import cached_model, is_hub_id
from csps.services.settings.settings import Settings

MODEL = "some-org/tiny"
FETCH = """
import sys
from csps.protocols.core.errors import CspsError
from csps.services.settings.hub import download_model
try:
    print(download_model(sys.argv[1]))
except CspsError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def hub(tiny_llama: Path) -> Iterator[LocalHub]:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    files |= {"original/consolidated.safetensors": b"twice", "weights.bin": b"pickled"}
    with local_hub(MODEL, files) as server:
        yield server


def fetch(name: str, home: Path, endpoint: str, **environment: str) -> str:
    """Return what `download_model` returns, or its error, in a process of its own: the library
    reads its environment once.
    """
    done = subprocess.run(
        [sys.executable, "-c", FETCH, name],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.strip()


def test_a_model_is_downloaded_once_and_served_from_the_cache(
    hub: LocalHub, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    settings = Settings.model_validate({"model": MODEL})
    assert cached_model(MODEL) is None
    with pytest.raises(
        ConfigError, match=rf"`csps serve {MODEL}` downloads it.*`hf download {MODEL}`"
    ):
        _ = settings.model_dir

    folder = Path(fetch(MODEL, tmp_path, hub.url))
    got = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    wanted = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    read = {name for name in wanted if name.endswith((".json", ".safetensors", ".jinja"))}
    assert got == {name: wanted[name] for name in read}
    assert not [path for path in hub.asked if "original" in path or ".bin" in path]

    assert settings.model_dir == folder.resolve()
    assert settings.model_name == settings.resolved().model_name == MODEL
    asked = len(hub.asked)
    assert fetch(MODEL, tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1") == str(folder)
    assert len(hub.asked) == asked

    next(folder.glob("*.safetensors")).unlink()
    assert cached_model(MODEL) is None, "an interrupted download is none"


@pytest.mark.parametrize("revision", ["", COMMIT])
def test_the_charts_init_container_downloads_to_where_its_pods_look(
    hub: LocalHub, tmp_path: Path, revision: str
) -> None:
    download = {"enabled": True, "revision": revision}
    endpoint = hub.url
    volume = {"mountPath": str(tmp_path)}
    model = {"path": MODEL, "volume": volume, "download": {**download, "endpoint": endpoint}}
    rendered = render({"model": model, "haproxy": {"enabled": False}})
    head = rendered.groups["head"]
    (init,) = head["template"]["spec"]["initContainers"]
    given = {variable["name"]: variable["value"] for variable in init["env"]}
    subprocess.run(
        [sys.executable, *init["command"][1:], *init["args"]],
        env={**os.environ, **given},
        timeout=100,
        check=True,
    )
    look = "import sys; from csps.services.settings.settings import Settings as S\n"
    look += "found = S.model_validate({'model': sys.argv[1], 'served_model_name': sys.argv[2]})\n"
    look += "print(found.model_dir, found.model_name)"
    settings = rendered.application["args"]
    pod = {name: one["value"] for name, one in environment(head).items() if name[:3] == "HF_"}
    done = subprocess.run(
        [sys.executable, "-c", look, settings["model"], settings["served_model_name"]],
        env={**os.environ, **pod},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    folder, name = done.stdout.split()
    assert name == MODEL
    assert Path(folder).parts[-2:] == ("snapshots", COMMIT)
    assert (Path(folder) / "config.json").is_file()


def test_what_cannot_be_downloaded_is_one_line_with_what_to_do(
    hub: LocalHub, tmp_path: Path
) -> None:
    here = hub.url
    expected = {
        (MODEL, "http://127.0.0.1:9"): ("FaultError", "could not be downloaded", "`hf download"),
        ("some-org/none", here): ("ConfigError", "neither a directory", "`hf auth login`"),
        ("some-org/gated", here): ("ConfigError", "accept its terms", "HF_TOKEN"),
    }
    for (name, endpoint), parts in expected.items():
        said = fetch(name, tmp_path, endpoint)
        assert "\n" not in said
        for part in (*parts, name):
            assert part in said, said


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen3-8B", True),
        ("needle", False),
        ("/models/llama", False),
        ("./models/llama", False),
        ("a/b/c", False),
        ("some-org/", False),
        ("models/needle", False),  # a folder
    ],
)
def test_an_id_is_two_words(name: str, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert is_hub_id(name) == is_one
