"""`jaxtrain search-growth CONFIG [key=value ...]`: find the growth schedule by short proxy runs.

AutoProg (Li et al. 2022, arXiv:2203.14509) without its supernet: each candidate is a separate run,
and all runs cost the same FLOPs. The lowest validation loss wins. An interrupted search resumes at
its current run, and gives the same answer.
"""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxtrain.config import find_config, load_config
from jaxtrain.config.resolve import Resolved, resolve, vocab_size_of
from jaxtrain.model import Transformer, flops_per_token, split
from jaxtrain.settings import UserError, command
from jaxtrain.storage.disk import write_json
from jaxtrain.train.arguments import search_growth_parser
from jaxtrain.train.loop import train


class Candidate(NamedTuple):
    """A sequence of depths, in equal parts of a share of the steps; then the whole model."""

    depths: tuple[int, ...]
    share: float
    grow: str

    @property
    def label(self) -> str:
        """The name of the candidate's run."""
        if not self.depths:
            return "whole"
        return f"{'-'.join(map(str, self.depths))}_{self.share:g}_{self.grow}"

    def phases(self, steps: int) -> list[dict[str, Any]]:
        """Return `train.phases` of a run with that many steps."""
        part = self.share / max(len(self.depths), 1)
        return [
            {"until": max(i, round(part * i * steps)), "model": {"depth": d}, "grow": self.grow}
            for i, d in enumerate(self.depths, 1)
        ]


def candidates(
    depths: Sequence[int], shares: Sequence[float], grows: Sequence[str]
) -> Iterator[Candidate]:
    """Yield the whole model from the start, then each sequence of depths, share and growth."""
    yield Candidate((), 0.0, "")
    ways = sorted({*depths})
    for count in range(1, len(ways) + 1):
        for chosen in itertools.combinations(ways, count):
            yield from (Candidate(chosen, share, g) for share in shares for g in grows)


def flops_of_depths(c: Resolved, vocab_size: int, depths: Sequence[int]) -> dict[int, float]:
    """Return the FLOPs of a training token by depth, including the whole model's depth."""

    def flops(depth: int) -> float:
        model = c.model.model_copy(update={"depth": depth})
        specs = split(Transformer(model, vocab_size))[1]
        return float(flops_per_token(model, specs, c.train.sequence_length, specs))

    return {depth: flops(depth) for depth in {*depths, c.model.depth}}


def equal_steps(one: Candidate, steps: int, whole: int, flops: dict[int, float]) -> int:
    """Return the candidate's steps that cost as many FLOPs as `steps` of the whole model."""
    part = one.share / max(len(one.depths), 1)
    mean = sum(part * flops[d] for d in one.depths) + (1 - one.share) * flops[whole]
    return round(steps * flops[whole] / mean)


def check(c: Resolved, depths: Sequence[int], shares: Sequence[float]) -> None:
    """Raise UserError for an invalid search."""
    if c.train.phases:
        raise UserError("train.phases: search-growth chooses them; leave them out")
    if bad := [d for d in depths if not 0 < d < c.model.depth]:
        raise UserError(
            f"--depths {bad[0]}: a first depth must be at least 1 and below model.depth "
            f"{c.model.depth}"
        )
    if bad := [s for s in shares if not 0 < s < 1]:
        raise UserError(f"--shares {bad[0]:g}: a share of the steps must be between 0 and 1")


@command
def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0, or 2 after one line about an error that the user can fix."""
    a = search_growth_parser().parse_intermixed_args(argv)
    path = find_config(a.config)
    config = load_config(path, a.overrides)
    vocab_size = vocab_size_of(config.data)
    c = resolve(config, vocab_size)
    check(c, a.depths, a.shares)
    flops = flops_of_depths(c, vocab_size, a.depths)
    folder = c.run.folder / f"{c.run.name}-growth"
    folder.mkdir(parents=True, exist_ok=True)
    found = known(folder / "results.json")
    tried = list(candidates(a.depths, a.shares, a.grow))
    for number, one in enumerate(tried, 1):
        steps = equal_steps(one, a.steps, c.model.depth, flops)
        key = f"{one.label} {steps}"
        if key not in found:
            found[key] = proxy_loss(path, a.overrides, folder, one, steps)
            write_json(folder / "results.json", found)
        print(f"growth   {number}/{len(tried)} {one.label}: {steps} steps, loss {found[key]:.4f}")
    keys = [f"{one.label} {equal_steps(one, a.steps, c.model.depth, flops)}" for one in tried]
    best = min(zip(keys, tried), key=lambda pair: found[pair[0]])[1]
    total = equal_steps(best, c.train.steps, c.model.depth, flops)
    text = yaml.safe_dump({"train": {"steps": total, "phases": best.phases(total)}})
    out = folder / "best.yaml"
    out.write_text(text)
    print(
        f"growth   best: {best.label}; {out} costs as much as {c.train.steps} steps of all layers"
    )
    print(text, end="")
    return 0


def known(path: Path) -> dict[str, float]:
    """Read the losses of the finished candidates."""
    return json.loads(path.read_text()) if path.exists() else {}


def proxy_loss(
    path: Path, overrides: Sequence[str], folder: Path, one: Candidate, steps: int
) -> float:
    """Train a candidate; return its last validation loss in nats per token."""
    phases = json.dumps(one.phases(steps))
    own = [f"run.directory={folder}", f"run.name={one.label}_{steps}", f"train.steps={steps}"]
    own += [f"train.phases={phases}", "sample.prompts=[]", "sample.every=null", "eval.every=null"]
    mine = {line.partition("=")[0] for line in own}
    rest = [line for line in overrides if line.partition("=")[0].strip() not in mine]
    result = train(load_config(path, [*rest, *own]))
    if result.stopped or "loss" not in result.metrics:
        raise UserError(
            f"{result.directory}: it has no validation loss yet; the same command resumes it"
        )
    return result.metrics["loss"]


if __name__ == "__main__":
    sys.exit(main())
