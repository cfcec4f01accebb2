"""Three small tasks, one of each kind, and the model that is asked."""

import numpy as np
from tiny import byte_model

T = 96  # the context, in bytes
FIELDS = byte_model(T, "model.attention_softcap=20")
MC = [
    {"query": f"{n} and {n} make", "choices": [str(2 * n), "many", str(n)], "gold": n % 3}
    for n in range(14)
]
SCHEMA = [
    {"context_options": [f"He saw {a}", f"He saw the {b}"], "continuation": "fall.", "gold": 1}
    for a, b in zip("abcdefghi", "ihgfedcba")
]
LM = [{"context": f"The word after {w} is ", "continuation": w * 3} for w in "abcdefgh"]
TASKS = {
    "sums": ("multiple_choice", MC, 4, {"continuation_delimiter": "\nAnswer: "}, 33.3),
    "falls": ("schema", SCHEMA, 0, {}, 50),
    "words": ("language_modeling", LM, 1, {}, 0),
}


def score_alone(alone, scored):
    """(nll, greedy, tokens) of one sequence, from its text alone."""
    log_TV = alone(scored.tokens[:-1])[scored.start - 1 : len(scored.tokens) - 1]
    labels = scored.tokens[scored.start :]
    nll = -log_TV[np.arange(len(labels)), labels].sum()
    return nll, (log_TV.argmax(-1) == labels).all(), len(labels)
