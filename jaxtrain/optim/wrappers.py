"""The table of wrappers for any optimizer, each with one file and one row."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from jaxtrain.optim.cautious import CautiousConfig, cautious
from jaxtrain.optim.dynamic_sparsity import RigLConfig, SETConfig, rigl, set_masks
from jaxtrain.optim.early_bird import EarlyBirdConfig, early_bird
from jaxtrain.optim.ema import EMAConfig, ema
from jaxtrain.optim.ema_nesterov import EMANesterovConfig, ema_nesterov
from jaxtrain.optim.fixed_masks import FixedMasksConfig, fixed_masks
from jaxtrain.optim.gradual_pruning import GradualPruningConfig, gradual_pruning
from jaxtrain.optim.lottery_ticket import LotteryTicketConfig, lottery_ticket
from jaxtrain.optim.sr_ste import SRSTEConfig, sr_ste
from jaxtrain.optim.tail_average import TailAverageConfig, tail_average
from jaxtrain.optim.types import ParamGroup, Restarts, Wrapper
from jaxtrain.settings import UserError

WRAPPERS = {
    "cautious": cautious,
    "ema": ema,
    "ema_nesterov": ema_nesterov,
    "tail_average": tail_average,
    "gradual_pruning": gradual_pruning,
    "set": set_masks,
    "rigl": rigl,
    "early_bird": early_bird,
    "sr_ste": sr_ste,
    "lottery_ticket": lottery_ticket,
    "fixed_masks": fixed_masks,
}
WrapperConfig = Annotated[
    CautiousConfig
    | EMAConfig
    | EMANesterovConfig
    | TailAverageConfig
    | GradualPruningConfig
    | SETConfig
    | RigLConfig
    | EarlyBirdConfig
    | SRSTEConfig
    | LotteryTicketConfig
    | FixedMasksConfig,
    Field(discriminator="name"),
]


def make_wrappers(configs: Sequence[WrapperConfig], averages: bool) -> list[Wrapper]:
    """Make the configured wrappers, innermost first.

    averages: the optimizer has its own evaluation weights. Raises UserError for a wrapper named
    twice, one that averages or zeroes weights and is not the last, or both of these together.
    """
    names = [c.name for c in configs]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"optim.wrappers: {name} is listed twice; name it once")
    made = [WRAPPERS[c.name](c) for c in configs]
    means = [name for name, wrapper in zip(names, made) if wrapper.eval_params]
    zeroing = [name for name, wrapper in zip(names, made) if wrapper.keeps_zeros]
    if means and zeroing:
        raise UserError(
            f"optim.wrappers: {zeroing[0]} sets weights to zero, and their average would not be "
            f"zero; leave {means[0]} out"
        )
    if len(zeroing) > 1:
        raise UserError(
            f"optim.wrappers: {' and '.join(zeroing)} each mask the same weights; name one of them"
        )
    if len(made) > 1 and (average := made[-1].over):
        ahead = made[-2]
        if ahead.eval_params and not ahead.over:  # a look-ahead: average what it would evaluate
            made[-1] = average(ahead.eval_params)
            means.remove(names[-2])
    for name in [*means, *zeroing]:
        if averages:
            raise UserError(
                f"optim.wrappers: this optimizer averages its weights itself; leave {name} out"
            )
        if name != names[-1]:
            verb = "averages" if means else "masks"
            raise UserError(f"optim.wrappers: {name} {verb} what the others give; name it last")
    return made


def with_wrappers(
    wrappers: Sequence[Wrapper], table: dict[str, ParamGroup]
) -> dict[str, ParamGroup]:
    """The table with wrappers around each group, innermost first."""
    if not wrappers:
        return table
    peaks = {name: rate for wrapper in wrappers for name, rate in wrapper.peaks.items()}
    by_rows = all(wrapper.by_rows for wrapper in wrappers)
    return {
        name: group._replace(
            peaks=group.peaks | peaks,
            by_rows=group.by_rows and by_rows,
            eval_params=wrappers[-1].eval_params or group.eval_params,
            wrappers=tuple(wrappers),
        )
        for name, group in table.items()
    }


def schedule_restarts(wrappers: Sequence[Wrapper], total_steps: int) -> Restarts | None:
    """Schedule restarts of the last wrapper. UserError if they need another number of steps."""
    restarts = wrappers[-1].restarts if wrappers else None
    if restarts and restarts.total != total_steps:
        raise UserError(
            f"optim.wrappers: its rounds take {restarts.total} steps, not {total_steps}; set "
            f"train.steps={restarts.total}"
        )
    return restarts
