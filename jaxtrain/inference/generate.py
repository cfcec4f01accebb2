"""Generate text with a trained model, in an engine that is sized for the prompts.

jaxtrain generate RUN --prompt "ROMEO:" [--tokens 256] [--temperature 0.8] ...
jaxtrain generate RUN --chat [--system "Be brief."] [--prompt "Hello!"]
"""

import argparse
import contextlib
import functools
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.cluster.processes import check_alone
from jaxtrain.cluster.runtime import start
from jaxtrain.config.resolve import Resolved
from jaxtrain.data import Chat, Tokenizer, make_chat
from jaxtrain.inference.arguments import TOKENS, DraftOptions, asked_drafts, generate_parser
from jaxtrain.inference.chat import chat_loop
from jaxtrain.inference.engine import Engine, EngineOptions, Request, SamplingParams
from jaxtrain.inference.engine.compiler import compile_all
from jaxtrain.inference.engine.device import usable_page_size
from jaxtrain.inference.engine.load import engine_of, load_drafter, params_of
from jaxtrain.interop.companions import Prompting
from jaxtrain.model import ResolvedModel
from jaxtrain.model.config import check_decoder, round_up
from jaxtrain.model.kv_cache import page_shapes
from jaxtrain.runs.saved import Saved, load_saved, template_for
from jaxtrain.settings import UserError, command, visible
from jaxtrain.storage.disk import write_whole
from jaxtrain.weights.params import Params

SLOTS = 32  # prompts that are continued at once
CHUNK = 512  # maximum tokens of one prompt in a prefill step
PREFILL = 4096  # maximum tokens of all prompts in a prefill step
CONTEXT_MULTIPLE = 128  # contexts are rounded up to it, so that few are compiled
NO_DRAFTS = DraftOptions()
ONE_PROGRAM = 2048  # tokens up to which all lengths share one program


def kv_bytes_per_token(c: ResolvedModel, dtype: jnp.dtype, cache_dtype: str | None = None) -> int:
    """KV cache bytes per token, over all layers. dtype: the compute dtype."""
    page = jax.tree.leaves(page_shapes(c, dtype, 1, cache_dtype))
    return sum(x.size * x.dtype.itemsize for x in page)


class Sampling(NamedTuple):
    """Sampling parameters of new tokens, and their maximum number."""

    tokens: int = TOKENS
    temperature: float | int = 0.8  # 0 takes the best token
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    cache_dtype: str | None = (
        None  # of the keys and values: int8, float8; None: the parameters' dtype
    )

    def params(self, row: int = 0) -> SamplingParams:
        """Sampling parameters of the engine; each row of a batch has its own seed."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingParams(
            self.tokens, self.temperature, top_p, self.top_k, seed=self.seed + row
        )


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as arguments by name."""

    tokens: int
    temperature: float | int
    top_k: int | None
    top_p: float | None
    seed: int
    cache_dtype: str | None


class LanguageModel(NamedTuple):
    """A model that continues texts. params: on the device, in the compute dtype."""

    config: ResolvedModel
    graphdef: nnx.GraphDef
    params: Params
    tokenizer: Tokenizer
    prompting: Prompting | None = None  # how texts begin and end; default BOS for both

    @property
    def prepends_bos(self) -> bool:
        """Whether a prompt starts with BOS."""
        return self.prompting is None or self.prompting.bos

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return (self.tokenizer.bos_id,) if self.prompting is None else self.prompting.stops


def model_of(saved: Saved) -> LanguageModel:
    """Language model of a saved model, with its parameters on the device."""
    params = params_of(saved, None)
    return LanguageModel(
        saved.config.model, saved.graphdef, params, saved.tokenizer, saved.prompting
    )


