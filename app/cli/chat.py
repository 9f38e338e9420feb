"""`manta chat`: a conversation in the terminal with a running service."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.errors import fail, user_errors
from app.cli.sampling import Seed, Stop, Temperature, TopK, TopP
from app.cli.service import ApiKey, service_url

if TYPE_CHECKING:
    from openai import OpenAI, OpenAIError

SERVICE_ERROR = 1


def chat(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which of its models; the first one if not given.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a running service. Ctrl-C stops an answer, Ctrl-D ends, /reset starts afresh."""
    from openai import OpenAI, OpenAIError

    with user_errors():
        url = service_url(url)
    # The client refuses to start without a key; a service that is open does not look at it.
    client = OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0)
    try:
        served = [each.id for each in client.models.list()]
    except OpenAIError as error:
        raise fail(_sentence(error, url, api_key), SERVICE_ERROR) from None
    if not served or (model is not None and model not in served):
        raise fail(f"the service at {url} has {', '.join(served) or 'no models'}" + (f", not {model}" if model else ""))
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
    given = {name: value for name, value in options.items() if value is not None}
    conversation = Conversation(client, model or served[0], system, given)
    failed = False
    for line in _lines():
        if line == "/reset":
            conversation.reset()
            continue
        if line in ("/help", "/?"):
            typer.echo("Ctrl-C stops an answer, Ctrl-D ends, /reset starts afresh.")
            continue
        try:
            with closing(conversation.answer(line)) as answer:
                for text in answer:
                    typer.echo(text, nl=False)
            typer.echo()
            if conversation.cut_at is not None:
                reason = "--max-tokens allows more" if conversation.cut_at == max_tokens else "the context is full"
                typer.secho(f"… cut at {conversation.cut_at:,} tokens; {reason}", dim=True, err=True)
        except KeyboardInterrupt:
            typer.echo(" …")
        except OpenAIError as error:
            fail(_sentence(error, url, api_key))
            failed = True
    if failed and not sys.stdin.isatty():
        raise typer.Exit(SERVICE_ERROR)


class Conversation:
    """Messages so far, and the way to the next one.

    Attributes:
        cut_at: tokens of the last answer, where it ended for its length alone.
    """

    def __init__(self, client: OpenAI, model: str, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._options = options
        self.cut_at: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, question: str) -> Generator[str, None, None]:
        """The answer's text as it comes.

        An answer that was stopped stays as far as it came; a question without any is taken back.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        parts: list[str] = []
        self.cut_at = None
        is_cut = False
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": messages, **streaming, **self._options}
        try:
            with self._client.chat.completions.create(**_known(body)) as stream:
                for chunk in stream:
                    for choice in chunk.choices:
                        is_cut = choice.finish_reason == "length"
                        if choice.delta.content:
                            parts.append(choice.delta.content)
                            yield choice.delta.content
                    if chunk.usage is not None and is_cut:
                        self.cut_at = chunk.usage.completion_tokens
        finally:
            if parts:
                self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def _known(body: dict[str, Any]) -> dict[str, Any]:
    """The openai client takes fields that OpenAI does not have as `extra_body`."""
    extra = {"top_k": body.pop("top_k")} if "top_k" in body else {}
    return {**body, "extra_body": extra}


def _lines() -> Iterator[str]:
    """What the user says, until the end of the input; Ctrl-C forgets the line."""
    asks = sys.stdin.isatty()
    if asks:
        import readline  # noqa: F401  # gives input() its line editing
    while True:
        try:
            line = input("> " if asks else "").strip()
        except EOFError:
            if asks:
                typer.echo()
            return
        except KeyboardInterrupt:
            if not asks:
                raise
            typer.echo()
            continue
        if line:
            yield line


def _sentence(error: OpenAIError, url: str, api_key: str | None) -> str:
    from openai import APIConnectionError, APIError, AuthenticationError, PermissionDeniedError

    if not api_key and isinstance(error, AuthenticationError | PermissionDeniedError):
        return "the service wants a key: --api-key or MANTA_API_KEY"
    if isinstance(error, APIConnectionError):
        if distrust := _distrust(error):
            return (
                f"{url} answers, but its certificate is not trusted ({distrust.verify_message}); "
                "SSL_CERT_FILE=cert.pem trusts one of your own"
            )
        return f"no service answers at {url} ({error.__cause__ or error}); `make serve` starts one"
    if isinstance(error, APIError):
        detail = error.body.get("message") if isinstance(error.body, dict) else None
        return str(detail or error.message)
    return str(error)


def _distrust(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """What a connection failed for, several libraries below, where it is a certificate."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
