"""Writes the golden fixtures beside it: the speed-run recipe by an independent implementation.

In an environment with torch==2.13.0 (the CPU build is enough) and numpy:
    python tests/oracle/make_golden.py

golden_model.npz  weights, tokens, logits, loss and all gradients of a small model; and, for each
                  switch of the model, its loss and a sketch of each gradient.
golden_optim.npz  weights and gradients, three steps of the whole recipe on a small model, three
                  steps of each switch of Muon on single matrices, and the schedules.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch_model
import torch_optim

HERE = Path(__file__).parent
VOCAB, BATCH, T = 50, 2, 24

SHALLOW = {"depth": 3}  # of the variants that do not say; compiles faster
VARIANTS = {
    "shallow": {},
    "no smear": {"smear": False},
    "no backout": {"backout": False},
    "no value embeddings": {"value_embeddings": False},
    "no residual scales": {"residual_scales": False},
    "no qk norm": {"qk_norm": False},
    "no softcap": {"logit_softcap": None},
    "attention softcap": {"attention_softcap": 2.0},
    "full context": {"depth": 4, "window_pattern": "L"},
    "other windows": {"window_pattern": "LS", "short_window": 1},
    "gelu": {"ffn": "gelu"},
    "swiglu": {"ffn": "swiglu"},
    "geglu": {"ffn": "geglu"},
    "tied head": {"tied_head": True},
    "norm gain": {"norm_gain": True},
    "no embed norm": {"embed_norm": False},
    "grouped queries": {"kv_heads": 2},
    "multi-query": {"kv_heads": 1},
    "document mask": {"document_mask": True},
    "llama": {
        "smear": False, "backout": False, "value_embeddings": False, "residual_scales": False,
        "qk_norm": False, "logit_softcap": None, "window_pattern": "L", "ffn": "swiglu",
        "tied_head": True, "norm_gain": True, "embed_norm": False, "kv_heads": 2,
        "rope_base": 10_000.0,
    },
}  # fmt: skip

MUON_SWITCHES = {
    "full": torch_optim.FULL,
    "plain": torch_optim.PLAIN,
    "newton schulz": torch_optim.FULL | {"orthogonalize": "newton_schulz"},
    "plain newton schulz": torch_optim.PLAIN | {"orthogonalize": "newton_schulz"},
    "constant decay": torch_optim.FULL | {"weight_decay_schedule": "constant"},
} | {
    f"no {switch}": torch_optim.FULL | {switch: False}
    for switch in ("nesterov", "equilibrate", "renormalize", "normuon", "cautious_decay")
}


def sketch(x):
    """Four numbers that any change of x changes: its products with fixed directions."""
    return np.cos(np.arange(1, 5)[:, None] * np.arange(1, x.size + 1)) @ x.ravel()


def model_golden():
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, VOCAB, (2, BATCH, T))
    targets[random.random((BATCH, T)) < 0.1] = -1
    documents = np.cumsum(random.random((BATCH, T)) < 0.2, axis=1)
    base = torch_model.random_weights(torch_model.DEFAULTS)
    run = lambda w, c: torch_model.loss_and_gradients(w, tokens, targets, c, VOCAB, documents)
    logits, loss, gradients = run(base, torch_model.DEFAULTS)
    arrays = {"tokens": tokens, "targets": targets, "documents": documents, "loss": loss}
    arrays |= {"logits": np.float32(logits), "config": json.dumps(torch_model.DEFAULTS)}
    arrays |= {f"weights/{name}": w for name, w in base.items()}
    arrays |= {f"gradients/{name}": np.float32(g) for name, g in gradients.items()}
    stored = dict(base)  # a variant adds only what differs
    for title, changes in VARIANTS.items():
        changes = SHALLOW | changes
        c = torch_model.DEFAULTS | changes
        weights = torch_model.random_weights(c)
        _, loss, gradients = run(weights, c)
        facts = {"config": changes, "names": list(weights)}
        arrays[f"{title}/facts"], arrays[f"{title}/loss"] = json.dumps(facts), loss
        arrays[f"{title}/sketches"] = np.stack([sketch(gradients[name]) for name in weights])
        arrays[f"{title}/norms"] = np.array([np.linalg.norm(gradients[n]) for n in weights])
        own = {n: w for n, w in weights.items() if not np.array_equal(w, stored.get(n))}
        stored |= own if title == "shallow" else {}
        arrays |= {f"{title}/weights/{name}": w for name, w in own.items()}
    return arrays


def random_gradients(weights, steps, seed):
    random = np.random.default_rng(seed)
    normal = lambda w: np.float16(random.normal(size=w.shape))
    gradients = [{name: normal(w) for name, w in weights.items()} for _ in range(steps)]
    for step, g in enumerate(gradients):  # tokens that a batch does not hold
        for name in g:
            if name.startswith(("wte", "value_embeds")):
                g[name][step::3] = 0
    return gradients


def optim_golden():
    # The steps lie in the warm-up, on the plateau and in the warm-down of a run of 2000.
    at, steps = [10, 450, 1500], 2000
    small = {"depth": 2, "width": 16, "kv_heads": 2, "hidden": 64, "vocab_rows": 56}
    rule = {"width": 16, "batch_tokens": 2**17, "horizon": 0.4}
    weights = torch_model.random_weights(torch_model.DEFAULTS | small)
    gradients = random_gradients(weights, len(at), seed=1)
    path = torch_optim.train(weights, gradients, at, steps, **rule)
    facts = {"model": small, "rule": rule, "at": at, "steps": steps, "muon": MUON_SWITCHES}
    arrays = {"facts": json.dumps(facts)}
    arrays |= {f"weights/{name}": w for name, w in weights.items()}
    for i in range(len(at)):
        arrays |= {f"gradients/{i}/{name}": g for name, g in gradients[i].items()}
    # Middle results are in what the last step returns, through the momenta.
    arrays |= {f"after/{name}": np.float32(w) for name, w in path[-1].items()}

    random = np.random.default_rng(2)
    shapes = {"h.tall": (24, 8), "h.wide": (8, 24), "h.square": (12, 12), "h.gate": (2, 12)}
    matrices = {name: np.float16(random.normal(size=s) / 4) for name, s in shapes.items()}
    gradients = random_gradients(matrices, len(at), seed=3)
    for name in matrices:
        arrays[f"muon/weights/{name}"] = matrices[name]
        arrays[f"muon/gradients/{name}"] = np.stack([g[name] for g in gradients])
    for title, switches in MUON_SWITCHES.items():
        path = torch_optim.train(matrices, gradients, at, steps, switches=switches, **rule)
        for name in matrices:
            arrays[f"muon/{title}/{name}"] = np.float32([w[name] for w in path])

    for n in (1000, 2520):
        functions = torch_optim.rate_multiplier, torch_optim.momentum, torch_optim.decay_multiplier
        arrays[f"schedule/{n}"] = np.array([[f(i, n) for f in functions] for i in range(0, n, 5)])
    return arrays


if __name__ == "__main__":
    for name, make in (("golden_model", model_golden), ("golden_optim", optim_golden)):
        versions = f"torch {torch.__version__}, numpy {np.__version__}"
        np.savez_compressed(HERE / f"{name}.npz", versions=versions, **make())
        print(name, (HERE / f"{name}.npz").stat().st_size)
