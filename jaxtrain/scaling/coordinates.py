"""muP's coordinate check: RMS of activations by width or depth, after a few steps.

Yang & Hu 2021 and Yang et al. 2022 (arXiv:2203.03466, appendix D.1): under muP the size of each
activation, and of its change over the first steps, does not depend on the width.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from scipy import stats

from jaxtrain import data
from jaxtrain.config import Config, find_config, load_config
from jaxtrain.evaluation.model import Model, build
from jaxtrain.model import Transformer
from jaxtrain.scaling.coordinate_report import write_coordinates
from jaxtrain.scaling.laws import Interval
from jaxtrain.scaling.plan import last_overrides
from jaxtrain.scaling.record import now
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json
from jaxtrain.train.fit import fit
from jaxtrain.weights.params import Params

LEVEL = 0.95  # confidence level of the slopes' intervals
TOLERANCE = 0.1  # tolerated slope: 7% larger RMS for twice the width
WIDTHS = (64, 128, 256)
Verdict = Literal["flat", "grows", "shrinks", "unclear"]
Activations = dict[str, list[Array]]


class ActivationChange(NamedTuple):
    """RMS of one activation of one model, before and after training steps."""

    kind: str
    size: int  # width or depth
    seed: int
    before: float  # RMS at the start
    after: float  # RMS after the steps
    change: float  # RMS of the difference (after - before)


class Slope(NamedTuple):
    """Slope of log RMS over log size."""

    kind: str
    what: str  # before, after, change
    slope: Interval
    verdict: Verdict


class Recorder(nnx.Module):
    """Wrapper of a module that records its outputs."""

    def __init__(self, part: nnx.Module, name: str, sink: "Sink"):
        self.part, self.name, self.sink = part, name, sink

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert callable(self.part)
        out = self.part(*args, **kwargs)
        self.sink.found.setdefault(self.name, []).append(out[0] if isinstance(out, tuple) else out)
        return out


class Sink:
    """Outputs that the recorders collected, by name; layers in order."""

    def __init__(self) -> None:
        self.found: Activations = {}


def activations(
    graphdef: nnx.GraphDef[Transformer], params: Params, tokens_BT: Int[Array, "B T"]
) -> Activations:
    """Outputs of each layer's attention and FFN, the embedding, the residual stream after the last
    layer, and the logits."""
    sink, network = Sink(), nnx.merge(graphdef, params)
    for name in ("attention", "ffn"):
        part = getattr(network.blocks, name)
        if part is not None:
            setattr(network.blocks, name, Recorder(part, name, sink))
    x_BTD, _ = network.embed_tokens(tokens_BT, None)
    out = network.all_layers(x_BTD, tokens_BT)
    logits = network.logits(network.final_norm(out.x_BTD, out.middle_BTD))
    return {"embedding": [x_BTD], **sink.found, "stream": [out.x_BTD], "logits": [logits]}


def rms(arrays: Sequence[Array]) -> Float[Array, ""]:
    """The root mean square over all entries of arrays of equal shape."""
    return jnp.sqrt(jnp.mean(jnp.stack([jnp.mean(jnp.square(x)) for x in arrays])))


def activation_rms(
    graphdef: nnx.GraphDef[Transformer], first: Params, last: Params, tokens_BT: Int[Array, "B T"]
) -> dict[str, tuple[float, float, float]]:
    """Kind -> RMS of the activations with `first`, with `last`, and RMS of their difference."""

    @jax.jit
    def figures(first: Params, last: Params) -> dict[str, tuple[Array, Array, Array]]:
        a, b = (activations(graphdef, params, tokens_BT) for params in (first, last))
        change = {name: [y - x for x, y in zip(a[name], b[name], strict=True)] for name in a}
        return {name: (rms(a[name]), rms(b[name]), rms(change[name])) for name in a}

    found = figures(first, last)
    return {name: (float(x), float(y), float(z)) for name, (x, y, z) in found.items()}


def loss(network: Transformer, batch: data.Batch) -> Array:
    """Mean cross-entropy of the next token."""
    logits = network.logits(network(jnp.asarray(batch.tokens_BT)).states)
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets_BT[..., None], -1)[
        ..., 0
    ]
    return -jnp.sum(likely * batch.weights_BT) / jnp.sum(batch.weights_BT)


def batches_of(model: Model, config: Config) -> Iterator[data.Batch]:
    """The training batches of a configuration, without segment ids and positions."""
    prepared = data.prepare(config.data)
    t = model.config.train
    loader = data.train_batches(
        prepared.train, config=config.data, batch_size=t.batch_size,
        sequence_length=t.sequence_length,
    )  # fmt: skip
    for batch in loader:
        if not isinstance(batch, data.Batch):
            raise UserError("coordinates: the check needs text, not preferences")
        yield data.Batch(batch.tokens_BT, batch.targets_BT, batch.weights_BT, None, None)


def measure_activations(config: Config, steps: int, size: int) -> list[ActivationChange]:
    """Activations of one model on its first batch, before and after `steps` steps on later ones."""
    model, seed = build(config), config.run.seed
    text = batches_of(model, config)
    tokens_BT = jnp.asarray(next(text).tokens_BT)
    first = jax.tree.map(jnp.array, model.params)
    if steps:
        fit(model, loss=loss, batches=text, steps=steps)
    found = activation_rms(model.saved.graphdef, first, model.params, tokens_BT)
    return [ActivationChange(kind, size, seed, *values) for kind, values in found.items()]


def slopes(found: Sequence[ActivationChange]) -> list[Slope]:
    """Least-squares slope of log RMS over log size for each kind, with Student's t interval."""
    lines = []
    for kind in dict.fromkeys(one.kind for one in found):
        for what in ("before", "after", "change"):
            points = [(one.size, getattr(one, what)) for one in found if one.kind == kind]
            lines.append(Slope(kind, what, *slope_of([p for p in points if p[1] > 0])))
    return lines


