"""A stand-in for the hub on loopback: the parts of its HTTP API that `huggingface_hub` uses for models, kept in memory.

Repositories are lists of commits, each a mapping of paths to bytes. Small files arrive inside a commit, large ones (by suffix here, as
`.gitattributes` says on the hub) through the batch API of Git LFS. `broken` makes the next answers an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants as constants
import pytest
import yaml

TOKEN, USER = "hf_a_token_that_only_the_stand_in_knows", "my-name"
LARGE = (".safetensors", ".png", ".mp4", ".zip", ".pkl")
REPO = r"/(?P<repo>[\w.-]+/[\w.-]+)"


class Repo:
    """A repository: its commits by id, the newest last."""

    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a version, and return its id."""
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[digest] = files
        return digest

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.newest]

    @property
    def newest(self) -> str:
        return list(self.commits)[-1]


class Hub(ThreadingHTTPServer):
    """The server. `requests` are the methods and paths that were asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.broken: int | None = None
        self.lie: Callable[[Handler, str], bool] | None = None
        """Answers a path in another way than the hub does; returns whether it did."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(Exception):
    """An answer other than success, with the hub's own code for it."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Handler(BaseHTTPRequestHandler):
    """Answers one request by the first route that fits."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self.chunks()
        if self.server.lie is not None and self.server.lie(self, path):
            return
        try:
            if self.server.broken is not None:
                raise Answer(self.server.broken, message="out of order")
            for method, route, name in ROUTES:
                found = re.fullmatch(route, path)
                if found is not None and self.command in method:
                    getattr(self, name)(**found.groupdict())
                    return
            raise Answer(404, message=f"no route for {self.command} {path}")
        except Answer as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self.send(json.dumps({"error": refusal.message}).encode(), refusal.status, {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def chunks(self) -> bytes:
        """Read a body of chunks, which comes without a length."""
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return body

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, content: object) -> None:
        self.send(json.dumps(content).encode(), headers={"Content-Type": "application/json"})

    def log_message(self, *args: object) -> None:
        """Print nothing."""

    @property
    def logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def need_token(self) -> None:
        if not self.logged_in:
            raise Answer(401, message="Invalid username or password.")

    def find(self, repo: str) -> Repo:
        """The repository; a private one is hidden from those who are not logged in."""
        found = self.server.repos.get(repo)
        if found is None or (found.private and not self.logged_in):
            raise Answer(404 if self.logged_in else 401, "RepoNotFound", "Repository not found")
        return found

    def version(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        found = self.find(repo)
        commit = found.newest if revision in ("main", "HEAD") else revision
        if commit not in found.commits:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, found.commits[commit]

    def whoami(self) -> None:
        self.need_token()
        self.send_json({"name": USER, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        self.need_token()
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        if not repo.startswith(f"{USER}/"):
            raise Answer(403, message=f"You don't have the rights to create a model under the namespace {repo.partition('/')[0]}")
        if repo in self.server.repos:
            known = {"error": "You already created this model repo", "url": f"{self.server.url}/{repo}"}
            self.send(json.dumps(known).encode(), 409)
            return
        self.server.repos[repo] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        self.send_json({"name": repo, "id": repo, "url": f"{self.server.url}/{repo}"})

    def info(self, repo: str, revision: str = "main") -> None:
        commit, files = self.version(repo, revision)
        siblings = [{"rfilename": name} for name in files]
        self.send_json({"_id": "0", "id": repo, "sha": commit, "private": self.find(repo).private, "siblings": siblings, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        self.send_json([self.entry(name, content) for name, content in self.version(repo, revision)[1].items()])

    def entry(self, name: str, content: bytes) -> dict[str, object]:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}} if is_large(name) else {}
        return {"type": "file", "path": name, "size": len(content), "oid": blob, **large}

    def preupload(self, repo: str, revision: str) -> None:
        self.need_token()
        asked = json.loads(self.body)["files"]
        mode = {True: "lfs", False: "regular"}
        self.send_json({"files": [{"path": f["path"], "uploadMode": mode[is_large(f["path"])], "shouldIgnore": False} for f in asked]})

    def batch(self, repo: str) -> None:
        self.need_token()
        objects = []
        for each in json.loads(self.body)["objects"]:
            known = each["oid"] in self.server.large
            upload = {} if known else {"actions": {"upload": {"href": f"{self.server.url}/large/{each['oid']}", "header": {}}}}
            objects.append({**each, **upload})
        self.send_json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Answer(400, message="the content has another hash")
        self.server.large[oid] = self.body
        self.send(b"")

    def commit(self, repo: str, revision: str) -> None:
        self.need_token()
        found = self.find(repo)
        files = dict(found.files)
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = found.commit(files)
        self.send_json({"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "hookOutput": ""})

    def validate(self) -> None:
        """Check the metadata at the beginning of a page, as far as results go."""
        content = json.loads(self.body)["content"]
        data = yaml.safe_load(content.split("---")[1])
        results = [result for model in data.get("model-index", []) for result in model["results"]]
        if not all({"task", "dataset", "metrics"} <= result.keys() for result in results):
            raise Answer(400, message="model-index is invalid")
        self.send_json({"errors": [], "warnings": []})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        commit, files = self.version(repo, revision)
        if name not in files:
            raise Answer(404, "EntryNotFound", "Entry not found")
        content, entry = files[name], self.entry(name, files[name])
        etag = hashlib.sha256(content).hexdigest() if is_large(name) else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self.send(content, headers=headers)
            return
        begin, end = int(asked[1]), int(asked[2] or len(content) - 1)
        self.send(content[begin : end + 1], 206, {**headers, "Content-Range": f"bytes {begin}-{end}/{len(content)}"})


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


ROUTES = [
    (("GET",), "/api/whoami-v2", "whoami"),
    (("POST",), "/api/repos/create", "create"),
    (("POST",), "/api/validate-yaml", "validate"),
    (("GET",), f"/api/models{REPO}", "info"),
    (("GET",), f"/api/models{REPO}/revision/(?P<revision>.+)", "info"),
    (("GET",), f"/api/models{REPO}/tree/(?P<revision>.+)", "tree"),
    (("POST",), f"/api/models{REPO}/preupload/(?P<revision>.+)", "preupload"),
    (("POST",), f"/api/models{REPO}/commit/(?P<revision>.+)", "commit"),
    (("POST",), f"{REPO}.git/info/lfs/objects/batch", "batch"),
    (("PUT",), "/large/(?P<oid>[0-9a-f]+)", "put"),
    (("GET", "HEAD"), f"{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "resolve"),
]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub until the end of the block."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def talk_to(hub: Hub, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the client in this process talk to a hub, with a cache in a folder: it reads the environment's variables only once."""
    settings = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_STORED_TOKENS_PATH": str(folder / "tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in settings.items():
        patch.setattr(constants, name, value)
    patch.setenv("HF_TOKEN", TOKEN)
