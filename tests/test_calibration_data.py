"""What a calibration reads: files, datasets, chats, mixtures, packing, and the sequences it writes down."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from calibration_jobs import random_texts, word_tokenizer, write_jsonl

from kvbridge_hf.calibration.data import DataConfig, leading_tokens, read_sequences
from kvbridge_hf.calibration.documents import DatasetSpec, with_defaults
from kvbridge_hf.calibration.sequences import SequenceStore, write_sequences
from kvbridge_hf.errors import ArtifactError, CalibrationError

TEMPLATE = "{% for m in messages %}<bos> {{ m['content'] }} <eos> {% endfor %}"


def read(*datasets: str, tokenizer=None, defaults=None, num_sinks=0, **settings):
    config = DataConfig(with_defaults(datasets, **(defaults or {})), **settings)
    sequences, report = read_sequences(config, tokenizer or word_tokenizer(), num_sinks)
    return list(sequences), report


def ids_of(text: str) -> list[int]:
    """The test tokenizer's vocabulary, by hand."""
    return [int(word[1:]) + 3 for word in text.split()]


def test_files_of_every_kind_give_the_same_sequences(tmp_path):
    import pyarrow
    from pyarrow import parquet

    texts = random_texts(12)
    jsonl = write_jsonl(tmp_path / "texts.jsonl", texts)
    (tmp_path / "texts.txt").write_text("\n\n".join(texts) + "\n")
    parquet.write_table(pyarrow.table({"other": range(12), "text": texts}), tmp_path / "texts.parquet")
    expected = [ids_of(text)[:16] for text in texts]
    for path in (jsonl, tmp_path / "texts.txt", tmp_path / "texts.parquet"):
        found, report = read(str(path), sequence_length=16)
        assert [sequence.tokens for sequence in found] == expected
        assert [sequence.row for sequence in found] == list(range(12))
        assert report.documents == 12
        assert report.short_documents == sum(len(text.split()) < 16 for text in texts)
        assert report.dropped_tokens == sum(max(0, len(text.split()) - 16) for text in texts)


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_are_read_by_name_split_and_column(tmp_path, streaming):
    pytest.importorskip("datasets")
    texts = random_texts(6)
    (tmp_path / "mine").mkdir()
    write_jsonl(tmp_path / "mine" / "validation.jsonl", texts, "body")
    name = str(tmp_path / "mine")
    found, report = read(f"{name},split=validation,column=body", sequence_length=99, streaming=streaming)
    assert [sequence.tokens for sequence in found] == [ids_of(text) for text in texts]
    assert list(report.fingerprints) == ["0:mine"]
    assert "tmp" not in json.dumps(report.fingerprints)
    with pytest.raises(CalibrationError, match="no column 'text' in mine.* has 'body'"):
        read(f"{name},split=validation", streaming=streaming)
    with pytest.raises(CalibrationError, match="split 'train'.* could not be opened"):
        read(f"{name},column=body", streaming=streaming)


def test_chats_go_through_the_template(tmp_path):
    chats = [
        [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}],
        [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}],
    ]
    path = write_jsonl(tmp_path / "chats.jsonl", chats, "messages")
    tokenizer = word_tokenizer()
    with pytest.raises(CalibrationError, match="no chat template"):
        read(f"{path},column=messages", tokenizer=tokenizer)
    tokenizer.chat_template = TEMPLATE
    found, _ = read(f"{path},column=messages", tokenizer=tokenizer)
    assert [sequence.tokens for sequence in found] == [[1, 4, 5, 2, 1, 6, 2], [1, 7, 2, 1, 8, 2]]
    bad = write_jsonl(tmp_path / "bad.jsonl", [[{"text": "w1"}]], "messages")
    with pytest.raises(CalibrationError, match="Row 0 of bad.jsonl.* has 'text', not 'role'"):
        read(f"{bad},column=messages", tokenizer=tokenizer)
    numbers = write_jsonl(tmp_path / "numbers.jsonl", [3], "messages")
    with pytest.raises(CalibrationError, match="Row 0 of numbers.jsonl.* holds a int"):
        read(f"{numbers},column=messages", tokenizer=tokenizer)


