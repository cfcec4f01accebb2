"""Checks of a population: fields in which runs may differ, unsupported features. Fail-closed."""

from collections.abc import Callable, Sequence

import jax

from jaxtrain.cluster.coordinator import Coordinator
from jaxtrain.config import Config
from jaxtrain.config.resolve import Resolved
from jaxtrain.objectives import PREFERENCES
from jaxtrain.runs.job import leaves
from jaxtrain.settings import UserError
from jaxtrain.train.checks import SkipNonfinite
from jaxtrain.train.loss_scale import DynamicLossScale
from jaxtrain.train.plan import Plan
from jaxtrain.train.recipes import CausalLM, Recipe
from jaxtrain.train.step import StepSpec

# Fields of `optim` that are arguments of the compiled step (`Optimizer.hyperparams`) in every
# optimizer with such a field. tests/test_population.py checks each.
TRACED = (
    "learning_rate", "weight_decay", "b1", "b2", "eps", "momentum", "momentum_start",
    "momentum_end", "momentum_warmup_steps", "normuon_b2", "matrix_lr", "embedding_lr",
    "value_embedding_lr", "head_lr", "residual_scale_lr", "x0_scale_lr", "scalar_lr", "gain_lr",
    "adam_betas", "adamw_lr", "adamw_weight_decay", "trust_coefficient", "multipliers",
    "decay_multipliers", "batch_scaling.rule", "batch_scaling.reference_tokens",
    "schedule.warmup_steps", "schedule.final_fraction", "schedule.decay_fraction",
    "schedule.decay_power", "schedule.initial_fraction", "schedule.warmup_fraction",
    "schedule.timescale",
)  # fmt: skip
MEMBER_FIELDS = (
    "run.name", "run.directory", "run.seed", "data.seed", *(f"optim.{name}" for name in TRACED)
)  # fmt: skip
SEEDS = 2**32  # a traced seed has 32 bits
TRANSFORMS = (SkipNonfinite, DynamicLossScale)  # supported: their states are arrays of the step

# (field, whether it is set, reason for the refusal)
Refused = tuple[str, Callable[[Resolved], object], str]
REFUSED: tuple[Refused, ...] = (
    ("model.fp8", lambda c: c.model.fp8, "float8 products have no batched form"),
    ("model.moe", lambda c: c.model.moe, "the experts' products have no batched form"),
    ("objective.name", lambda c: c.objective.name in PREFERENCES,
     "only pretraining has a population"),
    ("objective.name", lambda c: c.objective.name == "distill", "it reads another model"),
    ("finetune.name", lambda c: c.finetune.name != "full", "only pretraining has a population"),
    ("train.init_from", lambda c: c.train.init_from, "members begin with initial values"),
    ("train.phases", lambda c: c.train.phases, "a population has one model"),
    ("train.autofreeze", lambda c: c.train.autofreeze, "members would freeze at different steps"),
    ("train.local_sgd", lambda c: c.train.local_sgd, "it needs several devices"),
    ("train.loss_spike", lambda c: c.train.loss_spike,
     "members would roll back at different steps"),
    ("train.on_nonfinite", lambda c: c.train.on_nonfinite == "rollback",
     "members would roll back at different steps; use stop or skip"),
    ("optim.offload", lambda c: c.optim.offload, "states are moved for one model at a time"),
    ("metrics.wandb", lambda c: c.metrics.wandb, "a process has one W&B run"),
)  # fmt: skip


def check_configs(configs: Sequence[Config], coordinator: Coordinator) -> None:
    """Raise UserError for errors that need neither the data nor a device to find."""
    if not configs:
        raise UserError("a population needs at least one configuration")
    if coordinator.count > 1 or jax.process_count() > 1:
        raise UserError("a population trains in one process; start it without a launcher")
    for c in configs:
        if c.checkpoint.mirror or c.run.url:
            name = "checkpoint.mirror" if c.checkpoint.mirror else "run.directory at a URL"
            raise UserError(f"{name}: a population does not support it. Train the runs separately")
    folders = [c.run_dir.resolve() for c in configs]
    for number, folder in enumerate(folders):
        if folder in folders[:number]:
            raise UserError(
                f"run.name: {folder} is the directory of two members; give each its own name"
            )


def check_plans(plans: Sequence[Plan]) -> None:
    """Raise UserError for the first refused field, or field in which members may not differ."""
    first = plans[0]
    for field, is_set, why in REFUSED:
        if is_set(first.config):
            raise UserError(
                f"{field}: a population does not support it: {why}. Train the runs separately"
            )
    if first.mesh.size > 1:
        raise UserError(
            f"mesh: a population trains on one device, and the mesh has {first.mesh.size}; make "
            "one visible (CUDA_VISIBLE_DEVICES=0)"
        )
    whole = leaves(first.run.model_dump(mode="json"))
    for plan in plans[1:]:
        one = leaves(plan.run.model_dump(mode="json"))
        for field in [*whole, *(name for name in one if name not in whole)]:
            if one.get(field) != whole.get(field) and not may_differ(field):
                raise UserError(
                    f"{field}: {plan.run.run.name} has {one.get(field)}, {first.run.run.name} has "
                    f"{whole.get(field)}; members of a population may differ only in seeds, names "
                    "and the optimizer's hyperparameters"
                )
        if jax.tree.structure(plan.optimizer.hyperparams) != jax.tree.structure(
            first.optimizer.hyperparams
        ):
            raise UserError(
                f"optim.multipliers: {plan.run.run.name} and {first.run.run.name} name different "
                "groups; name the same groups in each, with factor 1 where nothing changes"
            )
    for plan in plans:
        if plan.run.run.seed >= SEEDS:
            raise UserError(f"run.seed={plan.run.run.seed}: in a population it must be below 2^32")


def may_differ(field: str) -> bool:
    """Whether members may have different values of a resolved field."""
    return any(field == name or field.startswith(f"{name}.") for name in MEMBER_FIELDS)


def check_step(spec: StepSpec, recipe: Recipe, plans: Sequence[Plan]) -> CausalLM:
    """Return the recipe. Raises UserError for a step with state outside of its arrays."""
    name = plans[0].config.objective.name
    if (
        not isinstance(recipe, CausalLM)
        or recipe.complete is not None
        or recipe.prepare is not None
    ):
        raise UserError(
            f"objective.name={name}: a population does not support it: it reads another model. "
            "Train the runs separately"
        )
    seeds = {plan.config.data.seed for plan in plans}
    if recipe.change is not None and len(seeds) > 1:
        raise UserError(
            f"data.seed: with objective.name={name} all members need the same value, which also "
            "decides which held-out tokens are masked"
        )
    own = [t.name for t in spec.transforms if not isinstance(t, TRANSFORMS)]
    if own or spec.step is not None or spec.update_loop is not None:
        what = own[0] if own else "a step of its own"
        raise UserError(f"a population does not support {what}. Train the runs separately")
    return recipe
