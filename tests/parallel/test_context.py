"""Context parallelism: a text over several devices gives the numbers of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LLAMA, T, batch, build, close, mesh_of

from jaxtrain import parallel
from jaxtrain.config import Config
from jaxtrain.config.resolve import resolve
from jaxtrain.objectives import next_token as objectives
from jaxtrain.parallel.context import ring_steps
from jaxtrain.settings import UserError

# Over four devices a chunk of the text is 4 tokens.


def arrays(kv_heads, seed=0):
    random = np.random.default_rng(seed)
    make = lambda heads: jnp.asarray(random.normal(size=(2, T, heads, 4)), jnp.float32)
    return make(4), make(kv_heads), make(kv_heads)


def documents(rows=2, seed=0):
    """Segment ids of documents of any length, some across chunks, and padding at the end."""
    ends = np.random.default_rng(seed).integers(1, T - 3, (rows, 3))
    ids = 1 + (np.arange(T)[None, :, None] >= ends[:, None]).sum(-1)
    return np.where(np.arange(T) < T - 3, ids, 0).astype(np.int32)


@pytest.mark.parametrize(
    ("window", "softcap", "segments"), [(12, 2.0, True), (3, 2.0, False), (None, None, True)]
)
@pytest.mark.quick("12-2.0-True")
def test_attention_of_a_spread_text(window, softcap, segments):
    """Outputs, and the gradients of a sum in which each output has another weight."""
    ids = jnp.asarray(documents()) if segments else None
    weights = np.cos(np.arange(2 * T * 16)).reshape(2, T, 4, 4)
    options = dict(window=window, softcap=softcap, scale=0.3)

    def total(zigzag, *qkv):
        given = (*qkv, ids, weights)
        *qkv, own_ids, own_weights = parallel.zigzag_shard(given) if zigzag else given
        return jnp.sum(
            own_weights * parallel.attention(*qkv, segments_BT=own_ids, zigzag=zigzag, **options)
        )

    run = lambda zigzag: jax.jit(jax.value_and_grad(functools.partial(total, zigzag), (0, 1, 2)))(
        *arrays(kv_heads=2)
    )
    expected = run(False)
    with jax.set_mesh(mesh_of(context=4)):
        close(run(True), expected, atol=3e-6)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_every_device_has_the_same_work_and_no_key_comes_twice(shards):
    """All (query chunk, key chunk) pairs of a causal mask, each once; as many a device."""
    seen = set()
    for e in ring_steps(shards, None, 1):
        for device in range(shards):
            for slot in (0, 1):
                half = e.queries[device, slot]
                query = device if half == 0 else 2 * shards - 1 - device
                assert (query, e.keys[device, slot]) not in seen
                seen.add((query, e.keys[device, slot]))
    own = {(p, p) for p in range(2 * shards)} | {(2 * shards - 1 - i, i) for i in range(shards)}
    assert (
        seen | own == {(q, k) for q in range(2 * shards) for k in range(q + 1)} and not seen & own
    )


@pytest.mark.slow
def test_a_window_sends_what_it_sees():
    """Sizes of the permutations in the compiled program: w tokens of K and V a neighbour."""
    q, k, v = arrays(kv_heads=2)

    def sent(window):
        f = lambda q, k, v: parallel.attention(q, k, v, window=window, zigzag=True)
        text = jax.jit(f).lower(q, k, v).compile().as_text()
        return sum(
            np.prod([int(n) for n in line.split("f32[")[1].split("]")[0].split(",")])
            for line in text.splitlines()
            if "= f32[" in line and "collective-permute(" in line
        )

    with jax.set_mesh(mesh_of(context=4)):
        token = 2 * 2 * 2 * 4  # of K and of V, in 2 rows of 2 heads of 4 channels
        assert sent(3) == 3 * 3 * token  # early chunks, late ones, and the one in the middle
        assert sent(None) <= 2 * T * token


# ---- the model -------------------------------------------------------------------------------


def loss_and_gradients(graphdef, params, rows, mesh=None):
    f = jax.value_and_grad(lambda p, b: objectives.next_token_loss(graphdef, p, b))
    if mesh is None:
        return jax.device_get(jax.jit(f)(params, rows))
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(f)(params, parallel.place_batch(rows, mesh)))


GPT = {
    "depth": 2, "kv_heads": 2, "window_pattern": "SL", "short_window": 8, "document_mask": True,
    "attention_softcap": 5.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (GPT, dict(fsdp=2, context=2, tensor=2)),
        (LLAMA | {"depth": 1}, dict(context=4)),
    ],
    ids=["gpt fsdp context tensor", "llama context"],
)
def test_a_model_over_context_is_one_device(family, sizes):
    check_over(sizes, build(**family), atol=2e-5)


def check_over(sizes, built, plain=None, **limits):
    """plain: the model of one device, where that is another."""
    rows = jax.tree.map(jnp.asarray, batch(4)._replace(segments_BT=documents(4)))
    _, graphdef, _, params = built
    expected = loss_and_gradients((plain or built)[1], params, rows)
    close(loss_and_gradients(graphdef, params, rows, mesh_of(**sizes)), expected, **limits)


# Weights of the balance losses at which a row that is not whole would show.
MOE = {"experts": 4, "top_k": 2, "hidden": 24, "shared_experts": 1, "aux_loss": 0.5, "z_loss": 0.1}
MIXED = LLAMA | {"depth": 1, "moe": MOE}
CASES = [
    (dict(context=4), False, 1), (dict(fsdp=2, context=2, expert=2), True, 4),
    (dict(data=2, context=2, tensor=2), True, 1),
]  # fmt: skip


def case(sizes, mask, tiles):
    name = " ".join([*sizes, *["documents"] * mask, *[f"{tiles} tiles"] * (tiles > 1)])
    return pytest.param(sizes, mask, tiles, id=name)


@pytest.mark.parametrize(("sizes", "mask", "tiles"), [case(*c) for c in CASES])
@pytest.mark.slow
def test_experts_over_context_and_in_tiles_are_one_device(sizes, mask, tiles):
    """Loss and gradients, of which that of the bias is the load."""
    plain = build(**MIXED, document_mask=mask)
    cut = build(**MIXED, document_mask=mask, ffn_tiles=tiles)
    check_over(sizes, cut, plain, atol=1e-5)


# ---- what cannot be --------------------------------------------------------------------------


def test_a_length_that_does_not_divide_says_what_would():
    with pytest.raises(
        UserError, match=r"length 36 .* mesh.context=4: .* multiple of 8 \(say 32\)"
    ):
        parallel.check_context_chunks(4, "a sequence of length", 36)


def test_a_window_that_ends_inside_a_piece_says_what_would_do():
    with pytest.raises(UserError, match=r"short_window 6: .* mesh.context=4 .* 4 tokens.* 4 or 8"):
        parallel.check_context_chunks(4, "train.sequence_length", T, (None, 3, 4, 12, 31, 6))


def test_the_configuration_is_checked_before_the_run():
    """Also the stages of the data, whose rows may be shorter."""
    stages = {"stages": [{"tokens": 64, "sequence_length": 8}, {}]}
    tree = {"model": {"depth": 1, "window_pattern": "L"}, "mesh": {"context": 8}}
    tree |= {"train": {"sequence_length": 64}, "data": {"tokenizer": {"name": "bytes"}}}
    resolve(Config.model_validate(tree), 256)
    mixed = {"model": tree["model"] | {"moe": {"experts": 4}, "ffn_tiles": 8}}
    mixed |= {"mesh": {"context": 2, "expert": 4, "data": 1}}
    resolve(Config.model_validate(tree | mixed), 256)
    tree["data"] |= stages
    with pytest.raises(UserError, match=r"data.stages: sequence_length 8 .* mesh.context=8"):
        resolve(Config.model_validate(tree), 256)
