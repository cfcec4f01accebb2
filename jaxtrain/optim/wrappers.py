"""The table of wrappers: what goes around any optimizer, one file and one row each."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from jaxtrain.optim.cautious import CautiousConfig, cautious
from jaxtrain.optim.ema import EMAConfig, ema
from jaxtrain.optim.types import Wrapper
from jaxtrain.settings import UserError

WRAPPERS = {"cautious": cautious, "ema": ema}
WrapperConfig = Annotated[CautiousConfig | EMAConfig, Field(discriminator="name")]


def make_wrappers(configs: Sequence[WrapperConfig], averages: bool) -> list[Wrapper]:
    """The configured wrappers, the innermost first.

    averages: the optimizer has weights of its own to evaluate. UserError for a wrapper that is
    named twice, or that averages and is not the last.
    """
    names = [c.name for c in configs]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"optim.wrappers: {name} is there twice; name it once")
    made = [WRAPPERS[c.name](c) for c in configs]
    for i, (name, wrapper) in enumerate(zip(names, made)):
        if wrapper.eval_params is None:
            continue
        if averages:
            raise UserError(
                f"optim.wrappers: this optimizer averages its weights itself; leave {name} out"
            )
        if i + 1 < len(made):
            raise UserError(f"optim.wrappers: {name} averages what the others give; name it last")
    return made
