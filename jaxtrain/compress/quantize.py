"""`jaxtrain quantize`: quantize a trained model's matrices to 8 or 4 bits, without training.

The new folder holds packed matrices (`weights.stored`); they stay packed in memory when loaded.
"""

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.cluster.ray_cluster import ray_cluster
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.compress.arguments import quantize_parser
from jaxtrain.compress.calibrate import Inputs, Matrix, visit_layers
from jaxtrain.compress.calibration_text import TokenRows, calibration_rows
from jaxtrain.compress.comparison import BeforeAfter
from jaxtrain.compress.fold import Fold, fold_layer, folds_of
from jaxtrain.compress.methods import METHODS, MethodOptions
from jaxtrain.compress.stages import Advance, Stages
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import DataConfig, open_bundle
from jaxtrain.data.config import SourceValidation
from jaxtrain.data.evaluation.tasks import Bundle, Rules
from jaxtrain.data.files.sources import TextSource
from jaxtrain.evaluation.evaluate import evaluate
from jaxtrain.evaluation.tasks import run_tasks
from jaxtrain.interop.companions import FOLDER
from jaxtrain.model import ParamSpec, cast
from jaxtrain.model.config import check_decoder
from jaxtrain.runs.saved import (
    WEIGHTS,
    Saved,
    apply_weight_form,
    check_out,
    is_quantized,
    load_saved,
    save_model,
)
from jaxtrain.settings import UserError, command
from jaxtrain.storage.disk import write_json, write_whole
from jaxtrain.weights.contract import dequantize, flatten
from jaxtrain.weights.int4 import GROUP, group_sizes
from jaxtrain.weights.params import Params, Specs, is_block_matrix, path_name
from jaxtrain.weights.quantized import QuantizedWeight
from jaxtrain.weights.stored import stored_bytes

Solved = dict[tuple[str, int], QuantizedWeight]  # by a matrix's name and index in its stack
Figures = dict[str, float]  # bpb, perplexity, loss, disk_bytes, memory_bytes; core if asked for
ABSMAX = MethodOptions()
array_of = jax.jit(dequantize)


class Calibration(NamedTuple):
    """Calibration text of a method that reads inputs; the arguments of `calibration_rows`."""

    text: Path | None = None  # a UTF-8 file; None: the training text
    sequences: int = 128
    length: int | None = None  # tokens per sequence; None: train.sequence_length


TRAINING_TEXT = Calibration()
MEASURED = {
    "bpb": "bits per byte", "perplexity": "perplexity", "core": "CORE",
    "disk_bytes": "bytes on disk", "memory_bytes": "bytes in memory",
}  # fmt: skip


def is_quantizable(spec: ParamSpec, head: bool) -> bool:
    """Whether a parameter is a matrix of the blocks (experts too), or the head if requested."""
    return is_block_matrix(spec) or (head and spec.role == "head")


