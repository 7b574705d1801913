"""KL distillation: what it may touch, what it guarantees, and how it resumes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from methods_pair import VOCAB, make_pair, token_batches, tokens
from models import tiny_model
from torch import nn

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.traces import read_batches
from kvbridge_hf.errors import CalibrationError, FitConfigError
from kvbridge_hf.mappers import distillation_run
from kvbridge_hf.mappers.config import DistillationConfig, FitConfig
from kvbridge_hf.mappers.distillation import Student, distill
from kvbridge_hf.mappers.distillation_data import (
    Lookup,
    StepBatches,
    lookup_batch,
    sequences_of,
    split_lookups,
    text_question,
    validation_batches,
)
from kvbridge_hf.mappers.functional import FunctionalHandoff, frozen, mean_kl
from kvbridge_hf.mappers.learning_rate import search_learning_rate
from kvbridge_hf.mappers.preconditioning import covariance_of, plain_state, precondition

SHORT = {"min_prefix": 6, "min_continuation": 4, "max_continuation": 10, "batch_size": 4}


BATCHES = token_batches(6, 24)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def start(pair):
    config = FitConfig(top_k=1, num_sinks=1, num_native_suffix=2, heldout_fraction=0.3)
    return fit_mapper(*pair, BATCHES, config, progress=False)


def run(pair, start, tmp=None, batches=BATCHES, **overrides):
    config = DistillationConfig(**{**SHORT, "steps": 6, "learning_rate": 3e-3, "evaluations": 2, **overrides})
    return distill(start, *pair, batches, config, heldout_fraction=0.3, output_dir=tmp, progress=False)


def spoiled(mapper):
    """With halved tensors, so that there is something to learn."""
    half = type(mapper)(mapper.config)
    half.load_state_dict({name: 0.5 * t if t.is_floating_point() else t for name, t in mapper.state_dict().items()})
    return half.eval()


def validation_kl(pair, mapper, config=None) -> float:
    """The KL on the held-out sequences, from the pieces and not from what a distillation says of itself."""
    config = config or DistillationConfig(**SHORT)
    handoff = FunctionalHandoff(*pair, 1, 2)
    _, held = sequences_of(read_batches(BATCHES, VOCAB), 0.3, 0)
    return mean_kl(validation_batches(held, config, 0), lambda b, at: handoff.continuation_kl(mapper, b, at))


def test_training_lowers_the_kl_and_says_what_it_did(pair, start):
    start = spoiled(start)
    before = {name: p.clone() for name, p in start.named_parameters()}
    frozen_before = [p.clone() for model in pair for p in model.parameters()]
    mapper = run(pair, start, steps=12, seeds=(0, 1), learning_rate=1e-2)
    facts = mapper.config.fit["distillation"]
    assert facts["start_kl"] == pytest.approx(validation_kl(pair, start), rel=1e-5)
    assert facts["kl"] == pytest.approx(validation_kl(pair, mapper), rel=1e-5)
    assert facts["kl"] < 0.97 * facts["start_kl"]
    ends = [facts["seeds"][seed]["kl"] for seed in ("0", "1")]
    assert facts["kl"] == pytest.approx(min(ends)) and facts["mean_kl"] == pytest.approx(sum(ends) / 2)
    assert facts["standard_error"] == pytest.approx(abs(ends[0] - ends[1]) / 2)
    assert all(torch.equal(before[name], p) for name, p in start.named_parameters())
    assert all(
        torch.equal(a, p) for a, p in zip(frozen_before, (p for m in pair for p in m.parameters()), strict=True)
    )
    assert all(p.requires_grad for model in pair for p in model.parameters()), "the models are given back as they were"
    json.dumps(mapper.config.fit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_never_ends_above_its_start(pair, start, dtype):
    start = type(start)(start.config).to(dtype).eval().requires_grad_(True)
    start.load_state_dict(
        fit_mapper(*pair, BATCHES, FitConfig(top_k=1, num_sinks=1, num_native_suffix=2), progress=False).state_dict()
    )
    mapper = run(pair, start, learning_rate=50.0, max_grad_norm=1e9)
    assert mapper.dtype == dtype
    assert validation_kl(pair, mapper) <= validation_kl(pair, start) * (1 + 1e-6)
    assert all(torch.isfinite(p).all() for p in mapper.parameters())


def test_the_same_seed_gives_the_same_mapper(pair, start):
    state = torch.get_rng_state()
    one, two = run(pair, start), run(pair, start)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"
    other = run(pair, start, seeds=(5,))
    assert not torch.equal(one.key_weight, other.key_weight)


def test_an_interrupted_run_ends_as_an_uninterrupted_one(pair, start, tmp_path, monkeypatch):
    whole = run(pair, start, tmp_path / "whole", steps=6, evaluations=3)

    class Interrupted(Exception):
        pass

    evaluate = distillation_run.MapperTrainer.evaluate

    def stop_at_four(self, *args, **kwargs):
        result = evaluate(self, *args, **kwargs)
        if self.state.global_step == 4:
            raise Interrupted
        return result

    monkeypatch.setattr(distillation_run.MapperTrainer, "evaluate", stop_at_four)
    with pytest.raises(Interrupted):
        run(pair, start, tmp_path / "cut", steps=6, evaluations=3)
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "cut" / "seed-0").iterdir())
    assert left == ["checkpoint-2"]
    again = run(pair, start, tmp_path / "cut", steps=6, evaluations=3)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)
    curves = [mapper.config.fit["distillation"]["seeds"]["0"]["curve"] for mapper in (whole, again)]
    assert [step for step, _ in curves[1]] == [2, 4, 6]
    assert [kl for _, kl in curves[1]] == pytest.approx([kl for _, kl in curves[0]], rel=1e-5)


def test_a_crash_while_saving_leaves_no_half_checkpoint(pair, start, tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(distillation_run.torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        run(pair, start, tmp_path)
    assert list((tmp_path / "seed-0").iterdir()) == []


@pytest.mark.parametrize("change", ["data", "settings", "start", "target", "code"])
def test_a_folder_of_another_run_is_refused(pair, start, tmp_path, monkeypatch, change):
    run(pair, start, tmp_path, steps=2)
    models, mapper, batches, overrides = pair, start, BATCHES, {}
    if change == "data":
        batches = [*BATCHES[:-1], tokens(6, 24, 77)]
    elif change == "settings":
        overrides = {"max_continuation": 11}
    elif change == "start":
        mapper = type(start)(start.config).eval()
    elif change == "target":
        models = (pair[0], tiny_model("llama", num_layers=2, seed=3))
    else:
        copied = tmp_path / "code"
        shutil.copytree(distillation_run.Path(distillation_run.__file__).parent, copied)
        (copied / "functional.py").write_text("# changed\n")
        monkeypatch.setattr(distillation_run, "__file__", str(copied / "distillation_run.py"))
    with pytest.raises(CalibrationError, match=f"other .*{change}"):
        run(models, mapper, tmp_path, batches, **{"steps": 2, **overrides})


def test_reconstruction_and_attention_losses_are_zero_for_a_perfect_map_and_differentiable(pair, start):
    target = pair[1]
    config = DistillationConfig(**SHORT, kl_weight=0.0, reconstruction_weight=1.0, attention_weight=1.0)
    inputs = StepBatches(list(tokens(4, 24)), config, 1, 0)[0]
    perfect = start.identity(target)
    assert float(Student(perfect, FunctionalHandoff(target, target), config)(**inputs)["loss"].detach()) < 1e-8
    for weights in ({"reconstruction_weight": 1.0}, {"attention_weight": 1.0}):
        mapper = type(start)(start.config)
        mapper.load_state_dict(start.state_dict())
        config = DistillationConfig(**SHORT, kl_weight=0.0, **weights)
        with frozen(*pair):
            loss = Student(mapper, FunctionalHandoff(*pair, 1, 2), config)(**inputs)["loss"]
            loss.backward()
        assert float(loss.detach()) > 1e-3
        assert mapper.key_weight.grad.norm() > 0 and mapper.value_weight.grad.norm() > 0


def test_the_reconstruction_loss_is_one_minus_r2(pair, start):
    """Over one batch, with mapped and own entries in rotated space, where norms are those of content space."""
    config = DistillationConfig(**SHORT, kl_weight=0.0, reconstruction_weight=1.0)
    inputs = StepBatches(list(tokens(4, 24)), config, 1, 0)[0]
    handoff = FunctionalHandoff(*pair, 1, 2)
    batch = next(read_batches([inputs], VOCAB))
    stop = handoff.mapped_columns(int(inputs["boundary"]))
    own, source = handoff.read_target(batch), handoff.read_source(batch, stop)
    expected = []
    for layer in range(2):
        keys, values = start.map_layer(layer, source)
        keys = handoff.target.rotary.apply(keys, source.position_ids, layer)
        for found, wanted in zip((keys, values), own.entries[layer], strict=True):
            y = wanted[:, :, 1:stop].transpose(1, 2).flatten(2).flatten(0, 1).double()
            e = (found[:, :, 1:] - wanted[:, :, 1:stop]).double().square().sum()
            expected.append(float((e / (y - y.mean(0)).square().sum()).detach()))
    loss = Student(start, handoff, config)(**inputs)["loss"]
    assert float(loss.detach()) == pytest.approx(sum(expected) / len(expected), rel=1e-4)


# ---- the search for a learning rate ---------------------------------------------------------------------------------


def test_the_search_goes_past_an_edge_until_it_has_a_better_neighbour_on_both_sides():
    best, losses = search_learning_rate(lambda rate: abs(rate - 0.3), [1e-3, 1e-2], 3)
    assert best == pytest.approx(0.1) and list(losses) == pytest.approx([1e-3, 1e-2, 0.1, 1.0])
    best, losses = search_learning_rate(lambda rate: abs(rate - 1e-5), [1e-3, 1e-2], 3)
    assert best == pytest.approx(1e-5) and min(losses) == pytest.approx(1e-6)
    best, losses = search_learning_rate(lambda rate: -rate, [1e-3, 1e-2], 2)
    assert best == pytest.approx(1.0) and len(losses) == 4
    best, losses = search_learning_rate(lambda rate: 1.0 if rate < 0.5 else float("nan"), [0.1, 1.0], 3)
    assert best < 0.5
    with pytest.raises(FitConfigError, match="finite"):
        search_learning_rate(lambda rate: float("nan"), [0.1, 1.0], 0)


def test_the_search_of_a_distillation_is_kept_and_used(pair, start, tmp_path):
    mapper = run(pair, start, tmp_path, steps=4, learning_rate=None, learning_rates=(1e-5, 1e-3), max_extensions=1)
    facts = mapper.config.fit["distillation"]
    rates = [rate for rate, _ in facts["learning_rates"]]
    assert facts["learning_rate"] == min(facts["learning_rates"], key=lambda entry: entry[1])[0]
    assert len(rates) == 3, "the best of two is at an edge, so one more was tried"
    assert len(json.loads((tmp_path / "learning_rates.json").read_text())) == 3


# ---- data -----------------------------------------------------------------------------------------------------------


def test_every_sequence_comes_once_an_epoch_with_others_of_its_length():
    sequences = [torch.arange(3, 3 + 12 + (index * 7) % 20) for index in range(21)]
    config = DistillationConfig(**SHORT)
    batches = StepBatches(sequences, config, 12, 1)
    assert len(batches) == 12
    assert sorted(index for group in batches.groups[:6] for index in group) == list(range(21))
    spread = [max(len(sequences[i]) for i in g) - min(len(sequences[i]) for i in g) for g in batches.groups[:6]]
    assert sum(spread) / len(spread) < 6
    assert StepBatches(sequences, config, 12, 2).groups != batches.groups
    first, again = batches[3], StepBatches(sequences, config, 5, 1)[3]
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_fit_driver_trains_and_needs_what_it_needs(pair):
    config = FitConfig(
        top_k=1,
        num_sinks=1,
        heldout_fraction=0.3,
        distillation=DistillationConfig(**SHORT, steps=3, learning_rate=1e-3, evaluations=1),
    )
    assert FitConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    mapper = fit_mapper(*pair, BATCHES, config, progress=False)
    facts = mapper.config.fit["distillation"]
    assert facts["kl"] <= facts["start_kl"]
    asking = config.replace(distillation={**config.distillation.to_dict(), "lookup_fraction": 0.5})
    asked = fit_mapper(*pair, BATCHES, asking, lookups=LOOKUPS, progress=False).config.fit["distillation"]
    assert asked["training_lookups"] > 0 and asked["settings"]["lookup_fraction"] == 0.5
    with pytest.raises(FitConfigError, match="distillation reads the data twice"):
        fit_mapper(*pair, iter(BATCHES), config, progress=False)
    with pytest.raises(CalibrationError, match="validate"):
        fit_mapper(*pair, BATCHES, config.replace(heldout_fraction=0.0), progress=False)
    for bad in ({"steps": -1}, {"learning_rates": (1e-2, 1e-3)}, {"kl_weight": 0.0}, {"seeds": ()}):
        with pytest.raises(FitConfigError, match=next(iter(bad))):
            DistillationConfig(**bad)


def test_only_the_mapper_is_a_part_of_the_student(pair, start):
    student = Student(start, FunctionalHandoff(*pair), DistillationConfig())
    assert isinstance(student, nn.Module)
    assert {name.partition(".")[0] for name in student.state_dict()} == {"mapper"}


# ---- lookups and repair ---------------------------------------------------------------------------------------------


def a_lookup(seed: int, text: int = 14, asked: int = 8) -> dict:
    ids = tokens(1, text + asked, seed)[0]
    return {"input_ids": ids, "boundary": text, "answers": [False] * (text + asked - 2) + [True] * 2}


LOOKUPS = [a_lookup(100 + seed, 12 + seed % 4) for seed in range(24)]


def test_texts_of_lookups_end_in_one_column_and_answers_ask_nothing():
    batch, boundary, question = lookup_batch([Lookup.of(a_lookup(1, 9)), Lookup.of(a_lookup(2, 12, 5))])
    assert boundary == 12 and batch.input_ids.shape == (2, 20)
    assert batch.attention_mask[0].tolist() == [False] * 3 + [True] * 17
    assert batch.attention_mask[1].tolist() == [True] * 17 + [False] * 3
    assert torch.equal(batch.input_ids[0, 3:], a_lookup(1, 9)["input_ids"])
    assert question[0].nonzero()[:, 0].tolist() == list(range(12, 18))
    assert question[1].nonzero()[:, 0].tolist() == list(range(12, 15))
    with pytest.raises(CalibrationError, match="questions from token 14"):
        Lookup.of({"input_ids": torch.ones(14), "boundary": 14})


def test_questions_about_one_text_are_not_divided():
    text = a_lookup(3)["input_ids"][:14]
    same = [{**a_lookup(3), "input_ids": torch.cat([text, tokens(1, 8, seed)[0]])} for seed in range(9)]
    for seed in range(4):
        training, heldout = split_lookups([*same, *LOOKUPS], 0.5, seed)
        for part in (training, heldout):
            assert sum(torch.equal(one.ids[:14], text) for one in part) in (0, 9)


def test_steps_take_turns_between_text_and_lookups():
    config = DistillationConfig(**SHORT, lookup_fraction=0.75, native_fraction=0.2)
    lookups = [Lookup.of(item) for item in LOOKUPS]
    batches = StepBatches(list(tokens(12, 24)), config, 16, 0, lookups)
    asked = [step for step in range(16) if bool(batches[step]["question"][:, int(batches[step]["boundary"]) :].any())]
    assert len(asked) == 12 == sum(batches.asks) and asked == [s for s in range(16) if batches.asks[s]]
    fractions = [float(batches[step]["native_fraction"]) for step in range(16)]
    for kind in (asked, [step for step in range(16) if step not in asked]):
        assert [fractions[step] for step in kind] == pytest.approx([0, 0.2] * (len(kind) // 2))
    text = next(step for step in range(16) if not batches.asks[step])
    mask, boundary = batches[text]["question"], int(batches[text]["boundary"])
    assert mask[0].nonzero()[:, 0].tolist() == list(range(max(boundary - 8, 0), boundary))


@pytest.mark.parametrize("rate", [1e-2, 50.0])
def test_on_lookups_with_repair_it_never_ends_above_its_start_either(pair, start, rate, tmp_path):
    """By the KL on held-out lookups and text, with and without repair, computed here from the pieces."""
    start = spoiled(start)
    config = DistillationConfig(
        **SHORT,
        steps=16,
        learning_rate=rate,
        evaluations=4,
        lookup_fraction=0.5,
        native_fraction=0.3,
        validation_sequences=8,
        max_grad_norm=1.0 if rate < 1 else 1e9,
    )
    mapper = distill(
        start, *pair, BATCHES, config, lookups=LOOKUPS, heldout_fraction=0.3, output_dir=tmp_path, progress=False
    )
    facts = mapper.config.fit["distillation"]
    handoff = FunctionalHandoff(*pair, 1, 2)
    _, held = sequences_of(read_batches(BATCHES, VOCAB), 0.3, 0)
    _, asked = split_lookups(LOOKUPS, 0.3, 0)
    texts = validation_batches(held, replace(config, validation_sequences=4), 0)
    items = [(batch, at, text_question(batch, at)) for batch, at in texts]
    rows = sorted(asked[:4], key=lambda lookup: len(lookup.ids))
    items += [lookup_batch(rows[:4])]
    found = {}
    for name, one in (("start", start), ("end", mapper)):
        total = count = 0.0
        for item in items:
            for share in (0.0, 0.3):
                with torch.no_grad():
                    kl, there = handoff.continuation_kl(one, *item, share)
                total, count = total + float(kl.double().sum()), count + float(there.sum())
        found[name] = total / count
    assert facts["start_kl"] == pytest.approx(found["start"], rel=1e-5)
    assert facts["kl"] == pytest.approx(found["end"], rel=1e-5)
    assert found["end"] <= found["start"] * (1 + 1e-6) and facts["training_lookups"] == len(LOOKUPS) - len(asked)
    if rate < 1:
        assert found["end"] < found["start"]
    settings = {"heldout_fraction": 0.3, "output_dir": tmp_path, "progress": False}
    with pytest.raises(CalibrationError, match="other .*data"):
        distill(start, *pair, BATCHES, config, lookups=[*LOOKUPS[:-1], a_lookup(500)], **settings)


def test_lookups_that_are_asked_for_have_to_be_there(pair, start):
    with pytest.raises(FitConfigError, match="lookups="):
        run(pair, start, lookup_fraction=0.5)
    with pytest.raises(FitConfigError, match="lookup_fraction"):
        DistillationConfig(lookup_fraction=1.5)


def test_the_tokens_own_loss_can_be_trained_on_and_is_then_what_counts(pair):
    """A fuser starts as the target's own cache, where KL has nothing to teach."""
    config = FitConfig(method="fuser", fuser_width=8, top_k=1, num_sinks=1, num_native_suffix=2, heldout_fraction=0.3)
    fuser = fit_mapper(*pair, BATCHES, config, progress=False)
    assert validation_kl(pair, fuser) < 1e-6
    trained = run(pair, fuser, steps=12, learning_rate=3e-3, kl_weight=0.0, nll_weight=1.0)
    facts = trained.config.fit["distillation"]
    assert facts["objective"].endswith("nll") and facts["kl"] < facts["start_kl"]
    _, held = sequences_of(read_batches(BATCHES, VOCAB), 0.3, 0)
    total = count = 0.0
    for batch, at in validation_batches(held, DistillationConfig(**SHORT), 0):
        with torch.no_grad():
            logits = pair[1](batch.input_ids, attention_mask=batch.attention_mask.long()).logits.double()
        losses = -logits.log_softmax(-1)[:, at - 1 : -1].gather(-1, batch.input_ids[:, at:, None])[..., 0]
        total += float(losses[batch.attention_mask[:, at:]].sum())
        count += int(batch.attention_mask[:, at:].sum())
    assert facts["start_kl"] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("method", ["causal", "anchored"])
