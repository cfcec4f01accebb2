"""Settings that the depth dial takes from a scaling-law fit: `train.scaling_fit`."""

import math
from pathlib import Path

from pydantic import Field, ValidationError

from jaxtrain.settings import Settings, UserError, read_object

SHIPPED = Path(__file__).with_name("scaling_fits")


class Ratio(Settings):
    """Compute-optimal training tokens per parameter of the matrices and head."""

    value: float = Field(gt=0, description="training tokens per parameter")
    low: float | None = Field(
        None, description="lower end of its confidence interval; null: not given"
    )
    high: float | None = Field(
        None, description="upper end of its confidence interval; null: not given"
    )


class Power(Settings):
    """Power law: coefficient x (training tokens, or parameters)^exponent."""

    coefficient: float = Field(gt=0, description="value at 1")
    exponent: float = Field(description="exponent of the power law")

    def __call__(self, x: float) -> float:
        return self.coefficient * x**self.exponent


class Dial(Settings):
    """Rules of the depth dial that a scaling-law fit replaces; the others stay nanochat's."""

    name: str = Field(description="name of the study or project")
    source: str = Field(description="source of the figures")
    tokens_per_parameter: Ratio = Field(
        description="compute-optimal tokens per parameter, which set train.steps"
    )
    batch_tokens: Power | None = Field(
        None,
        description="batch size in tokens as a function of the training tokens; default "
        "nanochat's rule",
    )
    rate_multiplier: Power | None = Field(
        None,
        description="factor on the derived learning rates as a function of the parameters; "
        "default 1",
    )

    def batch(self, tokens: float) -> int | None:
        """Tokens per step for `tokens` training tokens, a power of two; None without a law."""
        if self.batch_tokens is None:
            return None
        return 2 ** max(0, round(math.log2(self.batch_tokens(tokens))))

    def rates(self, parameters: float) -> float:
        """Factor on the derived learning rates for a number of parameters."""
        return self.rate_multiplier(parameters) if self.rate_multiplier else 1.0


def read_dial(name: str) -> Dial:
    """The dial of a fit.json, or of a shipped fit by its name.

    Raises UserError for a missing or invalid file, and for a fit without a dial.
    """
    path = SHIPPED / f"{name}.json"
    if Path(name).suffix or Path(name).parent != Path(".") or not path.is_file():
        path = Path(name)
    if not path.is_file():
        shipped = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.json")))
        raise UserError(
            f"train.scaling_fit {name}: no such file; give the fit.json of `jaxtrain scaling fit`, "
            f"or one of {shipped}"
        )
    tree = read_object(path).get("dial")
    if tree is None:
        raise UserError(
            f"train.scaling_fit {name}: that fit has no tokens per parameter of matrices and head; "
            "set train.tokens_per_parameter"
        )
    try:
        return Dial.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"train.scaling_fit {name}: dial.{where}: {first['msg']}") from None
