"""Cost of TLS on connections between router and ranks.

    python benchmarks/tls.py [--rounds 30]

Client and server are in this process, with loopback between them, on uvloop. For plain and
encrypted connections, which take turns, the output has medians over rounds: processor microseconds
of both ends for a token that a rank notifies, in bursts as an iteration of 16 sequences sends them;
processor milliseconds for a command with a prompt of 16K tokens; and seconds for connecting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.server import Peer, RpcServer
from csps.protocols.rpc.tls import Tls, TlsFiles

SECRET = b"a secret of the benchmark"
WAIT_S = 60.0
BURST, BURSTS, PROMPTS = 16, 200, 20
PROMPT = list(range(16_384))


def certificate(folder: Path) -> TlsFiles:
    """Write a certificate that has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "benchmark.crt", folder / "benchmark.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return TlsFiles(certificate=str(files[0]), key=str(files[1]), authority=str(files[0]))


class Ends:
    """A server that notifies tokens when it is asked, and how many of them have arrived."""

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls
        self._arrived = 0
        self._all = asyncio.Event()
        handlers: dict[str, Any] = {"tokens": self._notify, "prompt": lambda payload, peer: None}
        self.server = RpcServer(handlers, secret=SECRET, tls=tls)

    async def _notify(self, payload: Any, peer: Peer) -> None:
        for _ in range(BURSTS):
            for sequence in range(BURST):
                peer.notify("token", {"sequence_id": sequence, "token": 151_000, "index": 17})
            await peer.drain()
            await asyncio.sleep(0)  # the next iteration's tokens leave in a write of their own

    def _take(self, method: str, payload: Any) -> None:
        self._arrived += 1
        if self._arrived == BURST * BURSTS:
            self._all.set()

    async def round(self, host: str, port: int) -> dict[str, float]:
        """Measure once."""
        began = time.perf_counter()
        client = await RpcClient.connect(
            host,
            port,
            secret=SECRET,
            name="benchmark",
            deadline_s=WAIT_S,
            tls=self._tls,
            on_notification=self._take,
        )
        connecting_s = time.perf_counter() - began
        self._arrived = 0
        self._all.clear()
        before = time.process_time()
        await client.call("tokens", deadline_s=WAIT_S)
        await asyncio.wait_for(self._all.wait(), WAIT_S)
        token_us = 1e6 * (time.process_time() - before) / (BURST * BURSTS)
        before = time.process_time()
        for _ in range(PROMPTS):
            await client.call("prompt", {"tokens": PROMPT}, deadline_s=WAIT_S)
        prompt_ms = 1e3 * (time.process_time() - before) / PROMPTS
        await client.close()
        return {"token_us": token_us, "prompt_ms": prompt_ms, "connecting_s": connecting_s}


async def measure(rounds: int, tls: Tls) -> dict[str, dict[str, float]]:
    """Return medians for both kinds of connections."""
    ends = {"plain": Ends(None), "tls": Ends(tls)}
    addresses = {kind: await end.server.start("127.0.0.1") for kind, end in ends.items()}
    found: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in ends}
    for _ in range(rounds):
        for kind, end in ends.items():
            for name, value in (await end.round(*addresses[kind])).items():
                found[kind][name].append(value)
    for end in ends.values():
        await end.server.close(0.0)
    return {
        kind: {name: statistics.median(values) for name, values in of.items()}
        for kind, of in found.items()
    }


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        tls = Tls.load(certificate(Path(folder)))
        print(json.dumps(uvloop.run(measure(rounds, tls)), indent=1))


if __name__ == "__main__":
    main()
