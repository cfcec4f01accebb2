"""The golden fixtures, and how nanochat's names and layouts become ours."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxtrain.model import ModelConfig, Transformer, resolve_model, split


class Golden:
    """One fixture: arrays by path, JSON facts."""

    def __init__(self, name):
        self.arrays = np.load(Path(__file__).parent / f"{name}.npz")

    def __getitem__(self, path):
        return self.arrays[path]

    def facts(self, path):
        return json.loads(str(self.arrays[path]))

    def under(self, prefix):
        """name -> array of all `prefix/name`."""
        paths = (path for path in self.arrays.files if path.startswith(prefix + "/"))
        return {path.removeprefix(prefix + "/"): self.arrays[path] for path in paths}


def model_of(config, vocab, length):
    """(resolved config, graphdef, specs) of a fixture's model."""
    fields = {k: v for k, v in config.items() if k != "vocab_rows"}
    fields |= {"vocab_multiple": config["vocab_rows"], "norm_eps": 1e-6}
    c = resolve_model(ModelConfig.model_validate(fields), length)
    return c, *split(Transformer(c, vocab))


def swapped(w_io, head_dim):
    """The halves of each head's channels, exchanged.

    nanochat rotates by -theta and we by +theta (as Llama): with the halves of q and k exchanged
    the two are the same function.
    """
    halves = w_io.reshape(w_io.shape[0], -1, 2, head_dim // 2)
    return halves[:, :, ::-1].reshape(w_io.shape)


def to_ours(weights, c):
    """nanochat's weights by name ([out, in], a layer a name) as our tree ([L, in, out])."""
    w = {name: jnp.asarray(x, jnp.float32) for name, x in weights.items()}

    def stack(pattern, change=lambda x: x):
        names = [pattern.format(i) for i in range(c.depth)]
        return jnp.stack([change(w[name]) for name in names if name in w])

    linear = lambda pattern: stack(pattern, jnp.transpose)
    turned = lambda pattern: stack(pattern, lambda x: swapped(x.T, c.head_dim))
    attention = {"q": turned("h.{}.attn.c_q"), "k": turned("h.{}.attn.c_k")}
    attention |= {"v": linear("h.{}.attn.c_v"), "out": linear("h.{}.attn.c_proj")}
    ffn = {"up": linear("h.{}.mlp.c_fc"), "down": linear("h.{}.mlp.c_proj")}
    blocks, tree = {"attention": attention, "ffn": ffn}, {"embed": w["wte"]}
    if c.ffn in ("swiglu", "geglu"):
        ffn["gate"] = linear("h.{}.mlp.c_gate")
    if c.norm_gain:
        blocks["attention_gain"] = stack("h.{}.attn.norm")
        blocks["ffn_gain"] = stack("h.{}.mlp.norm")
        tree["final_gain"] = w["norm"]
    if c.value_embeddings:
        gate = linear("h.{}.attn.ve_gate")
        tree["value_embed"] = {"table": stack("value_embeds.{}"), "gate": gate}
    if c.residual_scales:
        tree |= {"residual_scale": w["resid_lambdas"], "x0_scale": w["x0_lambdas"]}
    if c.smear:
        tree |= {"smear_gate": w["smear_gate"][0], "smear_scale": w["smear_lambda"]}
    if c.backout:
        tree["backout_scale"] = w["backout_lambda"]
    if not c.tied_head:
        tree["head"] = w["lm_head"].T
    return tree | {"blocks": blocks}
