"""Tokenizers: what a document's ids are, whatever the tokenizer's own habits, and training one."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from fbt_megatron.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    encode_document,
    load_tokenizer,
    starts_with_bos,
)
from fbt_megatron.data.tokenizer_training import TokenizerTraining, train_tokenizer
from fbt_megatron.errors import DataError
from tests.data.bpe import byte_level_bpe
from tools.train_tokenizer import main

BOS, EOS = "<s>", "</s>"
TEXT = "def add(a, b):\n    return a + b  # naïve → 日本語 🙂\n"


def trained_bpe(specials=(BOS, EOS), vocab_size=300):
    return byte_level_bpe(specials, TEXT, vocab_size=vocab_size)


def adding(single):
    """A post-processor that adds what its template says."""
    return processors.TemplateProcessing(single=single, special_tokens=[(BOS, 0), (EOS, 1)])


def save(tokenizer, folder, config=None):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("template", [None, f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}"])
def test_one_bos_and_one_eos_whatever_the_post_processor_adds(tmp_path, template):
    raw = trained_bpe()
    text_ids = raw.encode(TEXT, add_special_tokens=False).ids
    if template is not None:
        raw.post_processor = adding(template)
        assert raw.encode(TEXT).ids != text_ids  # It does add something by itself.
    tokenizer = load_tokenizer(save(raw, tmp_path / "t", {"bos_token": BOS, "eos_token": EOS}))
    assert encode_document(tokenizer, TEXT, add_bos=True) == [0, *text_ids, 1]
    assert encode_document(tokenizer, TEXT, add_bos=False) == [*text_ids, 1]


def test_other_special_tokens_in_a_text_stay_text(tmp_path):
    raw = trained_bpe(specials=(BOS, EOS, "<|user|>"))
    assert 2 in raw.encode("a <|user|> b").ids
    tokenizer = load_tokenizer(save(raw, tmp_path / "t", {"eos_token": EOS}))
    ids = tokenizer.encode("a <|user|> b")
    assert 2 not in ids
    assert tokenizer.decode(ids) == "a <|user|> b"


@pytest.mark.parametrize("special", [True, False])
def test_spelled_out_special_tokens_stay_text(tmp_path, special):
    raw = trained_bpe(specials=())
    raw.add_tokens([AddedToken(BOS, special=special), AddedToken(EOS, special=special)])
    tokenizer = load_tokenizer(save(raw, tmp_path / "t", {"bos_token": BOS, "eos_token": EOS}))
    text = f"the end is written {EOS}, the start {BOS}"
    ids = encode_document(tokenizer, text, add_bos=True)
    assert ids.count(tokenizer.eos_id) == 1
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.decode(ids) == text


def test_spelled_out_special_token_of_a_whole_word_vocabulary_stays_text():
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), (EOS, 0.0), *((char, -5.0) for char in "ab<>/s")], 0, False))
    raw.decoder = decoders.Fuse()
    tokenizer = HuggingFaceTokenizer(raw.to_str(), "t", EOS)
    assert raw.encode(f"a{EOS}b").ids.count(1) == 1  # The model itself finds EOS in the text.
    ids = tokenizer.encode(f"a{EOS}b{EOS}")
    assert 1 not in ids
    assert tokenizer.decode(ids) == f"a{EOS}b{EOS}"


def test_tokenizer_that_cannot_keep_text_and_eos_apart_is_refused():
    raw = Tokenizer(models.WordLevel({"<unk>": 0, EOS: 1, "stop": 2}, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace("stop", EOS)
    tokenizer = HuggingFaceTokenizer(raw.to_str(), "t", EOS)
    with pytest.raises(DataError, match="ordinary text the id of BOS or EOS"):
        tokenizer.encode("stop")


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_document_without_text_gives_nothing(text):
    assert encode_document(ByteTokenizer(), text, add_bos=False) == []


def test_truncation_padding_and_dropout_of_the_file_are_not_used(tmp_path):
    raw = trained_bpe()
    expected = raw.encode(TEXT).ids
    raw.enable_truncation(4)
    raw.enable_padding(length=500)
    raw.model.dropout = 0.9
    tokenizer = load_tokenizer(save(raw, tmp_path / "t", {"eos_token": EOS}))
    assert tokenizer.encode(TEXT) == expected


def test_bos_is_added_only_where_it_is_not_also_eos(tmp_path):
    raw = trained_bpe()
    both = load_tokenizer(save(raw, tmp_path / "t", {"bos_token": BOS, "eos_token": EOS}))
    same = load_tokenizer(str(tmp_path / "t"), bos_token=EOS)
    none = load_tokenizer(save(raw, tmp_path / "u", {"eos_token": EOS}))
    assert [starts_with_bos(each, None) for each in (both, same, none)] == [True, False, False]
    assert starts_with_bos(same, True)
    assert not starts_with_bos(both, False)
    with pytest.raises(DataError, match="--bos-token"):
        starts_with_bos(none, True)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", [EOS, {"content": EOS, "lstrip": False}])
def test_eos_is_read_from_the_files_beside_the_tokenizer(tmp_path, file, value):
    folder = save(trained_bpe(specials=("<eos>", "<|endoftext|>", EOS)), tmp_path / "t")
    (tmp_path / "t" / file).write_text(json.dumps({"eos_token": value}))
    for spec in (folder, f"{folder}/tokenizer.json"):
        assert load_tokenizer(spec).eos_id == 2


def test_eos_is_guessed_only_when_there_is_one_candidate(tmp_path):
    assert load_tokenizer(save(trained_bpe(specials=("<pad>", EOS)), tmp_path / "one")).eos_id == 1
    for name, specials in (("two", (EOS, "<|endoftext|>")), ("none", ("<pad>",))):
        folder = save(trained_bpe(specials=specials), tmp_path / name)
        with pytest.raises(DataError, match="--eos-token"):
            load_tokenizer(folder)
    assert load_tokenizer(str(tmp_path / "none"), eos_token="<pad>").eos_id == 0
    with pytest.raises(DataError, match="'<stop>' is not in the vocabulary"):
        load_tokenizer(str(tmp_path / "none"), eos_token="<stop>")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"model": {"type": "BPE", "vocab": {"</s>": 0}}, "version": "1.0"}']
)
def test_file_that_is_no_tokenizer_is_a_clear_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("option", ["eos_token", "bos_token"])
def test_tokens_named_for_bytes_are_refused(option):
    with pytest.raises(DataError, match=rf"--{option.replace('_', '-')} <x>: tokenizer bytes has tokens of its own"):
        load_tokenizer("bytes", **{option: "<x>"})


@pytest.mark.parametrize("option", ["eos_token", "bos_token"])
def test_an_empty_name_is_no_token_and_not_left_out(tmp_path, option):
    save(trained_bpe(), tmp_path)
    with pytest.raises(DataError, match=f"'' is not in the vocabulary.*--{option.replace('_', '-')}"):
        load_tokenizer(str(tmp_path), **{option: ""})


def test_missing_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(DataError, match="bytes"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_vocabulary_counts_to_the_largest_id():
    raw = trained_bpe()
    definition = json.loads(raw.to_str())
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 300, "content": "<pad>"})
    tokenizer = HuggingFaceTokenizer(json.dumps(definition), "t", EOS)
    assert tokenizer.vocab_size == 301
    assert tokenizer.token_bytes().shape == (301,)


def test_fingerprint_follows_what_decides_the_ids(tmp_path):
    folder = save(trained_bpe(), tmp_path / "t", {"eos_token": EOS})
    other = save(trained_bpe(vocab_size=290), tmp_path / "u", {"eos_token": EOS})
    one = load_tokenizer(folder).fingerprint
    assert one == load_tokenizer(f"{folder}/tokenizer.json").fingerprint
    assert len({one, load_tokenizer(other).fingerprint, load_tokenizer(folder, eos_token=BOS).fingerprint}) == 3


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode("utf-8"))


BPE = HuggingFaceTokenizer(trained_bpe().to_str(), "t", EOS, BOS)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_bpe_round_trip(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    # Every byte of the text is one token's.
    assert BPE.token_bytes().astype(np.int64)[ids].sum() == len(text.encode("utf-8"))


def test_special_tokens_stand_for_no_text():
    assert BPE.token_bytes()[[BPE.bos_id, BPE.eos_id]].tolist() == [0, 0]
    assert (BPE.token_bytes() > 0).sum() == BPE.vocab_size - 2


def test_bytes_of_sentencepiece_and_wordpiece_tokens():
    pieces = ["<unk>", EOS, "\u2581the", "é", "<0x0A>"]
    unigram = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, True))
    unigram.add_special_tokens(["<unk>"])
    assert HuggingFaceTokenizer(unigram.to_str(), "t", EOS).token_bytes().tolist() == [0, 0, 4, 2, 1]
    words = Tokenizer(models.WordPiece({EOS: 0, "play": 1, "##ing": 2}, unk_token=EOS))
    assert HuggingFaceTokenizer(words.to_str(), "t", EOS).token_bytes().tolist() == [0, 4, 3]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        words = " ".join(f"word{number * index % 97} item{index}" for index in range(60))
        (folder / f"{number:02d}.txt").write_text(words + TEXT)
    return str(folder)


def test_trained_tokenizer_has_the_asked_vocabulary_and_is_reproducible(corpus, tmp_path):
    training = TokenizerTraining((corpus,), 360)
    outcome = train_tokenizer(training, tmp_path / "one")
    train_tokenizer(training, tmp_path / "two")
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "one"))
    assert (tokenizer.vocab_size, outcome.vocab_size, outcome.num_documents) == (360, 360, 20)
    assert tokenizer.decode([tokenizer.eos_id]) == ""
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(TEXT.encode())


def test_trained_tokenizer_has_further_special_tokens(corpus, tmp_path):
    """Within the vocabulary asked for, with ids of their own that no text gets."""
    turns = ("<|im_start|>", "<|im_end|>")
    main([corpus, "--vocab-size", "360", "--out", str(tmp_path / "t"), "--special-tokens", *turns])
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer.vocab_size == 360
    assert tokenizer.control_ids == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    assert tokenizer.eos_id == 0
    assert tokenizer.encode_with_controls("<|im_end|>\n")[0][0] == 2
    assert min(tokenizer.encode("<|im_end|>")) > 2
    assert train_tokenizer(TokenizerTraining((corpus,), 360, special_tokens=turns), tmp_path / "t").already_complete
    with pytest.raises(DataError, match="--restart"):
        train_tokenizer(TokenizerTraining((corpus,), 360), tmp_path / "t")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("<|a|>", "<|a|>"), r"--special-tokens '<\|a\|>': is named twice"),
        (("<|endoftext|>",), r"--special-tokens '<\|endoftext\|>': is there already"),
        (("x",), "--special-tokens 'x': must have at least two characters"),
        (("<|a|>", "<|c|> "), r"--special-tokens '<\|c\|> ': .* no white space around them"),
        (("<|a|>", "<|b|>"), "--vocab-size 258: must be at least 259: 256 bytes and 3 special tokens"),
    ],
)
def test_special_tokens_that_are_refused(corpus, tmp_path, tokens, message):
    with pytest.raises(DataError, match=message):
        train_tokenizer(TokenizerTraining((corpus,), 258, special_tokens=tokens), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_trained_tokenizer_is_kept_and_not_overwritten(corpus, tmp_path):
    out = tmp_path / "t"
    train_tokenizer(TokenizerTraining((corpus,), 360), out)
    written = (out / "tokenizer.json").stat().st_mtime_ns
    assert train_tokenizer(TokenizerTraining((corpus,), 360), out).already_complete
    assert (out / "tokenizer.json").stat().st_mtime_ns == written
    with pytest.raises(DataError, match="--restart"):
        train_tokenizer(TokenizerTraining((corpus,), 370), out)
    assert not train_tokenizer(TokenizerTraining((corpus,), 370), out, restart=True).already_complete
    assert load_tokenizer(str(out)).vocab_size == 370


def test_large_inputs_are_sampled(corpus, tmp_path):
    whole = train_tokenizer(TokenizerTraining((corpus,), 300), tmp_path / "whole")
    half = train_tokenizer(TokenizerTraining((corpus,), 300, max_bytes=whole.num_bytes // 2), tmp_path / "half")
    assert 4 <= half.num_documents <= 16


@pytest.mark.parametrize(("vocab_size", "message"), [(256, "at least 257"), (50_000, "only")])
def test_vocabulary_that_cannot_be_reached_is_refused(corpus, tmp_path, vocab_size, message):
    with pytest.raises(DataError, match=f"--vocab-size {vocab_size}.*{message}"):
        train_tokenizer(TokenizerTraining((corpus,), vocab_size), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_unreadable_input_of_a_training_is_a_clear_error(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8 \(byte 3\)"):
        train_tokenizer(TokenizerTraining((str(tmp_path / "bad.txt"),), 300), tmp_path / "t")
