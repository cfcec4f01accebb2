"""Requests, options, updates and statistics of an engine."""

from pathlib import Path
from typing import Literal, NamedTuple


class Grammar(NamedTuple):
    """Constraint on the generated text: a regular expression, a JSON schema as JSON, or a grammar
    in llguidance's variant of Lark."""

    kind: Literal["regex", "json_schema", "lark"]
    source: str


class SamplingParams(NamedTuple):
    """Sampling parameters and stop conditions of one request.

    temperature: 0 takes the best token. top_k: sample among this many best tokens. top_p: among the
    best tokens with this much probability (Holtzman et al. 2020). min_p: among tokens with at least
    this share of the best one's probability (Nguyen et al. 2024). typical_p: among tokens with this
    much probability whose surprise is nearest to the expected one (Meister et al. 2022).
    repetition_penalty divides positive logits of tokens in the sequence, prompt included, and
    multiplies negative ones (Keskar et al. 2019). presence_penalty and frequency_penalty are
    subtracted from the logits of generated tokens, once and per occurrence. stop: strings that end
    the text and are not part of it. logprobs: None, or the number of top tokens to report besides
    the sampled one. ignore_stop: continue to max_tokens in any case. grammar: constraint on the
    text. logit_bias: (token, value added to its logit, from -100 to 100), before all else.
    """

    max_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_stop: bool = False
    grammar: Grammar | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


class Request(NamedTuple):
    """A prompt of token ids to continue. id: the caller's, unique among unfinished requests.

    adapter: name of one of the engine's LoRA adapters; None: the model itself.
    behind: the new text continues the prompt's text, which an answer in a chat does not. A space at
    its start is then kept; sentencepiece removes it at the start of a text.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    behind: bool = False
    adapter: str | None = None


class TokenLogprob(NamedTuple):
    """Log-prob of a new token before temperature, penalties and masks, and of the top tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Update(NamedTuple):
    """Output that a step added to a request. `text` has whole characters only, and may be empty.

    finish_reason: "stop" (a stop string or token), "length" (max_tokens), "cancelled", or None
    while the request runs. A token that ends the text is in `tokens`, not in `text`.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class EngineStats(NamedTuple):
    """Statistics of an engine: current values, and from `preemptions` on totals since its start."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    preemptions: int
    prefix_hits: int  # prompt tokens found in the prefix cache
    prompt_tokens: int  # prompt tokens, cached or computed
    new_tokens: int
    drafts: int  # draft tokens that were verified
    accepted_drafts: int  # draft tokens that were accepted
    steps: int

    @property
    def acceptance(self) -> float | None:
        """Share of draft tokens that were accepted. None before the first draft token."""
        return self.accepted_drafts / self.drafts if self.drafts else None


class EngineOptions(NamedTuple):
    """Limits and features of an engine.

    slots: requests that run at once. pages: pages of the KV cache; default what fits in
    `memory_share` of the device's free memory, at most a full context for every slot. page_size:
    tokens per page. context: maximum tokens of a request, prompt and new ones; default the model's
    context_length.

    chunk: tokens of a prompt that one step computes, for up to prefill_rows prompts. cache_dtype:
    int8, float8, or None for the compute dtype. max_queue: maximum waiting requests. prefix_cache:
    prompts with the same prefix share full pages. least_tokens: tokens of the smallest page table;
    if as many as `context`, one program is compiled instead of several. tensor: devices that shard
    heads and hidden units. megakernel: run all layers of a decode step in one kernel
    (`model.packed`); None: if there is one slot, and the device and the model allow it. adapters:
    (name, folder) of each LoRA adapter that a request may name. A folder is a run with LoRA or an
    adapter from peft.

    decode_steps: decode steps per device call, before the host reads their tokens; one at a time
    while a prompt waits for prefill or a running request has a grammar. adapt_steps: run one or two
    steps per call if the device takes longer for them than the host for a call, so that a new
    request waits less. It depends on the clock, so it is for one process only.

    drafts: draft tokens per step, 0 for none; they are what followed the last two or three tokens
    earlier in the sequence (prompt lookup, Saxena 2023). draft_run: run directory of a small draft
    model to use instead, with the same tokenizer. draft_mtp: the model's own multi-token prediction
    module drafts instead (`objective.name=mtp`).
    """

    slots: int = 32
    pages: int | None = None
    memory_share: float = 0.8
    page_size: int = 32
    context: int | None = None
    chunk: int = 512
    prefill_rows: int = 16
    cache_dtype: str | None = None
    max_queue: int = 1024
    prefix_cache: bool = True
    drafts: int = 0
    decode_steps: int = 8
    draft_run: Path | None = None
    draft_mtp: bool = False
    tensor: int = 1
    adapters: tuple[tuple[str, Path], ...] = ()
    least_tokens: int = 256
    adapt_steps: bool = False
    megakernel: bool | None = None

    def most(self, steps: int) -> int:
        """Maximum new tokens per row in `steps` steps."""
        return steps * (self.drafts + 1)


DEFAULT = EngineOptions()