def test_what_stands_beside_a_linear_map_is_trained_with_it(pair, method):
    config = FitConfig(method=method, causal_width=8, causal_heads=2, top_k=1, num_sinks=1, heldout_fraction=0.3)
    start = spoiled(fit_mapper(*pair, BATCHES, config, progress=False))
    trained = run(pair, start, steps=16, evaluations=4, learning_rate=1e-2)
    facts = trained.config.fit["distillation"]
    assert facts["kl"] < facts["start_kl"] and trained.state_dict().keys() == start.state_dict().keys()
    changed = {name for name, p in trained.named_parameters() if not torch.equal(p, start.get_parameter(name))}
    assert {"key_weight", "value_weight"} <= changed
    assert method == "anchored" or {"trunk_in", "trunk_qkv", "trunk_o", "value_out"} <= changed


# ---- white coordinates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_white_coordinates_change_the_path_and_not_the_start(pair, support, tmp_path):
    config = FitConfig(top_k=2, num_sinks=1, num_native_suffix=2, heldout_fraction=0.3, support=support)
    start = fit_mapper(*pair, BATCHES, config, progress=False)
    handoff = FunctionalHandoff(*pair, 1, 2)
    contents = [handoff.read_source(batch, 20) for batch in read_batches(BATCHES, VOCAB)]
    roots = covariance_of(start, 1, contents)
    layers = start.config.selected_layers[1]
    x = torch.cat([torch.cat([c.values(layer)[:, :, 1:] for layer in layers], dim=-1) for c in contents])
    if support == "full_head":  # features are layer by layer, and head by head within one
        x = torch.cat(
            [
                torch.cat([c.values(layer)[:, :, 1:].transpose(1, 2).flatten(2) for layer in layers], -1)
                for c in contents
            ]
        ).unsqueeze(1)
    for head in range(x.shape[1]):
        rows = x[:, head].flatten(0, 1).double()
        covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
        covariance = covariance / covariance.diagonal().mean() + 1e-4 * torch.eye(len(covariance))
        root = roots[1, 1, head].double()
        torch.testing.assert_close(root @ covariance @ root, torch.eye(len(root)).double(), atol=1e-3, rtol=0)
    white = type(start)(start.config)
    white.load_state_dict(start.state_dict())
    precondition(white, roots)
    assert all(torch.equal(plain_state(white)[name], tensor) for name, tensor in start.state_dict().items())
    trained = run(pair, start, tmp_path, steps=4, precondition=True)
    plain = run(pair, start, steps=4)
    assert trained.state_dict().keys() == start.state_dict().keys()
    assert not torch.equal(trained.key_weight, plain.key_weight)
    assert validation_kl(pair, trained) <= validation_kl(pair, start)
    again = run(pair, start, tmp_path, steps=4, precondition=True)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters(), strict=True))


