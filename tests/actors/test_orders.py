"""Orders reach every rank of the gang, however many there are."""

from __future__ import annotations

import pytest
from mesh_threads import on_ranks

from csps.actors.mesh import Mesh
from csps.actors.orders import Change, Order, OrderChannel


def batch(count: int, first: int = 0) -> list[Order]:
    changes = list(Change)
    return [
        Order(changes[index % 4], rid=2**62 + first + index, token=index) for index in range(count)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_hears_every_order_in_order(ranks: int) -> None:
    """20 go into one message, more need two."""
    batches = [batch(0), batch(1), batch(20), batch(21), batch(0), batch(300), batch(2, first=7)]

    def body(mesh: Mesh) -> list[list[Order]]:
        channel = OrderChannel(mesh)
        if mesh.rank:
            return [channel.receive() for _ in batches]
        for orders in batches:
            channel.broadcast(orders)
        channel.flush()
        return batches

    for heard in on_ranks(ranks, body):
        assert heard == batches
