"""Data: text sources -> tokenizer -> token store -> packed batches. Host code only, no jax."""

from jaxtrain.data.batches.augment import make_augment
from jaxtrain.data.batches.loader import Loader, stores_of, train_batches, validation_batches
from jaxtrain.data.batches.mixture import check_lengths, named, sources_of
from jaxtrain.data.batches.packing import PACKINGS, Batch
from jaxtrain.data.chat.chat import Chat, make_chat, make_reader
from jaxtrain.data.chat.conversations import fitting, held_out_pairs, in_words, template_of
from jaxtrain.data.chat.defaults import chat_sources, fill_in_chat
from jaxtrain.data.chat.template import DEFAULT
from jaxtrain.data.config import DataConfig
from jaxtrain.data.evaluation.prompts import Scored, questions
from jaxtrain.data.evaluation.tasks import open_bundle
from jaxtrain.data.files.reading import SOURCES, documents
from jaxtrain.data.preference.pairs import PairBatch, References, every_pair
from jaxtrain.data.store.corpus import describe, left_out, prepare, revisions
from jaxtrain.data.store.prepare import Prepared
from jaxtrain.data.store.store import TokenStore, open_store, write_store
from jaxtrain.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "DEFAULT",
    "PACKINGS",
    "SOURCES",
    "TOKENIZERS",
    "Batch",
    "Chat",
    "DataConfig",
    "Loader",
    "PairBatch",
    "Prepared",
    "References",
    "Scored",
    "TokenStore",
    "Tokenizer",
    "chat_sources",
    "check_lengths",
    "describe",
    "documents",
    "every_pair",
    "fill_in_chat",
    "fitting",
    "held_out_pairs",
    "in_words",
    "left_out",
    "load_tokenizer",
    "make_augment",
    "make_chat",
    "make_reader",
    "named",
    "open_bundle",
    "open_store",
    "prepare",
    "questions",
    "revisions",
    "sources_of",
    "stores_of",
    "template_of",
    "train_batches",
    "validation_batches",
    "write_store",
]
