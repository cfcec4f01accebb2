"""lm-evaluation-harness's own client of OpenAI's API, against a live server."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from server_cases import live
from tiny import byte_model, random_run

from jaxtrain.runs.saved import load_saved

pytestmark = pytest.mark.slow
T = 128


class Instance(NamedTuple):
    """As lm_eval's, in what its client reads of it."""

    args: tuple
    request_type: str = "loglikelihood"
    doc: dict = {}  # noqa: RUF012


@pytest.fixture
def saved(tmp_path):
    return load_saved(random_run(tmp_path, byte_model(T)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_local_completions_gets_the_models_log_likelihoods(saved):
    pytest.importorskip("tenacity")
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    model = nnx.merge(saved.graphdef, jax.device_put(saved.params))

    def log_likelihood(context, continuation):
        """The harness moves spaces at the context's end to the continuation."""
        spaces = context[len(context.rstrip()) :]
        context, continuation = context.rstrip(), spaces + continuation
        ids = np.array([*context.encode(), *continuation.encode()])
        states = model(jnp.asarray(ids)[None]).states[0]
        table = np.asarray(jax.nn.log_softmax(model.logits(states)))
        places = range(len(context), len(ids))
        own = [table[i - 1, ids[i]] for i in places]
        return sum(own), all(table[i - 1].argmax() == ids[i] for i in places)

    pairs = [("Two and two make ", "four"), ("Two and two make ", "five"), ("a", "b")]
    with live(saved) as one:
        client = completions.LocalCompletionsAPI(
            model="tiny", base_url=f"{one.url}/v1/completions", max_length=T, batch_size=2
        )
        assert client.tokenizer_backend == "remote"
        found = client.loglikelihood([Instance(pair) for pair in pairs], disable_tqdm=True)
        settings = {"until": ["\n"], "max_gen_toks": 6, "temperature": 0}
        asked = [Instance(("Say: ", settings), "generate_until")]
        (text,) = client.generate_until(asked, disable_tqdm=True)
        whole = one.client().completions.create(
            model="tiny", prompt=list(b"Say: "), max_tokens=6, temperature=0
        )
    for (value, greedy), pair in zip(found, pairs, strict=True):
        expected, likeliest = log_likelihood(*pair)
        assert value == pytest.approx(expected, rel=1e-4) and greedy == likeliest
    assert text == whole.choices[0].text.split("\n")[0]
