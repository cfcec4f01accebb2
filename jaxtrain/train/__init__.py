"""Training: the loop, the step and its transforms, guards, local SGD, data preparation.

Losses are in `objectives/`, optimizers in `optim/`, files of a run in `runs/`. This package has the
name of the public function, so the module is callable: `jaxtrain.train(config)` is
`jaxtrain.train.loop.train(config)`, whether or not this package was imported before.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from jaxtrain.train.loop import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
