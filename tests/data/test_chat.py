"""Records of conversations: which tokens have loss, how long ones are cut, and all refusals."""

import copy
import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import models, pre_tokenizers, processors

from mesh_transformer.cli import completion_records as script
from mesh_transformer.data.chat import ANSWERS, PLAIN, ChatTemplate, Conversation, Segment
from mesh_transformer.data.completions import Encoder, _with_loss
from mesh_transformer.data.inputs import BadInputHandler
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.tokenizer import Tokenizer, load_tokenizer
from mesh_transformer.util import InputError
from tests.support.llama_tokenizers import LLAMA_LIKE, PIECES

END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
BARE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }} a{% endif %}{% endfor %}"
)
# As Qwen3's, thoughts are left out of all answers but the last.
THINKING = CHATML.replace(
    "\n{{ message.content }}",
    "\n{% if loop.last and message.reasoning_content %}<think>{{ message.reasoning_content }}"
    "</think>\n{% endif %}{{ message.content }}",
)
WORDS = [
    "to",
    "be,",
    "or",
    "not\n\n",
    "caf\u00e9",
    "\u4e2d",
    "don't",
    "4 2",
    "Assistant:",
    "assistant",
]


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer()


@pytest.fixture(scope="module")
def chatml():
    """GPT-2's tokenizer with the tokens of ChatML."""
    tokenizer: Any = load_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def conversations(count, seed=0, turns=5):
    """Random conversations; no content begins or ends with a space or line break."""
    generator = np.random.default_rng(seed)

    def content():
        return " ".join(generator.choice(WORDS, generator.integers(1, 9))).strip()

    made = []
    for _ in range(count):
        roles = ["user", "assistant"] * int(generator.integers(1, turns))
        first = ["system"] * int(generator.integers(0, 2))
        made.append([{"role": role, "content": content()} for role in first + roles])
    return made


def encoder(tokenizer, seq=10**6, template=None):
    made = ChatTemplate(tokenizer, template, "file") if template else None
    return Encoder(tokenizer, seq, BadInputHandler(False), made)


def texts(tokenizer, messages, **options):
    items = [Conversation.of(each, f"line {number}") for number, each in enumerate(messages)]
    return list(encoder(tokenizer, **options).texts(items))


def test_plain_template_is_as_documented(gpt2):
    """Compared with a concatenation of tokens in Python."""
    for messages in conversations(60):
        tokens, has_loss, context, answers = [], [], "", []
        for message in messages:
            role, content = message["role"].capitalize(), message["content"]
            context += ("\n\n" if context or tokens else "") + f"{role}:"
            if message["role"] == ANSWERS:
                before, answer = gpt2.encode(context), [*gpt2.encode(f" {content}"), 50256]
                tokens += before + answer
                has_loss += [False] * len(before) + [True] * len(answer)
                answers.append(f" {content}{END}")
                context = ""
            else:
                context += f" {content}"
        (text,) = texts(gpt2, [messages])
        assert (text.tokens, text.has_loss) == (tokens, has_loss)
        assert answers_in(gpt2, text) == answers


def answers_in(tokenizer, text):
    """Return the texts of the runs of tokens with loss."""
    runs, previous = [], False
    for token, has_loss in zip(text.tokens, text.has_loss, strict=True):
        if has_loss:
            runs[len(runs) if not previous else -1 :] = [[*(runs[-1] if previous else []), token]]
        previous = has_loss
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prompts", "by marks"])
def test_mask_matches_one_from_the_offsets_of_the_whole_text(chatml, template):
    """The oracle tokenises the whole text, and finds the answers in it by a regular expression."""
    everything = conversations(80, seed=1)
    for messages, text in zip(
        everything, texts(chatml, everything, template=template), strict=True
    ):
        whole = chatml.apply_chat_template(messages, chat_template=CHATML, tokenize=False)
        encoding = chatml(whole, return_offsets_mapping=True)
        spans = [
            match.span(1)
            for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)", whole, re.S)
        ]
        mask = [
            any(start <= first and last <= end for start, end in spans)
            for first, last in encoding["offset_mapping"]
        ]
        assert text.tokens == [*encoding["input_ids"], 50256]
        assert text.has_loss == [*mask, True]


def test_mask_matches_that_of_transformers(chatml):
    everything = conversations(80, seed=2)
    for messages, text in zip(everything, texts(chatml, everything, template=MARKED), strict=True):
        expected = chatml.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        assert text.tokens == [*expected["input_ids"], 50256]
        assert text.has_loss == [*map(bool, expected["assistant_masks"]), True]


