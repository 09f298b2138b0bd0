"""Secrets lie in a Secret, reach processes through their environment, and show nowhere else."""

from __future__ import annotations

import shutil
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
import yaml
from rendered_chart import CHART, EVERYTHING, Rendered, Values, container, environment, render

from csps.services.settings.credentials import (
    KEYS_VARIABLE,
    SECRET_MIN_LENGTH,
    SECRET_VARIABLE,
    ApiKeys,
)

LOOKUP = 'lookup "v1" "Secret" .Release.Namespace $name'


def secrets_of(rendered: Rendered) -> dict[str, str]:
    data = rendered.of_kind("Secret")["data"]
    return {name: b64decode(value).decode() for name, value in data.items()}


def test_secrets_show_in_no_other_object() -> None:
    given = ["first-key-of-a-client", "second-key-of-a-client"]
    rendered = render({**EVERYTHING, "auth": {"apiKeys": given}})
    values = secrets_of(rendered)
    assert values["api-keys"] == ",".join(given)
    others = [manifest for manifest in rendered.manifests if manifest["kind"] != "Secret"]
    text = yaml.safe_dump(others) + rendered.notes
    for secret in [values["cluster-secret"], *given]:
        assert secret not in text
        assert b64encode(secret.encode()).decode() not in text


def test_generated_secrets_are_long_and_differ() -> None:
    first, second = secrets_of(render()), secrets_of(render())
    assert set(first) == {"cluster-secret", "api-keys"}
    assert len(first["cluster-secret"]) >= 2 * SECRET_MIN_LENGTH
    assert first["api-keys"].startswith("csps-")
    assert all(first[name] != second[name] for name in first)


def test_an_upgrade_keeps_what_is_stored(tmp_path: Path) -> None:
    """No cluster answers `lookup` here, so the test replaces its answer."""
    chart = tmp_path / "csps"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "secret.yaml"
    stored = b64encode(b"drawn at the first installation").decode()
    answer = f'dict "data" (dict "cluster-secret" "{stored}" "api-keys" "{stored}")'
    text = template.read_text()
    assert LOOKUP in text
    template.write_text(text.replace(LOOKUP, answer))
    kept = secrets_of(render(chart=chart))
    assert set(kept.values()) == {"drawn at the first installation"}
    given: Values = {"auth": {"apiKeys": ["given-by-the-operator"]}}
    assert secrets_of(render(given, chart=chart))["api-keys"] == "given-by-the-operator"


def test_processes_get_what_they_need_and_no_more() -> None:
    for name, group in render().groups.items():
        variables = environment(group)
        reference = variables[SECRET_VARIABLE]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "demo-csps", "key": "cluster-secret"}
        assert KEYS_VARIABLE not in variables
        keys = ["api-keys"] if name == "head" else []
        volumes = group["template"]["spec"]["volumes"]
        assert [volume["name"] for volume in volumes] == ["haproxy", *keys]
        assert [mount["name"] for mount in container(group)["volumeMounts"]] == ["haproxy", *keys]


def test_an_existing_secret_replaces_the_charts() -> None:
    rendered = render({"auth": {"existingSecret": "mine"}})
    assert "Secret" not in rendered.kinds
    head = rendered.groups["head"]
    assert environment(head)[SECRET_VARIABLE]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    (volume,) = [one for one in head["template"]["spec"]["volumes"] if "secret" in one]
    assert volume["secret"]["secretName"] == "mine"
    assert "get secret mine" in rendered.notes


@pytest.mark.parametrize("extra", [{}, EVERYTHING])
def test_the_router_reads_api_keys_from_a_file_that_follows_the_secret(extra: Values) -> None:
    """Regression: in the environment of a pod, revoked keys stayed valid until it ended."""
    rendered = render(extra)
    head = rendered.groups["head"]
    (volume,) = [
        volume for volume in head["template"]["spec"]["volumes"] if volume["name"] == "api-keys"
    ]
    (mount,) = [
        mount for mount in container(head)["volumeMounts"] if mount["name"] == volume["name"]
    ]
    (item,) = volume["secret"]["items"]
    assert item["key"] in secrets_of(rendered)
    assert rendered.application["args"]["api_keys_file"] == f"{mount['mountPath']}/{item['path']}"
    assert mount["readOnly"]
    assert "subPath" not in mount  # which the kubelet never updates


@pytest.mark.parametrize("given", ["alice 0123456789abcdef", "0123456789abcdef"])
def test_keys_of_the_chart_may_have_names(given: str) -> None:
    stored = secrets_of(render({"auth": {"apiKeys": [given, "another-key-of-a-client"]}}))
    key = ApiKeys(stored["api-keys"].split(",")).check("Bearer 0123456789abcdef")
    assert (key.name == "alice") == given.startswith("alice")


@pytest.mark.parametrize("stored", ['dict "cluster-secret" "c2VjcmV0"', 'dict "api-keys" ""'])
def test_an_existing_secret_without_keys_is_refused(tmp_path: Path, stored: str) -> None:
    """Regression: its empty key opened the server."""
    chart = tmp_path / "csps"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "secret.yaml"
    text = template.read_text()
    asked = 'lookup "v1" "Secret" $.Release.Namespace .'
    assert asked in text
    template.write_text(text.replace(asked, f'dict "data" ({stored})'))
    with pytest.raises(Exception, match="the Secret mine has no api-keys"):
        render({"auth": {"existingSecret": "mine"}}, chart=chart)
    render({"auth": {"existingSecret": "mine", "requireApiKey": False}}, chart=chart)


def test_open_server_on_request() -> None:
    rendered = render({"auth": {"requireApiKey": False}})
    assert set(secrets_of(rendered)) == {"cluster-secret"}
    volumes = rendered.groups["head"]["template"]["spec"]["volumes"]
    assert "api-keys" not in [volume["name"] for volume in volumes]
    assert "api_keys_file" not in rendered.application["args"]


def test_ray_asks_for_its_token() -> None:
    rendered = render()
    assert rendered.cluster["authOptions"] == {"mode": "token"}
    for group in rendered.groups.values():
        assert environment(group)["RAY_AUTH_MODE"]["value"] == "token"
    named = render({"ray": {"tokenSecret": "ray-token"}})
    assert named.cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
