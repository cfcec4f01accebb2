"""The speed-run's optimizer step in plain PyTorch float64, one [out, in] matrix at a time.

Written from the formulas. Imported by make_golden.py alone.
"""

import math

import torch

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5
FULL = {
    "nesterov": True, "equilibrate": True, "orthogonalize": "polar_express", "renormalize": True,
    "normuon": True, "cautious_decay": True, "weight_decay_schedule": "cosine",
}  # fmt: skip
PLAIN = FULL | dict.fromkeys(
    ("nesterov", "equilibrate", "renormalize", "normuon", "cautious_decay"), False
)


# ---- schedules -------------------------------------------------------------------------------


def rate_multiplier(step, steps, warmup=40, warmdown=0.65, final=0.05):
    if step < warmup:
        return (step + 1) / warmup
    left = (steps - step) / (warmdown * steps)
    return 1.0 if left >= 1 else left + (1 - left) * final


def momentum(step, steps, warmdown=0.65):
    if step < 400:
        return 0.85 + (0.97 - 0.85) * step / 400
    past = (step - (1 - warmdown) * steps) / (warmdown * steps)
    return 0.97 if past < 0 else 0.97 + (0.90 - 0.97) * past


def decay_multiplier(step, steps):
    return 0.5 * (1 + math.cos(math.pi * step / steps))


# ---- one parameter ---------------------------------------------------------------------------


def orthogonalized(X, coefficients):
    X = X / (X.norm() * 1.01 + 1e-6)
    for a, b, c in coefficients:
        if X.shape[0] > X.shape[1]:
            A = X.T @ X
            X = a * X + X @ (b * A + c * A @ A)
        else:
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
    return X


def muon_step(p, g, state, lr, wd, mu, switches, beta2=0.9):
    """The parameter after the step; `state` is changed in place."""
    m, n = p.shape
    state["buf"] = torch.lerp(state.get("buf", torch.zeros_like(p)), g, 1 - mu)
    g = torch.lerp(g, state["buf"], mu) if switches["nesterov"] else state["buf"]
    if switches["equilibrate"]:
        g = g * (g.norm() / math.sqrt(m)) / g.norm(dim=1, keepdim=True).clamp(min=1e-6)
    polar = switches["orthogonalize"] == "polar_express"
    g = orthogonalized(g, POLAR_EXPRESS if polar else NEWTON_SCHULZ)
    if switches["renormalize"]:
        g = g * math.sqrt(min(m, n)) / g.norm()
    if switches["normuon"]:
        red_dim = -1 if m >= n else -2
        v = (g * g).mean(red_dim, keepdim=True)
        state["buf2"] = torch.lerp(state.get("buf2", torch.zeros_like(v)), v, 1 - beta2)
        s = state["buf2"].clamp(min=1e-10).rsqrt()
        g = g * s * g.norm() / (v * p.shape[red_dim] * s * s).sum().sqrt()
    mask = g * p >= 0 if switches["cautious_decay"] else torch.ones_like(p)
    lr = lr * max(1.0, m / n) ** 0.5
    return p - lr * g - lr * wd * p * mask


def adamw_step(p, g, state, lr, betas, wd, eps=1e-10):
    b1, b2 = betas
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = torch.lerp(state.get("m", torch.zeros_like(p)), g, 1 - b1)
    state["v"] = torch.lerp(state.get("v", torch.zeros_like(p)), g * g, 1 - b2)
    denominator = (state["v"] / (1 - b2**t)).sqrt() + eps
    return p * (1 - lr * wd) - lr * (state["m"] / (1 - b1**t)) / denominator


# ---- the recipe ------------------------------------------------------------------------------


def adamw_groups(width, batch_tokens):
    """Name prefix -> (rate, betas, decay), scaled to the width and the tokens of a step."""
    dm, bs = (width / 768) ** -0.5, math.sqrt(batch_tokens / 2**19)
    return {
        "lm_head": (0.008 * dm * bs, (0.8, 0.96), 0.01),
        "wte": (0.3 * dm * bs, (0.8, 0.995), 0.001),
        "value_embeds": (0.15 * dm * bs, (0.8, 0.995), 0.01),
        "resid_lambdas": (0.005 * bs, (0.8, 0.95), 0.05),
        "x0_lambdas": (0.5 * bs, (0.96, 0.95), 0.0),
        "smear": (0.2, (0.8, 0.95), 0.0),
        "backout": (0.2, (0.8, 0.95), 0.0),
    }


def train(weights, gradients, at, steps, *, width, batch_tokens, horizon, switches=FULL):
    """Weights after each of the steps `at` of a run of `steps`; `horizon` is D / D_ref."""
    p = {name: torch.tensor(w).double() for name, w in weights.items()}
    state: dict[str, dict] = {name: {} for name in p}
    bs, groups = math.sqrt(batch_tokens / 2**19), adamw_groups(width, batch_tokens)
    trajectory = []
    for step, given in zip(at, gradients):
        factor = rate_multiplier(step, steps)
        wd = 0.28 * bs / horizon
        if switches["weight_decay_schedule"] == "cosine":
            wd *= decay_multiplier(step, steps)
        for name, g in given.items():
            g, x, mine = torch.tensor(g).double(), p[name], state[name]
            if name.startswith("h."):
                mu = momentum(step, steps)
                p[name] = muon_step(x, g, mine, 0.02 * bs * factor, wd, mu, switches)
            else:
                lr, betas, decay = next(v for k, v in groups.items() if name.startswith(k))
                p[name] = adamw_step(x, g, mine, lr * factor, betas, decay)
        trajectory.append({name: x.numpy().copy() for name, x in p.items()})
    return trajectory
