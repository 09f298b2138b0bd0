"""API keys and the cluster secret."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import pytest

from csps.protocols.core.errors import ConfigError, Unauthorized
from csps.services.requests.request_spec import NO_KEY
from csps.services.settings import credentials
from csps.services.settings.credentials import (
    KEYS_VARIABLE,
    SECRET_VARIABLE,
    ApiKeys,
    ClusterSecret,
    cluster_secret,
)
from csps.services.settings.settings import AuthSettings, KeyLimits


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
    assert ApiKeys([]).check(None) is NO_KEY


def test_keys_come_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("# team\nfile-key # Ada's\n\nbob third, fourth\n")
    monkeypatch.setenv(KEYS_VARIABLE, "first, alice second")
    keys = ApiKeys.load(str(tmp_path / "keys"))
    for key in ("file-key", "first", "second", "third", "fourth"):
        keys.check(f"Bearer {key}")


def test_keys_have_names_that_do_not_show_them() -> None:
    keys = ApiKeys(["alice one", "bob two", "alice three", "four-is-secret"])
    one, two, three, four = (
        keys.check(f"Bearer {key}") for key in ("one", "two", "three", "four-is-secret")
    )
    assert (one.name, two.name, three.name) == ("alice", "bob", "alice")
    assert one.tenant == three.tenant != two.tenant
    assert one.digest != three.digest
    assert re.fullmatch("key-[0-9a-f]{8}", four.name)
    assert min(one.tenant, two.tenant, four.tenant) > 0


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", ",\n, ,"])
def test_a_key_file_without_keys_does_not_open_the_server(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError):
        ApiKeys.load(str(path))


@pytest.mark.parametrize("value", ["", " ", ",", "\n", "# none"])
def test_a_variable_without_keys_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    (tmp_path / "keys").write_text("one")
    monkeypatch.setenv(KEYS_VARIABLE, value)
    for path in (None, str(tmp_path / "keys")):
        with pytest.raises(ConfigError, match=f"{KEYS_VARIABLE} is set and holds no key"):
            ApiKeys.load(path)


@pytest.mark.parametrize("entry", ["the secret key", "na/me secret", f"{'n' * 65} secret"])
def test_a_malformed_entry_is_an_error_that_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"fine,{entry}")
    with pytest.raises(ConfigError, match="entry 2 must be KEY or NAME KEY") as raised:
        ApiKeys.load(None)
    assert "secret" not in str(raised.value)


# --- a file that changes ---------------------------------------------------------------------

DEADLINE_S = 30


class Watched:
    """A key file that is watched, and what was revoked."""

    def __init__(self, path: Path, *entries: str) -> None:
        self.path = path
        self.write(*entries)
        self.keys = ApiKeys.load(str(path))
        self.revoked: set[bytes] = set()

    def write(self, *entries: str) -> None:
        self.path.write_text("\n".join(entries))

    def known(self, key: str) -> bool:
        try:
            self.keys.check(f"Bearer {key}")
        except Unauthorized:
            return False
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Watch until something is so."""
        watching = asyncio.create_task(self.keys.watch(self.revoked.update, period_s=0.001))
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition() and not watching.done():  # noqa: ASYNC110 (a thread reads)
                    await asyncio.sleep(0)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def test_keys_are_added_and_revoked_while_the_server_runs(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "alice one", "bob two")
    alice, bob = (watched.keys.check(f"Bearer {key}") for key in ("one", "two"))
    watched.write("carol three", "bob two")
    await watched.until(lambda: watched.known("three"))
    assert not watched.known("one")
    assert watched.revoked == {alice.digest}
    with pytest.raises(Unauthorized, match="revoked"):
        watched.keys.check_again(alice)
    watched.keys.check_again(bob)
    assert watched.keys.check("Bearer two") == bob
    assert watched.keys.check("Bearer three").tenant not in (alice.tenant, bob.tenant)


async def test_a_name_keeps_its_number_when_its_key_is_replaced(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "zoe zero", "alice old")
    before = watched.keys.check("Bearer old")
    watched.write("alice old", "alice new")
    await watched.until(lambda: watched.known("new"))
    watched.write("alice new")
    await watched.until(lambda: not watched.known("old"))
    assert watched.keys.check("Bearer new").tenant == before.tenant


async def test_a_file_that_loses_all_keys_closes_the_server(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "one")
    watched.write("# nobody")
    await watched.until(lambda: not watched.known("one"))
    with pytest.raises(Unauthorized):
        watched.keys.check(None)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"three words here"])
async def test_a_file_that_cannot_be_read_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    watched = Watched(tmp_path / "keys", "one")
    if content is None:
        watched.path.unlink()
    else:
        watched.path.write_bytes(content)
    await watched.until(lambda: "API keys stay as they are" in caplog.text)
    assert watched.known("one")
    watched.write("two")
    await watched.until(lambda: watched.known("two"))
    assert caplog.text.count("stay as they are") == 1


async def test_a_file_that_is_being_written_revokes_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "one", "two")
    pieces = cycle(["one", "one\ntwo"])
    with patch.object(credentials, "_read", side_effect=pieces) as read:
        await watched.until(lambda: read.call_count > 20)
    assert watched.known("two")
    assert not watched.revoked


async def test_the_log_names_changes_without_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path / "keys", "alice hush-one")
    watched.write("bob hush-two")
    await watched.until(lambda: bool(watched.revoked))
    assert "API keys added: bob; revoked: alice" in caplog.text
    assert "hush" not in caplog.text


async def test_keys_of_the_environment_outlive_a_change_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "root")
    watched = Watched(tmp_path / "keys", "one")
    watched.write("two")
    await watched.until(lambda: watched.known("two"))
    assert watched.known("root")
    assert not watched.known("one")


def test_names_in_the_settings_that_no_key_has_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    auth = AuthSettings(
        overrides={"alice": KeyLimits(), "carol": KeyLimits()}, diagnostics=("bob",)
    )
    ApiKeys(["alice one"]).warn_of_unknown(auth.names)
    assert [record.getMessage() for record in caplog.records] == [
        "auth: no API key is named carol",
        "auth: no API key is named bob",
    ]


# --- the cluster secret ----------------------------------------------------------------------


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
