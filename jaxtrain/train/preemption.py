"""Preemption notices of spot machines: the run saves a checkpoint and stops, as after SIGTERM.

CLOUDS has one function per cloud. It takes the cloud's configuration and returns the notice's text,
or None if there is no notice.
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.runs.config import (
    AwsNotice,
    AzureNotice,
    FileNotice,
    GcpNotice,
    PreemptionConfig,
)

TIMEOUT = 2.0  # seconds of one request: the server is on the machine itself
# No proxy: it would answer for its own machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask_metadata(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with OPENER.open(request, timeout=TIMEOUT) as response:
        return response.read().decode()


def aws(c: AwsNotice) -> str | None:
    """Read the EC2 instance metadata service, version 2."""
    root = f"{c.endpoint}/latest"
    life = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = ask_metadata(f"{root}/api/token", life, "PUT")
    try:
        found = ask_metadata(
            f"{root}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
    said = json.loads(found)
    return f"{said['action']} at {said['time']}"


def gcp(c: GcpNotice) -> str | None:
    """Read the metadata server of Compute Engine."""
    url = f"{c.endpoint}/computeMetadata/v1/instance/preempted"
    return (
        "preempted" if ask_metadata(url, {"Metadata-Flavor": "Google"}).strip() == "TRUE" else None
    )


def azure(c: AzureNotice) -> str | None:
    """Read Azure's Scheduled Events about this virtual machine."""
    root, headers = f"{c.endpoint}/metadata", {"Metadata": "true"}
    events = json.loads(ask_metadata(f"{root}/scheduledevents?api-version=2020-07-01", headers))[
        "Events"
    ]
    events = [event for event in events if event["EventType"] in ("Preempt", "Terminate")]
    if not events:
        return None
    name = ask_metadata(f"{root}/instance/compute/name?api-version=2021-02-01&format=text", headers)
    ours = [event for event in events if name.strip() in event["Resources"]]
    return f"{ours[0]['EventType']} not before {ours[0]['NotBefore'] or 'now'}" if ours else None


def file(c: FileNotice) -> str | None:
    return f"{c.path} is there" if Path(c.path).exists() else None


CLOUDS: dict[str, Callable[[Any], str | None]] = {
    "aws": aws, "gcp": gcp, "azure": azure, "file": file,
}  # fmt: skip


def say_now(line: str) -> None:
    """Print a line from any process of a job, since each may be on its own machine."""
    print(line, flush=True)


@contextmanager
def watched_for_preemption(
    config: PreemptionConfig | None,
    stop: Callable[[], None],
    say: Callable[[str], Any] = say_now,
) -> Iterator[None]:
    """Call stop() from a thread once the cloud gives notice. A service that cannot be read is
    reported once and polled again."""
    if config is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        failed = False
        while True:
            try:
                if found := CLOUDS[config.name](config):
                    say(f"notice   {config.name}: {found}; the run saves and stops")
                    return stop()
            except (OSError, ValueError, LookupError, TypeError) as error:
                if not failed:
                    say(
                        f"notice   run.preemption: {config.name} cannot be queried "
                        f"({type(error).__name__}: {error}); it is queried again every "
                        f"{config.every:g} s, and SIGTERM still stops the run"
                    )
                failed = True
            if over.wait(config.every):
                return None

    thread = threading.Thread(target=watch, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * TIMEOUT)
