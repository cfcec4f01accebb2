"""`jaxtrain ui [RUNS]`: serve the page about a folder of runs, on this machine."""

import importlib
import socket
from collections.abc import Sequence
from contextlib import suppress

from jaxtrain.runs.arguments import ui_parser
from jaxtrain.settings import UserError, command

HOST = "127.0.0.1"  # loopback only: the page has no password


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until it is interrupted. Returns the exit code."""
    a = ui_parser().parse_args(argv)
    try:
        uvicorn = importlib.import_module("uvicorn")
        app = importlib.import_module("jaxtrain.runs.page.app")
    except ModuleNotFoundError as error:
        raise UserError(
            f"jaxtrain ui needs {error.name}: uv sync --extra serve, or install the "
            "wheel with [serve]"
        ) from None
    from jaxtrain.runs.page.endpoint import endpoint_at

    made = app.page_app(a.runs, [endpoint_at(url) for url in a.endpoint])
    config = uvicorn.Config(
        made, HOST, a.port, log_level="warning", access_log=False, server_header=False,
        log_config=None, timeout_graceful_shutdown=1,  # a stream of rows never ends by itself
    )  # fmt: skip
    with listening(a.port) as listener:
        port = listener.getsockname()[1]
        print(f"page     http://{HOST}:{port}/ (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
            uvicorn.Server(config).run([listener])
    return 0


def listening(port: int) -> socket.socket:
    """A listening loopback socket; port 0 is any free port. Raises UserError if it is in use."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # before the address is printed: early connections are queued
    except OSError as error:
        listener.close()
        raise UserError(f"--port {port}: {error.strerror}; take another, or 0 for any") from None
    return listener
