"""A language model in Python: logits, log-likelihoods, text, chat, saving and exporting."""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from jaxtrain import data
from jaxtrain.cluster.runtime import compute_dtype
from jaxtrain.config import Config
from jaxtrain.config.resolve import Resolved, resolve
from jaxtrain.data import Chat, Scored, make_chat
from jaxtrain.evaluation.log_likelihood import Scorer, Scores, make_scorer, scores
from jaxtrain.inference.engine import Request
from jaxtrain.inference.generate import (
    LanguageModel,
    Sampling,
    SamplingOptions,
    generate,
    make_engine,
    run_requests,
)
from jaxtrain.interop.companions import FOLDER, prompting
from jaxtrain.model import Transformer, cast, initialize, split
from jaxtrain.runs.convert import export_run, import_checkpoint
from jaxtrain.runs.saved import Saved, load_saved, save_model, template_for
from jaxtrain.settings import UserError
from jaxtrain.storage.location import is_url, local
from jaxtrain.weights.params import Params

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


class Model:
    """A model with its tokenizer, on this process's devices.

    config: the resolved configuration. params: the float32 weights, a tree. tokenizer: `encode`
    and `decode`. Made by `load` and `build`.
    """

    def __init__(self, saved: Saved, config: Resolved | None = None):
        self.saved, self.config, self.tokenizer = saved, config or saved.config, saved.tokenizer

    @property
    def params(self) -> Params:
        """The float32 weights."""
        return self.saved.params

    @params.setter
    def params(self, params: Params) -> None:
        self.saved = self.saved._replace(params=params)
        for name in ("compute_params", "scorer"):
            self.__dict__.pop(name, None)

    @cached_property
    def compute_params(self) -> Params:
        """The weights on one device, in the dtype of `train.precision`."""
        dtype = compute_dtype(self.config.train.precision)
        return cast(jax.device_put(self.params), self.saved.specs, dtype)

    @property
    def writer(self) -> LanguageModel:
        """Language model that continues texts."""
        parts = self.config.model, self.saved.graphdef, self.compute_params
        return LanguageModel(*parts, self.tokenizer, self.saved.prompting)

    @cached_property
    def scorer(self) -> Scorer:
        """Scorer of log-likelihoods, on the mesh of the configuration."""
        return make_scorer(self.saved, self.config)

    @cached_property
    def template(self) -> Chat:
        """Chat template of the model. Raises UserError if the model has none."""
        return make_chat(*template_for(self.saved), self.tokenizer)

    def logits(self, tokens_BT: ArrayLike) -> Float[Array, "B T V"]:
        """Float32 logits of the token after each of `tokens_BT`, int [B, T] (or [T], for B = 1)."""
        ids = jnp.atleast_2d(jnp.asarray(tokens_BT, jnp.int32))
        return _logits(self.saved.graphdef, self.compute_params, ids)

    # ---- log-likelihoods -----------------------------------------------------------------------

    def log_likelihood(self, texts: Iterable[str | tuple[str, str]]) -> np.ndarray:
        """Log-likelihoods in nats (negative), float64 [N]: of each text after BOS, or of each
        pair's second part after its first. A longer text than the context is scored in windows; a
        longer pair loses its beginning."""
        asked = [list(self.parts(x)) for x in texts]
        found = self.score([part] for parts in asked for part in parts)
        ends = np.cumsum([len(parts) for parts in asked])
        return np.array([-found.nll[e - len(p) : e].sum() for e, p in zip(ends, asked)])

    def answers(self, pairs: Iterable[tuple[str, str]]) -> Scores:
        """Scores of (context, continuation) pairs: nats, and whether each continuation is greedy.

        Consecutive pairs with the same context are answers to one question, whose context is
        computed once.
        """
        groups = groupby(pairs, key=lambda pair: pair[0])
        return self.score([self.pair(*pair) for pair in group] for _, group in groups)

    def score(self, questions: Iterable[Sequence[Scored]]) -> Scores:
        """Scores of sequences; those of a question share a prefix."""
        (found,) = scores(self.scorer, [questions])
        return found

    def parts(self, text: str | tuple[str, str]) -> Iterator[Scored]:
        """Sequences to score for a text, or for a pair."""
        if isinstance(text, str):
            yield from self.windows(self.encode(text))
        else:
            yield self.pair(*text)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [T], with BOS in front."""
        ids = [[self.tokenizer.bos_id], self.tokenizer.encode(text)]
        return np.concatenate(ids).astype(np.int32)

    def pair(self, context: str, continuation: str) -> Scored:
        """Sequence to score for a pair. Spaces at the context's end go to the continuation."""
        tokens = self.encode(context + continuation)
        first = min(len(self.encode(context.rstrip())), len(tokens) - 1)
        lost = max(0, len(tokens) - self.scorer.context - 1)
        return Scored(tokens[lost:], max(1, first - lost))

    def windows(self, tokens: np.ndarray) -> Iterator[Scored]:
        """Windows that score all tokens but the first; the last window has a whole context, too."""
        context = self.scorer.context
        for begin in range(1, len(tokens), context):
            end = min(begin + context, len(tokens))
            first = max(0, end - context - 1)
            yield Scored(tokens[first:end], begin - first)

    # ---- text ----------------------------------------------------------------------------------

    @overload
    def generate(self, prompts: str, **sampling: Unpack[SamplingOptions]) -> str: ...
    @overload
    def generate(
        self, prompts: Sequence[str], **sampling: Unpack[SamplingOptions]
    ) -> list[str]: ...
    def generate(
        self, prompts: str | Sequence[str], **sampling: Unpack[SamplingOptions]
    ) -> str | list[str]:
        """The continuation of a prompt (str), or of several (list[str]), without the prompts.

        sampling: tokens (256, at most), temperature (0.8; 0 takes the likeliest token), top_k,
        top_p, seed, cache_dtype ("int8", "float8" or None).
        """
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        found = generate(self.writer, many, Sampling(**sampling))
        return found[0] if isinstance(prompts, str) else found

    def chat(self, messages: Sequence[Message], **sampling: Unpack[SamplingOptions]) -> str:
        """The answer to a conversation of {"role": ..., "content": ...}.

        The other arguments are those of `generate`. Raises UserError if the model has no chat
        template.
        """
        asked = self.template.prompt([dict(message) for message in messages])
        how = Sampling(**sampling)
        params = how.params()._replace(stop_tokens=(self.template.end,))
        request = Request("", tuple(asked.tolist()), params)
        engine = make_engine(self.writer, [request], how.cache_dtype)
        return run_requests(engine, [request])[0].strip()

    # ---- files ---------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write FOLDER/model/, which `load` and every command take; returns the folder.

        Raises UserError if there is one already.
        """
        target = Path(folder) / "model"
        if target.exists():
            raise UserError(f"{target} is there already; name another folder")
        save_model(target, self.config, self.params, self.tokenizer)
        if (self.saved.tokenizer_dir / FOLDER).is_dir():  # of the checkpoint it comes from
            shutil.copytree(self.saved.tokenizer_dir / FOLDER, target / FOLDER)
        return Path(folder)

    def export(
        self, folder: str | Path, family: str | None = None, dtype: str | None = None
    ) -> str:
        """Write a Hugging Face checkpoint; returns its family, by default the one that fits.

        Raises UserError for a model that no family can hold.
        """
        with tempfile.TemporaryDirectory() as scratch:
            return export_run(self.save(scratch), Path(folder), family, dtype)


@jax.jit(static_argnums=0)
def _logits(graphdef: Any, params: Any, tokens_BT: Array) -> Array:
    model = nnx.merge(graphdef, params)
    return model.logits(model(tokens_BT).states)


def load(source: str | Path, step: int | None = None) -> Model:
    """Model of a run directory, a saved folder, or a Hugging Face checkpoint: a folder, or
    OWNER/NAME[@REVISION].

    step: load this checkpoint of a run instead of the final model. Raises UserError for anything
    else.
    """
    path = local(str(source)).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        return Model(load_saved(path, step))
    scratch = tempfile.mkdtemp(prefix="jaxtrain-")
    run = Path(scratch) / "imported"
    import_checkpoint(str(path if is_url(str(source)) else source), run)
    model = Model(load_saved(run))
    weakref.finalize(model, shutil.rmtree, scratch, ignore_errors=True)  # its tokenizer is there
    return model


def build(config: Config) -> Model:
    """A model initialized with `run.seed`. Prepares the data if the tokenizer is trained on it."""
    tokenizer = data.prepare(config.data).tokenizer
    c = resolve(config, tokenizer.vocab_size)
    graphdef, specs = split(Transformer(c.model, tokenizer.vocab_size))
    params = initialize(specs, c.run.seed)
    nowhere = c.run.folder / c.run.name / "model"
    ends = prompting(nowhere, tokenizer)
    return Model(Saved(c, graphdef, specs, params, tokenizer, nowhere, ends))
