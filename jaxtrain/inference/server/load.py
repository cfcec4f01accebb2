"""A saved model becomes a service."""

import argparse
from pathlib import Path

from jaxtrain.cluster.processes import check_alone
from jaxtrain.cluster.runtime import start
from jaxtrain.data import make_chat, make_reader
from jaxtrain.inference.engine import Engine, EngineOptions, Request, SamplingParams
from jaxtrain.inference.engine.load import engine_of
from jaxtrain.inference.server.engine_thread import EngineThread
from jaxtrain.inference.server.service import Limits, Served, Service
from jaxtrain.inference.server.tool_calls import read_format
from jaxtrain.inference.server.whole_texts import Pooling
from jaxtrain.model.config import check_decoder
from jaxtrain.runs.saved import Saved, load_saved, template_for
from jaxtrain.settings import UserError

SHORTEST = 32  # tokens of the first text that programs are compiled for


def served_model(saved: Saved, name: str, pooling: Pooling = "mean") -> Served:
    """What the endpoints need of a model; a model without a chat template answers no chats."""
    context, tokenizer = saved.config.model.context_length, saved.tokenizer
    reader = make_reader(tokenizer)
    ends = saved.prompting
    served = Served(name, tokenizer, ends, context, reader, reader.special, pooling=pooling)
    try:
        template, special = template_for(saved)
        chat = make_chat(template, special, tokenizer)
    except UserError as error:
        return served._replace(no_chat=str(error))
    served = served._replace(template=template, special=reader.special | special)
    try:
        return served._replace(chat=chat, tools=read_format(chat))
    except UserError as error:
        return served._replace(chat=chat, no_tools=str(error))


def served_name(run: Path) -> str:
    """The name of a run, also where its model folder is given."""
    run = run.resolve()
    return run.parent.name if run.name == "model" and run.parent.name else run.name


def load_service(a: argparse.Namespace) -> Service:
    """The service of a command line, its engine loaded and warm."""
    check_alone("jaxtrain serve")
    start()
    saved = load_saved(a.run, a.step)
    check_decoder(saved.config.model)
    served = served_model(saved, a.name or served_name(a.run), a.pooling)
    context = a.context or served.context
    served = served._replace(context=context)
    limits = Limits(
        min(a.max_tokens or context, context), a.max_concurrency, a.max_queue,
        int(a.max_body * 2**20), a.timeout,
    )  # fmt: skip
    options = EngineOptions(
        slots=a.max_concurrency, max_queue=a.max_concurrency + a.max_queue, context=context,
        cache_dtype=a.cache_dtype, drafts=a.drafts, tensor=a.tensor,
    )  # fmt: skip
    thread = EngineThread(lambda: warm_up(engine_of(saved, options), a.warm_up))
    thread.start()
    return Service(served, thread, limits)


def warm_up(engine: Engine, longest: int) -> Engine:
    """Compile what texts of up to so many tokens need, alone and several at once, so that no
    client waits for it."""
    sampling = SamplingParams(max_tokens=2, ignore_stop=True)
    length, most = SHORTEST, min(longest, engine.context) - sampling.max_tokens
    while length < most * 2 and most > 0:
        prompt = (engine.tokenizer.bos_id,) * min(length, most)
        for count in (1, 2):
            for i in range(count):
                engine.add(Request(f"warm-up {i}", prompt, sampling))
            while engine.busy:
                engine.step()
        length *= 2
    return engine
