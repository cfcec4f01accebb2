"""Statistics of the inputs of a model's matrices on a calibration text, layer by layer.

All sequences pass a layer before any passes the next one. Memory holds their residual streams and
the statistics of one layer. A method may change a layer's matrices after reading their statistics:
later layers then read the outputs of the changed layer, as in GPTQ and SparseGPT.

The unit of work is one layer on a block of BLOCK batches. Statistics are summed over a block's
batches, then over the blocks, in order, so that a Ray cluster gives the same sums as one host. Each
task carries all that a block needs, the layer's weights too: a lost node needs no replay.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.cluster.ray_cluster import current_cluster
from jaxtrain.cluster.ray_models import NodeModels
from jaxtrain.cluster.runtime import compute_dtype, start
from jaxtrain.compress.calibration_text import TokenRows
from jaxtrain.inference.engine.compiler import compile_all
from jaxtrain.model import ResolvedModel, Transformer, cast, split
from jaxtrain.model.attention import attend_rows
from jaxtrain.model.fused_ops import PLAIN, Stream
from jaxtrain.model.plan import LayerSpec
from jaxtrain.model.run_layers import run_layer, with_kv
from jaxtrain.model.stack import LayerWeights, picked
from jaxtrain.runs.saved import Saved
from jaxtrain.settings import UserError
from jaxtrain.weights.contract import Weight
from jaxtrain.weights.params import Params, is_block_matrix, path_name

BLOCK = 4  # batches per unit of work of a node


class Inputs(NamedTuple):
    """Statistics of a matrix [K, N]'s inputs x over all tokens, float32."""

    tokens: Array  # token count
    square_K: Array  # sum of x^2
    magnitude_K: Array  # sum of |x|
    amax_K: Array  # max |x|
    hessian_KK: Array | None  # X^T X, if requested


class Matrix(NamedTuple):
    """A matrix of one layer with its input statistics."""

    name: str  # of the parameter: blocks/attention/q
    stack_index: int  # index in its stack over layers
    w_KN: np.ndarray
    inputs: Inputs


class LayerBatch(NamedTuple):
    """The inputs of a layer for one batch. kv: keys and values of another layer, if this layer
    shares them."""

    rows: TokenRows
    stream: Stream
    x0_BTD: Any
    kv: Any


class LayerCall(NamedTuple):
    """A layer to run on blocks of batches. leaves: of its weights; places: indices of its parts in
    their stacks. statistics: whether to return them; hessian: with X^T X."""

    index: int
    places: dict[str, int]
    leaves: list[Any]
    hessian: bool
    statistics: bool


class LayerResult(NamedTuple):
    """Outputs of a layer: (stream, keys and values) of each batch; input statistics by matrix."""

    outputs: list[tuple[Stream, Any]]
    inputs: dict[str, Inputs]


# (layer index, its matrices by name) -> the changed arrays of the layer, by name
Visit = Callable[[int, dict[str, Matrix]], dict[str, np.ndarray]]


# ---- layers ------------------------------------------------------------------------------------


class Tape:
    """Inputs of a layer's matrices, recorded by name while the layer is traced."""

    def __init__(self):
        self.inputs: dict[str, list[Array]] = {}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["name", "tape"]
)
@dataclasses.dataclass(frozen=True)
class RecordedWeight(Weight):
    """A weight that records its inputs. It exists within one trace of one layer that is neither
    scanned nor rematerialized, so that the tape's values can be outputs of that trace."""

    array: Any
    name: str
    tape: Tape

    def matmul(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        self.tape.inputs.setdefault(self.name, []).append(x)
        return x @ self.array

    def dequantize(self) -> Float[Array, "K N"]:
        return self.array


def statistics(xs: list[Array], hessian: bool) -> Inputs:
    """Statistics of the inputs [.., K] of one matrix."""
    x_MK = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in xs]).astype(jnp.float32)
    product = lambda: jnp.matmul(x_MK.T, x_MK, precision=jax.lax.Precision.HIGHEST)
    return Inputs(
        jnp.float32(len(x_MK)),
        jnp.sum(jnp.square(x_MK), axis=0),
        jnp.sum(jnp.abs(x_MK), axis=0),
        jnp.max(jnp.abs(x_MK), axis=0),
        product() if hessian else None,
    )


@jax.jit
def combine(a: dict[str, Inputs], b: dict[str, Inputs]) -> dict[str, Inputs]:
    """Combined statistics of two batches or blocks."""
    return {
        name: Inputs(*jax.tree.map(jnp.add, one, b[name]))._replace(
            amax_K=jnp.maximum(one.amax_K, b[name].amax_K)
        )
        for name, one in a.items()
    }


