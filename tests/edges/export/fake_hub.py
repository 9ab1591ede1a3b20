"""A Hugging Face Hub on loopback that keeps the files of commits; what huggingface_hub asks of it to push a folder."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.edges.servers import QuietHandler, served

TOKEN, USER = "hf_of_the_tests", "me"
COMMIT = "0" * 40


@dataclass
class FakeHub:
    """Its repositories: the files of each by name, and whether it is private; and why commits are refused, if so."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    refusal: str | None = None

    def answer(self, verb: str, path: str, body: bytes) -> tuple[int, object]:
        path = path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, {"name": USER, "type": "user"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or USER}/{wanted['name']}"
            if not name.startswith(f"{USER}/"):
                return 403, {"error": "You don't have the rights to create a model under this namespace"}
            if name in self.files:
                return 409, {"error": "You already created this model repo", "url": f"{self.address}/{name}"}
            self.files[name], self.private[name] = (
                {".gitattributes": b""},
                bool(wanted.get("private")) or wanted.get("visibility") == "private",
            )
            return 200, {"url": f"{self.address}/{name}", "name": name}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path)
        if found is None or (name := found[1]) not in self.files:
            return 404, {"error": "Repository not found"}
        what = found[2] or ""
        if what.startswith("preupload/"):
            asked = json.loads(body)["files"]
            return 200, {
                "files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            }
        if what.startswith("commit/"):
            if self.refusal is not None:
                return 403, {"error": self.refusal}
            self._commit(name, body)
            url = f"{self.address}/{name}/commit/{COMMIT}"
            return 200, {"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""}
        if what.startswith("tree/"):
            listed = [
                {"type": "file", "path": path, "size": len(content), "oid": COMMIT}
                for path, content in self.files[name].items()
            ]
            return 200, listed
        siblings = [{"rfilename": path} for path in self.files[name]]
        about = {"id": name, "modelId": name, "sha": COMMIT, "private": self.private[name], "siblings": siblings}
        return 200, {**about, "tags": [], "downloads": 0, "likes": 0}

    def _commit(self, name: str, body: bytes) -> None:
        self.commits.append(name)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[name][value["path"]]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(QuietHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            code, answer = hub.answer(self.command, self.path, body) if known else (401, {"error": "Invalid token"})
            content = json.dumps(answer).encode()
            self.send_response(code)
            if code >= 400:
                self.send_header("X-Error-Message", answer["error"])
                if code == 404:
                    self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve

    with served(Handler) as hub.address:
        yield hub
