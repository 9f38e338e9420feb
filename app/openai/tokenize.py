"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from app.openai.body import parse_body, read_json, refuse_many, validate
from app.openai.errors import json_response
from app.openai.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from app.openai.served_model import ServedModel
from app.openai.service import Service, on_cpu
from engine.sampling_params import InvalidParameter
from engine.tokenizer import Tokenizer

MAX_CHARACTERS = 1 << 20
"""Of a text to be tokenised; a token costs some 300 bytes on the way."""


async def tokenize(service: Service, request: Request) -> Response:
    content = await read_json(request, service.limits.max_body_bytes)
    if content.get("messages") is not None:
        chat = validate(content, TokenizeChatRequest)
        model = service.model(chat.model)
        refuse_long("messages", chat.characters())
        return await _tokens(model, chat.characters(), lambda: render(model.tokenizer, chat), chat.return_token_strs)
    text = validate(content, TokenizeTextRequest)
    model = service.model(text.model)
    refuse_long("prompt", len(text.prompt))
    return await _tokens(
        model,
        len(text.prompt),
        lambda: model.tokenizer.encode(text.prompt, add_special_tokens=text.add_special_tokens),
        text.return_token_strs,
    )


def refuse_long(name: str, characters: int) -> None:
    """A text whose tokens alone would take hundreds of megabytes.

    Raises:
        InvalidParameter: it is one.
    """
    if characters > MAX_CHARACTERS:
        raise InvalidParameter(
            name, f"{name}: {characters:,} characters are too many; at most {MAX_CHARACTERS:,} are allowed"
        )


async def detokenize(service: Service, request: Request) -> Response:
    body = await parse_body(request, DetokenizeRequest, service.limits.max_body_bytes)
    text = await detokenized(service.model(body.model), body.tokens)
    return await on_cpu(len(text), lambda: json_response({"prompt": text}))


async def detokenized(model: ServedModel, tokens: Sequence[int]) -> str:
    """The text of tokens.

    Raises:
        ApiError: 400, they are too many.
        InvalidParameter: the model has no such token.
    """
    refuse_many(0, len(tokens))
    vocab_size = model.tokenizer.vocab_size

    def work() -> str:
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidParameter.of("tokens", wrong, f"token ids must be in [0, {vocab_size - 1}]")
        return model.tokenizer.decode(tokens, skip_special_tokens=False)

    return await on_cpu(len(tokens), work)


def render(tokenizer: Tokenizer, chat: TokenizeChatRequest) -> list[int]:
    args = chat.template_args()
    variables = args.pop("chat_template_kwargs") or {}
    return tokenizer.apply_chat_template(chat.template_messages(), **args, **variables)


async def _tokens(model: ServedModel, characters: int, work: Callable[[], list[int]], with_texts: bool) -> Response:
    def answer() -> Response:
        tokens = work()
        content = {
            "count": len(tokens),
            "max_model_len": model.model_config.max_model_len,
            "tokens": tokens,
            "token_strs": [model.tokenizer.token_text(token) for token in tokens] if with_texts else None,
        }
        return json_response(content)

    return await on_cpu(characters, answer)
