"""The ledger against a plain list of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csps.services.scheduling.kv_ledger import KvLedger

PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
CAPACITIES = (10, 20, 5)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "give_back", "give_back_all"]),
        st.integers(0, 4),
        st.lists(st.integers(0, 12), min_size=3, max_size=3),
    ),
    max_size=60,
)


@PATIENT
@given(MOVES)
def test_any_sequence_agrees_with_a_list_of_holdings(
    moves: list[tuple[str, int, list[int]]],
) -> None:
    ledger = KvLedger(CAPACITIES)
    held: dict[tuple[int, int], int] = {}
    for kind, owner, amounts in moves:
        used = [sum(n for (_, at), n in held.items() if at == i) for i in range(3)]
        owns = any(who == owner for who, _ in held)
        fits = all(u + n <= c for u, n, c in zip(used, amounts, CAPACITIES, strict=True))
        if kind == "reserve" and not owns:
            if fits:
                ledger.reserve(owner, dict(enumerate(amounts)))
                held |= {(owner, at): n for at, n in enumerate(amounts)}
            else:
                with pytest.raises(AssertionError):
                    ledger.reserve(owner, dict(enumerate(amounts)))
        elif kind == "give_back":
            at = amounts[0] % 3
            ledger.give_back(owner, at)
            held.pop((owner, at), None)
        elif kind == "give_back_all":
            ledger.give_back_all(owner)
            held = {key: n for key, n in held.items() if key[0] != owner}
        ledger.check_integrity()
        expected = tuple(sum(n for (_, at), n in held.items() if at == i) for i in range(3))
        assert ledger.used == expected
        assert ledger.owners == {who for who, _ in held}
        assert all(ledger.free(i) == CAPACITIES[i] - expected[i] for i in range(3))


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    ledger = KvLedger(CAPACITIES)
    with pytest.raises(AssertionError, match="6 slots of instance 2 wanted, 5 free"):
        ledger.reserve(1, {0: 10, 2: 6})
    assert ledger.used == (0, 0, 0)


def test_give_back_tells_when_nothing_is_left() -> None:
    ledger = KvLedger(CAPACITIES)
    ledger.reserve(1, {0: 3, 1: 4})
    assert not ledger.give_back(1, 0)
    assert not ledger.give_back(1, 0)
    assert ledger.give_back(1, 1)
    assert ledger.give_back(1, 1)


def test_integrity_finds_a_lost_slot() -> None:
    ledger = KvLedger(CAPACITIES)
    ledger.reserve(1, {0: 3})
    ledger._used[0] = 2
    with pytest.raises(AssertionError):
        ledger.check_integrity()
