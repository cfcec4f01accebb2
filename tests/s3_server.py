"""moto's S3 server behind a proxy that a test tells to fail: `s3.fault = lambda request: ...`."""

import contextlib
import http.client
import logging
import os
import threading
import uuid
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

SECRET = "hunter2"  # of the credentials that clients have: it may be nowhere
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAKEY", "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": f"token-{SECRET}", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",  # the tries are ours
}  # fmt: skip
SLOW_DOWN, EXPIRED, INTERNAL = (503, "SlowDown"), (400, "ExpiredToken"), (500, "InternalError")
DENIED, SKEWED = (403, "AccessDenied"), (403, "RequestTimeTooSkewed")
CUT, SHORT, LOST = "cut", "short", "lost"  # half a body; and a length that hides it; no answer
OVERWRITE = "overwrite"  # as a server that knows no conditional put


class Request(NamedTuple):
    method: str
    key: str  # BUCKET/KEY, without the query
    headers: dict


class S3:
    """Where it is. fault(request): None, (status, code), CUT, SHORT, LOST or OVERWRITE."""

    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.server import ThreadedMotoServer
        self.moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto.start()
        self.requests, self.fault = [], lambda request: None
        handler = type("Handler", (Proxy,), {"s3": self})
        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.proxy.daemon_threads = True
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        self.environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": self.endpoint}

    def bucket(self):
        """The URL of a new one."""
        import fsspec

        name = f"bucket-{uuid.uuid4().hex[:12]}"
        fsspec.filesystem("s3").mkdir(name)
        return f"s3://{name}"

    def reset(self):
        self.fault = lambda request: None
        self.requests.clear()

    def stop(self):
        self.proxy.shutdown()
        self.proxy.server_close()
        self.moto.stop()


class Proxy(BaseHTTPRequestHandler):
    """Passes a request on to moto, or fails as the test says."""

    protocol_version = "HTTP/1.1"
    s3: S3

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path[1:].partition("?")[0], dict(self.headers))
        self.s3.requests.append(request)
        fault = self.s3.fault(request)
        if isinstance(fault, tuple):
            text = f"<Error><Code>{fault[1]}</Code><Message>{fault[1]} was said</Message></Error>"
            content = b"" if self.command == "HEAD" else text.encode()
            return self.answer(fault[0], {"Content-Type": "application/xml"}, content)
        headers = dict(self.headers)
        if fault == OVERWRITE:
            headers.pop("If-None-Match", None)
        upstream = http.client.HTTPConnection(*self.s3.moto.get_host_and_port())
        upstream.request(self.command, self.path, body, headers)
        found = upstream.getresponse()
        content, headers = found.read(), dict(found.getheaders())
        upstream.close()
        length = headers.pop("Content-Length", None)
        for name in ("Connection", "Transfer-Encoding"):
            headers.pop(name, None)
        if fault == LOST:
            self.close_connection = True
            return None
        if fault == SHORT:
            content = content[: len(content) // 2]
        shown = length if self.command == "HEAD" and length else str(len(content))
        if fault == CUT:
            content = content[: len(content) // 2]
            self.close_connection = True
        return self.answer(found.status, headers, content, shown)

    def answer(self, status, headers, content, length=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def handle(self):
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client was killed
            super().handle()

    def log_message(self, *_):
        pass


def start():
    """A server that this process's clients use, and those of processes that it starts."""
    os.environ.update(ENVIRONMENT)
    server = S3()
    os.environ["AWS_ENDPOINT_URL"] = server.endpoint
    return server
