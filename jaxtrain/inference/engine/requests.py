"""What an engine is asked for, and what it answers."""

from pathlib import Path
from typing import Literal, NamedTuple


class Grammar(NamedTuple):
    """What a text has to match: a regular expression, a JSON schema as JSON, or a grammar in
    llguidance's variant of Lark."""

    kind: Literal["regex", "json_schema", "lark"]
    source: str


class SamplingParams(NamedTuple):
    """How new tokens of one request are sampled, and where they end.

    temperature: 0 takes the best token. top_k: among so many best tokens. top_p: among the best
    with so much probability (Holtzman et al. 2020). min_p: among those with so much of the best
    one's probability (Nguyen et al. 2024). typical_p: among so much probability of those whose
    surprise is nearest to the expected one (Meister et al. 2022). repetition_penalty divides
    positive logits of tokens that the text has, prompt included, and multiplies negative ones
    (Keskar et al. 2019). presence_penalty and frequency_penalty are subtracted from logits of new
    tokens, once and for each time. stop: strings that end the text, and are not part of it.
    logprobs: None, or how many best tokens to report beside the sampled one. ignore_stop: go on to
    max_tokens at any rate. grammar: the form that the text must have. logit_bias: (token, what is
    added to its logit, from -100 to 100), before all else.
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
    """A prompt of token ids to continue. id: of the caller's choice, unique among those at work.

    adapter: the name of a LoRA adapter of the engine's; None: the model itself.
    behind: the new text continues the prompt's, as an answer in a chat does not: a space at its
    start stays, which sentencepiece takes away from the start of a text.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    behind: bool = False
    adapter: str | None = None


class TokenLogprob(NamedTuple):
    """Log-probability of a new token before temperature, penalties and masks, and of the best."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Update(NamedTuple):
    """What a step added to a request; `text` may be empty, or have waited for whole characters.

    finish_reason: "stop" (a stop string or token), "length" (max_tokens), "cancelled", or None
    while more will come. A token that ends the text is in `tokens`, not in `text`.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class EngineStats(NamedTuple):
    """Counts of an engine: of now, and (from preemptions on) since its start."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    preemptions: int
    prefix_hits: int  # tokens of prompts that were found in the prefix cache
    prompt_tokens: int  # tokens of prompts, found or computed
    new_tokens: int
    drafts: int  # guessed tokens that were tried
    accepted_drafts: int  # those that were right
    steps: int

    @property
    def acceptance(self) -> float | None:
        """The share of guessed tokens that were right; None before the first guess."""
        return self.accepted_drafts / self.drafts if self.drafts else None


class EngineOptions(NamedTuple):
    """What an engine has room for.

    slots: requests that run at once. pages: of the KV cache; default what `memory_share` of the
    device's free memory holds, at most a full context for every slot. page_size: tokens of a page.
    context: tokens of a request, prompt and new ones; default the model's context_length. chunk:
    tokens of a prompt that one step computes, of up to prefill_rows prompts. cache_dtype: int8,
    float8, or None, the compute dtype. max_queue: requests that may wait. prefix_cache: prompts
    share full pages with the same beginning. drafts: tokens that are guessed for each step from
    what followed the last two or three tokens before (prompt lookup, Saxena 2023), 0: none.
    decode_steps: steps that the device runs before the host hears of their tokens, while no prompt
    waits to be computed and no running request has a grammar; then it is one at a time.
    adapt_steps: one step at a time where the device takes longer for it than the host for a call,
    so that a new request waits less; for one process, as it goes by the clock.
    draft_run: run directory of a small model that guesses them instead, of the same tokenizer.
    draft_mtp: the model's own module of multi-token prediction does (`objective.name=mtp`).
    tensor: devices that split heads and hidden units. adapters: (name, folder) of each LoRA
    adapter that a request may name. A folder is a run with LoRA or an adapter from peft.
    least_tokens: of a row that a step looks at, shorter ones too: with as many as `context`, one
    program is compiled in the place of several. megakernel: all layers of a decode step are one
    kernel (`model.packed`); None: where one slot, the device and the model allow it.
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
        """New tokens of a row that so many steps bring at most."""
        return steps * (self.drafts + 1)


DEFAULT = EngineOptions()
