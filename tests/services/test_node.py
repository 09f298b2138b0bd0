"""A rank's location, from the settings or from the label of its node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from csps.protocols.core.errors import ConfigError
from csps.services.deployments import gang_rank as gangs
from csps.services.settings.settings import Settings, TopologySettings


def on_node(monkeypatch: pytest.MonkeyPatch, label: str | None) -> None:
    """Run this process on a Ray node with this label, or without one."""
    labels = {} if label is None else {"csps.io/server": label}
    context = SimpleNamespace(get_node_labels=lambda: labels)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def test_a_node_without_the_label_is_server_0_0(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node(monkeypatch, None)
    assert gangs.location("prefill", Settings(), 1) == "0-0-1"


def test_the_label_names_rack_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node(monkeypatch, "2-13")
    assert gangs.location("decode", Settings(), 1) == "2-13-1"


def test_the_settings_come_before_the_label(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node(monkeypatch, "2-13")
    settings = Settings(topology=TopologySettings(prefill=("0-1-0", "0-0-0")))
    assert gangs.location("prefill", settings, 1) == "0-0-0"
    assert gangs.location("decode", settings, 1) == "2-13-1"


@pytest.mark.parametrize("label", ["", "rack0-srv1", "0", "0-1-2", "0-011", "0-1 "])
def test_an_invalid_label_is_refused(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    on_node(monkeypatch, label)
    with pytest.raises(ConfigError) as refused:
        gangs.location("prefill", Settings(), 0)
    assert str(refused.value) == (
        f"node label csps.io/server is {label!r}; allowed are two decimal numbers of at most "
        "9 digits, without leading zeros, rack and server, like 0-3"
    )
