"""In-context tasks: a model's accuracy, and CORE, the mean of the centered accuracies.

CORE (DCLM, arXiv:2406.11794) is the mean over 22 tasks of (accuracy - chance) / (1 - chance). An
example counts as correct as in nanochat. Of several answers, or several contexts, the right one
must have the best mean log-likelihood per token. Of a single answer, each token must be the
likeliest.
"""

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxtrain import data
from jaxtrain.cluster.ray_models import NodeModels
from jaxtrain.config.resolve import Resolved
from jaxtrain.data.evaluation.branches import RowShape, expected_shapes
from jaxtrain.data.evaluation.prompts import examples_of_all_lengths
from jaxtrain.data.evaluation.tasks import NANOCHAT, Bundle, Loaded, Rules
from jaxtrain.evaluation.log_likelihood import Scorer, Scores, make_scorer, scores
from jaxtrain.evaluation.remote import RemoteModel
from jaxtrain.runs.saved import Saved
from jaxtrain.settings import UserError
from jaxtrain.storage.disk import write_json

Result = dict[str, Any]
FORMAT = 3  # of the file; an older one is overwritten


def run_tasks(
    saved: Saved,
    config: Resolved,
    bundle: Bundle,
    names: Sequence[str],
    out: Path,
    rules: Rules = NANOCHAT,
    remote: RemoteModel | None = None,
) -> Result:
    """Run tasks, and write the results to `out` after each of them. Returns those of `names`.

    Results in `out` of the same model and questions are kept. `core` is included if all tasks of
    CORE are, with the same rules. Raises UserError for a model whose log-likelihoods are not
    finite. remote: the same model for the nodes of a Ray cluster, each of which runs whole tasks.
    """
    if config.model.position_embedding == "learned":  # no positions beyond the context
        rules = rules._replace(crop=True)
    found = bundle.find(names)
    model = identity(saved, config)
    result: Result = {"model": model, "tasks": previous_results(out, model)}
    few = None if rules.limit is None else 1 << (rules.limit - 1).bit_length()
    waiting = []
    for task, folder in found:
        loaded = bundle.load(task, folder, rules)
        if result["tasks"].get(task.label, {}).get("questions") != loaded.fingerprint:
            waiting.append(loaded)
    with progress_bar() as bar:
        if remote is not None:
            answers = zip(waiting, NodeModels(partial(load_answer, remote, few)).map(waiting))
        else:
            scorer = make_scorer(saved, config, few) if waiting else None
            answers = answer_all(scorer, saved.tokenizer, waiting, bar) if scorer else ()
        for loaded, entry in answers:
            result["tasks"][loaded.task.label] = entry
            save(out, result)
            text = f"{loaded.task.label:34s} {entry['accuracy']:.4f}  {entry['seconds']:.1f} s"
            bar.console.print(text, highlight=False)
    of_core = [result["tasks"][label] for label in bundle.core if label in result["tasks"]]
    if of_core and len(of_core) == len(bundle.core) and same_rules(of_core):
        result["core"] = sum(entry["centered"] for entry in of_core) / len(of_core)
    save(out, result)
    chosen = {task.label: result["tasks"][task.label] for task, _ in found}
    return result | {"tasks": chosen}


def load_answer(remote: RemoteModel, few: int | None) -> Callable[[Loaded], Result]:
    """Load a scorer on a node: task -> its results. few: `most_rows` of `make_scorer`."""
    saved, config = remote.load()
    scorer = make_scorer(saved, config, few)
    quiet = Progress(disable=True)
    return lambda loaded: next(answer_all(scorer, saved.tokenizer, [loaded], quiet))[1]


def same_rules(entries: Sequence[Result]) -> bool:
    """Whether all entries can have the same rules; a limit above a task's examples is no limit."""
    limited = [entry for entry in entries if entry["examples"] < entry["of"]]
    cut = {(entry["examples"], entry["all_shots"]) for entry in limited}
    most = min((examples for examples, _ in cut), default=math.inf)
    crop = {entry["crop"] for entry in entries}
    return max(len(cut), len(crop)) < 2 and all(entry["examples"] <= most for entry in entries)


def answer_all(
    scorer: Scorer, tokenizer: data.Tokenizer, tasks: Sequence[Loaded], bar: Progress
) -> Iterator[tuple[Loaded, Result]]:
    """Yield each task with its results, as soon as they are complete."""
    compile_ahead(scorer, tokenizer, tasks, bar)
    number = bar.add_task("examples", total=sum(loaded.asked for loaded in tasks))
    jobs = (data.questions(loaded, tokenizer, scorer.context) for loaded in tasks)
    begin = time.perf_counter()
    results = scores(scorer, jobs, lambda n: bar.advance(number, n))
    try:
        for loaded, found in zip(tasks, results, strict=True):
            now = time.perf_counter()
            yield (
                loaded,
                figures(loaded, is_correct(loaded, found)) | {"seconds": round(now - begin, 3)},
            )
            begin = now
    except (Exception, KeyboardInterrupt):
        scorer.compiler.stop()  # else the process ends only after all started compilations
        raise


