"""The store at which the ranks of a group find one another."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

JOIN_DEADLINE = timedelta(seconds=60)
"""For every rank of a group to arrive."""


@dataclass(frozen=True)
class StoreAddress:
    """Where a gang's rendezvous store listens."""

    host: str
    port: int


@dataclass(frozen=True)
class HostedStore:
    """A rendezvous store served by this process for as long as the object lives."""

    address: StoreAddress
    store: Store


def host_store(host: str) -> HostedStore:
    """Serve a rendezvous store on a free port of `host`, and on no other address.

    The socket is ours because a store that makes its own listens on all interfaces, and, where
    that is IPv6 with mapped addresses, asks the DNS for the name of everyone who connects.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=JOIN_DEADLINE,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )
    return HostedStore(StoreAddress(host, port), store)


def join_store(address: StoreAddress) -> Store:
    """Connect to a store that another rank serves."""
    return TCPStore(
        address.host, address.port, is_master=False, wait_for_workers=False, timeout=JOIN_DEADLINE
    )
