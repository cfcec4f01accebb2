"""A cloud's notice, as each cloud gives it, stops a run as SIGTERM does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny import WHOLE, assert_same_run, run_overrides, steps_of

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import load_config
from jaxtrain.main import main
from jaxtrain.runs.config import AwsNotice, AzureNotice, FileNotice, GcpNotice
from jaxtrain.train.preemption import CLOUDS, watched_for_preemption
from jaxtrain.train.stop_signal import StopSignal

EVENT = {"EventType": "Preempt", "Resources": ["vm_7"], "NotBefore": ""}


class Metadata(BaseHTTPRequestHandler):
    """The metadata services of three clouds, strict about their headers."""

    def answer(self):
        state, path = self.server.state, self.path.partition("?")[0]
        if state == "down":
            return self.send(500, "")
        if path == "/latest/api/token":
            life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            return self.send(200, "token-1") if self.command == "PUT" and life else self.send(400)
        if path == "/latest/meta-data/spot/instance-action":
            if self.headers.get("X-aws-ec2-metadata-token") != "token-1":
                return self.send(401)
            said = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
            return self.send(200, json.dumps(said)) if state == "notice" else self.send(404)
        if path == "/computeMetadata/v1/instance/preempted":
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.send(403)
            return self.send(200, "TRUE" if state == "notice" else "FALSE")
        if self.headers.get("Metadata") != "true" or "api-version=" not in self.path:
            return self.send(400)
        if path == "/metadata/instance/compute/name":
            return self.send(200, "vm_7")
        other = EVENT | {"Resources": ["vm_8"]}
        maintenance = EVENT | {"EventType": "Reboot"}
        events = [maintenance, other] + [EVENT] * (state == "notice")
        return self.send(200, json.dumps({"Events": events}))

    def send(self, status, text=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PUT = answer

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.state, server.url = "calm", f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked(name, server, tmp_path):
    if name == "file":
        return FileNotice(path=str(tmp_path / "notice"), every=0.01)
    kind = {"aws": AwsNotice, "gcp": GcpNotice, "azure": AzureNotice}[name]
    return kind(endpoint=server.url, every=0.01)


@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.quick("file", "gcp")
def test_a_notice_asks_the_run_to_stop(name, metadata, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never for the machine's own service
    said, config = [], asked(name, metadata, tmp_path)
    with StopSignal(Coordinator()) as stop:
        with watched_for_preemption(config, stop.ask, said.append):
            time.sleep(0.1)
            assert not stop.after(1) and said == []
            metadata.state = "notice"
            (tmp_path / "notice").touch()
            deadline = time.monotonic() + 20
            while not stop.wanted and time.monotonic() < deadline:
                time.sleep(0.01)
        assert stop.after(2)
    assert len(said) == 1 and said[0].startswith(f"notice   {name}: ")


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
@pytest.mark.quick("gcp")
def test_a_service_that_is_down_is_said_once_and_asked_again(name, metadata, tmp_path):
    said, stopped = [], threading.Event()
    metadata.state = "down"
    with watched_for_preemption(asked(name, metadata, tmp_path), stopped.set, said.append):
        time.sleep(0.2)
        assert len(said) == 1 and "cannot be queried (HTTPError" in said[0]
        metadata.state = "notice"
        assert stopped.wait(20)


def test_the_option_is_a_name_and_the_services_have_their_addresses():
    config = load_config(None, ["run.preemption={name: gcp}"])
    assert config.run.preemption == GcpNotice()
    assert config.run.preemption.endpoint == "http://metadata.google.internal"
    with watched_for_preemption(None, pytest.fail):
        pass


@pytest.mark.slow
def test_a_run_that_is_taken_back_is_saved_and_goes_on(tmp_path, whole, capsys):
    notice = tmp_path / "notice"
    notice.touch()
    fields = WHOLE | {"run__preemption": f"{{name: file, path: {notice}}}"}
    assert main(run_overrides(tmp_path, **fields)) == 0
    assert "the run saves and stops" in capsys.readouterr().out
    (step,) = steps_of(tmp_path / "tiny")
    assert step < 6
    notice.unlink()
    assert main(run_overrides(tmp_path, **fields)) == 0
    assert_same_run(tmp_path / "tiny", whole)
