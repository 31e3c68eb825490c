# SPDX-License-Identifier: Apache-2.0
"""A server that speaks as much of the Hugging Face hub's protocol as reading one data set needs, over a real socket.

    python tests/judge/hub_server.py FOLDER        serves FOLDER/OWNER/NAME as data sets, prints its address

Use it by HF_ENDPOINT.
"""

import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The calls of `datasets.load_dataset(..., streaming=True)`."""

    root = Path()
    protocol_version = "HTTP/1.1"

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", X_Error_Code=code, Content_Type="application/json")

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        oid = hashlib.sha1(str(path).encode()).hexdigest()
        size = 0 if path.is_dir() else path.stat().st_size
        return {"type": kind, "oid": oid, "size": size, "path": path.relative_to(folder).as_posix()}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        found = re.match(r"/api/datasets/([^/]+/[^/]+)/paths-info/", self.path)
        if not found:
            self._missing("EntryNotFound")
            return
        folder = self.root / found[1]
        names = json.loads(sent)["paths"] if sent.startswith(b"{") else parse_qs(sent.decode())["paths"]
        self._json([self._entry(folder, folder / name) for name in names if (folder / name).exists()])

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.match(r"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|resolve)/[^/]+/?(.*))?$", path)
        if not found or not (folder := self.root / found[1]).is_dir():
            self._missing("RepoNotFound")
            return
        kind, rest = found[2], found[3] or ""
        if kind == "resolve":
            self._resolve(folder / rest)
        elif kind == "tree":
            self._json([self._entry(folder, entry) for entry in sorted((folder / rest).glob("**/*"))])
        else:
            files = [{"rfilename": entry["path"]} for entry in (self._entry(folder, one) for one in folder.rglob("*"))]
            about = {"id": found[1], "sha": REVISION, "private": False, "gated": False, "disabled": False, "tags": []}
            self._json(about | {"siblings": files, "downloads": 0, "likes": 0})

    def _resolve(self, path: Path) -> None:
        if not path.is_file():
            self._missing("EntryNotFound")
            return
        data, status, extra = path.read_bytes(), 200, {}
        span = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            start, end = int(span[1]), int(span[2]) + 1 if span[2] else len(data)
            extra = {"Content_Range": f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}"}
            data, status = data[start:end], 206
        etag = f'"{hashlib.sha1(str(path).encode()).hexdigest()}"'
        self._send(status, data, X_Repo_Commit=REVISION, ETag=etag, Accept_Ranges="bytes", **extra)

    def log_message(self, format: str, *args: Any) -> None:
        sys.stderr.write(f"{format % args}\n")


def main() -> None:
    Hub.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
