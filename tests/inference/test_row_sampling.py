"""Sampling with each parameter an array: by what it leaves of a distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.inference.engine.requests import SamplingParams
from jaxtrain.inference.engine.rows import SlotTable, sampler_of
from jaxtrain.inference.engine.sampling import Sampler, sample_rows

P_V = np.array([0.4, 0.3, 0.2, 0.07, 0.03])
DRAWS = 4000


def shares(how, text=(), prompt=0, allowed=0b11111, sampler=Sampler.ALL):
    """How often each token is drawn, of seeds 0, 1, ..., behind a text."""
    table = SlotTable(DRAWS, len(P_V))
    sampling = SamplingParams(max_tokens=9)._replace(**{"temperature": 1.0} | how)
    for row in range(DRAWS):
        table.put(row, sampling._replace(seed=row), prompt)
    logits_BV = jnp.tile(jnp.log(jnp.asarray(P_V, jnp.float32)), (DRAWS, 1))
    texts_BC = jnp.tile(jnp.array([*text, 0], jnp.int32), (DRAWS, 1))
    lengths_B = jnp.full(DRAWS, len(text), jnp.int32)
    for row in range(DRAWS):
        table.allow(row, np.uint32(0xFFFFFFE0 | allowed))
    args = logits_BV, table.inputs(), texts_BC, lengths_B
    return (
        np.bincount(
            jax.jit(sample_rows, static_argnums=4)(*args, sampler).token_B, minlength=len(P_V)
        )
        / DRAWS
    )


def wanted(kept=(0, 1, 2, 3, 4), power=1.0, factor=(1, 1, 1, 1, 1)):
    p_V = np.zeros(len(P_V))
    p_V[list(kept)] = (P_V**power * np.array(factor))[list(kept)]
    return p_V / p_V.sum()


@pytest.mark.parametrize(
    ("how", "p_V"),
    [
        ({}, wanted()),
        ({"temperature": 0.5}, wanted(power=2)),
        ({"top_k": 2}, wanted((0, 1))),
        ({"top_p": 0.65}, wanted((0, 1))),
        ({"top_p": 0.75}, wanted((0, 1, 2))),  # the first that reaches the share is in
        ({"top_p": 1e-6}, wanted((0,))),
        ({"top_k": 4, "top_p": 0.75}, wanted((0, 1, 2))),
        ({"min_p": 0.3}, wanted((0, 1, 2))),
        ({"min_p": 1.0}, wanted((0,))),
        ({"typical_p": 0.25}, wanted((1,))),  # entropy 1.35, of which 0.3 is the nearest
        ({"typical_p": 0.6}, wanted((1, 2, 0))),
        ({"temperature": 0.0}, wanted((0,))),
    ],
    ids=str,
)
def test_what_is_kept_is_drawn_by_its_probability(how, p_V):
    np.testing.assert_allclose(shares(how), p_V, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "least"),
    [
        ({}, Sampler.TEMPERATURE),
        ({"temperature": 0.5}, Sampler.TEMPERATURE),
        ({"min_p": 0.3}, Sampler.TEMPERATURE),
        ({"temperature": 0.0}, Sampler.TEMPERATURE),
        ({"top_k": 2, "min_p": 0.3}, Sampler.BEST),
        ({"top_p": 0.75}, Sampler.BEST),
        ({"typical_p": 0.6, "top_k": 3}, Sampler.ALL),
    ],
)
@pytest.mark.quick("how2-0", "how5-1")
def test_the_least_program_draws_as_those_above_it(how, least):
    assert sampler_of(SamplingParams(**how)) == least
    for sampler in [one for one in Sampler if one >= least]:
        np.testing.assert_array_equal(shares(how, sampler=sampler), shares(how))


def test_parameters_of_a_row_are_the_same_on_the_device():
    table = SlotTable(3, 8)
    how = SamplingParams(max_tokens=2**30, temperature=0.7, top_k=5, seed=2**32 - 1, logprobs=3)
    table.put(1, how._replace(frequency_penalty=-0.25), prompt=2**20, adapter=4)
    row = jax.tree.map(lambda x_B: x_B[1].item(), table.inputs().sampling)
    ints = (row.top_k_B, row.seed_B, row.prompt_B, row.limit_B, row.top_B, row.adapter_B)
    assert ints == (5, 2**32 - 1, 2**20, 2**20 + 2**30, 3, 4)
    assert row.temperature_B == np.float32(0.7) and row.frequency_B == -0.25
    idle = jax.tree.map(lambda x_B: x_B[2].item(), table.inputs().sampling)
    assert (idle.temperature_B, idle.repetition_B, idle.limit_B, idle.top_B) == (0, 1, 0, -1)


def test_a_draw_depends_on_its_row_alone():
    table, rows = SlotTable(6, 64), 6
    for row in range(rows):
        table.put(row, SamplingParams(max_tokens=9, seed=row // 2, temperature=1.0), 0)
    logits_BV = jax.random.normal(jax.random.key(0), (rows, 64))
    texts_BC, lengths_B = jnp.zeros((rows, 8), jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    args = logits_BV, table.inputs(), texts_BC, lengths_B
    draw = jax.jit(sample_rows, static_argnums=4)
    together = draw(*args, Sampler.ALL).token_B
    for row in range(rows):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], args)
        assert draw(*alone, Sampler.ALL).token_B == together[row]


@pytest.mark.slow
def test_penalties_count_tokens():
    """Of the prompt [0, 3] and the new tokens [1, 1, 2]."""
    told = lambda how: shares(how, (0, 3, 1, 1, 2), prompt=2)
    f = lambda *logits: np.exp(logits)
    np.testing.assert_allclose(
        told({"frequency_penalty": 0.5}), wanted(factor=f(0, -1, -0.5, 0, 0)), atol=0.03
    )
    np.testing.assert_allclose(
        told({"presence_penalty": 0.5}), wanted(factor=f(0, -0.5, -0.5, 0, 0)), atol=0.03
    )
    # Log-probabilities are negative: those of all tokens in the text are multiplied.
    lower = np.where(np.arange(5) < 4, P_V, 1)
    np.testing.assert_allclose(told({"repetition_penalty": 2.0}), wanted(factor=lower), atol=0.03)


def test_biases_are_added_first():
    factor = (1, np.exp(-1), 1, np.exp(2), 1)
    biased = {"logit_bias": ((1, -1.0), (3, 2.0))}
    np.testing.assert_allclose(shares(biased), wanted(factor=factor), atol=0.03)
    assert shares(biased | {"temperature": 0.0, "repetition_penalty": 9.0}, (0,))[3] == 1


def test_tokens_that_are_not_allowed_are_never_drawn():
    np.testing.assert_allclose(shares({}, allowed=0b01010), wanted((1, 3)), atol=0.03)
    assert shares({"temperature": 0.0}, allowed=0b01010)[1] == 1
