"""A Hub on 127.0.0.1: enough of the Hub's HTTP protocol for an unmodified `huggingface_hub`, with faults on demand.

Repositories live in memory. Commits, branches, pull requests, LFS objects (served by redirect from another host name,
as the Hub's CDN does), tokens, private and gated repositories are as the client sees them on the real Hub; Xet is not
offered, so clients need `HF_HUB_DISABLE_XET=1`.

    with LoopbackHub() as hub:
        hub.fail("GET", r"/cdn/", "truncate", times=1)
        subprocess.run([...], env={**os.environ, **hub.environment(cache)})
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from hub_repos import Blob, Fault, HubError, Repo, card_errors, describe, tree_entry

TOKEN = "hf_loopback"
USER = "tester"
_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gz")


class LoopbackHub:
    """The server; use it as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.tokens = {TOKEN: USER}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, int]] = []
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, cache: str | Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables that point a client of another process here, with its own cache."""
        variables = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", "HF_TOKEN": token or ""}
        return variables | {
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_ETAG_TIMEOUT": "5",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def fail(self, method: str, pattern: str, kind: str, times: int = 1) -> None:
        """Do something wrong to the next `times` requests of this method whose path matches.

        Args:
            kind: `"drop"` (close without an answer), `"truncate"` (half of the body), `"wrong_bytes"` (one bit of the
                body flipped), or a status code such as `"503"`.
        """
        self.faults.append(Fault(method, pattern, kind, times))

    def put(self, repo_id: str, folder: Path, repo_type: str = "model", card: str | None = None) -> None:
        """Make a repository of a folder, as if it had been pushed; `card` stands in for the folder's README.md."""
        repo = self.repos[repo_type, repo_id] = Repo(repo_id)
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        files = {name: Blob(path.read_bytes(), name.endswith(_LFS_SUFFIXES)) for name, path in paths.items()}
        if card is not None:
            files["README.md"] = Blob(card.encode(), False)
        self.lfs.update({blob.sha256: blob.data for blob in files.values() if blob.lfs})
        repo.commit("main", files)

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        """The files of a repository at a revision."""
        repo = self.repos[repo_type, repo_id]
        return {name: blob.data for name, blob in repo.commits[repo.resolve(revision) or ""].items()}

    def count(self, method: str, pattern: str) -> int:
        """Requests so far of this method whose path matches."""
        return sum(1 for seen, path, _ in self.requests if seen == method and re.search(pattern, path))

    def take_fault(self, method: str, path: str) -> str | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault.kind
        return None

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


