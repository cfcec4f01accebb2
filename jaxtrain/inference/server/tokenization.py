"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them, for lm-evaluation-harness."""

from typing import Any

from pydantic import Field

from jaxtrain.inference.server.bodies import Body
from jaxtrain.inference.server.service import Service


class TokenizeBody(Body):
    """Body of /tokenize. Special tokens written out in the text are read as special tokens."""

    prompt: str
    add_special_tokens: bool = True  # BOS in front, if the model's texts begin with it


class DetokenizeBody(Body):
    """Body of /detokenize."""

    tokens: list[int] = Field(min_length=1)


def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    served = service.model_of(body)
    (pieces,) = served.reader.encode([body.prompt])
    add_bos = body.add_special_tokens and served.prompting.bos
    tokens = [served.tokenizer.bos_id] * add_bos + pieces.ids.tolist()
    return {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}


def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    return {"prompt": service.served.tokenizer.decode(service.check_ids(body.tokens, "tokens"))}


def tokenizer_info(service: Service) -> dict[str, Any]:
    served = service.served
    names = {name: served.special.get(name) for name in ("bos_token", "eos_token")}
    return names | {"chat_template": served.template, "max_model_len": served.context}