@contextlib.contextmanager
def named_error(name: str) -> Iterator[None]:
    """Prefix a UserError raised inside with the matrix's name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error.args[0]}") from None


def solve(
    saved: Saved,
    batches: list[TokenRows],
    method: str,
    options: MethodOptions = ABSMAX,
    advance: Advance = lambda *_: None,
) -> tuple[Solved, Params]:
    """Quantize layer by layer with a method that reads a calibration text. Returns the quantized
    matrices, and the parameters with all changes, such as gains that input scales are folded into.

    A layer's inputs come from the quantized layers before it, as in GPTQ. advance: called after
    each layer. Raises UserError for
    experts, whose inputs are not recorded.
    """
    if saved.config.model.moe:
        raise UserError(
            f"--method {method} reads the inputs of every matrix, and those of experts are not "
            "recorded; --method int4 takes them"
        )
    solved: Solved = {}
    scales = METHODS[method].scales
    folds = folds_of(saved.config.model) if scales else ()
    makers = {name for fold in folds for name in fold.makers}
    vectors = {
        n: np.asarray(x, np.float32) for n, x in flatten(saved.params).items() if n in makers
    }
    vectors = {name: x for name, x in vectors.items() if x.ndim == 2}
    saved = saved._replace(params=replaced(saved.params, vectors))  # in float32, as norms compute

    def scales_of(w_KN: jax.Array, inputs: Inputs, fold: Fold) -> jax.Array:
        assert scales is not None
        with named_error(fold.readers[0]):
            return scales(w_KN, inputs, fold, options)

    def visit(index: int, matrices: dict[str, Matrix]) -> dict[str, np.ndarray]:
        seen = {name: m.inputs for name, m in matrices.items()}
        arrays = {name: m.w_KN for name, m in matrices.items()}
        arrays |= {name: x[index] for name, x in vectors.items()}
        changed = fold_layer(folds, arrays, seen, scales_of)
        whole = {name for fold in folds for name in fold.readers}  # their scales are folded
        for name, matrix in matrices.items():
            w_KN = jnp.asarray(changed.get(name, matrix.w_KN), jnp.float32)
            with named_error(name):
                inputs = None if name in whole else seen[name]
                weight = METHODS[method].quantize(w_KN, inputs, options)
            solved[name, matrix.stack_index] = weight
            changed[name] = np.asarray(array_of(weight))
        advance(index + 1, saved.config.model.depth)
        return changed

    return solved, visit_layers(saved, batches, visit, METHODS[method].hessian)


def replaced(params: Params, arrays: Mapping[str, np.ndarray]) -> Params:
    """The parameters with the arrays of these names replaced."""
    one = lambda path, x: arrays.get(path_name(path), x)
    return jax.tree_util.tree_map_with_path(one, params)


def quantize_params(
    params: Params,
    specs: Specs,
    method: str,
    options: MethodOptions = ABSMAX,
    head: bool = False,
    solved: Solved | None = None,
) -> Params:
    """The parameters with quantized matrices; each layer and expert is quantized separately.

    solved: matrices that `solve` has quantized already. Raises UserError naming a matrix whose
    shape the method does not allow.
    """
    done = solved or {}

    def one(path: tuple[Any, ...], spec: ParamSpec, param: Any) -> Any:
        if not is_quantizable(spec, head):
            return param
        name, stack = path_name(path), np.asarray(param)
        *front, K, N = stack.shape
        plain = jax.jit(lambda w_KN: METHODS[method].quantize(w_KN, None, options))
        found = []
        for i, matrix in enumerate(stack.reshape(-1, K, N)):
            with named_error(name):
                quantized = done.get((name, i)) or plain(jnp.asarray(matrix, jnp.float32))
            found.append(jax.device_get(quantized))
        return jax.tree.map(lambda *x: np.stack(x).reshape((*front, *x[0].shape)), *found)

    return jax.tree_util.tree_map_with_path(one, specs, params)


def quantized_model(saved: Saved, params: Params) -> tuple[Resolved, Params]:
    """The configuration and parameters to save: no fake quantization in the forward pass any more,
    and no array in a wider dtype than it is used in."""
    model = saved.config.model.model_copy(update={"weight_form": None})
    dtype = compute_dtype(saved.config.train.precision)
    narrow = cast(params, saved.specs, dtype)
    pick = lambda spec, x, y: y if isinstance(x, QuantizedWeight) or y.nbytes < x.nbytes else x
    return saved.config.model_copy(update={"model": model}), jax.tree.map(
        pick, saved.specs, params, narrow
    )


def quantize_saved(
    saved: Saved,
    method: str,
    options: MethodOptions = ABSMAX,
    head: bool = False,
    calibration: Calibration = TRAINING_TEXT,
    stages: Stages | None = None,
) -> tuple[Resolved, Params]:
    """Quantize a loaded model; returns the configuration and the parameters to save.

    Raises UserError for a model that is quantized already, for `head` if it is tied to the
    embedding, and as `quantize_params` and `calibration_rows` do.
    """
    if is_quantized(saved):
        raise UserError(f"{saved.tokenizer_dir} is quantized already; use the unquantized model")
    if head and saved.config.model.tied_head:
        raise UserError(
            "--head: this model's head is its embedding, which is not quantized; leave out --head"
        )
    if METHODS[method].activations and saved.config.model.mla:
        raise UserError(
            f"--method {method} rounds the inputs of matrices, and with model.mla decoding "
            "multiplies latents by other matrices than the forward pass; take --method int8"
        )
    saved, solved = apply_weight_form(saved), None
    params, stages = saved.params, stages or Stages("quantize", quiet=True)
    if METHODS[method].inputs:
        with stages.stage("calibration text"):
            rows = calibration_rows(saved, saved.config, *calibration)
        with stages.stage("layers") as advance:
            solved, params = solve(saved, rows, method, options, advance)
    with stages.stage("pack"):
        params = quantize_params(params, saved.specs, method, options, head, solved)
        return quantized_model(saved, params)


def trained_group(config: Resolved) -> int:
    """Group size (inputs per scale) that the model was trained with, else the default."""
    form = config.model.weight_form
    return (form and form.group_size) or GROUP


def save_quantized(out: Path, saved: Saved, config: Resolved, params: Params) -> None:
    """Write what `quantize_saved` returned as a model folder, with the auxiliary files of the
    Hugging Face checkpoint that the model was made from."""
    save_model(out, config, params, saved.tokenizer)
    if (saved.tokenizer_dir / FOLDER).is_dir():
        shutil.copytree(saved.tokenizer_dir / FOLDER, out / FOLDER)


def text_config(config: Resolved, text: Path | None) -> Resolved:
    """A configuration that validates on the file `text`; None: on the run's own validation text."""
    if text is None:
        return config
    if not text.is_file():
        raise UserError(f"--text {text} is not a file")
    source = TextSource(path=str(text))
    validation = SourceValidation(source=source)
    data = DataConfig(
        train=source, validation=validation, tokenizer=config.data.tokenizer,
        cache_dir=config.data.cache_dir,
    )  # fmt: skip
    return config.model_copy(update={"data": data})