def test_anchors_have_white_coordinates_too(pair):
    config = FitConfig(method="anchored", anchors=("embedding",), top_k=1, num_sinks=1, heldout_fraction=0.3)
    start = fit_mapper(*pair, BATCHES, config, progress=False)
    handoff = FunctionalHandoff(*pair, 1, 2)
    batches = list(read_batches(BATCHES, VOCAB))
    contents = [handoff.read_source(batch, 20, handoff.extras(start, batch, 20)) for batch in batches]
    root = covariance_of(start, 1, contents)[0, 1, 0].double()
    layer = start.config.selected_layers[1][0]
    embedded = [pair[1].model.embed_tokens.weight[batch.input_ids[:, 1:20]].detach() for batch in batches]
    keys = [content.keys(layer)[:, :, 1:].transpose(1, 2).flatten(2) for content in contents]
    rows = torch.cat([torch.cat(parts, -1).flatten(0, 1) for parts in zip(keys, embedded, strict=True)]).double()
    covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
    covariance = covariance / covariance.diagonal().mean() + 1e-4 * torch.eye(len(covariance))
    torch.testing.assert_close(root @ covariance @ root, torch.eye(len(root)).double(), atol=1e-3, rtol=0)


def test_white_coordinates_are_for_affine_maps(pair):
    config = FitConfig(method="low_rank", rank=2, top_k=1, num_sinks=1, heldout_fraction=0.3)
    with pytest.raises(FitConfigError, match="low_rank"):
        run(pair, fit_mapper(*pair, BATCHES, config, progress=False), steps=1, precondition=True)
