"""A Hub of models on this machine, as the Hugging Face client asks it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub(ThreadingHTTPServer):
    """A Hub with the files of one model."""

    model: str
    files: dict[str, bytes]
    asked: list[str]
    """Paths of all requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: LocalHub

    def do_GET(self) -> None:
        path, model = self.path.partition("?")[0], self.server.model
        self.server.asked.append(path)
        if path in (f"/api/models/{model}/revision/{name}" for name in ("main", COMMIT)):
            self._send(json.dumps({"id": model, "modelId": model, "sha": COMMIT}).encode())
        elif path == f"/api/models/{model}/tree/{COMMIT}":
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                for name, data in self.server.files.items()
            ]
            self._send(json.dumps(listed).encode())
        elif path.startswith(f"/{model}/resolve/{COMMIT}/"):
            data = self.server.files[path.rpartition(f"{COMMIT}/")[2]]
            self._send(data, ETag=f'"{_oid(data)}"', **{"X-Repo-Commit": COMMIT})
        elif path.startswith("/api/models/some-org/gated"):
            self._send(b"{}", 403, **{"X-Error-Code": "GatedRepo"})
        else:
            self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def local_hub(model: str, files: dict[str, bytes]) -> Iterator[LocalHub]:
    """Serve a model under its id. Ids that begin with some-org/gated need terms to be accepted."""
    server = LocalHub(("127.0.0.1", 0), _Answer)
    server.model, server.files, server.asked = model, files, []
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
