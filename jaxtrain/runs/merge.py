"""`jaxtrain merge`: merge several models of one structure into one, without training.

mean    average of the weights (model soups, Wortsman et al. 2022, arXiv:2203.05482; of a
        run's last checkpoints: stochastic weight averaging, arXiv:1803.05407)
slerp   spherical interpolation between each pair of arrays of two models (Shoemake 1985)
ties    TIES: keep the largest changes of each model from a common base, elect the sign with
        the larger total, average the changes of that sign (Yadav et al. 2023, arXiv:2306.01708)
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxtrain.runs.arguments import merge_parser
from jaxtrain.runs.saved import Saved, check_out, is_quantized, load_saved, save_model
from jaxtrain.settings import UserError, command
from jaxtrain.storage.location import local
from jaxtrain.weights.params import Params

Merge = Callable[[Sequence[np.ndarray]], np.ndarray]  # arrays of one parameter, float64


def mean(weights: Sequence[float]) -> Merge:
    shares = np.asarray(weights) / np.sum(weights)
    return lambda arrays: np.einsum("i,i...->...", shares, np.stack(arrays))


def slerp(t: float) -> Merge:
    """Spherical interpolation. t: 0 is the first model, 1 the second. (Anti)parallel arrays are
    interpolated linearly."""

    def merge(arrays: Sequence[np.ndarray]) -> np.ndarray:
        a, b = arrays
        lengths = np.linalg.norm(a) * np.linalg.norm(b)
        cosine = np.sum(a * b) / lengths if lengths else 1.0
        angle = np.arccos(np.clip(cosine, -1.0, 1.0))
        if np.sin(angle) < 1e-6:
            return (1 - t) * a + t * b
        return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)

    return merge


def ties(weights: Sequence[float], density: float, scale: float) -> Merge:
    """TIES merge. The first array is the base's. density: share of each model's changes to keep."""

    def kept(change: np.ndarray) -> np.ndarray:
        count = round(density * change.size)
        if count == 0:
            return np.zeros_like(change)
        least = np.partition(np.abs(change), change.size - count, axis=None)[-count]
        return np.where(np.abs(change) >= least, change, 0.0)

    def merge(arrays: Sequence[np.ndarray]) -> np.ndarray:
        base, *models = arrays
        changes = np.stack([w * kept(x - base) for w, x in zip(weights, models)])
        agree = np.sign(changes) == np.sign(changes.sum(axis=0))
        shares = np.stack([np.full(base.shape, w) for w in weights]) * (agree & (changes != 0))
        total = shares.sum(axis=0)
        mean_change = (changes * agree).sum(axis=0) / np.where(total > 0, total, 1.0)
        return base + scale * mean_change

    return merge


def merged(models: Sequence[Saved], names: Sequence[str], merge: Merge) -> Params:
    """Merge the parameters of all models; each array keeps its dtype.

    Raises UserError, with the first difference, if model structures or tokenizers differ.
    """
    first = models[0]
    for name, model in zip(names[1:], models[1:]):
        if model.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise UserError(f"{name} and {names[0]} have different tokenizers and cannot be merged")
        if model.config.model != first.config.model:
            ours, theirs = (m.config.model.model_dump() for m in (first, model))
            field = next(key for key in ours if ours[key] != theirs[key])
            raise UserError(
                f"{name} has model.{field} {theirs[field]}, {names[0]} {ours[field]}; only models "
                "of the same architecture can be merged"
            )

    def one(*arrays: np.ndarray | jax.Array) -> np.ndarray:
        wide = [np.atleast_1d(np.asarray(x, np.float64)) for x in arrays]  # scalars as well
        return merge(wide).reshape(arrays[0].shape).astype(arrays[0].dtype)

    return jax.tree.map(one, *(model.params for model in models))


@command
def main(argv: list[str] | None = None) -> int:
    """Merge models. Returns 0, or 2 after a one-line UserError."""
    a = merge_parser().parse_args(argv)
    named = [split_step(text) for text in a.models]
    weights = a.weights or [1.0] * len(named)
    if len(weights) != len(named):
        raise UserError(
            f"--weights has {len(weights)} numbers for {len(named)} models; give one per model"
        )
    if a.method == "ties" and a.base is None:
        raise UserError("--method ties needs --base, the model that all were tuned from")
    if a.method != "ties" and a.base is not None:
        raise UserError(f"--base applies only to --method ties, not to {a.method}")
    if a.method == "slerp" and len(named) != 2:
        raise UserError(f"--method slerp merges two models, not {len(named)}")
    if len(named) < (1 if a.method == "ties" else 2):
        raise UserError("name two models or more")
    check_out(a.out)
    if a.base is not None:
        named.insert(0, split_step(a.base))
    methods: dict[str, Callable[[], Merge]] = {
        "mean": lambda: mean(weights),
        "slerp": lambda: slerp(weights[1] / sum(weights)),
        "ties": lambda: ties(weights, a.density, a.scale),
    }
    models = [load_saved(path, step) for path, step in named]
    for (path, _), model in zip(named, models):
        if is_quantized(model):
            raise UserError(
                f"{path} is quantized; merge the unquantized models, then quantize the result"
            )
    params = merged(models, [str(path) for path, _ in named], methods[a.method]())
    save_model(a.out, models[-1].config, params, models[-1].tokenizer)
    print(f"merged   {len(a.models)} models by {a.method} into {a.out}")
    return 0


def split_step(text: str) -> tuple[Path, int | None]:
    """Parse RUN (the final model) or RUN@STEP (the checkpoint of that step)."""
    path, mark, step = text.rpartition("@")
    return (local(path), int(step)) if mark and step.isdigit() else (local(text), None)
