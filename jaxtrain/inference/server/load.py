"""Build the service of a saved model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.cluster.processes import check_alone
from jaxtrain.cluster.runtime import start
from jaxtrain.data import load_tokenizer, make_chat, make_reader
from jaxtrain.data.tokenizer.tokenizer import huggingface_tokenizer
from jaxtrain.finetune import adapter_folder
from jaxtrain.inference.arguments import asked_drafts
from jaxtrain.inference.engine import Engine, EngineOptions
from jaxtrain.inference.engine.load import engine_of
from jaxtrain.inference.server.engine_thread import EngineThread
from jaxtrain.inference.server.service import Limits, Served, Service
from jaxtrain.inference.server.tool_calls import read_format
from jaxtrain.inference.server.whole_texts import Pooling
from jaxtrain.interop.companions import adds_bos, prompting
from jaxtrain.model.config import check_decoder
from jaxtrain.runs.saved import WEIGHTS, Saved, load_resolved, load_saved, template_for
from jaxtrain.settings import UserError

# Two tokenizers that encode this alike count as one; their files may differ in format alone.
PROBE = "To be, or not to be: that is the question. x = [1, 23];\n\tÉté, 日本"
OTHER_TOKENIZER = (
    "its tokenizer differs from the model's; serve its merged model in a server of its own"
)


def served_model(saved: Saved, name: str, pooling: Pooling = "mean") -> Served:
    """Model data that the endpoints need. A model without a chat template answers no chats."""
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


def served_adapter(saved: Saved, base: Served, name: str, path: Path) -> Served:
    """An adapter as a served model; if it is from a run, with the run's chat template.

    Whether its texts begin with BOS is the rule of its own run or tokenizer.json. Raises UserError
    if its tokenizer gives other token ids than the model's.
    """
    adapter = adapter_folder(str(path), f"--adapter {name}:")
    folder, differs = adapter.parent, f"--adapter {name}={path}: {OTHER_TOKENIZER}"
    if not (folder / WEIGHTS).is_file():  # not from a run
        served = base._replace(name=name, adapter=True)
        if not (file := adapter / "tokenizer.json").is_file():
            return served
        own = huggingface_tokenizer(file.read_bytes(), str(file))
        if own.encode(PROBE).tolist() != saved.tokenizer.encode(PROBE).tolist():
            raise UserError(differs)
        bos = adds_bos(own.model, saved.tokenizer.bos_id)
        return served._replace(prompting=base.prompting._replace(bos=bos))
    config, tokenizer = load_resolved(folder / "config.yaml"), load_tokenizer(folder)
    if tokenizer.fingerprint != saved.tokenizer.fingerprint:
        raise UserError(differs)
    tuned = saved._replace(
        config=config, tokenizer_dir=folder, prompting=prompting(folder, tokenizer)
    )
    served = served_model(tuned, name, base.pooling)
    return served._replace(context=base.context, adapter=True)


def check_names(names: Sequence[str]) -> None:
    """Raise UserError if two models have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--adapter: {name} is the name of two models; give each a different name"
            )


def served_name(run: Path) -> str:
    """Name of a run, given its folder or its model folder."""
    run = run.resolve()
    return run.parent.name if run.name == "model" and run.parent.name else run.name


def load_service(a: argparse.Namespace) -> Service:
    """Service for a command line. Its engine is loaded, and warm unless --no-warm-up is given."""
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
    adapters = [served_adapter(saved, served, *one) for one in a.adapter]
    check_names([served.name, *(one.name for one in adapters)])
    options = EngineOptions(
        slots=a.max_concurrency, max_queue=a.max_concurrency + a.max_queue, context=context,
        cache_dtype=a.cache_dtype, decode_steps=a.decode_steps, tensor=a.tensor,
        adapters=tuple(a.adapter), adapt_steps=True,
        megakernel=False if a.no_megakernel else None, **asked_drafts(a)._asdict(),
    )  # fmt: skip
    # The end tokens of one model end the texts of all.
    chats = [one.chat.end for one in (served, *adapters) if one.chat]
    ends = dict.fromkeys((*saved.prompting.stops, *chats))
    saved = saved._replace(prompting=saved.prompting._replace(stops=tuple(ends)))

    def load() -> Engine:
        engine = engine_of(saved, options)
        if not a.no_warm_up:
            engine.warm_up(background=True)
        return engine

    thread = EngineThread(load)
    thread.start()
    return Service(served, thread, limits, adapters)
