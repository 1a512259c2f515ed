"""The part of the Hugging Face Hub's API that huggingface_hub calls to push and pull a model, on
loopback."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN, COMMIT = "hf_secret", "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """The files of each repository. Without a token, private repositories do not exist."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Api)
        self.repos = {}
        self.private = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Api(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if asked.get("organization")
                else asked["name"]
            )
            if name in self.server.repos:
                return self.answer(
                    409,
                    {
                        "error": "You already created this model repo",
                        "url": f"{self.server.url}/{name}",
                    },
                )
            self.server.repos[name] = {}
            if (
                asked.get("private") or asked.get("visibility") == "private"
            ):  # of huggingface_hub 1, of 2
                self.server.private.add(name)
            return self.answer(200, {"url": f"{self.server.url}/{name}"})
        found = re.fullmatch(r"/api/models/(.+)/(preupload|commit)/main", path)
        if not found or found[1] not in self.server.repos:
            return self.answer(404, {"error": "Repository not found"}, "RepoNotFound")
        if found[2] == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repos[found[1]][line["value"]["path"]] = base64.b64decode(
                    line["value"]["content"]
                )
        url = f"{self.server.url}/{found[1]}/commit/{COMMIT}"
        return self.answer(
            200, {"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""}
        )

    def do_GET(self):
        found = re.fullmatch(r"/(.+)/resolve/([^/]+)/([^/]+)", self.path.partition("?")[0])
        seen = found and found[1] in self.server.repos
        if found and found[1] in self.server.private:
            seen = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not found or not seen:
            return self.answer(401, {"error": "Repository not found"}, "RepoNotFound")
        if found[2] not in ("main", "v1", COMMIT):
            return self.answer(404, {"error": "Invalid rev id"}, "RevisionNotFound")
        content = self.server.repos[found[1]].get(found[3])
        if content is None:
            return self.answer(404, {"error": "Entry not found"}, "EntryNotFound")
        self.answer(200, content)

    do_HEAD = do_GET

    def answer(self, status, content, error=""):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
