"""The speed-run's forward pass in plain PyTorch: one float64 function of nanochat's weights.

Written from the formulas, in nanochat's names and layout (a weight is [out, in], a layer a name),
with a switch for each variant that the tests compare. Imported by make_golden.py alone.
"""

import math
import zlib

import numpy as np
import torch
import torch.nn.functional as F

EPS = 1e-6  # torch's own default is finfo(dtype).eps
DEFAULTS = {
    "depth": 4, "width": 32, "head_dim": 8, "kv_heads": 4, "hidden": 128, "vocab_rows": 64,
    "short_window": 5, "window_pattern": "SSSL", "rope_base": 100_000.0, "ffn": "relu2",
    "qk_norm": True, "qk_scale": 1.2, "logit_softcap": 15.0, "attention_softcap": None,
    "tied_head": False, "norm_gain": False, "embed_norm": True, "value_embeddings": True,
    "residual_scales": True, "smear": True, "backout": True, "document_mask": False,
}  # fmt: skip


def weight_shapes(c):
    """Name -> shape, as nanochat's state dict has them."""
    D, KH, hidden, rows = c["width"], c["kv_heads"] * c["head_dim"], c["hidden"], c["vocab_rows"]
    shapes = {"wte": (rows, D)}
    for i in range(c["depth"]):
        for name, out in (("c_q", D), ("c_k", KH), ("c_v", KH), ("c_proj", D)):
            shapes[f"h.{i}.attn.{name}"] = (out, D)
        shapes[f"h.{i}.mlp.c_fc"] = (hidden, D)
        shapes[f"h.{i}.mlp.c_proj"] = (D, hidden)
        if c["ffn"] in ("swiglu", "geglu"):
            shapes[f"h.{i}.mlp.c_gate"] = (hidden, D)
        if c["value_embeddings"] and i % 2 == (c["depth"] - 1) % 2:
            shapes[f"value_embeds.{i}"] = (rows, KH)
            shapes[f"h.{i}.attn.ve_gate"] = (c["kv_heads"], 12)
        if c["norm_gain"]:
            shapes[f"h.{i}.attn.norm"] = shapes[f"h.{i}.mlp.norm"] = (D,)
    if c["norm_gain"]:
        shapes["norm"] = (D,)
    if c["residual_scales"]:
        shapes["resid_lambdas"] = shapes["x0_lambdas"] = (c["depth"],)
    if c["smear"]:
        shapes["smear_gate"], shapes["smear_lambda"] = (1, min(24, D)), ()
    if c["backout"]:
        shapes["backout_lambda"] = ()
    if not c["tied_head"]:
        shapes["lm_head"] = (rows, D)
    return shapes


def random_weights(c, salt=""):
    """Values that no path is closed by; float16 numbers, so that the fixture is small and exact."""

    def value(name, shape):
        noise = np.random.default_rng(zlib.crc32((salt + name).encode())).normal(size=shape)
        if len(shape) < 2:
            return 0.6 + 0.2 * noise
        return noise if name.startswith(("wte", "value")) else noise * 1.5 / math.sqrt(shape[-1])

    shapes = weight_shapes(c)
    return {name: np.float16(value(name, shape)) for name, shape in shapes.items()}


def norm(x, gain=None):
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    return y if gain is None else y * gain


def rope(x, base):
    """Half-split, by -theta. x: [B, T, heads, H]"""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype) * 2 / x.shape[-1])
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequency
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], -1)


def attention(x, ve, w, i, c, documents):
    B, T, _ = x.shape
    heads, kv_heads, H = c["width"] // c["head_dim"], c["kv_heads"], c["head_dim"]
    q = (x @ w[f"h.{i}.attn.c_q"].T).view(B, T, heads, H)
    k = (x @ w[f"h.{i}.attn.c_k"].T).view(B, T, kv_heads, H)
    v = (x @ w[f"h.{i}.attn.c_v"].T).view(B, T, kv_heads, H)
    if ve is not None:
        gate = 3 * torch.sigmoid(x[..., :12] @ w[f"h.{i}.attn.ve_gate"].T)
        v = v + gate[..., None] * ve.view(B, T, kv_heads, H)
    q, k = rope(q, c["rope_base"]), rope(k, c["rope_base"])
    if c["qk_norm"]:
        q, k = norm(q) * c["qk_scale"], norm(k) * c["qk_scale"]
    k, v = (y.repeat_interleave(heads // kv_heads, dim=2) for y in (k, v))
    scores = torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
    if c["attention_softcap"]:
        scores = c["attention_softcap"] * torch.tanh(scores / c["attention_softcap"])
    row, column = torch.arange(T)[:, None], torch.arange(T)[None, :]
    visible = column <= row
    short = c["window_pattern"][i % len(c["window_pattern"])] == "S"
    if short and i < c["depth"] - 1:
        visible = visible & (row - column <= c["short_window"])
    if c["document_mask"]:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    y = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v.transpose(1, 2)
    return y.transpose(1, 2).reshape(B, T, heads * H) @ w[f"h.{i}.attn.c_proj"].T


def feed_forward(x, w, i, c):
    up = x @ w[f"h.{i}.mlp.c_fc"].T
    if c["ffn"] == "relu2":
        h = up.relu() ** 2
    elif c["ffn"] == "gelu":
        h = F.gelu(up, approximate="tanh")
    else:
        gate = x @ w[f"h.{i}.mlp.c_gate"].T
        h = up * (F.silu(gate) if c["ffn"] == "swiglu" else F.gelu(gate, approximate="tanh"))
    return h @ w[f"h.{i}.mlp.c_proj"].T


def logits(w, tokens, c, vocab_size, documents=None):
    """[B, T, V] after the softcap."""
    x = w["wte"][tokens]
    if c["embed_norm"]:
        x = norm(x)
    if c["smear"]:
        gate = w["smear_lambda"] * torch.sigmoid(x[:, 1:, :24] @ w["smear_gate"].T)
        if c["document_mask"]:
            gate = gate * (documents[:, 1:] == documents[:, :-1])[..., None]
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
    x0 = x
    for i in range(c["depth"]):
        if c["residual_scales"]:
            x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * x0
        table = w.get(f"value_embeds.{i}")
        ve = None if table is None else table[tokens]
        x = x + attention(norm(x, w.get(f"h.{i}.attn.norm")), ve, w, i, c, documents)
        x = x + feed_forward(norm(x, w.get(f"h.{i}.mlp.norm")), w, i, c)
        if i == c["depth"] // 2:
            middle = x
    if c["backout"]:
        x = x - w["backout_lambda"] * middle
    x = norm(x, w.get("norm"))
    z = (x @ (w["wte"] if c["tied_head"] else w["lm_head"]).T)[..., :vocab_size]
    return (
        z if c["logit_softcap"] is None else c["logit_softcap"] * torch.tanh(z / c["logit_softcap"])
    )


def loss_and_gradients(weights, tokens, targets, c, vocab_size, documents=None):
    """(logits, mean cross-entropy over targets other than -1, gradients by name), float64."""
    w = {name: torch.tensor(np.float64(x), requires_grad=True) for name, x in weights.items()}
    documents = None if documents is None else torch.tensor(documents)
    z = logits(w, torch.tensor(tokens), c, vocab_size, documents)
    labels = torch.tensor(targets).flatten()
    loss = F.cross_entropy(z.flatten(0, 1), labels, ignore_index=-1)
    gradients = torch.autograd.grad(loss, list(w.values()))
    return z.detach().numpy(), loss.item(), dict(zip(w, (g.numpy() for g in gradients)))
