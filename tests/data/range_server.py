"""An HTTP server on this machine that answers range requests and can be told to fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class RangeServer:
    """What a test sees of the server."""

    url: str
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, range header) of each GET."""
    failures_left: int = 0
    """So many of the next range requests are answered with status 503."""
    fails_whole_files: bool = False
    """Requests without a range count as well."""

    def bytes_asked_for(self, suffix: str) -> int:
        """Bytes of the ranges that were asked of files with this suffix."""
        ranges = [header for path, header in self.requests if path.endswith(suffix) and header]
        bounds = [re.fullmatch(r"bytes=(\d+)-(\d+)", header) for header in ranges]
        return sum(int(match[2]) - int(match[1]) + 1 for match in bounds if match)


@contextmanager
def serve(folder: Path) -> Iterator[RangeServer]:
    """Serve the files of `folder` while the context lasts."""
    state = RangeServer("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path, asked = folder / self.path.lstrip("/"), self.headers.get("Range")
            if body:
                state.requests.append((self.path, asked))
            if (asked or (body and state.fails_whole_files)) and state.failures_left:
                state.failures_left -= 1
                self.send_error(503)
                return
            if not path.is_file():
                self.send_error(404)
                return
            self._send(path.read_bytes(), asked, body=body)

        def _send(self, content: bytes, asked: str | None, *, body: bool) -> None:
            total, first, last = len(content), 0, len(content) - 1
            if asked:
                start, _, end = asked.removeprefix("bytes=").partition("-")
                first, last = int(start), min(int(end), last) if end else last
            part = content[first : last + 1]
            self.send_response(206 if asked else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
            self.end_headers()
            if body:
                self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
