"""Bad data and bad luck in a calibration: what cannot be read, NaN, memory and disks that are full, damaged files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from calibration_jobs import (
    interrupted_run,
    job_arguments,
    make_job,
    random_texts,
    relative_error,
    weights_of,
    word_tokenizer,
    write_jsonl,
    write_pair,
)
from transformers import AutoModelForCausalLM

from kvbridge_hf.calibration import content_store, sequences, storage
from kvbridge_hf.calibration.content_store import ContentStore
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.calibration.traces import Batch, TracedModel, kept_tokens
from kvbridge_hf.cli import main
from kvbridge_hf.errors import ArtifactError, CalibrationError, PairMismatchError
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def run(job):
    return run_calibration(job, progress=False, say=lambda text: None)


def test_a_damaged_shard_is_named_and_computed_again(pair, tmp_path, monkeypatch, caplog):
    run(make_job(pair, tmp_path / "whole"))
    job = make_job(pair, tmp_path / "out", plan="c", checkpoint_every=1)
    interrupted_run(job, monkeypatch, 10)  # 8 batches of the source, 2 of the target
    shards = sorted(job.state_folder.glob("process-00000/content/shard-*.safetensors"))
    assert len(shards) == 8
    damaged = bytearray(shards[5].read_bytes())
    damaged[-40] ^= 4
    shards[5].write_bytes(damaged)
    before = {path.name: path.stat().st_mtime_ns for path in shards if path != shards[5]}
    with caplog.at_level(logging.WARNING):
        interrupted_run(job, monkeypatch, 2)  # the one shard, and one more batch of the target
    assert f"Shard {shards[5].name} is damaged or gone; its 4 sequences are computed again" in caplog.text
    assert {name: (shards[0].parent / name).stat().st_mtime_ns for name in before} == before
    run(job)
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) < 1e-6


def test_shards_that_are_damaged_gone_or_cut_off_do_not_count(tmp_path, caplog):
    store = ContentStore(tmp_path)
    for first in (0, 2):
        store.write(torch.rand(2, 5, 2, 4), torch.rand(2, 5, 2, 4), [(first, 3), (first + 1, 2)], [])
    batch = Batch(torch.ones(2, 3).long(), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), torch.tensor([2, 3]))
    keep = kept_tokens(batch.attention_mask, 0, 1)
    assert store.content(batch, keep)[0].shape == (2, 5, 2, 4)
    (tmp_path / store.shards[1].file).write_bytes(b"")
    (tmp_path / "index.jsonl").open("a").write('{"file": "shard-cut-off')
    again = ContentStore(tmp_path)
    assert len(again.shards) == 2
    with pytest.raises(ArtifactError, match=f"Shard {store.shards[1].file} .* damaged or gone. Run the same"):
        again.content(batch, keep)  # damaged after the run looked at it
    with caplog.at_level(logging.WARNING):
        assert again.drop_damaged() == [store.shards[1].file]
    assert store.shards[1].file in caplog.text
    assert again.missing([0, 1, 2, 3]).tolist() == [2, 3]
    assert ContentStore(tmp_path).missing([0, 1, 2, 3]).tolist() == [2, 3]


@pytest.mark.parametrize("plan", ["a", "c"])
@pytest.mark.parametrize("role", ["source", "target"])
def test_sequences_with_nan_are_left_out_and_counted(pair, tmp_path, plan, role, caplog):
    texts = [text.replace("w7 ", "w8 ") for text in random_texts(30, longest=20)]
    texts = [text.replace(" w7", " w8") for text in texts]
    broken = tmp_path / role
    model = AutoModelForCausalLM.from_pretrained(pair / role)
    with torch.no_grad():
        model.model.embed_tokens.weight[7 + 3] = float("inf")
    model.save_pretrained(broken)
    word_tokenizer().save_pretrained(broken)
    bad = {4, 11}
    spoilt = [text.replace(" ", " w7 ", 1) if number in bad else text for number, text in enumerate(texts)]
    clean = [text for number, text in enumerate(texts) if number not in bad]
    settings = {"plan": plan, "weighting": "sensitivity", "support": "head_local"}
    job = make_job(
        pair,
        tmp_path / "out",
        datasets=[str(write_jsonl(tmp_path / "spoilt.jsonl", spoilt))],
        **{role: str(broken)},
        **settings,
    )
    with caplog.at_level(logging.WARNING):
        summary = run(job)
    assert summary["bad_sequences"] == sorted(bad)
    # Token 1 is a sink; what it does to the tokens behind it shows from the next layer on.
    assert f"Left out sequences 11, 4: The {role}'s keys of layer 1 are NaN or Inf in sequence 11" in caplog.text
    clean_data = [str(write_jsonl(tmp_path / "clean.jsonl", clean))]
    run(make_job(pair, tmp_path / "clean", datasets=clean_data, **{role: str(broken)}, **settings))
    assert relative_error(weights_of(tmp_path / "out"), weights_of(tmp_path / "clean")) < 1e-6
    job.output, job.max_bad_sequences = tmp_path / "strict", 1
    with pytest.raises(CalibrationError, match="2 sequences gave NaN or Inf, more than --max-bad-sequences=1"):
        run(job)


@pytest.mark.parametrize("torn", [False, True])
def test_out_of_memory_halves_the_batch_and_says_so(pair, tmp_path, monkeypatch, caplog, torn):
    run(make_job(pair, tmp_path / "whole"))
    from kvbridge_hf.calibration.statistics import Statistics

    forward, update, updates = TracedModel.forward, Statistics.update, []

    def starved(self, batch):
        if not torn and len(batch.input_ids) > 2 and self.role == "target":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, batch)

    def torn_update(self, trace, weights=None):
        updates.append(1)
        if torn and len(updates) == 5:
            self.moments[:1].update(torch.rand(1, 3, self.layout.features), torch.rand(1, 3, self.layout.outputs))
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        update(self, trace, weights)

    monkeypatch.setattr(TracedModel, "forward", starved)
    monkeypatch.setattr(Statistics, "update", torn_update)
    with caplog.at_level(logging.WARNING):
        run(make_job(pair, tmp_path / "starved", checkpoint_every=2))
    assert caplog.text.count("Out of memory") == 1 and "batches of 2 sequences" in caplog.text
    assert relative_error(weights_of(tmp_path / "starved"), weights_of(tmp_path / "whole")) < 1e-6


def test_memory_for_not_even_one_sequence_is_an_error(pair, tmp_path, monkeypatch):
    def starved(self, batch):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TracedModel, "forward", starved)
    with pytest.raises(CalibrationError, match="not suffice for one sequence"):
        run(make_job(pair, tmp_path / "out"))


def full_disk(path: Path) -> None:
    """Half of a file, and then no more room."""
    Path(path).write_bytes(b"half")
    raise OSError(28, "No space left on device")


# What is being written when the disk is full -> the name that writes it, and after how many batches that is.
WRITERS = {
    "state": (storage, "save_file", 3, lambda tensors, path: full_disk(path)),
    "shard": (content_store, "save_file", 3, lambda tensors, path: full_disk(path)),
    "sequences": (sequences, "sequence_digest", None, lambda ids: full_disk(Path("/dev/null"))),
    "mapper": (KVBridgeMapper, "save_pretrained", None, lambda self, folder: full_disk(Path("/dev/null"))),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_named_and_leaves_what_was_whole(pair, tmp_path, monkeypatch, what):
    place, name, after, full = WRITERS[what]
    plan = "c" if what == "shard" else "a"
    job = make_job(pair, tmp_path / "out", checkpoint_every=1, plan=plan)
    if after is not None:
        interrupted_run(job, monkeypatch, after)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(CalibrationError, match="disk of .* is full.*run the same command again"):
            run(job)
    assert not (job.output / "config.json").exists()
    assert not [path for path in job.state_folder.rglob("*.tmp") if path.parent.name != "data"]
    run(job)
    run(make_job(pair, tmp_path / "whole", plan=plan))
    assert relative_error(weights_of(job.output), weights_of(tmp_path / "whole")) == 0


def test_a_tokenizer_of_other_models_is_noticed_before_they_are_loaded(pair, tmp_path, monkeypatch):
    words = tmp_path / "tokenizer"
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"w{number}" for number in range(90, 130)])
    tokenizer.save_pretrained(words)
    monkeypatch.setattr("kvbridge_hf.calibration.run.load_model", None)
    with pytest.raises(PairMismatchError, match="no embedding for all of the tokenizer's 133 ids"):
        run(make_job(pair, tmp_path / "out", tokenizer=str(words)))


def test_wrong_arguments_are_answered_in_one_line(pair, tmp_path, capsys):
    base = job_arguments(make_job(pair, tmp_path / "out"))
    for more, message in (
        (["--memory-budget", "much"], "no size"),
        (["--memory-budget", "1KiB", "--plan", "auto"], "No plan fits into"),
        (["--set", "layer_budget"], "NAME=VALUE"),
        (["--plan", "d"], "auto, a, b or c"),
        (["--text-column", "body"], "no column 'body' in line 1 of texts.jsonl; it has 'text'"),
        (["--tokenizer", str(tmp_path / "none")], "no tokenizer"),
    ):
        assert main(["fit", *base, *more]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    (tmp_path / "file").write_text("")
    assert main(["fit", *job_arguments(make_job(pair, tmp_path / "file"))]) == 2
