"""The 1F1B pipeline schedule: a stage's backward pass of a microbatch follows soon after its
forward pass (Narayanan et al. 2021, PipeDream-Flush, arXiv:2006.09503). No layer is recomputed.

Each tick has a slot for a forward pass, one for the head and one for a backward pass. S = 2, M = 4
(F forward, H a stage's share of the head's work on a microbatch, B backward, . idle):

    tick      0          1          2          3          4          5
    stage 0   F0  .  .   F1 H0  .   F2 H1 B0   F3 H2 B1    . H3 B2    .  . B3
    stage 1    .  .  .   F0 H0 B0   F1 H1 B1   F2 H2 B2   F3 H3 B3    .  .  .

The last stage's output is sharded over the stages by rows. So all stages compute the head, its loss
and their gradients, and no stage takes longer than the others. The ticks together take as long as
M + S - 1 forward and backward passes of a stage, and M of the head.

Stage s saves the residuals of its backward pass for 2(S-1-s) ticks, so for at most 2S - 1
microbatches, whatever their number; with `model.remat` they are small. The gradients are computed
together with the loss, and JAX's backward pass only scales them.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from jaxtrain.parallel.axes import manual_axes
from jaxtrain.parallel.pipeline import AXIS, Stage, at, pipeline_size

# (weights of the head, the last stage's output for some rows, their labels) -> the sum of losses
Finish = Callable[[PyTree, PyTree, PyTree], Array]
# With up to this many saved microbatches, the loop body unrolls as many ticks, each with its own
# buffers. More would take long to compile; then each tick copies the saved residuals.
UNROLLED = 3


class TreeLeaves(NamedTuple):
    """A tree's arrays with gradients, and its arrays without."""

    differentiable: list[Array]
    nondifferentiable: list[Array]


def split_tree(tree: PyTree) -> tuple[TreeLeaves, Callable[[TreeLeaves], Any]]:
    """Split a tree's leaves by kind; also returns the function that joins them again."""
    leaves, structure = jax.tree.flatten(tree)
    moves = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    chosen = lambda wanted: [leaf for leaf, moved in zip(leaves, moves) if moved == wanted]

    def join(parts: TreeLeaves) -> Any:
        rest = iter(parts.nondifferentiable), iter(parts.differentiable)
        return structure.unflatten([next(rest[moved]) for moved in moves])

    return TreeLeaves(chosen(True), chosen(False)), join


class StageResiduals(NamedTuple):
    """Locations of the arrays of a stage's backward pass."""

    structure: Any  # of the backward pass, a pytree of arrays
    sources: list[tuple[bool, int]]  # of each array: (whether it is an input, index)
    places: list[int]  # buffers of the arrays that are not inputs, in the list of all stages


class SharedResiduals:
    """Residuals of all stages' backward passes, in one shared list of buffers.

    A stage's residuals use the first buffers of their shape and dtype. Arrays that its backward
    pass gets anyway (`inputs`: weights, the microbatch) use none.
    """

    def __init__(self, vjps: Sequence[Callable[..., Any]], inputs: PyTree, received: PyTree):
        counts: Counter[tuple[tuple[int, ...], Any]] = Counter()
        for vjp in vjps:
            own = lambda inputs, received, vjp=vjp: residual_arrays(
                vjp(inputs, received)[1], inputs
            )[0]
            found = jax.eval_shape(own, inputs, received)
            counts |= Counter((x.shape, x.dtype) for x in found)
        self.kinds = sorted(counts.elements(), key=str)
        self.stages: dict[int, StageResiduals] = {}

    def empty(self) -> list[Array]:
        return [jax.lax.empty(*kind) for kind in self.kinds]

    def keep(self, stage: int, backward: PyTree, inputs: PyTree, old: list[Array]) -> list[Array]:
        """The list with the stage's residuals written; other buffers keep their values."""
        arrays, structure, sources = residual_arrays(backward, inputs)
        free = defaultdict(list)
        for i, kind in reversed(list(enumerate(self.kinds))):
            free[kind].append(i)
        places = [free[x.shape, x.dtype].pop() for x in arrays]
        self.stages[stage] = StageResiduals(structure, sources, places)
        new = dict(enumerate(old)) | dict(zip(places, arrays))
        return [new[i] for i in range(len(old))]

    def restore(self, stage: int, inputs: PyTree, kept: list[Array]) -> Any:
        """Rebuild the stage's backward pass from a list made by `keep`."""
        found, given = self.stages[stage], jax.tree.leaves(inputs)
        own = [kept[i] for i in found.places]
        leaves = [(given if is_input else own)[i] for is_input, i in found.sources]
        return found.structure.unflatten(leaves)


def residual_arrays(
    backward: PyTree, inputs: PyTree
) -> tuple[list[Array], Any, list[tuple[bool, int]]]:
    """Return the distinct arrays of a backward pass that are not inputs; its structure; and for
    each of its arrays, whether it is an input, and its index among the inputs or those arrays."""
    leaves, structure = jax.tree.flatten(backward)
    given = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(inputs))}
    own = {id(leaf): leaf for leaf in leaves if id(leaf) not in given}
    index_of = {key: i for i, key in enumerate(own)}
    source = lambda key: (True, given[key]) if key in given else (False, index_of[key])
    return list(own.values()), structure, [source(id(leaf)) for leaf in leaves]


