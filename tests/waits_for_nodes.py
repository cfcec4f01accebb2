"""`jaxtrain.main`, whose run of one process waits after step 10 until it is asked to stop."""

import functools
import sys
import time

import jax

from jaxtrain import main
from jaxtrain.train import loop
from jaxtrain.train.events import Event


class Wait(Event):
    def __init__(self, c, evaluator, metrics, stop):
        super().__init__(10)
        self.stop = stop

    def run(self, step, state):
        until = time.monotonic() + (100 if jax.process_count() == 1 else 0)
        while time.monotonic() < until and not self.stop.wanted:
            time.sleep(0.1)


if __name__ == "__main__":
    loop.train = functools.partial(loop.train, events=[Wait])
    sys.exit(main.main())
