"""The Hub on this machine, as far as it is written to: what it answers to the calls of an upload."""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from tests.hub import Hub

TOKEN = "hf_writer"
LICENCES = ("mit", "apache-2.0", "other")


@dataclass
class Writing:
    """What a Hub allows, which calls it breaks, and what it was sent."""

    members: set[str] = field(default_factory=lambda: {"org"})  # organisations that TOKEN may write to
    private: set[str] = field(default_factory=set)  # repositories
    broken: list[str] = field(default_factory=list)  # calls whose connection breaks: patterns, each for one call
    lost: list[str] = field(default_factory=list)  # calls that are done and whose answer is lost
    blobs: dict[str, bytes] = field(default_factory=dict)  # large files that arrived, by SHA-256
    calls: list[str] = field(default_factory=list)  # paths


@dataclass(frozen=True)
class Answer:
    status: int
    data: Any
    code: str = ""
    message: str = ""


def refusal(status: int, message: str, code: str = "") -> Answer:
    return Answer(status, {"error": message}, code, message)


def answer_upload(hub: "Hub", path: str, body: bytes, token: str) -> Answer | None:
    """What the Hub answers to a call that writes; None where the connection breaks instead."""
    writing = hub.writing
    writing.calls.append(path)
    if _taken(writing.broken, path):
        return None
    answer = _answer(hub, path, body, token)
    return None if _taken(writing.lost, path) else answer


def _taken(patterns: list[str], path: str) -> bool:
    found = next((pattern for pattern in patterns if re.search(pattern, path)), None)
    if found is not None:
        patterns.remove(found)
    return found is not None


def _answer(hub: "Hub", path: str, body: bytes, token: str) -> Answer:
    if blob := re.fullmatch(r"/blobs/(\w+)", path):  # signed: needs no token
        assert hashlib.sha256(body).hexdigest() == blob[1]
        hub.writing.blobs[blob[1]] = body
        return Answer(200, {})
    if path == "/api/validate-yaml":
        return _validated(json.loads(body)["content"])
    if token != TOKEN:
        return refusal(401, "Invalid credentials in Authorization header")
    if path == "/api/repos/create":
        return _created(hub, json.loads(body))
    found = re.fullmatch(r"/(api/models/)?(\w+/\w+)(/preupload/|/commit/|\.git/info/lfs/objects/).*", path)
    return _written(hub, f"models/{found[2]}", found[3], body) if found else refusal(404, "no such page")


def _written(hub: "Hub", repo: str, what: str, body: bytes) -> Answer:
    if repo not in hub.files:
        return refusal(404, "Repository not found", "RepoNotFound")
    if repo.split("/")[1] not in hub.writing.members:
        return refusal(403, "Forbidden: you don't have write access")
    match what:
        case "/preupload/":
            return Answer(200, {"files": [_mode(hub, repo, file) for file in json.loads(body)["files"]]})
        case "/commit/":
            return _committed(hub, repo, [json.loads(line) for line in body.splitlines()])
        case _:
            return Answer(200, {"objects": [_place(hub, item) for item in json.loads(body)["objects"]]})


def _validated(card: str) -> Answer:
    """The Hub reads the header, knows licences, and wants a result's task, data set and metrics."""
    fields = yaml.safe_load(card.split("---\n")[1])
    problems = []
    if fields.get("license") not in LICENCES:
        problems.append(f'"license" must be one of {list(LICENCES)}')
    for result in (fields.get("model-index") or [{"results": []}])[0]["results"]:
        if not (result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]):
            problems.append('"model-index[0].results" is incomplete')
        problems += [str(metric) for metric in result["metrics"] if not (metric["type"] and "value" in metric)]
    return Answer(400 if problems else 200, {"errors": [{"message": text} for text in problems], "warnings": []})


def _created(hub: "Hub", asked: dict[str, Any]) -> Answer:
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] not in hub.writing.members:
        return refusal(403, "You don't have the rights to create a model under this namespace")
    if f"models/{name}" in hub.files:
        return Answer(409, {"error": "You already created this model repo", "url": f"{hub.endpoint}/{name}"})
    hub.files[f"models/{name}"] = {".gitattributes": b"*.safetensors filter=lfs"}
    if asked.get("visibility") == "private" or asked.get("private"):
        hub.writing.private.add(f"models/{name}")
    return Answer(200, {"url": f"{hub.endpoint}/{name}"})


def _mode(hub: "Hub", repo: str, file: dict[str, Any]) -> dict[str, Any]:
    """How a file is to be sent, and the digest of the one that is there."""
    path, there = file["path"], hub.files[repo].get(file["path"])
    large = path.endswith(".safetensors")
    git = b"blob %d\0" % len(there) + there if there is not None else b""
    mark = hashlib.sha256(there or b"") if large else hashlib.sha1(git)
    oid = None if there is None else mark.hexdigest()
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}


def _place(hub: "Hub", item: dict[str, Any]) -> dict[str, Any]:
    """Where a large file is to be put, unless it has arrived before."""
    upload = {"upload": {"href": f"{hub.endpoint}/blobs/{item['oid']}"}}
    return item if item["oid"] in hub.writing.blobs else {**item, "actions": upload}


def _committed(hub: "Hub", repo: str, lines: list[dict[str, Any]]) -> Answer:
    files = dict(hub.files[repo])
    if lines[0]["value"].get("parentCommit", hub.head(repo)) != hub.head(repo):
        return refusal(412, "A commit has happened since")
    for line in lines[1:]:
        value = line["value"]
        match line["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = hub.writing.blobs[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
    sha = hub.commit(repo, files)
    return Answer(200, {"commitUrl": f"{hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha})
