"""The path from the command to the loss, with its true line counts.

`python tests/tour.py` writes the table between the markers of the pages that have it;
tests/test_docs.py fails where it is stale.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/explanation/code.md")
MARKERS = re.compile(r"(<!-- tour -->\n).*?(<!-- end -->)", re.DOTALL)

# File -> what happens there. Each calls the next.
TOUR = {
    "jaxtrain/main.py": "arguments to a `Config`, then `train(config)`",
    "jaxtrain/train/loop.py": "`train`: plan, data, state, compile, end",
    "jaxtrain/train/run_steps.py": "steps, and the events between them",
    "jaxtrain/train/program.py": "what is compiled for one phase of the run",
    "jaxtrain/train/step.py": "one optimizer step: microbatch gradients, accumulate, clip, update",
    "jaxtrain/objectives/next_token.py": "hidden states, then the sum of token losses",
    "jaxtrain/model/transformer.py": "embed, the blocks as the layer plan says, final norm",
    "jaxtrain/model/run_layers.py": "the layers one after the other, unrolled or scanned",
    "jaxtrain/model/block.py": "one layer: attention and feed-forward with their residuals",
    "jaxtrain/model/attention.py": "project to Q, K, V, rotate (RoPE), attend, project back",
    "jaxtrain/model/layers.py": "norms and feed-forward networks",
    "jaxtrain/parallel/kernels.py": "each device runs the kernel on its own rows and heads",
    "kernels/jaxtrain_kernels/cross_entropy/reference.py": "the loss in plain jnp",
}


def lines_of(name: str) -> int:
    return len((ROOT / name).read_text().splitlines())


def table(page: str) -> str:
    """Markdown rows, with links from that page, and the sum of all lines."""
    link = "" if page == "README.md" else "https://github.com/jaxtrain/jaxtrain/blob/main/"
    rows = ["| file | lines | what happens there |", "|---|---|---|"]
    rows += [f"| [{name}]({link}{name}) | {lines_of(name)} | {what} |"
             for name, what in TOUR.items()]  # fmt: skip
    total = sum(map(lines_of, TOUR))
    return "\n".join([*rows, f"| **{len(TOUR)} files** | **{total:,}** | |"]) + "\n"


def renewed(page: str) -> str:
    """The page's text with a table that is true now."""
    text = (ROOT / page).read_text()
    return MARKERS.sub(lambda found: found[1] + table(page) + found[2], text)


def main() -> int:
    for page in PAGES:
        (ROOT / page).write_text(renewed(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
