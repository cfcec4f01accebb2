"""Any task of EleutherAI's lm-evaluation-harness on one of our models (extra `eval`).

jaxtrain lm-eval RUN --tasks mmlu,gsm8k [--num-fewshot 5] [--limit 100]

Use it in Python as `lm_eval.simple_evaluate(model=HarnessModel(load_saved(path)))`.
"""

import importlib
import importlib.util
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import override
from jaxtrain.evaluation.arguments import lm_eval_parser
from jaxtrain.evaluation.log_likelihood import FIELDS
from jaxtrain.evaluation.model import Model
from jaxtrain.inference.engine import Request
from jaxtrain.inference.generate import Sampling, make_engine, run_requests
from jaxtrain.runs.saved import Saved, load_saved
from jaxtrain.settings import UserError, command
from jaxtrain.storage.disk import write_json
from jaxtrain.storage.fetch import send_results

INSTALLED = importlib.util.find_spec("lm_eval") is not None
Base: Any = importlib.import_module("lm_eval.api.model").LM if INSTALLED else object
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
PATIENCE = 4.0  # seconds to wait for the hub
NEW_TOKENS = 256  # maximum of an answer if the task sets none


class HarnessModel(Base):
    """The harness's model interface. Every text begins with BOS; a too long one keeps its end.

    A request is lm_eval's `Instance`; its contents are in `args`.
    """

    def __init__(self, saved: Saved, overrides: Sequence[str] = ()):
        super().__init__()
        self.saved, self.config = saved, override(saved.config, overrides, (*FIELDS, "run.seed"))
        self.model = Model(saved, self.config)
        self.scorer = self.model.scorer

    def loglikelihood(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        """args (context, continuation) -> its log-likelihood in nats, and whether it is greedy."""
        found = self.model.answers(request.args for request in requests)
        return [(-float(nll), bool(greedy)) for nll, greedy in zip(found.nll, found.greedy)]

    def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> list[float]:
        """args (text,) -> its log-likelihood after BOS.

        Each token is scored once. A longer text than the context is scored in windows of that size.
        """
        return self.model.log_likelihood(request.args[0] for request in requests).tolist()

    def generate_until(self, requests: list[Any], **options: Any) -> list[str]:
        """args (context, settings) -> text up to the first of `until`, which is not part of it.

        Other settings: max_gen_toks, and with do_sample temperature, top_p, top_k.
        """
        asked = [self.request(i, *one.args) for i, one in enumerate(requests)]
        return run_requests(make_engine(self.model.writer, asked), asked) if asked else []

    def request(self, i: int, text: str, settings: dict[str, Any]) -> Request:
        """Engine request for one request of `generate_until`."""
        new = min(int(settings.get("max_gen_toks", NEW_TOKENS)), self.scorer.context // 2)
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0
        top_k, top_p = settings.get("top_k") or None, settings.get("top_p")
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        how = Sampling(new, temperature, top_k, top_p, self.config.run.seed).params(i)
        ids = self.model.encode(text)[new - self.scorer.context :]
        return Request(str(i), tuple(ids.tolist()), how._replace(stop=stop))


def reachable() -> bool:
    """Whether the dataset hub answers, through a proxy if there is one."""
    try:
        urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def stay_offline() -> None:
    """Make the hub's libraries use their caches alone; otherwise they would try for a minute."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # read when they are imported
        if module := sys.modules.get(name):
            vars(module)["HF_HUB_OFFLINE"] = True


@command
def main(argv: list[str] | None = None) -> int:
    a = lm_eval_parser().parse_intermixed_args(argv)
    if not INSTALLED:
        raise UserError(
            "lm-evaluation-harness is not installed: pip install lm_eval, or uv sync --extra eval"
        )
    start()
    model = HarnessModel(load_saved(a.run, a.step), a.overrides)
    why = "" if reachable() else f"; {HUB} cannot be reached, and only what is in its cache is used"
    if why:
        stay_offline()
    lm_eval = importlib.import_module("lm_eval")
    try:
        found = lm_eval.simple_evaluate(
            model, tasks=a.tasks.split(","), num_fewshot=a.num_fewshot, limit=a.limit
        )
    except (OSError, KeyError, ValueError) as error:  # from its tasks, or their data
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--tasks {a.tasks}: the harness cannot load its data: {first}{why}"
        ) from error
    print(importlib.import_module("lm_eval.utils").make_table(found))
    out = a.out or a.run / "harness.json"
    write_json(out, found["results"])
    send_results(a.run, out)
    return 0
