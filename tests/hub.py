"""A hub with two repositories on this machine: enough of its web interface to read them."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import huggingface_hub
from huggingface_hub import HfFileSystem


class Hub:
    """Commits of repositories: {"models/o/n": {revision: {path: bytes}}}; `main` is the last."""

    def __init__(self):
        self.repositories, self.asked = {}, []

    def commit(self, repository, files):
        """Returns the commit, which main is at from now on."""
        name = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(repository, {})[name] = files
        self.repositories[repository]["main"] = files
        return name

    def find(self, repository, revision):
        """(commit, files) or None."""
        commits = self.repositories.get(repository, {})
        files = commits.get(revision)
        names = (name for name in commits if name != "main" and commits[name] is files)
        return None if files is None else (next(names), files)

    def api(self, path):
        """(repository, revision, what is asked, commit and files) of an address, or None."""
        found = re.fullmatch(
            r"/api/(models|datasets)/([\w.-]+/[\w.-]+)/(revision|tree|paths-info)/([^/?]+)/?([^?]*).*",
            path,
        )
        if not found:
            return None
        kind, name, what, revision, inner = found.groups()
        there = self.find(f"{kind}/{name}", unquote(revision))
        return None if there is None else (name, what, unquote(inner), *there)

    def answer(self, path, body):
        """The JSON value of an address, or None."""
        if (found := self.api(path)) is None:
            return None
        name, what, inner, commit, files = found
        entry = lambda p, data: {
            "type": "file", "path": p, "size": len(data), "oid": hashlib.sha1(data).hexdigest()
        }  # fmt: skip
        if what == "revision":
            siblings = [{"rfilename": p, "size": len(d)} for p, d in files.items()]
            return {"id": name, "sha": commit, "private": False, "siblings": siblings}
        if what == "tree":
            return [entry(p, d) for p, d in files.items() if p.startswith(inner)]
        asked = re.findall(r"paths=([^&]*)", body) or json.loads(body or "{}").get("paths", [])
        asked = {unquote(p) for p in ([asked] if isinstance(asked, str) else asked)}
        return [entry(p, d) for p, d in files.items() if p in asked]

    def file(self, path):
        """(commit, bytes) of a file's address, or None."""
        found = re.fullmatch(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
        if not found:
            return None
        kind = "datasets" if found[1] else "models"
        there = self.find(f"{kind}/{found[2]}", unquote(found[3]))
        data = there and there[1].get(unquote(found[4]))
        return None if data is None else (there[0], data)


@contextmanager
def serving(hub, folder, monkeypatch):
    """The hub's library asks this one, and keeps its copies in `folder`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status, data, **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_GET(self):
            hub.asked.append(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            value = hub.answer(self.path, self.rfile.read(size).decode())
            if value is not None:
                return self.reply(200, json.dumps(value).encode(), Content_Type="application/json")
            found = hub.file(self.path.partition("?")[0])
            if found is None:
                return self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
            tag = f'"{hashlib.sha1(found[1]).hexdigest()}"'
            first, last = 0, len(found[1]) - 1
            if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                first, last = int(wanted[1]), min(int(wanted[2] or last), last)
            part = found[1][first : last + 1]
            span = f"bytes {first}-{last}/{len(found[1])}"
            status = 206 if len(part) < len(found[1]) else 200
            self.reply(status, part, X_Repo_Commit=found[0], ETag=tag, Content_Range=span)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for module in (huggingface_hub.constants, huggingface_hub.file_download.constants):
            monkeypatch.setattr(module, "ENDPOINT", address)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address, raising=False)
        HfFileSystem.clear_instance_cache()
        try:
            yield address
        finally:
            HfFileSystem.clear_instance_cache()
            server.shutdown()
