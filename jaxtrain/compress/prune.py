"""`jaxtrain prune`: set weights of a trained model to zero, without training.

jaxtrain prune RUN --method wanda --sparsity 0.5 --out DIR [key=value ...]
"""

import json

import jax
import numpy as np
from jax.tree_util import KeyPath

from jaxtrain.cluster.runtime import start
from jaxtrain.compress.arguments import prune_parser
from jaxtrain.compress.calibrate import Matrix, visit_layers
from jaxtrain.compress.calibration_text import TokenRows, calibration_rows
from jaxtrain.compress.sparsify import (
    METHODS,
    InputStatistics,
    SparsityTarget,
    check_shape,
    parse_target,
    sparsify,
)
from jaxtrain.config.resolve import override
from jaxtrain.evaluation.evaluate import VALIDATED, evaluate
from jaxtrain.evaluation.model import Model
from jaxtrain.runs.saved import (
    Saved,
    check_out,
    folder_of,
    is_quantized,
    load_resolved,
    load_saved,
)
from jaxtrain.settings import UserError, command
from jaxtrain.weights.contract import flatten
from jaxtrain.weights.params import Params, is_block_matrix, path_name


def prune(
    saved: Saved, method: str, target: SparsityTarget, batches: list[TokenRows] | None = None
) -> Params:
    """The parameters with every matrix of the blocks pruned.

    batches: the calibration text, for methods that read one; a layer's inputs then come from the
    pruned layers before it. Raises UserError for experts with such a method.
    """
    specs = {name: spec for name, spec in flatten(saved.specs).items() if is_block_matrix(spec)}
    for name, spec in specs.items():
        check_shape(name, spec.shape[-2], target)
    if not METHODS[method].inputs:

        def one(path: KeyPath, w: np.ndarray | jax.Array) -> np.ndarray:
            w, name = np.array(w), path_name(path)
            if name in specs:
                for index in np.ndindex(w.shape[:-2]):
                    w[index] = sparsify(method, name, w[index], None, target)
            return w

        return jax.tree_util.tree_map_with_path(one, saved.params)
    if saved.config.model.moe:
        raise UserError(
            f"--method {method} reads the inputs of every matrix, and those of experts are not "
            "recorded; --method magnitude prunes them"
        )

    def visit(index: int, matrices: dict[str, Matrix]) -> dict[str, np.ndarray]:
        return {name: prune_one(method, matrix, target) for name, matrix in matrices.items()}

    return visit_layers(saved, batches or [], visit, METHODS[method].hessian)


def prune_one(method: str, matrix: Matrix, target: SparsityTarget) -> np.ndarray:
    square_K, hessian_KK = jax.device_get((matrix.inputs.square_K, matrix.inputs.hessian_KK))
    inputs = InputStatistics(np.asarray(square_K, np.float64), hessian_KK)
    return sparsify(method, matrix.name, matrix.w_KN, inputs, target)


def sparsity_of(saved: Saved) -> dict[str, float]:
    """Share of zeros of each matrix of the blocks, by name."""
    specs, params = flatten(saved.specs), flatten(saved.params)
    names = [name for name, spec in specs.items() if is_block_matrix(spec)]
    return {name: float(np.mean(np.asarray(params[name]) == 0)) for name in names}


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    a = prune_parser().parse_intermixed_args(argv)
    target = parse_target(a.sparsity, a.pattern)
    check_out(a.out)
    config = override(load_resolved(folder_of(a.run) / "config.yaml"), a.overrides, VALIDATED)
    start()
    saved = load_saved(a.run, a.step)
    if is_quantized(saved):
        raise UserError(f"{a.run} is quantized; prune the unquantized model")
    batches = None
    if METHODS[a.method].inputs:
        batches = calibration_rows(saved, config, a.text, a.sequences, a.length)
    pruned = saved._replace(params=prune(saved, a.method, target, batches))
    Model(pruned).save(a.out)
    facts = {"run": str(a.run), "method": a.method, "sparsity": target.sparsity}
    facts |= {"pattern": a.pattern, "zeros": sparsity_of(pruned)}
    if batches:
        size = sum(rows.tokens_BT.size for rows in batches)
        facts |= {"calibration": {"text": str(a.text or "data.train"), "tokens": size}}
    facts |= {"before": evaluate(saved, config), "after": evaluate(pruned, config)}
    (a.out / "prune.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name in facts["before"]:
        print(f"{name:12s} {facts['before'][name]:.4f} -> {facts['after'][name]:.4f}")
    print(f"pruned   {a.run} by {a.method} into {a.out}")
    return 0
