"""A random model of bytes that has a chat template, and a server of it."""

import pytest
from server_cases import TEMPLATE, T, live
from tiny import byte_model, random_run

from jaxtrain.runs.saved import load_saved


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random model of bytes that has a chat template."""
    folder = tmp_path_factory.mktemp("run")
    template = folder / "model" / "huggingface" / "chat_template.jinja"
    template.parent.mkdir(parents=True)
    template.write_text(TEMPLATE)
    return load_saved(random_run(folder, byte_model(T)))


@pytest.fixture(scope="module")
def server(saved):
    with live(saved) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    return server.client()
