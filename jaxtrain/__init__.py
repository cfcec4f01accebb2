"""jaxtrain: train language models fast with JAX.

    import jaxtrain

    config = jaxtrain.load_config("quickstart", ["train.steps=100"])
    result = jaxtrain.train(config)
    model = jaxtrain.load(result.directory)
    print(model.generate("ROMEO:"))

Names are imported lazily: `import jaxtrain` loads no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.config import Config as Config
    from jaxtrain.config import load_config as load_config
    from jaxtrain.evaluation.model import Model as Model
    from jaxtrain.evaluation.model import build as build
    from jaxtrain.evaluation.model import load as load
    from jaxtrain.settings import UserError as UserError
    from jaxtrain.train.fit import fit as fit
    from jaxtrain.train.loop import TrainResult as TrainResult
    from jaxtrain.train.loop import train as train

__version__ = "0.1.0"
_MODULES = {
    "Config": "config",
    "Model": "evaluation.model",
    "TrainResult": "train.loop",
    "UserError": "settings",
    "build": "evaluation.model",
    "fit": "train.fit",
    "load": "evaluation.model",
    "load_config": "config",
    "train": "train.loop",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"jaxtrain.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
