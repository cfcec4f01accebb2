"""`jaxtrain COMMAND`: one table, command -> module; a module is imported when it is called."""

import importlib
import sys

# Command -> (module, the words that come first in its arguments, summary).
COMMANDS = {
    "train": ("jaxtrain.main", (), "train a language model, or resume a run"),
    "prepare": ("jaxtrain.train.prepare", (), "text to token stores, ahead of training"),
    "show-data": ("jaxtrain.data.__main__", ("show",), "rows of a configuration's batches"),
    "filter": ("jaxtrain.data.__main__", ("filter",), "filter a text and write what is kept"),
    "score": ("jaxtrain.evaluation.score", (), "score documents by a trained model"),
    "generate": ("jaxtrain.inference.generate", (), "continue a prompt, or chat"),
    "evaluate": ("jaxtrain.evaluation.evaluate", (), "validation loss, or CORE and other tasks"),
    "lm-eval": ("jaxtrain.evaluation.lm_eval", (), "tasks of EleutherAI's lm-eval"),
    "report": ("jaxtrain.runs.report", (), "one HTML page about a run"),
    "import": ("jaxtrain.interop.__main__", ("import",), "a Hugging Face checkpoint as a run"),
    "export": ("jaxtrain.interop.__main__", ("export",), "a run as a Hugging Face checkpoint"),
    "launch": ("jaxtrain.cluster.launch", (), "several processes on this host as one job"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code. `jaxtrain --config ...` is `jaxtrain train ...`."""
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""
    if name in COMMANDS:
        module, first, _ = COMMANDS[name]
        return importlib.import_module(module).main([*first, *words[1:]])
    return importlib.import_module("jaxtrain.main").main(words)


if __name__ == "__main__":
    sys.exit(main())