class LayerRunner:
    """Runs a model's layers one at a time on one device.

    Raises UserError for layers that share weights, and for virtual tokens (prompt, prefix).
    """

    def __init__(self, c: ResolvedModel, vocab_size: int, precision: str):
        if c.share_layers:
            raise UserError(
                "model.share_layers: calibration measures the inputs of each layer's own matrices, "
                "which several layers share here; only --method magnitude supports them"
            )
        if c.virtual:
            raise UserError(
                "model.prompt, model.prefix: calibration reads text without virtual tokens; take "
                "the model that they were trained for"
            )
        plain = {"weight_form": None, "remat": "none", "scan_layers": False, "ffn_tiles": 1}
        c = c.model_copy(update=plain)
        self.model = Transformer(c, vocab_size)
        self.graphdef, specs = split(self.model)
        self.abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
        self.dtype = compute_dtype(precision)
        self.modules = self.model.modules()
        self.jitted: dict[tuple[LayerSpec, bool], jax.stages.Wrapped] = {}
        self.shares_kv = any(spec.kv_from for spec in self.model.plan)

        @jax.jit
        def embed(params: Params, rows: TokenRows) -> Stream:
            model = nnx.merge(self.graphdef, cast(params, specs, self.dtype))
            x_BTD, _ = model.embed_tokens(rows.tokens_BT, None, rows.segments_BT)
            x_BTD = model.add_positions(x_BTD, rows.positions_BT)
            return Stream(x_BTD, balance_B=jnp.zeros(len(x_BTD)) if c.moe else None)

        self.embed = embed

    def run(self, spec: LayerSpec, hessian: bool) -> jax.stages.Wrapped:
        """A compiled (weights, kv of another layer, stream, x0, rows) -> (stream, kv, statistics by
        name)."""
        if (spec, hessian) in self.jitted:
            return self.jitted[spec, hessian]

        @jax.jit
        def layer(weights: LayerWeights, kv: Any, stream: Stream, x0_BTD: Array, rows: TokenRows):
            tape = Tape()
            inputs = self.model.layer_inputs(x0_BTD, *rows, attend_rows, PLAIN)
            source = (self.recorded(weights, tape), lambda source: source)
            source = with_kv(*source, kv) if spec.kv_from else source
            out, pair = run_layer(self.modules, spec, *source, inputs, None, False, stream)
            seen: dict[tuple[int, ...], Inputs] = {}
            found = {}
            for name, xs in tape.inputs.items():  # q, k and v share an input: compute X^T X once
                key = tuple(map(id, xs))
                seen.setdefault(key, statistics(xs, hessian))
                found[name] = seen[key]
            return out, pair, found

        self.jitted[spec, hessian] = layer
        return layer

    def pick(self, params: Params, index: int, places: dict[str, int]) -> LayerWeights:
        """The weights of one layer."""
        return picked(index, places, nnx.merge(self.graphdef, params).stack())

    def with_leaves(self, leaves: list[Any], index: int, places: dict[str, int]) -> LayerWeights:
        """The weights of one layer from their leaves."""
        template = jax.eval_shape(lambda p: self.pick(p, index, places), self.abstract)
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def layers(self) -> Iterator[tuple[int, LayerSpec, dict[str, int]]]:
        """Each layer's index, spec, and the indices of its parts in their stacks."""
        places = dict.fromkeys(nnx.merge(self.graphdef, self.abstract).stack().parts, 0)
        for index, spec in enumerate(self.model.plan):
            own = {name: places[name] for name in spec.parts}
            places |= {name: stack_index + 1 for name, stack_index in own.items()}
            yield index, spec, own

    def compile(self, params: Params, stream: Stream, rows: TokenRows, hessian: bool) -> None:
        """Compile the programs of all layers in parallel, except of those that read another
        layer's keys and values. There is one for each kind of layer."""

        def lowered() -> Iterator[jax.stages.Lowered]:
            kinds = {spec: (index, own) for index, spec, own in self.layers()}
            for spec, (index, own) in kinds.items():
                if not spec.kv_from:
                    leaves = jax.tree.leaves(self.pick(params, index, own))
                    weights = self.with_leaves(leaves, index, own)
                    yield self.run(spec, hessian).lower(weights, None, stream, stream.x_BTD, rows)

        compile_all(lowered())

    def pass_block(self, block: list[LayerBatch], call: LayerCall) -> LayerResult:
        """Run a block of batches through a layer."""
        weights = self.with_leaves(call.leaves, call.index, call.places)
        run = self.run(self.model.plan[call.index], call.hessian)
        outputs, found = [], {}
        for one in block:
            stream, kv, inputs = run(weights, one.kv, one.stream, one.x0_BTD, one.rows)
            outputs.append((stream, kv if self.shares_kv else None))
            if call.statistics:
                found = combine(found, inputs) if found else inputs
        return LayerResult(outputs, found)

    def recorded(self, weights: LayerWeights, tape: Tape) -> LayerWeights:
        """A layer's parameters in the compute dtype, with its matrices as RecordedWeight."""

        def one(prefix: str, path: Any, param: nnx.Param) -> nnx.Variable:
            spec = param.get_metadata()["spec"]
            w = cast({"w": param.get_value()}, {"w": spec}, self.dtype)["w"]
            if not is_block_matrix(spec) or spec.group == "experts":
                return param.replace(w)
            return param.replace(RecordedWeight(w, f"{prefix}/{path_name(path)}", tape))

        def module(prefix: str, state: Any) -> Any:
            is_param = lambda leaf: isinstance(leaf, nnx.Param)
            named = functools.partial(one, prefix)
            return jax.tree_util.tree_map_with_path(named, state, is_leaf=is_param)

        layer = weights.layer | {"block": module("blocks", weights.layer["block"])}
        return LayerWeights(layer, {name: module(name, w) for name, w in weights.parts.items()})