_REPO = r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)"
_TYPE = r"(?P<type>model|dataset|space)s"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create_repo"),
    ("GET", rf"/api/{_TYPE}", "search"),
    ("POST", rf"/api/{_TYPE}/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/{_TYPE}/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/api/{_TYPE}/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("POST", rf"/api/{_TYPE}/{_REPO}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("GET", rf"/api/{_TYPE}/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", "tree"),
    ("GET", rf"/api/{_TYPE}/{_REPO}/refs", "refs"),
    ("GET", rf"/api/{_TYPE}/{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"/api/{_TYPE}/{_REPO}", "info"),
    ("POST", rf"/(?:(?P<type>dataset|space)s/)?{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs-upload/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
    ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", "cdn"),
    ("GET", rf"/(?:(?P<type>dataset|space)s/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub  # type: ignore[attr-defined]

    @property
    def user(self) -> str | None:
        return self.hub.tokens.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self._read_body()
        self.fault = self.hub.take_fault(self.command, url.path)
        if self.fault == "drop":
            self.hub.requests.append((self.command, url.path, 0))
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        try:
            if self.fault is not None and self.fault.isdigit():
                raise HubError(int(self.fault), f"Fault injected: {self.fault}")
            for route_method, pattern, name in _ROUTES:
                if route_method == method and (match := re.fullmatch(pattern, url.path)):
                    arguments = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    with self.hub.lock:
                        getattr(self, f"on_{name}")(**arguments)
                    return
            raise HubError(404, f"No such route: {method} {url.path}")
        except HubError as error:
            headers = {"X-Error-Message": error.message, "X-Request-Id": "loopback"}
            if error.code:
                headers["X-Error-Code"] = error.code
            self.send(json.dumps({"error": error.message}).encode(), error.status, headers)

    def _read_body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer, honouring a `Range` header on success."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked and status == 200:
            first, last = asked.groups()
            start = int(first) if first else max(0, len(body) - int(last))
            stop = min(len(body), int(last) + 1) if first and last else len(body)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
            body, status = body[start:stop], 206
        if self.fault == "wrong_bytes" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        self.hub.requests.append((self.command, urlsplit(self.path).path, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)

    def send_json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), headers=headers)

    def find(self, repo: str, type: str = "model", write: bool = False) -> Repo:
        found = self.hub.repos.get((type, repo))
        if found is None or (found.private and self.user is None):
            # The Hub does not tell an anonymous client whether a repository is missing or private.
            raise HubError(401 if self.user is None else 404, "Repository not found", "RepoNotFound")
        if write and self.user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return found

    def find_commit(self, repo: str, type: str, revision: str) -> tuple[Repo, str, dict[str, Blob]]:
        found = self.find(repo, type)
        oid = found.resolve(revision)
        if oid is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found, oid, found.commits[oid]

    def on_whoami(self) -> None:
        if self.user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        self.send_json({"type": "user", "name": self.user, "fullname": self.user, "orgs": [{"name": "org"}]})

    def on_validate_yaml(self) -> None:
        try:
            card = yaml.safe_load(re.match(r"\A---\n(.*?)\n---", json.loads(self.body)["content"], re.S).group(1))
            errors = card_errors(card)
        except (AttributeError, yaml.YAMLError) as error:
            errors = [f"no metadata: {error}"]
        self.send(
            json.dumps({"errors": [{"message": error} for error in errors], "warnings": []}).encode(),
            400 if errors else 200,
        )

    def on_create_repo(self) -> None:
        if self.user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        wanted = json.loads(self.body)
        type = wanted.get("type") or "model"
        repo_id = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        prefix = "" if type == "model" else f"{type}s/"
        answer = {"url": f"{self.hub.endpoint}/{prefix}{repo_id}", "name": repo_id, "id": repo_id}
        if (type, repo_id) in self.hub.repos:
            self.send(json.dumps({**answer, "error": "You already created this model repo"}).encode(), 409)
            return
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repo = self.hub.repos[type, repo_id] = Repo(repo_id, private)
        repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", False)})
        self.send_json(answer)

    def on_preupload(self, repo: str, revision: str, type: str) -> None:
        self.find(repo, type, write=True)
        _, _, present = self.find_commit(repo, type, revision)
        self.send_json({"files": [self._upload_mode(file, present) for file in json.loads(self.body)["files"]]})

    @staticmethod
    def _upload_mode(file: dict[str, Any], present: dict[str, Blob]) -> dict[str, Any]:
        path = file["path"]
        lfs = path.endswith(_LFS_SUFFIXES) or file["size"] > 10 * 2**20
        oid = present[path].oid if path in present else None
        return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def on_lfs_batch(self, repo: str, type: str = "model") -> None:
        self.find(repo, type, write=True)
        objects = []
        for entry in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.hub.endpoint}/lfs-upload/{entry['oid']}", "header": {}}
            actions = {} if entry["oid"] in self.hub.lfs else {"actions": {"upload": upload}}
            objects.append({"oid": entry["oid"], "size": entry["size"], **actions})
        self.send_json({"transfer": "basic", "objects": objects})

    def on_lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "The uploaded bytes do not have the announced SHA-256")
        self.hub.lfs[oid] = self.body
        self.send(b"")

    def on_commit(self, repo: str, revision: str, type: str) -> None:
        found = self.find(repo, type, write=True)
        _, parent, present = self.find_commit(repo, type, revision)
        files = dict(present)
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    raise HubError(422, f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = Blob(self.hub.lfs[value["oid"]], True)
            elif entry["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            elif entry["key"] == "deletedFolder":
                files = {
                    name: blob for name, blob in files.items() if not name.startswith(value["path"].rstrip("/") + "/")
                }
            elif value.get("parentCommit") not in (None, parent):
                raise HubError(412, "A commit has happened since.")
        number = sum(ref.startswith("refs/pr/") for ref in found.refs) + 1
        ref = f"refs/pr/{number}" if "create_pr" in self.query else revision
        oid = found.commit(ref, files)
        url = f"{self.hub.endpoint}/{repo}"
        pr_url = f"{url}/discussions/{number}" if "create_pr" in self.query else None
        self.send_json(
            {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "pullRequestUrl": pr_url}
        )

    def on_create_branch(self, repo: str, branch: str, type: str) -> None:
        found = self.find(repo, type, write=True)
        if branch in found.refs:
            raise HubError(409, "Reference already exists")
        start = found.resolve((json.loads(self.body or b"{}")).get("startingPoint") or "main")
        found.refs[branch] = start or ""
        self.send_json({})

    def on_refs(self, repo: str, type: str) -> None:
        refs = self.find(repo, type).refs
        named = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in refs.items()]
        branches = [ref for ref in named if not ref["name"].startswith("refs/")]
        self.send_json({"branches": branches, "converts": [], "tags": []})

    def on_info(self, repo: str, type: str, revision: str = "main") -> None:
        found, oid, files = self.find_commit(repo, type, revision)
        self.send_json({**describe(found, oid, files), "siblings": [{"rfilename": name} for name in sorted(files)]})

    def on_tree(self, repo: str, type: str, revision: str, path: str = "") -> None:
        _, _, files = self.find_commit(repo, type, revision)
        prefix = f"{path}/" if path else ""
        self.send_json([tree_entry(name, blob) for name, blob in sorted(files.items()) if name.startswith(prefix)])

    def on_paths_info(self, repo: str, type: str, revision: str) -> None:
        _, _, files = self.find_commit(repo, type, revision)
        is_json = self.body.lstrip().startswith(b"{")
        wanted = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode()).get("paths", [])
        wanted = [wanted] if isinstance(wanted, str) else wanted
        self.send_json([tree_entry(name, files[name]) for name in wanted if name in files])

    def on_search(self, type: str) -> None:
        tags = {tag for value in self.query.get("filter", []) for tag in value.split(",")}
        found = []
        for (repo_type, _), repo in sorted(self.hub.repos.items()):
            described = describe(repo, repo.refs["main"], repo.commits[repo.refs["main"]])
            visible = repo_type == type and not (repo.private and self.user is None)
            if visible and tags <= set(described["tags"]) and self.query.get("search", [""])[0] in repo.repo_id:
                found.append(described)
        self.send_json(found[: int(self.query.get("limit", ["1000"])[0])])

    def on_resolve(self, repo: str, revision: str, path: str, type: str = "model") -> None:
        found, oid, files = self.find_commit(repo, type, revision)
        if found.gated and self.user is None:
            raise HubError(401, f"Access to model {repo} is restricted.", "GatedRepo")
        headers = {"X-Repo-Commit": oid, "Content-Type": "application/octet-stream"}
        if path not in files:
            body = json.dumps({"error": "Entry not found"}).encode()
            self.send(body, 404, {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        blob = files[path]
        headers |= {"ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            self.send(blob.data, headers=headers)
            return
        headers |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.data))}
        # Another host name: the client keeps the headers of this answer only when a redirect leaves the host.
        cdn = self.hub.endpoint.replace("127.0.0.1", "localhost")
        self.send(b"", 302, {**headers, "Location": f"{cdn}/cdn/{blob.oid}"})

    def on_cdn(self, oid: str) -> None:
        if oid not in self.hub.lfs:
            raise HubError(404, "Not found")
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"{oid}"'}
        self.send(self.hub.lfs[oid], headers=headers)
