"""Data: text sources -> tokenizer -> token store -> packed batches. Host code only, no jax."""

from jaxtrain.data.augment import make_augment
from jaxtrain.data.chat import Chat, make_chat, make_reader
from jaxtrain.data.config import DataConfig
from jaxtrain.data.conversations import fitting, held_out_pairs, in_words, template_of
from jaxtrain.data.corpus import describe, left_out, prepare, revisions
from jaxtrain.data.defaults import chat_sources, fill_in_chat
from jaxtrain.data.loader import Loader, stores_of, train_batches, validation_batches
from jaxtrain.data.mixture import check_lengths, named, sources_of
from jaxtrain.data.packing import PACKINGS, Batch
from jaxtrain.data.pairs import PairBatch, References, every_pair
from jaxtrain.data.prepare import Prepared
from jaxtrain.data.prompts import Scored, questions
from jaxtrain.data.reading import SOURCES, documents
from jaxtrain.data.store import TokenStore, open_store, write_store
from jaxtrain.data.tasks import open_bundle
from jaxtrain.data.template import DEFAULT
from jaxtrain.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

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