def held_bytes(saved: Saved) -> int:
    """Bytes of the parameters in memory during generation and evaluation."""
    dtype = compute_dtype(saved.config.train.precision)
    shapes = jax.eval_shape(lambda p: cast(p, saved.specs, dtype), saved.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def byte_sizes(saved: Saved, file: Path) -> dict[str, int]:
    """Bytes on disk and in memory. file: of the weights, if it exists."""
    disk = file.stat().st_size if file.is_file() else 0
    return {"disk_bytes": disk, "memory_bytes": held_bytes(saved)}


def measure(saved: Saved, config: Resolved, file: Path) -> Figures:
    """Validation metrics and sizes. file: of the weights, if it exists."""
    return evaluate(saved, config) | byte_sizes(saved, file)


def open_core(folder: Path | None, rules: Rules) -> Bundle:
    """The tasks of CORE. Raises UserError for a missing task, or one that `rules` do not allow."""
    bundle = open_bundle(folder, ["core"])
    for task, data_folder in bundle.find(["core"]):
        bundle.load(task, data_folder, rules)
    return bundle


def core_score(saved: Saved, bundle: Bundle, out: Path, rules: Rules) -> Figures:
    """The CORE metric of a model; each task's metrics are written to `out`."""
    result = run_tasks(saved, saved.config, bundle, ["core"], out, rules)
    return {"core": result["core"]}


def figures_table(before: Figures, after: Figures) -> str:
    """A Markdown table of metrics before and after."""
    lines = ["| | before | after |", "|---|---|---|"]
    for name, what in MEASURED.items():
        if name not in before:
            continue
        form = ",.0f" if name.endswith("bytes") else ".4f"
        lines.append(f"| {what} | {before[name]:{form}} | {after[name]:{form}} |")
    return "\n".join(lines)


def options_of(a: argparse.Namespace, config: Resolved) -> MethodOptions:
    """Method options of a command line. Raises UserError for one that the method does not read."""
    given = {name for name in MethodOptions._fields if getattr(a, name) not in (None, False)}
    for name in sorted(given - METHODS[a.method].options):
        others = ", ".join(other for other in METHODS if name in METHODS[other].options)
        raise UserError(
            f"--{name.replace('_', '-')}: --method {a.method} does not use it; leave it out, or "
            f"use a method that does: {others}"
        )
    alpha = ABSMAX.alpha if a.alpha is None else a.alpha
    return MethodOptions(a.group_size or trained_group(config), a.act_order, alpha)


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 after one line about what the user can fix."""
    a = quantize_parser().parse_args(argv)
    if a.out.exists() and (not a.out.is_dir() or any(a.out.iterdir())):
        raise UserError(f"--out {a.out}: already exists and is not empty; name another folder")
    check_out(a.out)
    if not a.core and (a.bundle or a.limit):
        raise UserError("--bundle and --limit need --core: add it, or leave them out")
    if a.ray and not METHODS[a.method].inputs:
        others = ", ".join(name for name, method in METHODS.items() if method.inputs)
        raise UserError(
            f"--ray spreads the calibration over nodes, and --method {a.method} reads no text: "
            f"leave it out, or take a method that does: {others}"
        )
    rules = Rules(a.limit)
    bundle = open_core(a.bundle, rules) if a.core else None
    start()
    stages = Stages("quantize")
    with stages.stage("model"):
        saved = load_saved(a.run, a.step)
    if bundle:
        check_decoder(saved.config.model)
    options = options_of(a, saved.config)
    calibration = Calibration(a.calibration, a.sequences, a.length)
    asked = text_config(saved.config, a.text)
    comparison = BeforeAfter(saved, asked)
    with ray_cluster(a.ray):
        config, params = quantize_saved(saved, a.method, options, a.head, calibration, stages)
    with stages.stage("text before"):
        before = comparison.before() | byte_sizes(saved, saved.tokenizer_dir / WEIGHTS)
    with stages.stage("save"):
        save_quantized(a.out, saved, config, params)
        small = load_saved(a.out)
    with stages.stage("text after"):
        after = comparison.after(small) | byte_sizes(small, a.out / WEIGHTS)
    if bundle:
        with stages.stage("CORE before"):
            before |= core_score(saved, bundle, a.out / "tasks_before.json", rules)
        with stages.stage("CORE after"):
            after |= core_score(small, bundle, a.out / "tasks.json", rules)
    write_figures(a.out, str(a.run), a.method, options, params, before, after, stages)
    return 0


def write_figures(
    out: Path,
    run: str,
    method: str,
    options: MethodOptions,
    params: Params,
    before: Figures,
    after: Figures,
    stages: Stages,
) -> None:
    """Print a summary; write quantization.json and quantization.md."""
    leaves = flatten(params).items()
    weights = {name: x for name, x in leaves if isinstance(x, QuantizedWeight)}
    stored = {name: stored_bytes(x) for name, x in weights.items()}
    facts = {"model": run, "method": method, "matrices": stored, "before": before, "after": after}
    facts |= {x: y for x, y in options._asdict().items() if x in METHODS[method].options}
    if sizes := group_sizes(weights):  # at most a matrix's inputs, whatever was asked for
        facts["group_size"] = sizes
    write_json(out / "quantization.json", facts)
    title = f"# {run}, quantized by {method}\n\n"
    write_whole(out / "quantization.md", f"{title}{figures_table(before, after)}\n")
    print(f"quantized {len(weights)} stacks of matrices by {method} into {out}")
    print(figures_table(before, after))
    print(stages.summary())
