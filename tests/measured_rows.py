"""Invented rows of a scaling information base."""

from __future__ import annotations

from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
)
from csps.services.measured.measured_groups import kind_of


def accuracy_row(
    ratio: float, right: int, *, kind: str = "single", questions: int = 100
) -> AccuracyRow:
    return AccuracyRow(
        kind=kind,
        tokens=4_096,
        strategy="ntp",
        levels=3,
        drop_ratio=ratio,
        importance_layer="same",
        importance_window=64,
        group_shape="2+2",
        questions=questions,
        right_exact=questions,
        right=right,
        divergence=0.0,
        date="d",
    )


def add_times(base: ScalingInformationBase) -> None:
    for row in link_rows("0-0-0", "0-0-1", s_per_byte=1e-9):
        base.add(row)
    add_phases(base)


def link_rows(sender: str, receiver: str, *, s_per_byte: float) -> list[LinkRow]:
    """Return rows of a pair of ranks with 100 us of latency."""
    return [
        LinkRow(
            kind=kind_of(sender, receiver),
            sender=sender,
            receiver=receiver,
            bytes=size,
            seconds=1e-4 + size * s_per_byte,
            load=0.0,
            date="d",
        )
        for size in (8, 100_000)
    ]


def add_phases(base: ScalingInformationBase) -> None:
    for phase in ("qkv", "attention", "linear", "mlp"):
        for tokens in (100, 1_000):
            base.add(
                PhaseRow(
                    strategy="any",
                    group_shape="1",
                    tp=1,
                    phase=phase,
                    tokens=tokens,
                    keys=tokens,
                    bytes=0,
                    seconds=tokens * 1e-6,
                    load=0.0,
                    date="d",
                )
            )