def load_layers(
    c: ResolvedModel, vocab_size: int, precision: str
) -> Callable[[list[LayerBatch], LayerCall], LayerResult]:
    """On a node: return the function that runs blocks through layers."""
    start(quiet=True)
    layers = LayerRunner(c, vocab_size, precision)
    return lambda block, call: jax.device_get(layers.pass_block(block, call))


# (blocks, the layer to run) -> the results in order
PassBlocks = Callable[[Iterable[list[LayerBatch]], LayerCall], Iterator[LayerResult]]


def make_pass_blocks(saved: Saved, layers: LayerRunner) -> PassBlocks:
    """The function that runs blocks through a layer, on the nodes of the current Ray cluster or on
    this host."""
    if current_cluster() is not None:
        model = saved.config.model, saved.tokenizer.vocab_size, layers.dtype.name
        return NodeModels(functools.partial(load_layers, *model)).map

    def here(blocks: Iterable[list[LayerBatch]], call: LayerCall) -> Iterator[LayerResult]:
        call = call._replace(leaves=jax.device_put(call.leaves))  # once, not for each batch
        return (layers.pass_block(block, call) for block in blocks)

    return here


def visit_layers(
    saved: Saved, batches: list[TokenRows], visit: Visit, hessian: bool = False
) -> Params:
    """Call `visit` with each layer's matrices and their input statistics; returns the parameters
    as numpy arrays, with its changes. Later layers read the outputs of the changed layers.

    hessian: statistics include X^T X, K^2 values for each matrix of the layer. Experts' matrices
    are not recorded.
    """
    params = jax.tree.map(np.array, saved.params)
    c = saved.config
    layers = LayerRunner(c.model, saved.tokenizer.vocab_size, c.train.precision)
    through = make_pass_blocks(saved, layers)
    streams = [layers.embed(params, rows) for rows in batches]
    x0s = [stream.x_BTD for stream in streams]
    kvs: list[list[Any]] = [[] for _ in batches]
    if current_cluster() is None:
        layers.compile(params, streams[0], batches[0], hessian)
    for index, spec, own in layers.layers():
        sources = [kv[index - spec.kv_from] if spec.kv_from else None for kv in kvs]
        each = map(LayerBatch, batches, streams, x0s, sources)
        blocks = [list(block) for block in itertools.batched(each, BLOCK)]
        weights = jax.tree.leaves(layers.pick(params, index, own))
        outputs, found = [], {}
        for result in through(blocks, LayerCall(index, own, weights, hessian, statistics=True)):
            outputs += result.outputs
            found = combine(found, result.inputs) if found else result.inputs
        matrices = {}
        for name, inputs in found.items():
            stack_index = own.get(name.split("/")[0], index)
            matrices[name] = Matrix(name, stack_index, leaf(params, name)[stack_index], inputs)
        changed = visit(index, matrices)
        for name, x in changed.items():  # matrices and biases or gains
            leaf(params, name)[own.get(name.split("/")[0], index)] = x
        if changed:
            weights = jax.tree.leaves(layers.pick(params, index, own))
            call = LayerCall(index, own, weights, hessian, statistics=False)
            outputs = [out for result in through(blocks, call) for out in result.outputs]
        streams = [stream for stream, _ in outputs]
        for kept, (_, kv) in zip(kvs, outputs):
            kept.append(kv)
    return params


def leaf(params: Params, name: str) -> np.ndarray:
    """The array of a parameter path such as blocks/attention/q."""
    found: Any = functools.reduce(lambda tree, key: tree[key], name.split("/"), params)
    return found


def calibrate(
    saved: Saved, batches: list[TokenRows], hessian: bool = False
) -> dict[tuple[str, int], Inputs]:
    """Input statistics of every matrix by (name, index in its stack), with the model unchanged."""
    found: dict[tuple[str, int], Inputs] = {}

    def visit(index: int, matrices: dict[str, Matrix]) -> dict[str, np.ndarray]:
        found.update({(m.name, m.stack_index): jax.device_get(m.inputs) for m in matrices.values()})
        return {}

    visit_layers(saved, batches, visit, hessian)
    return found