def slope_of(points: Sequence[tuple[int, float]]) -> tuple[Interval, Verdict]:
    """Slope and verdict; "unclear" with fewer than three points or two sizes."""
    if len(points) < 3 or len({size for size, _ in points}) < 2:
        return Interval(math.nan, -math.inf, math.inf), "unclear"
    x, y = np.log(np.array(points, float)).T
    x -= x.mean()
    slope = float(x @ y / (x @ x))
    residual = y - y.mean() - slope * x
    error = math.sqrt(float(residual @ residual / (x @ x)) / (len(points) - 2))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(points) - 2)) * error
    one = Interval(slope, slope - half, slope + half)
    return one, verdict_of(one)


def verdict_of(slope: Interval) -> Verdict:
    """flat: the whole interval is within TOLERANCE of zero; grows, shrinks: all of it is beyond."""
    if -TOLERANCE <= slope.low and slope.high <= TOLERANCE:
        return "flat"
    if slope.low > TOLERANCE:
        return "grows"
    return "shrinks" if slope.high < -TOLERANCE else "unclear"


def check_coordinates(name: str, overrides: tuple[str, ...], a: argparse.Namespace) -> int:
    """Measure each size and seed, print the verdicts, write coordinates.json and .html."""
    if a.widths and a.depths:
        raise UserError("coordinates: give --widths or --depths, not both")
    sizes = tuple(a.depths or a.widths or WIDTHS)
    axis = "depth" if a.depths else "width"
    if len(set(sizes)) < 2:
        raise UserError(f"--{axis}s {sizes[0]}: a slope needs two sizes or more")
    path, found = find_config(name), []
    for size in sizes:
        for seed in range(a.seeds):
            lines = (
                *overrides, f"model.{axis}={size}", f"run.seed={seed}", "model.scan_layers=false",
                "train.precision=float32",
            )  # fmt: skip
            if axis == "width":
                lines += ("model.heads=null", "model.kv_heads=null", "model.hidden=null")
            config = load_config(path, last_overrides(lines))
            found += measure_activations(config, a.steps, size)
            print(f"coordinates {axis} {size}, seed {seed}: done", flush=True)
    lines = slopes(found)
    folder = a.out or Path("scaling")
    folder.mkdir(parents=True, exist_ok=True)
    tree = {
        "what": "jaxtrain coordinate check", "when": now(), "config": name,
        "overrides": list(overrides), "axis": axis, "steps": a.steps, "level": LEVEL,
        "tolerance": TOLERANCE, "slopes": [flat(one) for one in lines],
        "measured": [one._asdict() for one in found],
    }  # fmt: skip
    write_json(folder / "coordinates.json", tree)
    page = write_coordinates(folder / "coordinates.html", tree)
    print(f"{'activation':11s} {'RMS':7s} slope of log RMS over log {axis} ({LEVEL:.0%} interval)")
    for one in lines:
        s = one.slope
        text = f"{s.value:+.3f} ({s.low:+.3f} to {s.high:+.3f})"
        print(f"{one.kind:11s} {one.what:7s} {text:28s} {one.verdict}")
    print(f"coordinates {folder / 'coordinates.json'}, {page}")
    return 0


def flat(one: Slope) -> dict[str, Any]:
    """A slope as a JSON object; infinite values become null."""
    finite = lambda x: x if math.isfinite(x) else None
    slope = {name: finite(value) for name, value in one.slope._asdict().items()}
    return {"kind": one.kind, "what": one.what, **slope, "verdict": one.verdict}
