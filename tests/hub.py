"""A Hub on this machine: as much of its HTTP interface as the real huggingface_hub and datasets clients use."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What a Hub holds and does, and what it was asked for. Serves the repositories of `files` over HTTP."""

    files: dict[str, dict[str, bytes]]  # "models/org/name" or "datasets/org/name" to path to content
    gated: set[str] = field(default_factory=set)  # repositories whose files need a licence
    broken: set[str] = field(default_factory=set)  # paths whose download ends early
    endpoint: str = ""
    downloads: list[str] = field(default_factory=list)

    def info(self, repo: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in self.files[repo]]
        return {"id": repo.partition("/")[2], "sha": SHA, "private": False, "tags": [], "siblings": siblings}

    def tree(self, repo: str, under: str = "", paths: list[str] | None = None) -> list[dict[str, Any]]:
        """Files of `repo` below a folder, or those of `paths`, and the folders that hold them."""
        inside = [path for path in self.files[repo] if path.startswith(under)]
        files = [
            {"type": "file", "path": path, "size": len(self.files[repo][path]), "oid": etag(self.files[repo][path])}
            for path in inside
        ]
        parents = {str(parent) for path in inside for parent in Path(path).parents} - {"."}
        folders = [{"type": "directory", "path": path, "oid": SHA, "size": 0} for path in sorted(parents)]
        return [item for item in folders + files if paths is None or item["path"] in paths]


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def make_handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if api := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.*))?", path):
                repo, what, revision, under = api.groups()
                if self.known(repo, revision):
                    self.reply_json(hub.tree(repo, under or "") if what == "tree" else hub.info(repo))
            elif file := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
                repo = (file[1] or "models/") + file[2]
                if self.known(repo, file[3]):
                    self.reply_file(repo, file[4])
            else:
                self.refuse(404, "", "no such page")

        do_GET = do_HEAD = answer  # noqa: N815

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            api = re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/paths-info/([^/]+)", urlsplit(self.path).path)
            if api is None:
                self.refuse(404, "", "no such page")
            elif self.known(api[1], api[2]):
                self.reply_json(hub.tree(api[1], paths=asked))

        def known(self, repo: str, revision: str | None) -> bool:
            if repo not in hub.files:
                self.refuse(404, "RepoNotFound", "Repository not found")
            elif revision not in (None, "main", SHA):
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return True
            return False

        def reply_file(self, repo: str, path: str) -> None:
            if repo in hub.gated:
                return self.refuse(403, "GatedRepo", "Access to this repository is restricted")
            if path not in hub.files[repo]:
                return self.refuse(404, "EntryNotFound", "Entry not found")
            content = hub.files[repo][path]
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(wanted[1]), int(wanted[2] or len(content) - 1) + 1) if wanted else (0, len(content))
            headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            if wanted:
                headers["Content-Range"] = f"bytes {start}-{min(end, len(content)) - 1}/{len(content)}"
            if self.command == "GET":
                hub.downloads.append(path)
            return self.reply(206 if wanted else 200, content[start:end], headers, path in hub.broken)

        def reply_json(self, data: Any) -> None:
            self.reply(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

        def refuse(self, status: int, code: str, message: str) -> None:
            self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

        def reply(self, status: int, body: bytes, headers: dict[str, str], broken: bool = False) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if broken else body)
            self.close_connection = broken

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(hub))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hub_environment(home: Path, **values: str) -> dict[str, str]:
    """An environment for a process that has its own Hub cache and sees no proxy and no token."""
    kept = {name: value for name, value in os.environ.items() if not re.match(r"HF_|.*_PROXY$", name, re.IGNORECASE)}
    return {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **values}


def run_python(script: str, *arguments: str, env: dict[str, str]) -> Any:
    """What `script`, run by a new Python, prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
