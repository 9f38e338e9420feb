from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.sampling_params import InvalidParameter
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.small_tokenizers import DECODERS, sentencepiece_like

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


def with_template(folder: Path, target: Path, template: str | None, bos: bool = False) -> Tokenizer:
    """The demo's tokenizer under another chat template, or one that puts a begin-of-sequence in front."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(folder / name, target)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    if bos:
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        }
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return load_tokenizer(target)


TEXTS = [
    "",
    " ",
    "\n\n  two  spaces\t",
    "naïve café 日本語 \N{GRINNING FACE}\N{ZERO WIDTH JOINER}\N{LEFT-TO-RIGHT MARK}",
    "<|im_start|>user\nHi<|im_end|>",
    "<|im_start|> <|IM_END|><|im_end",
    " <|endoftext|> x<|endoftext|>",
    "don't . , ! ( a n't",
    "1234567890 0x1F e\u0301 \x00\x7f\ufffd",
    "a" * 3000,
]
CHATS: list[list[dict[str, Any]]] = [
    HELLO,
    [{"role": "system", "content": ""}, *HELLO, {"role": "assistant", "content": " Hi <|im_end|> é "}],
    [{"role": "user", "content": "x", "name": None}, {"role": "made up", "content": "\n"}],
]


@pytest.mark.parametrize("bos", [False, True])
def test_a_plain_folder_gives_transformers_ids_texts_and_prompts(demo_folder: Path, tmp_path: Path, bos: bool) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ cls_token }}{{ messages[-1].content }}"
    ours = with_template(demo_folder, tmp_path, template if bos else None, bos=bos)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours.hf) is type(theirs)
    assert ours.hf.special_tokens_map == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add in (False, True):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
            for skip in (False, True):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    if not bos:
        return
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == expected


def test_the_demos_chat_prompts_are_transformers(demo: Tokenizer, demo_folder: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(demo_folder)
    for chat in CHATS:
        for opened in (False, True):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=opened)
            assert demo.render_chat(chat, add_generation_prompt=opened) == expected
            ids = theirs.encode(expected, add_special_tokens=False)
            assert demo.apply_chat_template(chat, add_generation_prompt=opened) == ids


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    "change",
    [
        changed("tokenizer_config.json", lambda c: c.update(pad_token="<new>")),
        changed("tokenizer_config.json", lambda c: c.update(mask_token="<new>")),
        changed("tokenizer_config.json", lambda c: c.update(extra_special_tokens=["<new>"])),
        changed("tokenizer_config.json", lambda c: c.update(bos_token={"__type": "AddedToken", "content": "<new>"})),
        changed("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"49152": {"content": "<new>"}})),
        changed("tokenizer_config.json", lambda c: c.update(split_special_tokens=True)),
        changed("tokenizer_config.json", lambda c: c.update(tokenizer_class="LlamaTokenizer")),
        changed("tokenizer_config.json", lambda c: c.pop("tokenizer_class")),
        changed("special_tokens_map.json", lambda c: c.update(eos_token="<new>")),
        changed("added_tokens.json", lambda c: c.update({"<new>": 49152})),
        changed("tokenizer.json", lambda c: c.update(post_processor=None)),
        changed("config.json", lambda c: c.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"])),
        lambda folder: (folder / "tokenizer_config.json").unlink(),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_what_transformers_makes_of_other_folders_is_kept(
    demo_folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(demo_folder / name, tmp_path)
    change(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours.hf) is type(theirs)
    assert ours.vocab_size == len(theirs)
    for text in (*TEXTS, "a<new> b", "<|im_start|>"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_tokenizer_json_that_cannot_be_read_is_refused_by_name(demo_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        shutil.copy(demo_folder / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidParameter, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_text_survives_a_round_trip(demo: Tokenizer) -> None:
    text = "naïve café 日本語 \N{GRINNING FACE}\n\n  def f(x):\treturn x"
    assert demo.decode(demo.encode(text)) == text


def test_special_tokens_are_left_out_of_text_only_when_asked(demo: Tokenizer) -> None:
    ids = demo.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert demo.decode(ids) == "user\nHi"
    assert demo.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"
    assert demo.is_special(1)
    assert not demo.is_special(ids[1])


def test_chat_template_opens_the_answer(demo: Tokenizer) -> None:
    assert demo.render_chat(HELLO).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert demo.render_chat(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")
    assert demo.apply_chat_template(HELLO) == demo.encode(demo.render_chat(HELLO), add_special_tokens=False)


def test_final_message_is_left_open_to_be_continued(demo: Tokenizer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    text = demo.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nGood mor")
    with pytest.raises(InvalidParameter) as refused:
        demo.render_chat(messages, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_begin_of_sequence_is_added_to_text_and_not_doubled_in_a_chat(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(demo_folder, tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos=True)
    assert tokenizer.encode("Hi")[0] == 1
    assert tokenizer.encode("Hi", add_special_tokens=False)[0] != 1
    assert tokenizer.apply_chat_template(HELLO).count(1) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hello",
        ["Hello"],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
    ],
)
def test_messages_that_the_template_refuses_are_the_clients_fault(
    demo_folder: Path, tmp_path: Path, messages: list[dict[str, str]]
) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users speak') }}{% endif %}"
        "{{ '[' + m['content'] + ']' }}{% endfor %}"
    )
    tokenizer = with_template(demo_folder, tmp_path, template)
    assert tokenizer.render_chat(HELLO) == "[Hello]"
    with pytest.raises(InvalidParameter) as refused:
        tokenizer.render_chat(messages)
    assert refused.value.param == "messages"
    if messages == [{"role": "tool", "content": "x"}]:
        assert "only users speak" in str(refused.value)


def test_template_variables_reach_the_template_but_not_its_maker(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(demo_folder, tmp_path, "{{ messages[0].content }} {{ mood }}")
    assert tokenizer.render_chat(HELLO, variables={"mood": "glad"}) == "Hello glad"
    for name in ("chat_template", "tokenize", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidParameter) as refused:
            tokenizer.render_chat(HELLO, variables={name: "x"})
        assert refused.value.param == "chat_template_kwargs"


def test_a_model_without_template_says_so(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(demo_folder, tmp_path, None)
    with pytest.raises(InvalidParameter, match="no chat template"):
        tokenizer.apply_chat_template(HELLO)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_token_text_keeps_the_space_that_decode_strips() -> None:
    tokenizer = sentencepiece_like("llama2")
    assert tokenizer.decode([1]) == "the"
    assert tokenizer.token_text(1) == " the"
    assert tokenizer.token_bytes(0xE2 + 14) == b"\xe2"


def test_token_bytes_join_to_the_text(demo: Tokenizer) -> None:
    text = "日本 \N{GRINNING FACE} café"
    assert b"".join(map(demo.token_bytes, demo.encode(text))).decode() == text


@pytest.mark.parametrize("kind", ["regex", "stripped end", "ctc"])
def test_decoders_that_cannot_be_streamed_are_refused(kind: str) -> None:
    assert kind in DECODERS
    with pytest.raises(InvalidParameter, match="decoder is not supported"):
        sentencepiece_like(kind)
