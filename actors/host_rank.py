"""Host one rank in a process of its own, without Ray: `python -m csps.actors.host_rank CONFIG`.

CONFIG is a JSON object with the fields of `RankConfig` and, for ranks other than 0, `store`:
[host, port] as rank 0 printed it. The cluster secret comes from CSPS_CLUSTER_SECRET. Prints one
JSON line with `store` before the gang has formed, one with `rpc` after, and serves until its
standard input closes, so that it never outlives the program that started it.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from csps.actors.comm.rendezvous import HostedStore, StoreAddress, host_store
from csps.actors.worker.rank import Rank
from csps.actors.worker.rank_config import RankConfig


def main(arguments: list[str]) -> None:
    """Run a rank until standard input ends."""
    logging.basicConfig(level=os.environ.get("CSPS_LOG", "WARNING"))
    fields = json.loads(arguments[0])
    address = fields.pop("store", None)
    config = RankConfig(**fields)
    secret = os.environ["CSPS_CLUSTER_SECRET"].encode()
    store = _announced_store(config.host, secret) if address is None else StoreAddress(*address)
    rank = Rank(config, secret=secret, store=store)
    _say(rpc=rank.start())
    try:
        sys.stdin.read()
    finally:
        rank.close()


def _announced_store(host: str, secret: bytes) -> HostedStore:
    hosted = host_store(host, secret)
    _say(store=[hosted.address.host, hosted.address.port])
    return hosted


def _say(**fact: object) -> None:
    print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