def make_requests(
    model: LanguageModel,
    prompts: Sequence[str],
    sampling: Sampling,
    chat: Chat | None = None,
    system: str | None = None,
) -> list[Request]:
    """Requests for the prompts of `generate`. With learned positions, texts end at the context."""
    first = [{"role": "system", "content": system}] if system else []
    c, tokenizer = model.config, model.tokenizer

    def encode(prompt: str) -> list[int]:
        if chat and prompt:
            return chat.prompt([*first, {"role": "user", "content": prompt}]).tolist()
        bos = [tokenizer.bos_id] if model.prepends_bos or not prompt else []
        return [*bos, *tokenizer.encode(prompt).tolist()]

    stops = (chat.end,) if chat else ()
    requests = []
    for i, prompt in enumerate(prompts):
        ids, how = encode(prompt), sampling.params(i)._replace(stop_tokens=stops)
        if c.position_embedding == "learned":
            ids = ids[1 - c.context_length :]
            how = how._replace(max_tokens=min(how.max_tokens, c.context_length - len(ids)))
        requests.append(Request(str(i), tuple(ids), how, behind=bool(prompt) and chat is None))
    return requests


def beyond_context(model: LanguageModel, requests: Sequence[Request]) -> str | None:
    """A line for requests that are longer than the context of training; None if none is."""
    context = model.config.context_length
    need = max(len(one.prompt) + one.sampling.max_tokens for one in requests)
    if need <= context:
        return None
    return (
        f"note: {need:,} tokens with the prompt are more than the context of {context:,} in "
        "training; text beyond it may be worse"
    )


