"""The first state of a run: initial, pretrained, or restored from a checkpoint."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config.resolve import Resolved
from jaxtrain.finetune import (
    ADDED_MODULES,
    EXTRAS,
    LoRAConfig,
    Partition,
    PromptLearningConfig,
    adapter_folder,
)
from jaxtrain.interop.peft import read_adapter
from jaxtrain.interop.peft_prompt import read_prompt_adapter
from jaxtrain.interop.pretrained import has_params, load_base, load_init_params
from jaxtrain.parallel import shardings
from jaxtrain.runs.checkpoint import Checkpointer
from jaxtrain.train.growth import Growth
from jaxtrain.train.local_sgd import LocalState, as_saved, replicas_in, resize_replicas
from jaxtrain.train.plan import Plan
from jaxtrain.train.step import State, StepSpec, init_state, state_shardings
from jaxtrain.weights.params import Params


def load_pretrained(
    partition: Partition, c: Resolved, mesh: Mesh, resumed: bool
) -> tuple[Params | None, Params | None]:
    """Load (frozen parameters, first trainable parameters of a new run) from train.init_from.

    None if nothing is frozen; None if the trainable values are initialized or restored.
    """
    if c.train.init_from is None or (resumed and partition.init is None):
        return None, None
    base_shardings = shardings(partition.base, mesh)
    store = partition.store_on(mesh)
    base = load_base(c.train.init_from, partition.base, base_shardings, store, c.run.seed)
    if partition.init is None:
        begin = jax.device_put(
            partition.begin(base, c.run.seed), shardings(partition.trainable, mesh)
        )
        return None, begin
    frozen, begin = partition.init(base, c.run.seed)
    if partition.extras:
        frozen[EXTRAS] = jax.device_put(frozen[EXTRAS], shardings(partition.extras, mesh))
    adapter = None
    if isinstance(c.finetune, LoRAConfig | PromptLearningConfig):
        adapter = c.finetune.init_adapter
    if adapter and not resumed:
        read = read_adapter if c.finetune.name == "lora" else read_prompt_adapter
        begin = read(adapter_folder(adapter), c.model, begin)
    elif c.finetune.name in ADDED_MODULES and has_params(c.train.init_from, partition.trainable):
        begin = load_init_params(
            c.train.init_from, partition.trainable, shardings(partition.trainable, mesh)
        )
    return frozen, jax.device_put(begin, shardings(partition.trainable, mesh))


def init_or_restore(
    spec: StepSpec,
    shardings: State,
    checkpoints: Checkpointer,
    seed: int,
    start: Params | None = None,
    coordinator: Coordinator | None = None,
    log: Callable[[str], Any] = lambda line: None,
    growth: Growth | None = None,
) -> tuple[Future[State], Any]:
    """Initialize the state, or restore the newest checkpoint's with its position in the data.

    On one device a thread compiles and runs the initialization, while the caller traces the step.
    start: the first parameters of a new run, which are donated; default initial values. log: called
    with a message if the checkpoint has another number of replicas. growth: of the phase.
    """
    newest = checkpoints.latest()
    (coordinator or Coordinator()).compare(
        {f"the newest checkpoint in {checkpoints.directory}": str(newest)},
        "run.directory must be one that all processes share",
    )
    if newest is not None:
        like = saved_part(shapes_of(spec, shardings), spec)
        state, position = restored(checkpoints, newest, like, log, growth)
        return _done(state), position
    given = () if start is None else (start,)
    create = jax.jit(
        lambda *params: init_state(spec, seed, *params),
        donate_argnums=tuple(range(len(given))),
        out_shardings=shardings,
    )
    lowered, mesh = create.lower(*given), jax.sharding.get_mesh()

    def begin() -> State:
        with jax.set_mesh(mesh):
            state = lowered.compile()(*given)
            if spec.update_loop:
                spec.update_loop.begin(state.params)
            return state

    pool = ThreadPoolExecutor(1)
    first = pool.submit(begin)
    # Several devices must start their programs in one order.
    pool.shutdown(wait=mesh.size > 1)
    return first, None


def _done(state: State) -> Future[State]:
    """Return a future that has its result."""
    future: Future[State] = Future()
    future.set_result(state)
    return future


def shapes_of(spec: StepSpec, shardings: State) -> State:
    """Return the shapes and shardings of a step's state."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(lambda: init_state(spec, 0)),
        shardings,
    )


def make_growth(spec: StepSpec, now: StepSpec, plan: Plan, before: Plan) -> Growth:
    """Make the growth from the previous phase's state to this phase's. spec: of `before`'s step."""
    old = saved_part(shapes_of(spec, state_shardings(spec, plan.mesh)), spec)
    depths = before.config.model.depth, plan.config.model.depth
    fresh = functools.partial(init_state, now, plan.config.run.seed)
    return Growth(plan.phase.start, old, depths, plan.phase.grow or "stack", fresh)


def restored(
    checkpoints: Checkpointer,
    step: int,
    like: State,
    log: Callable[[str], Any],
    growth: Growth | None = None,
) -> tuple[State, Any]:
    """Restore a checkpoint's state, in the shapes and shardings of `like`, and data position."""
    if growth and step == growth.step:
        state, position = restored(checkpoints, step, growth.before, log)
        return growth(state, like), position
    read, had, asked = like, 0, 0
    if isinstance(like.optimizer, LocalState):
        had = replicas_in(checkpoints.shapes(step)["optimizer"]["replicas"])
        asked = replicas_in(like.optimizer.replicas)
    if had != asked:
        read = like._replace(optimizer=as_saved(like.optimizer, had))
    params, rest, position = checkpoints.restore(step, read.params, non_param_state(read))
    own = [rest.pop(name) for name in ("optimizer", "step", "key")]
    state = State(params, *own, extras=rest)
    if had != asked:
        log(
            f"local    from {had} replica{'s' * (had > 1)} to {asked}: each starts from the mean "
            "of the earlier replicas' parameters and optimizer states"
        )
        state = state._replace(optimizer=resize_replicas(state.optimizer, like.optimizer))
    return state, position


def saved_part(state: State, spec: StepSpec) -> State:
    """Return the state without the transform states that are not saved with it (`is_saved`)."""
    left_out = {t.name for t in spec.transforms if not t.is_saved}
    extras = {name: x for name, x in state.extras.items() if name not in left_out}
    return state._replace(extras=extras)


def non_param_state(state: State) -> dict[str, Any]:
    """Return the state without its parameters, in the form that a checkpoint stores."""
    return {"optimizer": state.optimizer, "step": state.step, "key": state.key, **state.extras}
