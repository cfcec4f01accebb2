"""Log-probs in the API's format."""

from collections.abc import Sequence
from typing import Any

from jaxtrain.data import Tokenizer
from jaxtrain.inference.engine import TokenLogprob

LEAST = -9999.0  # instead of -inf, which is not valid JSON


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as a string. Part of a character is written as by OpenAI, `bytes:\\xe4`."""
    piece = tokenizer.pieces[token]
    if not piece:
        return next((name for name, i in tokenizer.specials.items() if i == token), "")
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offset: int,
) -> dict[str, Any]:
    """Log-probs for /v1/completions. None: a first token, without context. offset: characters
    before the first token."""
    texts = [token_text(tokenizer, token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [
        None if one is None else {token_text(tokenizer, i): max(p, LEAST) for i, p in one.top}
        for one in logprobs
    ]
    own = [None if one is None else max(one.logprob, LEAST) for one in logprobs]
    return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probs for /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = list(tokenizer.pieces[token])
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": piece or None}

    content = [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}
