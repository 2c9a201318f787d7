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

import pytest
from huggingface_hub.utils import close_session

from tests.hub_uploads import Writing, answer_upload

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What a Hub holds and does, and what it was asked for. Serves the repositories of `files` over HTTP."""

    files: dict[str, dict[str, bytes]]  # "models/org/name" or "datasets/org/name" to path to content
    gated: set[str] = field(default_factory=set)  # repositories whose files need a licence
    broken: set[str] = field(default_factory=set)  # paths whose download ends early
    endpoint: str = ""
    downloads: list[str] = field(default_factory=list)
    heads: dict[str, str] = field(default_factory=dict)  # repository to its last commit, SHA where none is said
    earlier: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)  # files of commits before it
    writing: Writing = field(default_factory=Writing)

    def head(self, repo: str) -> str:
        return self.heads.get(repo, SHA)

    def at(self, repo: str, revision: str | None) -> dict[str, bytes] | None:
        """The files of a commit or of the branch main, None where there is no such revision."""
        if revision in (None, "main", self.head(repo)):
            return self.files[repo]
        return self.earlier.get((repo, str(revision)))

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Make `files` the last commit of `repo`. Returns it."""
        self.earlier[repo, self.head(repo)] = self.files[repo]
        number = len(self.earlier)
        self.files[repo], self.heads[repo] = files, hashlib.sha1(str(number).encode()).hexdigest()
        return self.heads[repo]

    def info(self, repo: str, revision: str | None) -> dict[str, Any]:
        files = self.at(repo, revision)
        assert files is not None
        sha = self.head(repo) if revision in (None, "main") else revision
        siblings = [{"rfilename": path} for path in files]
        private = repo in self.writing.private
        return {"id": repo.partition("/")[2], "sha": sha, "private": private, "tags": [], "siblings": siblings}

    def tree(
        self, repo: str, revision: str | None, under: str = "", paths: list[str] | None = None
    ) -> list[dict[str, Any]]:
        """Files of a revision below a folder, or those of `paths`, and the folders that hold them."""
        held = self.at(repo, revision)
        assert held is not None
        inside = [path for path in held if path.startswith(under)]
        files = [{"type": "file", "path": path, "size": len(held[path]), "oid": etag(held[path])} for path in inside]
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
                    tree = what == "tree"
                    self.reply_json(hub.tree(repo, revision, under or "") if tree else hub.info(repo, revision))
            elif file := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
                repo = (file[1] or "models/") + file[2]
                if self.known(repo, file[3]):
                    self.reply_file(repo, file[3], file[4])
            else:
                self.refuse(404, "", "no such page")

        do_GET = do_HEAD = answer  # noqa: N815

        def do_POST(self) -> None:
            body, path = self.rfile.read(int(self.headers["Content-Length"])), urlsplit(self.path).path
            if api := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)/paths-info/([^/]+)", path):
                text = body.decode()
                asked = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
                if self.known(api[1], api[2]):
                    self.reply_json(hub.tree(api[1], api[2], paths=asked))
            else:
                self.write(path, body)

        def do_PUT(self) -> None:
            length = self.headers["Content-Length"]
            body = self.rfile.read(int(length)) if length else b"".join(self.chunks())
            self.write(urlsplit(self.path).path, body)

        def chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        def write(self, path: str, body: bytes) -> None:
            """Answer an upload; a connection that is to break is closed without an answer."""
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            answer = answer_upload(hub, path, body, token)
            if answer is None:
                self.close_connection = True
            elif answer.status == 200:
                self.reply_json(answer.data)
            else:
                code = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
                self.reply(answer.status, json.dumps(answer.data).encode(), code)

        def known(self, repo: str, revision: str | None) -> bool:
            if repo not in hub.files:
                self.refuse(404, "RepoNotFound", "Repository not found")
            elif hub.at(repo, revision) is None:
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return True
            return False

        def reply_file(self, repo: str, revision: str, path: str) -> None:
            held = hub.at(repo, revision)
            assert held is not None
            if repo in hub.gated:
                return self.refuse(403, "GatedRepo", "Access to this repository is restricted")
            if path not in held:
                return self.refuse(404, "EntryNotFound", "Entry not found")
            content = held[path]
            sha = hub.head(repo) if revision == "main" else revision
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, end = (int(wanted[1]), int(wanted[2] or len(content) - 1) + 1) if wanted else (0, len(content))
            headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
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


@contextmanager
def served_here(hub: Hub, patch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """Serve a Hub to the real client in this process, with a cache of its own, no proxy and no token."""
    with serve(hub) as served:
        values = {
            "ENDPOINT": served.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(home),
            "HF_TOKEN_PATH": str(home / "token"),
        }
        for name, value in values.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setenv("NO_PROXY", "127.0.0.1")
        close_session()  # it remembers proxies
        yield served
        close_session()


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