def test_packed_sequences_are_the_running_text_cut_into_pieces(tmp_path):
    texts = random_texts(20, longest=25)
    path = write_jsonl(tmp_path / "texts.jsonl", texts)
    running = [token for text in texts for token in (*ids_of(text), 2)]
    found, report = read(str(path), packing="pack", sequence_length=16)
    assert [sequence.tokens for sequence in found] == [
        running[start : start + 16] for start in range(0, len(running) - 15, 16)
    ]
    assert report.dropped_tokens == len(running) % 16
    for sequence in found:  # where it says that it starts, these tokens stand
        rest = [*ids_of(texts[sequence.row]), 2][sequence.start :]
        rest += [token for text in texts[sequence.row + 1 :] for token in (*ids_of(text), 2)]
        assert rest[:16] == sequence.tokens


def test_packed_sequences_begin_as_the_tokenizer_begins_texts(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    assert leading_tokens(tokenizer) == [1] and leading_tokens(word_tokenizer()) == []
    path = write_jsonl(tmp_path / "texts.jsonl", ["w1 w2 w3", "w4 w5 w6"])
    packed, _ = read(str(path), tokenizer=tokenizer, packing="pack", sequence_length=4)
    assert [sequence.tokens for sequence in packed] == [[1, 4, 5, 6], [1, 2, 7, 8]]
    cut, _ = read(str(path), tokenizer=tokenizer, sequence_length=3)
    assert [sequence.tokens for sequence in cut] == [[1, 4, 5], [1, 7, 8]]


def test_mixtures_keep_their_weights_all_along(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", random_texts(80, seed)) for seed, name in enumerate("abc")]
    specs = [f"{path},weight={weight}" for path, weight in zip(paths, (5, 3, 2), strict=True)]
    found, _ = read(*specs, num_sequences=100, sequence_length=8)
    for count in range(1, 101):
        taken = np.bincount([sequence.dataset for sequence in found[:count]], minlength=3)
        assert np.abs(taken - count * np.array([0.5, 0.3, 0.2])).max() <= 1
    for number in range(3):
        rows = [sequence.row for sequence in found if sequence.dataset == number]
        assert rows == list(range(len(rows)))
    again, _ = read(*specs, num_sequences=100, sequence_length=8)
    assert again == found
    short = write_jsonl(tmp_path / "short.jsonl", random_texts(3))
    found, report = read(str(short), specs[0], num_sequences=30, sequence_length=8)
    assert len(found) == 30 and report.exhausted == ["short.jsonl"]


def test_short_and_empty_documents_are_kept_left_out_or_refused_and_counted(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", ["w1 w2 w3 w4 w5", "", None, "w1 w2 w3", "  ", "w1"])
    kept, report = read(str(path), sequence_length=5, num_sinks=2)
    assert [sequence.row for sequence in kept] == [0, 3]
    assert (report.documents, report.empty_documents, report.short_documents, report.skipped_documents) == (6, 3, 2, 1)
    skipped, report = read(str(path), sequence_length=5, num_sinks=2, short_sequences="skip")
    assert [sequence.row for sequence in skipped] == [0] and report.skipped_documents == 2
    with pytest.raises(CalibrationError, match="Row 3 of texts.jsonl has 3 tokens, fewer than sequence_length=5"):
        read(str(path), sequence_length=5, short_sequences="error")


def test_bad_files_and_options_are_named(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "w1 w2"}\n{"text": \n')
    with pytest.raises(CalibrationError, match="Line 2 of texts.jsonl is not JSON"):
        read(str(path))
    path.write_text('{"text": "w1 w2"}\n["w3"]\n')
    with pytest.raises(CalibrationError, match="no column 'text' in line 2 of texts.jsonl; it has 'list'"):
        read(str(path))
    with pytest.raises(CalibrationError, match="no file .*none.jsonl"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(CalibrationError, match="bad.parquet is not a Parquet file"):
        read(str(tmp_path / "bad.parquet"))
    (tmp_path / "bad.csv").write_text("text")
    with pytest.raises(CalibrationError, match="none of .jsonl, .parquet, .txt"):
        read(str(tmp_path / "bad.csv"))
    for text, message in (("a,colum=b", "'colum=b' is not one of config="), ("a,weight=-1", "positive number")):
        with pytest.raises(CalibrationError, match=message):
            DatasetSpec.parse(text)
    with pytest.raises(CalibrationError, match="packing must be one of"):
        DataConfig(with_defaults(["a"]), packing="stack")
    default = with_defaults([], column="body")[0]
    assert (default.name, default.config, default.column) == ("HuggingFaceFW/fineweb-edu", "sample-10BT", "body")


# ---- on disk --------------------------------------------------------------------------------------------------------


def write(folder: Path, path: Path, **settings) -> SequenceStore:
    config = DataConfig(with_defaults([str(path)]), **{"sequence_length": 16, **settings})
    return write_sequences(folder, config, word_tokenizer(), vocab_size=96)


def test_the_sequences_on_disk_are_those_of_the_texts(tmp_path):
    texts = random_texts(12)
    store = write(tmp_path / "data", write_jsonl(tmp_path / "texts.jsonl", texts))
    expected = [ids_of(text)[:16] for text in texts]
    lines = [json.loads(line) for line in (tmp_path / "data" / "sequences.jsonl").read_text().splitlines()]
    for number, ids in enumerate(expected):
        assert store.tokens(number).tolist() == ids
        assert lines[number]["sha256"] == hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()
    batch = store.batch([3, 0, 5])
    assert batch.numbers.tolist() == [3, 0, 5]
    for row, number in enumerate((3, 0, 5)):
        assert batch.input_ids[row][batch.attention_mask[row]].tolist() == expected[number]
    assert not bool(batch.input_ids[~batch.attention_mask].any())
    again = write(tmp_path / "again", tmp_path / "texts.jsonl")
    assert again.digest == store.digest
    assert write(tmp_path / "other", tmp_path / "texts.jsonl", sequence_length=15).digest != store.digest


@pytest.mark.parametrize("processes", [1, 2, 4, 7])
def test_processes_share_the_same_batches(tmp_path, processes):
    store = write(tmp_path / "data", write_jsonl(tmp_path / "texts.jsonl", random_texts(13)))
    shares = [store.share(4, process, processes) for process in range(processes)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(13))
    whole = store.share(4)
    batches = [whole[start : start + 4].tolist() for start in range(0, 13, 4)]
    for process, share in enumerate(shares):
        assert [share[start : start + 4].tolist() for start in range(0, len(share), 4)] == batches[process::processes]
    assert store.lengths[whole].tolist() == sorted(store.lengths.tolist(), reverse=True)
    if processes == 7:
        assert any(len(share) == 0 for share in shares)


def test_damaged_or_incomplete_sequences_are_refused(tmp_path):
    store = write(tmp_path / "data", write_jsonl(tmp_path / "texts.jsonl", random_texts(5)))
    path = store.folder / "tokens.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="tokens.bin .* is damaged"):
        SequenceStore(store.folder)
    path.write_bytes(good)
    (store.folder / "data.json").unlink()
    with pytest.raises(ArtifactError, match="incomplete"):
        SequenceStore(store.folder)


def test_empty_data_and_foreign_tokens_are_refused(tmp_path):
    with pytest.raises(CalibrationError, match="gave no sequence: it is empty"):
        write(tmp_path / "data", write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(CalibrationError, match="gave no sequence: {'documents': 2, 'empty_documents': 2}"):
        write(tmp_path / "data", write_jsonl(tmp_path / "blank.jsonl", ["", " "]))
    path = write_jsonl(tmp_path / "texts.jsonl", ["w1 w2", "w3 w80 w4"])
    config = DataConfig(with_defaults([str(path)]), sequence_length=16)
    with pytest.raises(CalibrationError, match=r"Sequence 1 \(row 1 of texts.jsonl\) holds token 83 at place 1.* 80"):
        write_sequences(tmp_path / "data", config, word_tokenizer(), vocab_size=80)
    assert not (tmp_path / "data" / "data.json").exists()
