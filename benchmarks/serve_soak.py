"""Soak test of `jaxtrain serve`: many clients; some disconnect or send garbage.

Decoding is greedy, and every complete answer is compared with the answer to its prompt alone. In
the end nothing may leak: no KV page, no slot in the batch, no file, no memory.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.record import describe
from benchmarks.soak import MIB, flatness
from jaxtrain.settings import UserError

PROMPTS, SHORTEST, LONGEST = 48, 4, 64  # prompts; fewest and most new tokens of an answer
LEAVE, GARBAGE = 0.10, 0.05  # shares of requests
EVERY = 1.0  # seconds between two memory samples
TIES = 0.02  # share of answers that may differ: in 16 bits a tie can resolve either way
GROWTH, SLACK = 0.10, 64.0  # allowed memory growth: relative, and in MiB
PATIENCE = 120.0  # timeout of a request in seconds
START = 600.0  # timeout of loading and compiling in seconds
IDLE_S, IDLE_PERCENT = 2.0, 20.0  # below this CPU use of a core over IDLE_S seconds, it is idle
RANDOM_MODEL = [
    "model.depth=2", "model.width=64", "model.head_dim=16", "train.sequence_length=512",
    "train.batch_size=8", "train.device_batch_size=1", "train.steps=1", "data.tokenizer.name=bytes",
    "train.precision=float32",
]  # fmt: skip


class Reply(NamedTuple):
    """A response; status 0 if the connection was closed without one."""

    status: int
    text: str
    tokens: int
    first: float  # seconds to the first byte of the answer
    total: float


class Tally:
    """Counts and latencies of all clients."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.first: list[float] = []
        self.total: list[float] = []
        self.examples: list[str] = []

    def wrong(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        self.examples.append(f"{kind}: {example[:200]}")


def write_random_model(folder: Path) -> None:
    """Write a small byte model with random weights. A separate process on the CPU does it, since
    this one must not occupy the server's accelerator."""
    program = f"from benchmarks.serve_soak import save_random; save_random({str(folder)!r})"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def save_random(folder: str) -> None:
    import jax

    from jaxtrain.config import load_config
    from jaxtrain.config.resolve import resolve
    from jaxtrain.data.tokenizer.tokenizer import byte_tokenizer
    from jaxtrain.model import Transformer, split
    from jaxtrain.runs.saved import save_model

    tokenizer = byte_tokenizer()
    config = resolve(load_config(None, RANDOM_MODEL), tokenizer.vocab_size)
    _, specs = split(Transformer(config.model, tokenizer.vocab_size))
    draw = np.random.default_rng(0)
    value = lambda spec: draw.normal(size=spec.shape, scale=0.2).astype(spec.dtype)
    save_model(Path(folder) / "model", config, jax.tree.map(value, specs), tokenizer)


def request_bytes(path: str, body: bytes) -> bytes:
    """An HTTP/1.0 request, whose response ends with the connection."""
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def garbage(draw: random.Random, name: str) -> bytes:
    """A random malformed or invalid request."""
    ask = lambda **body: request_bytes("/v1/completions", json.dumps(body).encode())
    return draw.choice(
        [
            draw.randbytes(200) + b"\r\n\r\n",
            b"GET /v1/models\r\n\r\n",
            request_bytes("/v1/completions", b'{"prompt": '),
            request_bytes("/v1/../../etc/passwd", b"{}"),
            ask(model="another", prompt="a"),
            ask(model=name, prompt={"a": 1}),
            ask(model=name, prompt="a" * 100_000),
            ask(model=name, prompt="a", max_tokens=-1, temperature="hot"),
            ask(model=name, prompt=[10**9]),
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{",
        ]
    )


async def exchange(
    port: int, data: bytes, leave: float | None = None, half: bool = False
) -> tuple[bytes, float, float]:
    """Send a request; returns (response, seconds to its first byte, seconds to its end). leave:
    disconnect after this many seconds; half: half-close after sending, like a crashed client."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        if half:
            writer.write_eof()
        if leave is not None:
            await asyncio.sleep(leave)
            return b"", 0.0, 0.0
        async with asyncio.timeout(PATIENCE):
            found = await reader.read(1)
            first = time.perf_counter() - begun
            found += await reader.read()
        return found, first, time.perf_counter() - begun
    except ConnectionError:
        return b"", 0.0, time.perf_counter() - begun
    finally:
        writer.transport.abort()


async def complete(port: int, body: dict[str, Any]) -> Reply:
    """Request one completion, streamed or not."""
    data = request_bytes("/v1/completions", json.dumps(body).encode())
    found, first, total = await exchange(port, data)
    head, _, rest = found.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    if status != 200:
        return Reply(status, rest.decode(errors="replace"), 0, first, total)
    if not body["stream"]:
        answer = json.loads(rest)
        tokens = answer["usage"]["completion_tokens"]
        return Reply(status, answer["choices"][0]["text"], tokens, first, total)
    events = rest.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        return Reply(0, rest.decode()[-200:], 0, first, total)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    return Reply(status, text, chunks[-1]["usage"]["completion_tokens"], first, total)


def body_of(name: str, prompt: int, stream: bool) -> dict[str, Any]:
    """The request for prompt number `prompt`: always the same text and length."""
    draw = random.Random(prompt)
    text = f"{prompt}: " + "".join(draw.choices("the cat sat on a mat. ", k=draw.randint(1, 200)))
    more = {"stream_options": {"include_usage": True}} if stream else {}
    tokens = draw.randint(SHORTEST, LONGEST)
    body = {"model": name, "prompt": text, "max_tokens": tokens, "temperature": 0}
    return body | {"stream": stream} | more


class Load:
    """Clients that send requests for a given time."""

    def __init__(self, port: int, name: str):
        self.port, self.name, self.tally = port, name, Tally()
        self.alone: list[str] = []

    async def ask_alone(self) -> None:
        """Store the answer to each prompt when no other request is running."""
        for prompt in range(PROMPTS):
            reply = await complete(self.port, body_of(self.name, prompt, False))
            if reply.status != 200:
                raise UserError(f"serve-soak: a lone prompt got {reply.status}: {reply.text}")
            self.alone.append(reply.text)

    async def warm_up(self) -> None:
        """Send all prompts at once, so that programs for large batches are compiled."""
        for _ in range(2):
            bodies = [body_of(self.name, prompt, False) for prompt in range(PROMPTS)]
            await asyncio.gather(*(complete(self.port, body) for body in bodies))

    async def client(self, seed: int, end: float) -> None:
        """One client: it requests, disconnects or sends garbage until `end`."""
        draw = random.Random(seed)
        while time.perf_counter() < end:
            kind = draw.random()
            if kind < GARBAGE:
                await self.send_garbage(draw)
            elif kind < GARBAGE + LEAVE:
                stream, prompt = draw.random() < 0.5, draw.randrange(PROMPTS)
                body = json.dumps(body_of(self.name, prompt, stream)).encode()
                data = request_bytes("/v1/completions", body)
                await exchange(self.port, data, leave=draw.random())
                self.tally.counts["left"] += 1
            else:
                await self.check_answer(draw.randrange(PROMPTS), draw.random() < 0.5)

    async def send_garbage(self, draw: random.Random) -> None:
        self.tally.counts["garbage"] += 1
        data = garbage(draw, self.name)
        found, _, _ = await exchange(self.port, data, half=True)
        if not re.match(rb"HTTP/1\.[01] 4\d\d ", found) and found:
            self.tally.wrong("taken garbage", f"{data[:80]!r}: {found[:80]!r}")

    async def check_answer(self, prompt: int, stream: bool) -> None:
        try:
            reply = await complete(self.port, body_of(self.name, prompt, stream))
        except TimeoutError:
            return self.tally.wrong("lost", f"prompt {prompt} within {PATIENCE:g} s")
        if reply.status == 429:
            self.tally.counts["refused"] += 1
            return await asyncio.sleep(1)
        if reply.status != 200:
            return self.tally.wrong("lost", f"prompt {prompt}: {reply.status} {reply.text}")
        if reply.text != self.alone[prompt]:
            kind = "crossed" if reply.text in self.alone else "different"
            return self.tally.wrong(kind, f"prompt {prompt}: {reply.text!r}")
        self.tally.counts["answers"] += 1
        self.tally.counts["tokens"] += reply.tokens
        self.tally.total.append(reply.total)
        if stream:
            self.tally.first.append(reply.first)

    async def run(self, clients: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
        """Run the clients; returns the server's memory curve meanwhile."""
        begin, at, rss = time.perf_counter(), [], []
        end = begin + seconds
        tasks = [asyncio.create_task(self.client(i, end)) for i in range(clients)]
        while any(not task.done() for task in tasks):
            at.append(round(time.perf_counter() - begin, 2))
            rss.append(round(server.memory_info().rss / MIB, 2))
            await asyncio.wait(tasks, timeout=EVERY)
        await asyncio.gather(*tasks)
        return {"seconds": at, "rss_mib": rss}


def metrics_of(port: int) -> dict[str, float]:
    """The server's metrics without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    pairs = [line.split(" ") for line in lines if re.match(r"[a-z_]+ ", line)]
    return {name: float(value) for name, value in pairs}


def held_of(port: int) -> dict[str, int]:
    """Running and waiting requests, used pages: all 0 once every request ended or was cancelled."""
    found = metrics_of(port)
    names = ("running", "waiting", "pages_used")
    return {name: int(found[f"jaxtrain_engine_{name}"]) for name in names}


def wait_until_free(port: int, seconds: float = 30.0) -> dict[str, int]:
    end = time.perf_counter() + seconds
    while any((leaked := held_of(port)).values()) and time.perf_counter() < end:
        time.sleep(0.2)
    return leaked


def start_server(run: Path, clients: int) -> tuple[subprocess.Popen[str], int, str]:
    """Start `jaxtrain serve`; returns (process, port, model name)."""
    options = [
        "--port",
        "0",
        "--name",
        "soak",
        "--max-queue",
        str(2 * clients),
        "--max-body",
        "0.05",
    ]
    command = [sys.executable, "-m", "jaxtrain.cli", "serve", str(run), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not (found := re.search(r":(\d+)/v1", line)):
        raise UserError(f"serve-soak: the server did not start (exit code {process.wait()})")
    return process, int(found[1]), "soak"


def wait_until_idle(server: psutil.Process) -> None:
    """Wait until background compilation ends, since it would count as memory growth."""
    deadline = time.monotonic() + START
    while server.cpu_percent(IDLE_S) > IDLE_PERCENT:
        if time.monotonic() > deadline:
            raise UserError(f"serve-soak: without a request the server is busy for {START:g} s")


def bench_serve_soak(
    run: Sequence[str], variant: str | None, clients: int, minutes: float
) -> Iterator[dict[str, Any]]:
    """Yield one record, then raise UserError if an answer was lost or wrong, or something leaked.

    run: a run directory; if empty, a small random model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(run[0]) if run else Path(temporary)
        if not run:
            write_random_model(folder)
        process, port, name = start_server(folder, clients)
        try:
            load = Load(port, name)
            asyncio.run(load.ask_alone())
            asyncio.run(load.warm_up())
            server = psutil.Process(process.pid)
            wait_until_idle(server)
            files, begun = server.num_fds(), time.perf_counter()
            curve = asyncio.run(load.run(clients, minutes * 60, server))
            seconds = time.perf_counter() - begun
            leaked = wait_until_free(port)
            leaked["files"] = max(
                0, server.num_fds() - files - 1
            )  # one of them is this check's own
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(60)
        finally:
            process.kill()
            process.communicate()
    row = row_of(load.tally, curve, leaked, seconds)
    row |= {"ties_allowed": int(TIES * row["answers"]) if run else 0}
    row |= {"name": f"{clients} clients", "shape": f"{minutes:g} minutes", "exit_code": exit_code}
    workload = {"clients": clients, "minutes": minutes, "leave": LEAVE, "garbage": GARBAGE}
    workload |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    config = folder.name if run else "random"
    yield describe("serve_soak", config, variant or "", workload) | {"rows": [row], "curve": curve}
    if faults := faults_of(row, load.tally.examples):
        raise UserError(f"serve-soak: {'; '.join(faults)}")


def row_of(
    tally: Tally, curve: dict[str, list[float]], leaked: dict[str, int], seconds: float
) -> dict[str, Any]:
    """The record's row: counts, latencies in milliseconds, memory, leaked resources."""
    ms = lambda times, q: round(1000 * float(np.percentile(times, q)), 2) if times else None
    kinds = ("answers", "left", "garbage", "refused", "lost", "crossed", "different",
             "taken garbage")  # fmt: skip
    row: dict[str, Any] = {kind.replace(" ", "_"): tally.counts[kind] for kind in kinds}
    for name, times in (("first_token", tally.first), ("request", tally.total)):
        row |= {f"{name}_p{q}_ms": ms(times, q) for q in (50, 99)}
    row |= {"tokens_per_s": round(tally.counts["tokens"] / seconds, 1)}
    row |= {f"held_{name}": count for name, count in leaked.items()}
    return row | flatness(curve["seconds"], curve["rss_mib"])


def faults_of(row: dict[str, Any], examples: Sequence[str]) -> list[str]:
    """The faults of the server in a row."""
    found = [f"{row[kind]} {kind}" for kind in ("lost", "crossed", "taken_garbage") if row[kind]]
    if row["different"] > row["ties_allowed"]:
        found.append(f"{row['different']} different")
    found += [f"held in the end: {row[name]} {name[5:]}" for name in row
              if name.startswith("held_") and row[name]]  # fmt: skip
    grown = row["last_mib"] - row["first_mib"]
    if grown > max(SLACK, GROWTH * row["first_mib"]):
        found.append(f"the memory grew by {grown:.0f} MiB")
    if row["exit_code"]:
        found.append(f"exit code {row['exit_code']} after SIGTERM")
    if not row["answers"]:
        found.append("no answer at all")
    return found + list(examples[:3])
