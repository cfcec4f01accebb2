"""Data: text sources -> tokenizer -> token store -> packed batches. Host code only, no jax.

One folder per step: files/, filters/, chat/ and preference/, tokenizer/, store/, batches/;
evaluation/ turns benchmark tasks into packed rows. `records.py` has the record types that they
share, `config.py` the `data` section, `pool.py` worker processes, `show.py` decoded rows.
"""

from jaxtrain.data.batches.augment import make_augment
from jaxtrain.data.batches.loader import (
    Complete,
    stores_of,
    stream_identity,
    train_batches,
    validation_batches,
)
from jaxtrain.data.batches.mixture import check_lengths, source_names, sources_of
from jaxtrain.data.batches.packing import Batch
from jaxtrain.data.chat.chat import Chat, make_chat, make_reader
from jaxtrain.data.chat.conversations import (
    counts_phrase,
    fit_stores,
    training_template,
    validation_pairs,
)
from jaxtrain.data.chat.template import DEFAULT_TEMPLATE, apply_chat_defaults, chat_sources
from jaxtrain.data.config import DataConfig
from jaxtrain.data.evaluation.prompts import Scored, questions
from jaxtrain.data.evaluation.tasks import open_bundle
from jaxtrain.data.files.reading import read_documents
from jaxtrain.data.preference.pairs import PairBatch, References, iterate_pairs
from jaxtrain.data.store.facts import describe_stores
from jaxtrain.data.store.prepare import Prepared, damaged_shards, prepare, revisions
from jaxtrain.data.store.store import TokenStore, open_store
from jaxtrain.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DEFAULT_TEMPLATE", "Batch", "Chat", "Complete", "DataConfig", "PairBatch", "Prepared",
    "References", "Scored", "TokenStore", "Tokenizer", "apply_chat_defaults", "chat_sources",
    "check_lengths", "counts_phrase", "damaged_shards", "describe_stores", "fit_stores",
    "iterate_pairs", "load_tokenizer", "make_augment", "make_chat", "make_reader",
    "open_bundle", "open_store", "prepare", "questions", "read_documents", "revisions",
    "source_names", "sources_of", "stores_of", "stream_identity", "train_batches",
    "training_template", "validation_batches", "validation_pairs",
]  # fmt: skip
