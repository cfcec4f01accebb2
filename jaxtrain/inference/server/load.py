"""A saved model becomes a service."""

import argparse
from pathlib import Path

from jaxtrain.cluster.processes import check_alone
from jaxtrain.cluster.runtime import start
from jaxtrain.data import make_chat, make_reader
from jaxtrain.inference.engine import Engine, EngineOptions
from jaxtrain.inference.engine.load import engine_of
from jaxtrain.inference.server.engine_thread import EngineThread
from jaxtrain.inference.server.service import Limits, Served, Service
from jaxtrain.inference.server.tool_calls import read_format
from jaxtrain.inference.server.whole_texts import Pooling
from jaxtrain.model.config import check_decoder
from jaxtrain.runs.saved import Saved, load_saved, template_for
from jaxtrain.settings import UserError


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
        cache_dtype=a.cache_dtype, drafts=a.drafts, draft_run=a.draft_run, tensor=a.tensor,
    )  # fmt: skip
    if served.chat:  # its end of an answer ends every text
        ends = dict.fromkeys((*saved.prompting.stops, served.chat.end))
        saved = saved._replace(prompting=saved.prompting._replace(stops=tuple(ends)))

    def load() -> Engine:
        engine = engine_of(saved, options)
        if not a.no_warm_up:
            engine.warm_up()
        return engine

    thread = EngineThread(load)
    thread.start()
    return Service(served, thread, limits)