def compile_ahead(
    scorer: Scorer, tokenizer: data.Tokenizer, tasks: Sequence[Loaded], bar: Progress
) -> None:
    """Start to compile programs that the tasks will need, judged by some of their examples, because
    tokenizing all of CORE takes as long as scoring it. Others are compiled when they are needed."""
    if jax.process_count() > 1:  # as `Scorer.compile`
        return
    shapes: dict[RowShape, None] = {}  # in the order of their use
    for loaded in tasks:
        some = data.questions(loaded, tokenizer, scorer.context, examples_of_all_lengths(loaded))
        shapes |= dict.fromkeys(expected_shapes(some, scorer.shape))
    new = [shape for shape in shapes if shape not in scorer.compiler.coming]
    if new and not bar.disable:
        lengths = ", ".join(f"{shape.trunk + shape.branch:,}" for shape in new)
        bar.console.print(f"compiling for rows of {lengths} tokens", highlight=False)
    number = bar.add_task("programs compiled", total=len(new))
    for one in scorer.compile(new):
        one.add_done_callback(lambda _: bar.advance(number))


def is_correct(loaded: Loaded, found: Scores) -> np.ndarray:
    """Whether each example is answered correctly, bool [examples]. In a tie the first wins."""
    if not np.isfinite(found.nll).all():
        raise UserError(
            f"{loaded.task.label}: the model's log-likelihoods are not finite: its weights are not "
            "finite, or train.precision=float16 overflows"
        )
    if loaded.task.icl_task_type == "language_modeling":
        return found.greedy
    mean = found.nll / found.tokens
    ends = np.cumsum(found.sizes)
    choices = [int(np.argmin(mean[end - size : end])) for end, size in zip(ends, found.sizes)]
    return np.array([c == e["gold"] for c, e in zip(choices, loaded.examples)])


def figures(loaded: Loaded, correct: np.ndarray) -> Result:
    """Results of a task."""
    accuracy, chance = float(correct.mean()), loaded.chance
    return {
        "accuracy": accuracy,
        "centered": (accuracy - chance) / (1 - chance),
        "error": math.sqrt(accuracy * (1 - accuracy) / len(correct)),
        "chance": chance,
        "examples": len(correct),
        "of": loaded.total,
        "shots": loaded.task.shots,
        "kind": loaded.task.icl_task_type,
        "file": loaded.file.name,
        "questions": loaded.fingerprint,
        "crop": loaded.rules.crop,
        "all_shots": loaded.rules.all_shots,
    }


# ---- the file ----------------------------------------------------------------------------------


def identity(saved: Saved, config: Resolved) -> Result:
    """Identity of all that the results depend on besides the questions."""
    digest = 0
    for leaf in jax.tree.leaves(saved.params):
        digest = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1), digest)
    settings = json.dumps(config.model.model_dump(mode="json"), sort_keys=True)
    return {
        "format": FORMAT,
        "weights": f"{digest:08x}",
        "model": f"{zlib.crc32(settings.encode()):08x}",
        "tokenizer": saved.tokenizer.fingerprint,
        "precision": config.train.precision,
    }


def previous_results(path: Path, model: Result) -> Result:
    """Results of this model's tasks in an existing file."""
    with suppress(OSError, ValueError, AttributeError):
        written = json.loads(path.read_text())
        if written.get("model") == model:
            return written["tasks"]
    return {}


def save(path: Path, result: Result) -> None:
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)


# ---- the screen --------------------------------------------------------------------------------


def progress_bar() -> Progress:
    text = TextColumn("{task.description}")
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    quiet = jax.process_index() > 0
    console = Console(stderr=True, quiet=quiet)
    return Progress(*columns, console=console, transient=True, disable=quiet)


def task_table(result: Result) -> Table:
    """The tasks, and CORE or else their centred mean, for a console."""
    table = Table(box=None, header_style="bold")
    table.add_column("task")
    for name in ("shots", "examples", "accuracy", "+-", "chance", "centered", "seconds"):
        table.add_column(name, justify="right")
    for label, r in result["tasks"].items():
        table.add_row(
            label, f"{r['shots']}", f"{r['examples']:,}", f"{r['accuracy']:.4f}",
            f"{r['error']:.4f}", f"{r['chance']:.3f}", f"{r['centered']:.4f}",
            f"{r['seconds']:.1f}",
        )  # fmt: skip
    rows = result["tasks"].values()
    mean = sum(r["centered"] for r in rows) / len(rows)
    whole = "core" in result and result["core"] == mean
    seconds = sum(r["seconds"] for r in rows)
    cells = ("CORE" if whole else "mean", *[""] * 5, f"{mean:.4f}", f"{seconds:.1f}")
    table.add_row(*cells, style="bold")
    return table