def test_spaces_outside_of_tokens_spans_count_where_they_are():
    """Some tokenizers, such as GPT-NeoX's, leave spaces out of the spans of tokens."""
    text = "Answer:  two  "  # the answer is from the second space on
    letters = {letter: number for number, letter in enumerate(dict.fromkeys("Ġ:Answertwo"))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    spans = backend.encode(text).offsets
    assert len(spans) == len(text)
    assert any(start == end for start, end in spans)
    segments = [Segment(text[:8], False), Segment(text[8:], True)]
    assert _with_loss(segments, spans) == [False] * 8 + [True] * 6


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_a_text_without_special_tokens_around_answers_is_tokenised_as_a_whole(kind):
    """As by transformers; an answer alone would get SentencePiece's space before it."""
    tokenizer, generator = LLAMA_LIKE[kind](), np.random.default_rng(9)
    inside = 0
    for _ in range(60):
        turns = 2 * int(generator.integers(1, 4))
        messages = [
            {
                "role": ("user", ANSWERS)[turn % 2],
                # Of a last character in several bytes, transformers marks only the first.
                "content": "".join(generator.choice(PIECES, generator.integers(1, 6))) + ".",
            }
            for turn in range(turns)
        ]
        expected = tokenizer.apply_chat_template(
            messages, chat_template=BARE, return_dict=True, return_assistant_tokens_mask=True
        )
        (text,) = texts(tokenizer, [messages], template=BARE)
        assert text.tokens == [*expected["input_ids"], tokenizer.eos_token_id]
        assert text.has_loss == [*map(bool, expected["assistant_masks"]), True]
        pieces = [tokenizer.encode(m["content"], add_special_tokens=False) for m in messages]
        inside += pieces[-1] != text.tokens[-1 - len(pieces[-1]) : -1]
    assert inside > 10


@pytest.mark.parametrize("seq", [10**6, 90])
def test_a_template_that_changes_earlier_answers_gives_one_text_per_answer(chatml, seq):
    """As the text that the model has before it when it answers; each answer counts once."""
    chatml = copy.deepcopy(chatml)
    chatml.eos_token = "<|im_end|>"
    everything = conversations(20, seed=11, turns=4)
    for messages in everything:
        for message in messages:
            if message["role"] == ANSWERS:
                message["reasoning_content"] = f"so {message['content'][:3]}"
    made = encoder(chatml, seq, THINKING)
    actual = list(made.texts([Conversation.of(each, "here") for each in everything]))
    if seq == 90:
        assert made.cut > 3
    expected = []
    for messages in everything:
        system, rest = exchanges(messages)
        part: list[Any] = []
        for exchange in rest:
            prompts = [[*system, *part, *exchange[:-1]], [*system, *exchange[:-1]]]
            whole = [chatml.encode(rendered(chatml, [*p, exchange[-1]])) for p in prompts]
            if part and len(whole[0]) - 2 > seq:  # without the line end, and the last label
                part = []
            prompt, tokens = prompts[not part], whole[not part]
            part += exchange
            before = len(chatml.encode(rendered(chatml, prompt, prompt=True)))
            assert tokens.pop() == 198
            expected.append((tokens, [False] * before + [True] * (len(tokens) - before)))
    assert [(text.tokens, text.has_loss) for text in actual] == expected
    assert made.several > 3


def rendered(tokenizer, messages, template=THINKING, *, prompt=False):
    options = {"chat_template": template, "add_generation_prompt": prompt}
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_answers_of_weight_0_are_read_but_not_learnt(chatml, template):
    """The tokens are those without weights, up to the last answer that counts."""
    generator = np.random.default_rng(5)
    for messages in conversations(40, seed=5):
        weights = generator.integers(0, 2, len(messages)).tolist()
        weighed = [message | {"weight": w} for message, w in zip(messages, weights, strict=True)]
        counted = [n for n, m in enumerate(weighed) if m["role"] == ANSWERS and m["weight"]]
        if not counted:
            continue
        (text,) = texts(chatml, [weighed], template=template)
        (plain,) = texts(chatml, [messages[: counted[-1] + 1]], template=template)
        assert text.tokens == plain.tokens
        runs = iter(answers_in(chatml, plain))
        answers = [n for n in range(counted[-1] + 1) if messages[n]["role"] == ANSWERS]
        kept = [run for n, run in zip(answers, runs, strict=True) if n in counted]
        assert answers_in(chatml, text) == kept


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_tokens_before_an_answer_are_the_prompt_for_it(chatml, template):
    for messages in conversations(30, seed=3, turns=2):
        (text,) = texts(chatml, [messages], template=template)
        first = text.has_loss.index(True)
        if template != MARKED:  # which has no prompt
            prompt = rendered(chatml, messages[:-1], template or PLAIN, prompt=True)
            assert text.tokens[:first] == chatml.encode(prompt)


def test_end_of_text_is_added_once(chatml, tmp_path):
    """A template that ends each answer with the end-of-text token needs no other."""
    chatml.save_pretrained(tmp_path)
    tokenizer: Any = load_tokenizer(tmp_path)
    tokenizer.eos_token = "<|im_end|>"
    end = tokenizer.eos_token_id
    for messages in conversations(10, seed=4):
        (text,) = texts(tokenizer, [messages], template=CHATML)
        assert text.tokens.count(end) == len(messages)
        marks = [
            label == end for label, counts in zip(text.tokens, text.has_loss, strict=True) if counts
        ]
        assert sum(marks) == sum(each["role"] == ANSWERS for each in messages)


def exchanges(messages):
    """Return the system message and the exchanges, each with one answer at its end."""
    system = [each for each in messages[:1] if each["role"] == "system"]
    rest = messages[len(system) :]
    return system, [rest[at : at + 2] for at in range(0, len(rest), 2)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize("seq", [60, 90, 200])
def test_long_conversations_are_cut_after_answers(chatml, template, seq):
    everything = conversations(40, seed=5, turns=30)
    made = encoder(chatml, seq, template)
    whole = encoder(chatml, template=template)

    def text_of(messages):
        (text,) = whole.texts([Conversation.of(messages, "here")])
        return text

    expected, cut = [], 0
    for messages in everything:
        system, rest = exchanges(messages)
        parts = []
        for exchange in rest:
            if parts and len(text_of([*parts[-1], *exchange])) <= seq:
                parts[-1] += exchange
            else:
                parts.append([*system, *exchange])
        cut += len(parts) > 1
        expected += map(text_of, parts)
    actual = list(made.texts([Conversation.of(messages, "here") for messages in everything]))
    assert actual == expected
    assert made.cut == cut > 3
    assert made.parts == len(actual) - (len(everything) - cut)
    assert all(len(text) <= seq for text in actual)


def create(tmp_path, source, *flags):
    arguments = [str(source), "set", "--output-dir", str(tmp_path / "out"), "--seq", "64", *flags]
    script.main(arguments)
    return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_conversations_in_every_kind_of_table_give_the_same_records(tmp_path, capsys):
    import datasets

    rows = [{"id": n, "messages": each} for n, each in enumerate(conversations(30, seed=6))]
    table = pyarrow.Table.from_pylist(rows)
    sources = [write_lines(tmp_path / "in.jsonl", rows)]
    parquet.write_table(table, tmp_path / "in.parquet")
    with open(tmp_path / "in.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "id"])
        writer.writerows([[json.dumps(row["messages"]), row["id"]] for row in rows])
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    columns = {
        key: [[m[key] for m in row["messages"]] for row in rows] for key in ("role", "content")
    }
    lists = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    write_lines(tmp_path / "lists.jsonl", [{"messages": row} for row in lists])
    renamed = [{"chat": row["messages"], "prompt": "p"} for row in rows]
    write_lines(tmp_path / "renamed.jsonl", renamed)
    sources += [tmp_path / name for name in ("in.parquet", "in.csv", "saved", "lists.jsonl")]
    outs = [create(tmp_path, source, "--pack") for source in sources]
    outs.append(create(tmp_path, tmp_path / "renamed.jsonl", "--pack", "--messages-column", "chat"))
    assert all(out == outs[0] for out in outs)
    assert "; chat template: plain; cut: " in capsys.readouterr().out


def test_records_have_the_mask_and_pairs_may_be_among_them(tmp_path, gpt2, capsys):
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello\ud800"},
        {"role": "user", "content": "not read"},
    ]
    rows = [{"messages": chat}, {"prompt": "a", "completion": " b"}]
    create(tmp_path, write_lines(tmp_path / "in.jsonl", rows))
    loader = TFRecordNewInputs(str(tmp_path / "out/set.index"), 1, 64, repeat=False)
    labels = [batch["target"][batch["loss_mask"] == 1].tolist() for batch in loader]
    assert [gpt2.decode(tokens) for tokens in labels] == [f" Hello?{END}", f" b{END}"]
    assert "2 records of 64 tokens" in capsys.readouterr().out


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def test_the_command_counts_conversations_in_several_texts(tmp_path, capsys):
    (tmp_path / "template.jinja").write_text(THINKING)
    answer = ANSWER | {"reasoning_content": "c"}
    rows = [{"messages": [USER, answer] * turns} for turns in (1, 2, 3)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    flags = ("--seq", "256", "--chat-template", str(tmp_path / "template.jinja"))
    create(tmp_path, source, *flags)
    printed = capsys.readouterr().out
    assert "6 records of 256 tokens" in printed
    assert "; 2 conversations in one text per answer, as the chat template changes" in printed


BAD = [
    ([], "no message has the role assistant, found none", "no answer"),
    ([USER], "no message has the role assistant, found user", "no answer"),
    (None, "expected a list of messages, each with the strings role and content", "no messages"),
    ("[", "expected a list of messages", "no messages"),
    ([USER, 3], "expected a list of messages", "no messages"),
    ([USER, {"role": "assistant", "content": None}], "expected a list of messages", "no messages"),
    ([{"speaker": "human", "text": "a"}], "content, found the keys speaker, text", "no messages"),
    ([{"from": "human", "value": "a"}], "no message has the role assistant", "no answer"),
    ([USER, ANSWER | {"weight": 0}], "every answer has the weight 0", "no answer"),
    ([USER, ANSWER | {"weight": 0.5}], "weight of a message is 0.5, expected 0", "no messages"),
    ({"role": ["user", "assistant"], "content": ["a"]}, "expected a list of mess", "no messages"),
    ([USER, {**ANSWER, "content": "b " * 70}], "message 2: 7. tokens .* --seq 64", "too long"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("messages", "message", "reason"), BAD)
def test_bad_conversation_is_named_or_skipped(tmp_path, capsys, messages, message, reason):
    good = {"messages": [USER, ANSWER]}
    source = write_lines(tmp_path / "in.jsonl", [good, {"messages": messages}, good])
    with pytest.raises(InputError, match=rf"in\.jsonl: line 2: .*{message}.*--skip-bad$") as caught:
        create(tmp_path, source)
    assert "\n" not in str(caught.value)
    create(tmp_path, source, "--skip-bad")
    printed = capsys.readouterr().out
    assert "2 records of 64 tokens" in printed
    assert printed.strip().endswith(f"; skipped: 1 {reason}")


FAILING = {
    "refuses": "{{ raise_exception('roles\nmust alternate') }}",
    "fails": "{{ messages[0].content + 1 }}",
    "rewrites": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "is silent": "{% generation %}{% endgeneration %}",
}


@pytest.mark.parametrize("name", FAILING)
def test_template_that_fails_is_reported_with_the_line(tmp_path, capsys, name):
    (tmp_path / "template.jinja").write_text(FAILING[name])
    source = write_lines(tmp_path / "in.jsonl", [{"messages": [USER, ANSWER, USER, ANSWER]}])
    flags = ("--chat-template", str(tmp_path / "template.jinja"))
    with pytest.raises(InputError, match=r"in\.jsonl: line 1: the chat template .*skip-bad$") as e:
        create(tmp_path, source, *flags)
    assert "\n" not in str(e.value)
    with pytest.raises(InputError, match=r"found no pairs \(skipped: 1 template\)"):
        create(tmp_path, source, *flags, "--skip-bad")


def test_template_files_that_are_none_are_refused(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"messages": [USER, ANSWER]}])
    path = tmp_path / "template.jinja"
    flags = ("--chat-template", str(path))
    with pytest.raises(InputError, match=r"template\.jinja cannot be read \(No such file"):
        create(tmp_path, source, *flags)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"template\.jinja cannot be read \(not UTF-8 text\)"):
        create(tmp_path, source, *flags)
    path.write_text("\n{% for %}")
    with pytest.raises(InputError, match=r"template\.jinja: .*not valid in line 2: .*; correct it"):
        create(tmp_path, source, *flags)


@pytest.mark.slow
def test_template_of_the_tokenizer_is_used_and_saved_with_a_model(tmp_path, small, chatml, capsys):
    chatml.chat_template = CHATML
    chatml.save_pretrained(tmp_path / "tokenizer")
    chatml.chat_template = None
    rows = [{"messages": each} for each in conversations(9, seed=8)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    flags = ("--tokenizer", str(tmp_path / "tokenizer"))
    own = create(tmp_path, source, *flags)
    assert "chat template: the tokenizer's" in capsys.readouterr().out
    (tmp_path / "template.jinja").write_text(CHATML)
    given = create(tmp_path, source, *flags, "--chat-template", str(tmp_path / "template.jinja"))
    assert given == own
    assert f"chat template: {tmp_path}/template.jinja" in capsys.readouterr().out
    (tmp_path / "model").mkdir()
    config = small(tokenizer=flags[1], n_vocab=50304)
    Tokenizer.of(None, config, must_fit=True).save(str(tmp_path / "model"))
    assert Path(tmp_path / "model/chat_template.jinja").read_text() == CHATML
    assert load_tokenizer(tmp_path / "model").chat_template == CHATML
