"""Text to token ids and back: a model's own fast tokenizer and chat template."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

_PLAIN_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}  # two names of one class
_NAMED_TOKENS = {"bos_token", "eos_token", "pad_token", "unk_token"}
_INERT_SETTINGS = {
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_max_length",
    "tokenizer_class",
}
"""Of tokenizer_config.json: what leaves a tokenizer.json as it is."""

_TOKENWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder or of a .gguf file.

    Raises:
        InvalidParameter: there is none, or it is of a kind that is not supported.
    """
    if (backend := _plain_backend(path)) is not None:
        return Tokenizer(backend, lambda: _plain_tokenizer(path))
    hf = _transformers_tokenizer(path)
    return Tokenizer(hf.backend_tokenizer, lambda: hf)


def _plain_backend(folder: Path) -> Backend | None:
    """A tokenizer.json, where it is all that transformers would make of the folder's files.

    None for any other: classes that build a tokenizer of their own, tokens and settings that are written elsewhere, and
    what cannot be read are transformers' business. Its import takes as long as that of torch.
    """
    if not (folder / "tokenizer.json").is_file() or any(
        (folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json")
    ):
        return None
    from tokenizers import Tokenizer as Backend

    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if model_type != "llama" or settings["tokenizer_class"] not in _PLAIN_CLASSES:
            return None  # of the supported model types, Llama's alone has no class of its own
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises nothing more special; transformers will say what is wrong
        return None
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    named = [settings[name] for name in _NAMED_TOKENS if settings.get(name) is not None]
    if settings.keys() - _NAMED_TOKENS - _INERT_SETTINGS or any(token not in special for token in named):
        return None
    return None if backend.post_processor is None or backend.padding is not None else backend


def _plain_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """What AutoTokenizer gives for a folder with a plain backend, without what it imports to read the config."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # it raises whatever its readers happen to
        raise InvalidParameter("model", f"{folder} has no tokenizer that can be loaded: {error}") from error


def _transformers_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        hf: Any
        if path.is_file():
            hf = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        else:
            hf = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # it raises whatever its readers happen to
        raise InvalidParameter("model", f"{path} has no tokenizer that can be loaded: {error}") from error
    if not hf.is_fast:
        raise InvalidParameter("model", f"{path} has no fast tokenizer (tokenizer.json)")
    tokenizer: PreTrainedTokenizerFast = hf
    return tokenizer


class Tokenizer:
    """A model's tokenizer. Nothing in it changes with use but caches, so that threads may share it.

    The tokenizers library is called beneath transformers, whose own methods set truncation and padding on the shared
    object at each call; chat templates are transformers' to render.

    Attributes:
        vocab_size: tokens that it knows, added ones included. The model's vocabulary may be larger.
        is_byte_level: its tokens are pieces of UTF-8; otherwise each is a text of its own, save `<0xE2>` and the like.
        longest_token: in characters; a text has at least as many tokens as this goes into it.
    """

    def __init__(self, backend: Backend, load_hf: Callable[[], PreTrainedTokenizerFast]) -> None:
        """
        Args:
            backend: the tokenizers library's object, which is changed: its truncation and padding are taken away.
            load_hf: gives transformers' object, and is called when it is first needed.
        """
        self._backend = backend
        self._load_hf = load_hf
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        steps = _decoder_steps(self._backend.decoder)
        kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
        self.is_byte_level = kinds == ["ByteLevel"]
        if not self.is_byte_level and not _is_tokenwise(steps):
            raise InvalidParameter("model", f"the tokenizer's decoder is not supported: {' → '.join(kinds)}")
        self._byte_tokens = self._find_byte_tokens() if "ByteFallback" in kinds else {}
        self.longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        self._special = frozenset(id for id, token in self._backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """Transformers' object. Where nothing has needed it before, that takes about half a second."""
        return self._load_hf()

    def prepare_chats(self) -> None:
        """Loads what renders chats, which the first one would otherwise wait for."""
        _ = self.hf

    # ---- text → tokens ----

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Token ids of a text; special tokens written in it become those tokens.

        Args:
            add_special_tokens: put in front (or behind) what this model wants there, such as Llama's begin-of-sequence.
            param: the field that an error names.

        Raises:
            InvalidParameter: the text has a lone surrogate, which JSON can carry but UTF-8 cannot.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            rule = f"prompt has a lone surrogate at character {error.start:,}, which is not valid Unicode"
            raise InvalidParameter(param, rule) from error
        # Of the library's calls only those for batches release the GIL, without which a long text stops every thread.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model's chat template makes of messages, with all special tokens that belong there.

        Args:
            add_generation_prompt: end with what opens the assistant's answer.
            continue_final_message: leave the last message open, so that the model goes on with it.
            variables: further ones of the template, such as `enable_thinking`.

        Raises:
            InvalidParameter: the template refuses the messages or cannot work with them; the model has none.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidParameter.of("messages", messages, "must be a list of one message or more")
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidParameter("messages", "messages: each must be an object with a role and a content")
        if not self.hf.chat_template:
            raise InvalidParameter("messages", "messages: the model has no chat template; give a prompt instead")
        if add_generation_prompt and continue_final_message:
            raise InvalidParameter(
                "continue_final_message", "continue_final_message=True: add_generation_prompt must then be false"
            )
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping):
            raise InvalidParameter.of("chat_template_kwargs", variables, "must be an object")
        # What clients may not choose through template arguments: how the result is made.
        arguments = inspect.signature(self.hf.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
        if reserved := (arguments | {"messages"}) & variables.keys():
            raise InvalidParameter("chat_template_kwargs", f"chat_template_kwargs: {min(reserved)!r} cannot be set")
        from jinja2 import TemplateSyntaxError

        try:
            text: Any = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except TemplateSyntaxError:  # the model's fault, not the messages'
            raise
        except Exception as error:  # a template fails in many ways on messages that it was not written for
            raise InvalidParameter("messages", f"messages: the chat template refuses them: {error}") from error
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; nothing is put in front, since the template has done so."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=kwargs,
        )
        return self.encode(text, add_special_tokens=False, param="messages")

    # ---- tokens → text ----

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids that the tokenizer does not know have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def knows(self, token: int) -> bool:
        """Whether there is such a token; a model's vocabulary may be padded with ids that are none."""
        return self._backend.id_to_token(token) is not None

    def is_special(self, token: int) -> bool:
        """Whether `skip_special_tokens` leaves it out."""
        return token in self._special

    def is_byte(self, token: int) -> bool:
        """Whether it stands for one byte (`<0xE2>`), so that its text depends on its neighbours."""
        return token in self._byte_tokens

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the bytes of a text that others have begun."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._token_bytes(token)
        return found

    def token_text(self, token: int) -> str:
        """What a token adds to a text that others have begun; a replacement character where it is a part of one."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = (
                self.token_bytes(token).decode("utf-8", "replace") if self.is_byte_level else self.text_after([token])
            )
        return found

    def text_after(self, ids: Sequence[int]) -> str:
        """The text of tokens behind an ordinary one; they differ from those that begin a text by a space."""
        return self.decode([self._anchor, *ids], skip_special_tokens=False)[len(self._anchor_text) :]

    def _token_bytes(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in text)
            except KeyError:  # an added token with other characters stands for itself
                return text.encode()
        if self.is_byte(token):
            return bytes([self._byte_tokens[token]])
        return self.token_text(token).encode()

    def _find_byte_tokens(self) -> dict[int, int]:
        """Token id to the byte that it stands for."""
        names = (high + low for high, low in itertools.product("0123456789abcdefABCDEF", repeat=2))
        found = ((self._backend.token_to_id(f"<0x{name}>"), int(name, 16)) for name in names)
        return {token: byte for token, byte in found if token is not None}

    @cached_property
    def _anchor(self) -> int:
        """A token that has a text and is no byte: what follows it does not begin the text."""
        for token in range(self.vocab_size):
            if not self.is_special(token) and not self.is_byte(token) and self.decode([token]).strip():
                return token
        raise InvalidParameter("model", "the tokenizer has no token that stands for a text")

    @cached_property
    def _anchor_text(self) -> str:
        return self.decode([self._anchor], skip_special_tokens=False)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The tokenizers library's decoder as its parts; none at all joins tokens by spaces."""
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [part for inner in step["decoders"] for part in flat(inner)] if step["type"] == "Sequence" else [step]

    return flat(described)


def _is_tokenwise(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text is the join of its tokens' texts, where runs of byte tokens count as one and the first may differ.

    After `Fuse` a step sees the whole text: there it may replace single characters and strip the front.
    """
    fused = False
    for step in steps:
        if step["type"] not in _TOKENWISE:
            return False
        if fused and step["type"] in ("ByteFallback", "Metaspace"):
            return False
        if fused and step["type"] == "Replace" and len(step["pattern"].get("String", "")) != 1:
            return False
        if fused and step["type"] == "Strip" and step["stop"] > 0:
            return False
        fused = fused or step["type"] == "Fuse"
    return True


def _byte_characters() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_characters()
