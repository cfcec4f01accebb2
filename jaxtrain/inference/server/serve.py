"""jaxtrain serve RUN: the process around the app. It binds, loads, listens, drains and ends."""

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.inference.server.arguments import serve_parser
from jaxtrain.settings import UserError, command, say_error

if TYPE_CHECKING:
    from jaxtrain.inference.server.service import Service

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
POLL = 0.05  # seconds between checks for requests in flight


def read_api_keys(file: Path | None, variable: str | None) -> list[str]:
    """API keys of the server. Raises UserError, which never quotes a key."""
    if file is not None:
        if not file.is_file():
            raise UserError(f"--api-key-file: there is no file {file}")
        found, where = file.read_text(encoding="utf-8").split("\n"), f"--api-key-file {file}"
    elif variable is not None:
        found, where = [os.environ.get(variable, "")], f"--api-key-env {variable}"
    else:
        return []
    keys = [key.strip() for key in found if key.strip()]
    if not keys:
        raise UserError(f"{where}: it holds no key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UserError(f"{where}: a key must be of printable ASCII without spaces")
    return keys


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address, before minutes are spent on loading a model."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--host {host}: {error.strerror}") from None
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there; take another --port, or 0 for a free one"
        else:
            why = error.strerror
        raise UserError(f"{host}:{port}: {why}") from None
    return bound


def check_extra() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"jaxtrain serve needs {', '.join(missing)}, of the extra serve: "
            "uv sync --extra serve, or install the wheel with [serve]"
        )


@command
def main(argv: list[str] | None = None) -> int:
    a = serve_parser().parse_args(argv)
    check_extra()
    keys = read_api_keys(a.api_key_file, a.api_key_env)
    with bind(a.host, a.port) as bound:
        from jaxtrain.inference.server.load import load_service

        try:
            service = load_service(a)
        except KeyboardInterrupt:
            return 130
        if not keys and not ipaddress.ip_address(bound.getsockname()[0]).is_loopback:
            print(f"note: anyone who reaches {a.host} can use it; --api-key-file requires a key",
                  file=sys.stderr)  # fmt: skip
        code = asyncio.run(listen(service, keys, bound, a.drain))
    if code:  # XLA aborts a process that ends while it still compiles or computes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def listen(service: "Service", keys: list[str], bound: socket.socket, drain: float) -> int:
    """Answer requests until a signal or the engine's failure; returns the exit code."""
    import uvicorn

    from jaxtrain.inference.server.app import make_app
    from jaxtrain.inference.server.errors import ApiError

    class Server(uvicorn.Server):
        """Without uvicorn's signal handlers, which would refuse requests during a drain."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    config = uvicorn.Config(
        make_app(service, keys), log_level="error", access_log=False, lifespan="off",
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = Server(config)
    service.thread.attach(loop, ending.set)

    def stop() -> None:
        if service.draining:  # a second signal is final
            server.force_exit = server.should_exit = True
        service.draining = True
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    task = asyncio.create_task(server.serve([bound]))
    while not server.started and not task.done():
        await asyncio.sleep(POLL)
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {service.served.name} at http://{shown}:{port}/v1", flush=True)
    waiting = asyncio.create_task(ending.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    end = loop.time() + drain
    while service.in_flight and loop.time() < end and not server.should_exit:
        await asyncio.sleep(POLL)
    left = service.in_flight
    service.thread.interrupt(ApiError(503, "the server ends", code="draining"))
    server.should_exit = True
    await task
    if failure := service.thread.failure:
        say_error(f"the engine failed: {type(failure).__name__}: {failure}")
        return 1
    service.thread.stop()
    if left:
        say_error(f"{left} requests were cut off; --drain says how long they may take")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
