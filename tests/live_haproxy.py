"""HAProxy as Serve and the launcher of `csps serve` configure it, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from free_ports import free_ports
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from csps.services.launch.reverse_proxy import reverse_proxy_environment

START_DEADLINE_S = 60.0
LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def haproxy(
    folder: Path, router: tuple[str, int] | None, *, client_silence_s: int
) -> AsyncIterator[tuple[str, int]]:
    """Run HAProxy with Serve's own configuration; yield its address.

    Args:
        folder: its path must be short enough for a socket.
        router: address to which HAProxy forwards requests; None if Serve knows of none yet.
        client_silence_s: instead of `reverse_proxy.CLIENT_SILENCE_S`.
    """
    port, *others = free_ports(4)
    variables = reverse_proxy_environment(folder, folder, ports=others, host=LOOPBACK)
    config = _config(folder, port, others, client_silence_s)
    api = _api(config, folder, router)
    api._generate_config_file_internal()
    launcher = variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
    process = await asyncio.create_subprocess_exec(launcher, "-db", "-f", api.config_file_path)
    try:
        expected = b" 503 " if router is None else b" 200 "
        await asyncio.wait_for(_serving(port, process, expected), START_DEADLINE_S)
        yield LOOPBACK, port
    finally:
        process.kill()
        await process.wait()


def _config(folder: Path, port: int, others: list[int], client_silence_s: int) -> HAProxyConfig:
    return HAProxyConfig(
        http_options=HTTPOptions(host=LOOPBACK, port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        stats_port=others[0],
        metrics_port=others[1],
        timeout_client_s=client_silence_s,
        nbthread=1,
        is_head=True,
    )


def _api(config: HAProxyConfig, folder: Path, router: tuple[str, int] | None) -> HAProxyApi:
    api = HAProxyApi(config, config_file_path=str(folder / "haproxy.cfg"))
    if router is None:
        return api
    host, port = router
    backend = BackendConfig(
        name="http-csps",
        path_prefix="/",
        app_name="csps",
        servers=[ServerConfig(name="router", host=host, port=port)],
        http_health_check_path="/health",
    )
    api.set_backend_configs({backend.name: backend})
    return api


async def _serving(port: int, process: asyncio.subprocess.Process, status_word: bytes) -> None:
    """Wait until a request is answered with this status."""
    while process.returncode is None:
        try:
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if status_word in status:
                return
        except OSError:
            pass
        await asyncio.sleep(0.01)
    raise AssertionError(f"HAProxy ended with status {process.returncode}")
