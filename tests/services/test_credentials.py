"""API keys and the cluster secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from csps.protocols.core.errors import ConfigError, Unauthorized
from csps.services.settings.credentials import (
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    ApiKeys,
    ClusterSecret,
    cluster_secret,
)


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "Bearer  two "])
def test_a_known_key_is_accepted(header: str) -> None:
    ApiKeys(["one", "two"]).check(header)


@pytest.mark.parametrize(
    "header", [None, "", "one", "Basic one", "Bearer", "Bearer on", "Bearer onee", "Bearer \udc80"]
)
def test_any_other_key_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        ApiKeys(["one", "two"]).check(header)


def test_without_keys_the_server_is_open() -> None:
    ApiKeys([]).check(None)


def test_keys_come_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("# team\nfile-key # Ada's\n\n")
    monkeypatch.setenv(KEYS_VARIABLE, "first, second")
    keys = ApiKeys.load(str(tmp_path / "keys"))
    for key in ("file-key", "first", "second"):
        keys.check(f"Bearer {key}")


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_key_file_without_keys_does_not_open_the_server(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError):
        ApiKeys.load(str(path))


def test_the_secret_is_not_shown() -> None:
    assert "hush" not in repr(ClusterSecret(b"hush"))


def test_the_secret_is_fresh_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert cluster_secret() != cluster_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef")
    assert cluster_secret() == ClusterSecret(b"0123456789abcdef")
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError):
        cluster_secret()
