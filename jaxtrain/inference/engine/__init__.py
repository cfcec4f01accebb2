"""An inference engine: continuous batching over a paged KV cache.

engine = load_engine(Path("runs/quickstart"))
engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=64)))
while engine.busy:
    for update in engine.step():
        print(update.text, end="")
"""

from jaxtrain.inference.engine.engine import Engine
from jaxtrain.inference.engine.load import load_engine
from jaxtrain.inference.engine.requests import (
    EngineOptions,
    EngineStats,
    Grammar,
    Request,
    SamplingParams,
    TokenLogprob,
    Update,
)

__all__ = [
    "Engine", "EngineOptions", "EngineStats", "Grammar", "Request", "SamplingParams",
    "TokenLogprob", "Update", "load_engine",
]  # fmt: skip