def make_engine(
    model: LanguageModel,
    requests: Sequence[Request],
    cache_dtype: str | None = None,
    all_pages: bool = False,
    drafts: DraftOptions = NO_DRAFTS,
) -> Engine:
    """An engine with room for these requests, and few programs to compile.

    all_pages: allocate the pages that all slots may need, however little memory is free, so that
    each process has as many.
    """
    c = model.config
    need = max(len(one.prompt) + one.sampling.max_tokens for one in requests)
    limit, scaling = c.context_length, c.rope_scaling
    if scaling and scaling.name == "longrope" and need <= scaling.original_context:
        limit = min(limit, scaling.original_context)
    context = max(need, min(round_up(need, CONTEXT_MULTIPLE), limit))
    longest = max(len(one.prompt) for one in requests)
    chunk = min(CHUNK, max(32, 1 << (longest - 1).bit_length()))
    slots = min(len(requests), SLOTS)
    options = EngineOptions(
        slots=slots, context=context, chunk=chunk, prefill_rows=min(slots, PREFILL // chunk),
        cache_dtype=cache_dtype, max_queue=len(requests), least_tokens=min(context, ONE_PROGRAM),
        # Compiling it takes 3.6 s more on an H200, which gpt_d12 wins back after 26,000 tokens.
        megakernel=False, **drafts._asdict(),
    )  # fmt: skip
    if all_pages:
        size = usable_page_size(c.virtual, options.page_size)
        options = options._replace(pages=slots * -(-context // size))
    drafter = load_drafter(options, model.tokenizer, None)
    parts = c, model.graphdef, model.params, model.tokenizer, model.stops
    return Engine(*parts, options, drafter=drafter)


def run_requests(engine: Engine, requests: Sequence[Request]) -> list[str]:
    """The new texts of requests, in their order."""
    texts: dict[str, str] = dict.fromkeys((one.id for one in requests), "")
    for request in requests:
        engine.add(request)
    while engine.busy:
        for update in engine.step():
            texts[update.id] += update.text
    return list(texts.values())


def generate(
    model: LanguageModel,
    prompts: Sequence[str],
    sampling: Sampling,
    chat: Chat | None = None,
    system: str | None = None,
    drafts: DraftOptions = NO_DRAFTS,
) -> list[str]:
    """Continuations of prompts (without the prompts); the end of a document ends a row.

    chat: the prompts are user messages, after the system message `system`; an empty prompt is
    continued without the chat template. drafts: speculative decoding, which does not change the
    output.
    """
    requests = make_requests(model, prompts, sampling, chat, system)
    engine = make_engine(model, requests, sampling.cache_dtype, drafts=drafts)
    engine.warm_up(requests)
    return run_requests(engine, requests)


def sample_engine(
    model: LanguageModel, c: Resolved, chat: Chat | None
) -> tuple[Engine, list[Request]]:
    """Engine and requests of a run's samples. It has memory for these requests alone."""
    s = c.sample
    sampling = Sampling(s.tokens, s.temperature, s.top_k, s.top_p, c.run.seed)
    requests = make_requests(model, s.prompts, sampling, chat)
    return make_engine(model, requests, s.kv_cache_dtype, all_pages=True), requests


def lower_samples(model: LanguageModel, c: Resolved, chat: Chat | None) -> Callable[[], int]:
    """Lower the programs that `write_samples` will run with the same arguments, ahead of their use.
    Returns a function that compiles them. The parameters may be shapes only."""
    engine, requests = sample_engine(model, c, chat)
    return functools.partial(compile_all, list(engine.lower(requests)))


def write_samples(path: Path, model: LanguageModel, c: Resolved, chat: Chat | None) -> None:
    """Write continuations of `sample.prompts` to a file. All processes compute, the first writes.

    Control characters become symbols, because the run shows the last file in the terminal. Without
    prompts there is no file.
    """
    if not c.sample.prompts:
        return
    texts = run_requests(*sample_engine(model, c, chat))
    if jax.process_index():
        return
    gap = "\n> " if chat else ""
    path.parent.mkdir(exist_ok=True)
    texts = (p + gap + x for p, x in zip(c.sample.prompts, texts))
    write_whole(path, visible("\n---\n".join(texts)))


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C, so that it does not interrupt an engine step."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def stream(engine: Engine, request: Request) -> Iterator[str]:
    """Yield a request's new text. Ctrl-C cancels the request, then raises KeyboardInterrupt."""
    with interrupts() as seen:
        engine.add(request)
        while engine.busy:
            if seen:
                engine.cancel(request.id)
            for update in engine.step():
                yield update.text
    if seen:
        raise KeyboardInterrupt


def chat_in_terminal(saved: Saved, chat: Chat, a: argparse.Namespace) -> None:
    """Chat in the terminal, with the options of the command line.

    One engine serves the whole conversation: a turn computes only what the KV pages lack.
    """
    logging.getLogger("jaxtrain_kernels").setLevel(logging.WARNING)  # it would write between turns
    context = saved.config.model.context_length
    tokens = a.tokens or min(TOKENS, context // 2)
    room = context - tokens
    if room < 1:
        raise UserError(f"--tokens {tokens} leaves no room in a context of {context}; give fewer")
    # One step per call, so that each token is shown as it comes. No megakernel (see `make_engine`):
    # it takes longer to compile than a conversation gains from it.
    options = EngineOptions(slots=1, cache_dtype=a.cache_dtype, decode_steps=1, megakernel=False)
    options = options._replace(**asked_drafts(a)._asdict())
    engine = engine_of(saved, options)
    turns = itertools.count()

    def answer(prompt: np.ndarray) -> Iterator[str]:
        sampling = asked_sampling(a)._replace(tokens=tokens).params(turn := next(turns))
        sampling = sampling._replace(stop_tokens=(chat.end,))
        return stream(engine, Request(str(turn), tuple(prompt.tolist()), sampling))

    chat_loop(chat, answer, room=room, system=a.system, typed=sys.stdin, out=sys.stdout)


def asked_sampling(a: argparse.Namespace) -> Sampling:
    """The sampling options of a command line."""
    return Sampling(a.tokens or TOKENS, a.temperature, a.top_k, a.top_p, a.seed, a.cache_dtype)


@command
def main(argv: list[str] | None = None) -> int:
    a = generate_parser().parse_args(argv)
    check_alone("jaxtrain generate")
    try:
        start()
        saved = load_saved(a.run, a.step)
        check_decoder(saved.config.model)
        if a.system and not a.chat:
            raise UserError("--system needs --chat")
        chat = make_chat(*template_for(saved), saved.tokenizer) if a.chat else None
        if chat and not a.prompt:
            chat_in_terminal(saved, chat, a)
            return 0
        prompts, model, sampling = a.prompt or [""], model_of(saved), asked_sampling(a)
        asked = sampling._replace(tokens=a.tokens or 0)
        if note := beyond_context(model, make_requests(model, prompts, asked, chat, a.system)):
            print(note, file=sys.stderr)
        texts = generate(model, prompts, sampling, chat, a.system, asked_drafts(a))
    except KeyboardInterrupt:  # while nothing is being answered
        print()
        return 130
    gap = "\n> " if chat else ""
    print(visible("\n---\n".join(prompt + gap + text for prompt, text in zip(prompts, texts))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
