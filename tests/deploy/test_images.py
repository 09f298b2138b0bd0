"""The Dockerfiles build images that serve, and the compose file names things that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from dockerfile_steps import Stage, build, copy_context, instructions
from documented_commands import Documented, arguments, documented

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
EXPOSED = "8000"
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")
each = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)


@each
def test_bases_are_pinned_to_a_release_that_the_package_supports(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {words.rpartition(" ")[2] for words in project["classifiers"]}
    bases = {text.split()[0] for name, text in instructions(dockerfile) if name == "FROM"}
    assert len(bases) == 1, "the wheel is built with the Python that runs it"
    (base,) = bases
    assert PINNED.fullmatch(base)
    assert ".".join(base.partition(":")[2].split(".")[:2]) in known


@each
def test_the_image_does_not_run_as_root(dockerfile: Path) -> None:
    """By number: Kubernetes cannot check a name for runAsNonRoot."""
    steps = instructions(dockerfile)
    users = [text for name, text in steps if name == "USER"]
    assert users == ["1000"]
    after = steps[steps.index(("USER", "1000")) :]
    assert not {"RUN", "COPY", "ADD"} & {name for name, _ in after}
    chart = yaml.safe_load((ROOT / "helm" / "csps" / "values.yaml").read_text())
    assert chart["pods"]["podSecurityContext"]["runAsUser"] == 1000


def test_only_the_gpu_image_has_a_compiler() -> None:
    has = {path.stem: "gcc" in path.read_text().split() for path in DOCKERFILES}
    assert has == {"cpu": False, "gpu": True}


@pytest.mark.slow
@pytest.mark.timeout(900)
@each
def test_every_step_runs_and_the_image_checks_its_configuration(
    dockerfile: Path, tmp_path: Path
) -> None:
    image = build(dockerfile, ROOT, ROOT / ".dockerignore", tmp_path / "build")
    assert image.users == {"csps": 1000}
    assert image.environment.get("NVIDIA_VISIBLE_DEVICES") == (
        "all" if dockerfile.stem == "gpu" else None
    )
    for words in (["--help"], [*image.command, "--help"], ["check-config"]):
        said = run(image, [*image.entrypoint, *words], tmp_path)
        assert said
    where = run(image, ["python", "-c", "import csps; print(csps.__file__)"], tmp_path)
    assert where.startswith(str(image.root))


def run(image: Stage, words: list[str], folder: Path) -> str:
    """Run a command of the image in an empty folder."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    program = image.root / "venv" / "bin" / words[0]
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        [program, *words[1:]],
        cwd=empty,
        env=environment | image.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_context_has_what_the_wheel_is_made_of_and_nothing_that_is_large(
    tmp_path: Path,
) -> None:
    copy_context(ROOT, tmp_path / "context", ROOT / ".dockerignore")
    copied = {path.name for path in (tmp_path / "context").iterdir()}
    links = [
        path for path in (tmp_path / "context" / "src" / "csps").iterdir() if path.is_symlink()
    ]
    assert [link.name for link in links if not link.exists()] == []
    assert not {".git", ".venv", "tests", "benchmarks", "docs", "run", "deploy"} & copied
    assert not list((tmp_path / "context").rglob("__pycache__"))


def test_files_of_the_compose_file_exist() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), volume
    assert (ROOT / services["csps"]["build"]["dockerfile"]).is_file()
    assert (DEPLOY / services["csps"]["build"]["context"]).resolve() == ROOT


def test_images_of_the_compose_file_are_pinned_and_listen_on_this_machine() -> None:
    for name, service in COMPOSE["services"].items():
        assert PINNED.fullmatch(service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_services_of_the_compose_file_find_each_other() -> None:
    services = COMPOSE["services"]
    assert services["prometheus"]["network_mode"] == "service:csps", "or /metrics is not answered"
    sources = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())
    assert sources["datasources"][0]["url"] == "http://csps:9090"
    providers = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())
    folder = providers["providers"][0]["options"]["path"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert any(path.startswith(f"{folder}/") for path in mounted)
    endpoint = services["csps"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert endpoint.partition("//")[2].partition(":")[0] in services


@pytest.mark.parametrize("command", documented("docker"), ids=str)
def test_documented_commands_name_files_that_are_here(command: Documented) -> None:
    action, *words = arguments(command)
    if action == "run":
        assert words[-1] == "csps"
        assert f"127.0.0.1:8000:{EXPOSED}" in words
        return
    (named,) = [ROOT / words[place + 1] for place, word in enumerate(words) if word == "-f"]
    assert named.is_file()
    assert action == ("build" if named in DOCKERFILES else "compose")
    if action == "build":
        assert words[-1] == ".", "the context that .dockerignore is for"


def test_images_listen_where_documents_say() -> None:
    for dockerfile in DOCKERFILES:
        assert ("EXPOSE", EXPOSED) in instructions(dockerfile)


def test_notice_names_what_the_compose_file_runs() -> None:
    notice = (ROOT / "NOTICE").read_text()
    assert "deploy/compose.yaml" in notice
    for name in ("Jaeger", "Prometheus", "Grafana"):
        assert name in notice
        assert name.lower() in COMPOSE["services"]
