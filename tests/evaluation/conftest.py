"""A random model of bytes, and a bundle of three small tasks."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from task_cases import FIELDS, TASKS, T
from tiny import random_run

from jaxtrain.runs.saved import load_saved


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run directory's content with a random model of bytes."""
    return load_saved(random_run(tmp_path_factory.mktemp("run"), FIELDS))


@pytest.fixture
def bundle(tmp_path):
    """A bundle of three small tasks, one of each kind."""
    folder = tmp_path / "bundle"
    (folder / "eval_data").mkdir(parents=True)
    entries, lines = [], ["Eval Task,Task Category,Random baseline"]
    for label, (kind, examples, shots, more, chance) in TASKS.items():
        uri = f"{label}.jsonl"
        text = "".join(json.dumps(example) + "\n" for example in examples)
        (folder / "eval_data" / uri).write_text(text)
        entry = {"label": label, "dataset_uri": uri, "num_fewshot": [shots]}
        entries.append(entry | {"icl_task_type": kind} | more)
        lines.append(f"{label},anything,{chance}")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (folder / "eval_meta_data.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def alone(model):
    """tokens -> log-probabilities [T, V] of what follows each, one plain text at a time."""

    @jax.jit
    def logits(params, tokens_1T):
        merged = nnx.merge(model.graphdef, params)
        if tokens_1T.shape[1] > T:  # nanochat's full layers look back as far as in training
            merged.plan = tuple(replace(spec, window=spec.window or T) for spec in merged.plan)
        return jax.nn.log_softmax(merged.logits(merged(tokens_1T).states[0]))

    def run(tokens):
        padded = np.zeros((1, -(-len(tokens) // T) * T), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(logits(model.params, jnp.asarray(padded)))

    return run