def widened(x: Array) -> Array:
    """Zeros to sum arrays like x: float32 if x has 16 bits."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return jnp.zeros(x.shape, jnp.float32 if narrow else x.dtype)


def add_to[Tree](totals: Tree, tree: Tree) -> Tree:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, tree)


def zeros_like[Tree](tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def head_gradients(
    finish: Finish, here: Array, head: PyTree, made: PyTree, labels: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """This stage's share of a microbatch's loss and of the head's gradients, and the whole gradient
    of the last stage's output.

    If the number of rows is not divisible by the stages, each stage computes all of them.
    """
    stages = pipeline_size()
    split = len(jax.tree.leaves(made)[0]) % stages == 0
    share = functools.partial(jax.lax.psum_scatter, tiled=True) if split else jax.lax.psum
    rows = jax.tree.map(lambda x: share(jnp.where(here == stages - 1, x, 0), AXIS), made)
    if split:
        size = len(jax.tree.leaves(rows)[0])
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, here * size, size)
        labels = jax.tree.map(part, labels)
    loss, (d_head, d_rows) = jax.value_and_grad(finish, (0, 1))(head, rows, labels)
    if split:
        gather = lambda g: jax.lax.all_gather(g, AXIS, tiled=True)
        return loss, d_head, jax.tree.map(gather, d_rows)
    once = jnp.where(here == 0, 1.0, 0.0)  # all stages have the same loss; count it once
    return loss * once, jax.tree.map(lambda g: (g * once).astype(g.dtype), d_head), d_rows


def run_stage_1f1b(
    stage: Stage,
    kinds: Sequence[Hashable],
    first: Callable[[PyTree], PyTree],
    finish: Finish,
    over: tuple[str, ...],
    index: Array,
    stacks: PyTree,
    micro: PyTree,
    labels: PyTree,
    head: PyTree,
) -> tuple[Array, list[Array], list[Array], PyTree]:
    """Run stage index[0]; see `pipeline_loss`. over: other mesh axes that shard the rows."""
    stages, count, here = pipeline_size(), len(jax.tree.leaves(micro)[0]), index[0]
    weights, join_stacks = split_tree(stacks)
    texts, join_micro = split_tree(micro)
    made = jax.eval_shape(lambda m: first(at(m, 0)), micro)
    microbatch = lambda number: at(texts, jnp.clip(number, 0, count - 1))
    waits = lambda number: (number < 0) | (number >= count)

    def vjp_of(
        s: int, inputs: tuple[TreeLeaves, TreeLeaves], received: PyTree
    ) -> tuple[PyTree, Any]:
        """Output of stage s, and its backward pass."""
        own, one = inputs

        def run(moving: list[Array], of_one: list[Array], received: PyTree) -> PyTree:
            whole = join_micro(one._replace(differentiable=of_one))
            given = first(whole) if s == 0 else received
            return stage(kinds[s], join_stacks(own._replace(differentiable=moving)), given, whole)

        return jax.vjp(run, own.differentiable, one.differentiable, received)

    vjps = [functools.partial(vjp_of, s) for s in range(stages)]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
    arrays = SharedResiduals(vjps, (weights, microbatch(jnp.int32(0))), zeros)

    def forward(s: int, inputs: PyTree, received: PyTree, old: list[Array]) -> PyTree:
        made, backward = vjp_of(s, inputs, received)
        return made, arrays.keep(s, backward, inputs, old)

    def backward(s: int, inputs: PyTree, g_after: PyTree, g_head: PyTree, kept: PyTree) -> PyTree:
        of_stage = kept[2 * (stages - 1 - s)]
        run = arrays.restore(s, inputs, of_stage)
        d_weights, d_one, d_received = run(g_head if s == stages - 1 else g_after)
        return d_weights, d_one, g_after if s == 0 else d_received

    wait_forward = lambda inputs, received, old: (received, old)
    wait_backward = lambda inputs, g_after, g_head, kept: (
        zeros_like(inputs[0].differentiable),
        zeros_like(inputs[1].differentiable),
        g_after,
    )
    forwards = [*(functools.partial(forward, s) for s in range(stages)), wait_forward]
    backwards = [*(functools.partial(backward, s) for s in range(stages)), wait_backward]
    onwards = [(i, i + 1) for i in range(stages - 1)]
    back = [(i + 1, i) for i in range(stages - 1)]

    def head_of(number: Array, made: PyTree) -> Any:
        run = lambda: head_gradients(finish, here, head, made, at(labels, number))
        none = lambda: (jnp.zeros((), jnp.float32), zeros_like(head), zeros_like(made))
        return jax.lax.cond(waits(number), none, run)

    def tick(carry: Any, t: Array) -> tuple[Any, None]:
        received, g_after, (*kept, spare), loss, totals, d_micro, d_head = carry
        number = t - here
        inputs = weights, microbatch(number)
        branch = jnp.where(waits(number), stages, here)
        made, fresh = jax.lax.switch(branch, forwards, inputs, received, spare)
        kept = [fresh, *kept]

        of_one, g_one, g_made = head_of(t - (stages - 1), made)
        loss, d_head = loss + of_one, add_to(d_head, g_one)

        number = t - 2 * (stages - 1) + here
        inputs = weights, microbatch(number)
        branch = jnp.where(waits(number), stages, here)
        d_weights, d_one, g_before = jax.lax.switch(
            branch, backwards, inputs, g_after, g_made, kept
        )
        # The next forward pass overwrites the buffers that this backward pass reads, so it must
        # come after. Without this order, XLA would copy the saved residuals.
        g_before, kept[-1] = jax.lax.optimization_barrier((g_before, kept[-1]))
        totals = add_to(totals, d_weights)
        entry = jnp.where(waits(number), count, number)  # idle ticks write to a spare last entry
        put = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, entry, 0)
        d_micro = jax.tree.map(put, d_micro, d_one)
        send = lambda tree, pairs: jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)
        sent = send(made, onwards), send(g_before, back)
        return (*sent, kept, loss, totals, d_micro, d_head), None

    size = 2 * stages - 1
    period = size if size <= UNROLLED else 1
    ticks = -(-(count + 2 * (stages - 1)) // period) * period
    carry = (
        zeros,
        zeros,
        [arrays.empty() for _ in range(size)],
        jnp.zeros((), jnp.float32),
        jax.tree.map(widened, weights.differentiable),
        [jnp.zeros((count + 1, *x.shape[1:]), x.dtype) for x in texts.differentiable],
        jax.tree.map(widened, head),
    )
    end = jax.lax.scan(tick, carry, jnp.arange(ticks), unroll=period)[0]
    _, _, _, loss, totals, d_micro, d_head = end
    everywhere = (AXIS, *over)
    totals = jax.lax.psum(totals, over) if over else totals
    share = functools.partial(jax.lax.psum_scatter, tiled=True)
    share = jax.lax.psum if count % stages else share
    d_micro = [share(g[:count], AXIS) for g in d_micro]
    return jax.lax.psum(loss, everywhere), totals, d_micro, jax.lax.psum(d_head, everywhere)


def pipeline_loss(
    stage: Stage,
    kinds: Sequence[Hashable],
    first: Callable[[PyTree], PyTree],
    finish: Finish,
    stacks: PyTree,
    micro: PyTree,
    labels: PyTree,
    head: PyTree,
) -> Float[Array, ""]:
    """Sum of the losses of all microbatches, each run through all stages.

    stage, kinds, first, stacks, micro: as in `run_pipeline`, with one chunk per stage. labels:
    arrays [M, rows, ...] without gradients. head: the weights that `finish` reads, replicated on
    all stages. Gradients of stacks and head are summed over the microbatches in float32.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {AXIS, "data"} - set(manual_axes(mesh))
    weights, join_stacks = split_tree(stacks)
    texts, join_micro = split_tree(micro)
    rows = jax.tree.leaves(micro)[0].shape[1]
    over = ("data",) if "data" in free and mesh.shape["data"] > 1 else ()
    over = over if rows % mesh.shape["data"] == 0 else ()
    shared = AXIS if len(jax.tree.leaves(micro)[0]) % mesh.shape[AXIS] == 0 else None
    # Arrays shared by all rows, such as positions, have one row.
    spec_of = lambda x: P(None, "data" if over and x.shape[1] == rows else None)
    places = lambda tree: jax.tree.map(spec_of, tree)

    def with_gradients(moving: PyTree, still: PyTree) -> PyTree:
        (stacks, micro, head), (of_stacks, of_micro, labels) = moving, still
        stacks = join_stacks(TreeLeaves(stacks, of_stacks))
        micro = join_micro(TreeLeaves(micro, of_micro))
        split = jax.shard_map(
            functools.partial(run_stage_1f1b, stage, kinds, first, finish, over),
            in_specs=(P(AXIS), P(AXIS), places(micro), places(labels), P()),
            out_specs=(
                P(),
                P(AXIS),
                [P(shared, *spec_of(x)[1:]) for x in texts.differentiable],
                P(),
            ),
            axis_names=free,
            check_vma=False,
        )
        loss, *grads = split(jnp.arange(mesh.shape[AXIS]), stacks, micro, labels, head)
        return loss, tuple(grads)

    moving = weights.differentiable, texts.differentiable, head
    still = weights.nondifferentiable, texts.nondifferentiable, labels
    dtypes = jax.tree.map(lambda x: x.dtype, moving)

    def backward(grads: PyTree, g: Array) -> tuple[PyTree, None]:
        scale = lambda x, dtype: (g * x.astype(jnp.float32)).astype(dtype)
        return jax.tree.map(scale, grads, dtypes), None

    run = jax.custom_vjp(lambda *given: with_gradients(*given)[0])
    run.defvjp(with_gradients, backward)
    return run(moving, still)
