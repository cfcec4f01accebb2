"""Prompt and prefix tuning: virtual tokens in front of every text train (`model/virtual.py`)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.finetune.partition import Parts, inserted


def virtual(c: Any, specs: Any, dtype: jnp.dtype) -> Parts:
    """The base is frozen as a whole. A prompt starts as the embeddings of random tokens, as in the
    paper; a prefix as it is declared."""
    parts = inserted(c, specs, dtype)

    def from_vocabulary(base: Any, seed: int) -> tuple[Any, Any]:
        table_VD = base["embed"]
        rows_P = jax.random.randint(jax.random.key(seed), (c.tokens,), 0, len(table_VD))
        return base, {"prompt": table_VD[rows_P].astype(jnp.float32)}

    return parts._replace(split=from_vocabulary) if c.name == "prompt" else parts
