"""The Space: its logic without a browser, and the page in Chromium where that and Gradio are installed."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_server import LoopbackHub
from models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvbridge_hf import FitConfig, KVBridge, bundled, fit_mapper
from kvbridge_hf.cli import main
from kvbridge_hf.guard import calibrate_gates

SPACE = Path(__file__).resolve().parent.parent / "spaces" / "handoff-demo"
sys.path.insert(0, str(SPACE))

import markup  # noqa: E402
from chat import Chat, plain_render  # noqa: E402
from damage import DamageTest, damaged_bridge  # noqa: E402
from judgement import judge_answer  # noqa: E402
from machine import FairLock, Job  # noqa: E402
from pairs import PairError, Pairs  # noqa: E402
from prompts import Unsuitable, encode, explain, pieces  # noqa: E402
from race import Race, Settings  # noqa: E402
from visitors import Visitors  # noqa: E402

CHROMIUM = shutil.which("chromium")
WORDS = [f"w{number}" for number in range(92)]
FAST = Settings(max_new_tokens=6, readable=False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["<pad>", "<bos>", "<end>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} <end> {% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=template + "{% if add_generation_prompt %}w0{% endif %}",
    )


def text(count: int, seed: int = 0) -> str:
    picks = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[int(pick)] for pick in picks)


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Path:
    """A family of two random models with a fitted mapper whose gates are calibrated, laid out as the bundled one."""
    folder = tmp_path_factory.mktemp("family")
    tokenizer = make_tokenizer()
    # Trained on nothing: an end token would come at random, so there is none to stop at.
    small = tiny_model("qwen3", seed=1, num_layers=2, max_position_embeddings=512)
    large = tiny_model("llama", seed=2, num_layers=3, max_position_embeddings=512)
    for name, model in (("m", small), ("l", large)):
        model.save_pretrained(folder / "models" / f"tinytown-{name}")
        tokenizer.save_pretrained(folder / "models" / f"tinytown-{name}")
    batches = [tokenizer(text(48, seed), return_tensors="pt")["input_ids"] for seed in range(60)]
    config = FitConfig(top_k=2, num_sinks=2, num_native_suffix=4)
    mapper = fit_mapper(small, large, batches[:30], config, tokenizer=tokenizer, progress=False)
    calibrate_gates(small, large, mapper, batches[30:], quantile=0.99)
    mapper.save_pretrained(folder / "mappers" / "m-to-l")
    questions = folder / "questions"
    questions.mkdir()
    line = {"context": text(40), "question": text(5), "choices": ["w1", "w2"], "answer": 0, "kind": "thing"}
    (questions / "test.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def pair(family):
    return Pairs(family).load("m-to-l")


@pytest.fixture(scope="session")
def open_pair(pair):
    """The pair without calibrated gates: random models answer with words unlike anything in calibration."""
    mapper = copy.deepcopy(pair.mapper)
    mapper.config.gates = {}
    bridge = KVBridge(pair.source, mapper, pair.bridge.policy, tokenizer=pair.tokenizer)
    return dataclasses.replace(pair, bridge=bridge)


# Taking turns


def test_lock_is_given_in_the_order_of_asking():
    lock, order, threads = FairLock(), [], []
    lock.acquire()
    for number in range(6):

        def wait(number=number):
            with lock:
                order.append(number)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()
        while len(lock._waiting) <= number:
            time.sleep(0.001)
    lock.release()
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_jobs_alternate_and_waiting_is_not_counted():
    lock, order = FairLock(), []

    def work(name, pause, others):
        def run(job):
            for turn in range(4):
                time.sleep(pause)
                while turn < others and not lock._waiting:  # the other one has turns left and stands in the queue
                    time.sleep(0.0005)
                order.append(name)
                job.collect([0])
                job.next_turn()

        return run

    first = Job(work("a", 0.002, 4), lock=lock).start()
    while not lock._held:
        time.sleep(0.0005)
    second = Job(work("b", 0.2, 3), lock=lock).start()
    first.join(), second.join()
    assert order == ["a", "b"] * 4
    assert first.seconds < 0.4 < second.seconds  # the other's 0.8 s of holding the machine are not the first's


def test_each_job_has_random_numbers_of_its_own():
    def work(job):
        drawn = []
        for _ in range(5):
            drawn.append(float(torch.rand(())))
            job.next_turn()
        return drawn

    torch.manual_seed(123)
    outside = torch.get_rng_state()
    jobs = [Job(work, seed=seed).start() for seed in (7, 7, 8)]
    for job in jobs:
        job.join()
    generator = torch.Generator().manual_seed(7)
    alone = [float(torch.rand((), generator=generator)) for _ in range(5)]
    assert jobs[0].result == jobs[1].result == alone != jobs[2].result
    assert torch.equal(torch.get_rng_state(), outside)


def test_visitors_do_not_mix_and_are_forgotten():
    visitors = Visitors(limit=2)
    first, second = visitors.get("a"), visitors.get("b")
    stop_a, stop_b = first.begin(), second.begin()
    visitors.get("a").stop()
    assert stop_a.is_set() and not stop_b.is_set()
    again = first.begin()
    newer = first.begin()  # a second run of the same page ends the first
    assert again.is_set() and not newer.is_set()
    visitors.get("a"), visitors.get("c")
    assert stop_b.is_set() and len(visitors) == 2  # b was quiet for longest
    assert visitors.get("a") is first
    visitors.forget("a")
    assert newer.is_set() and visitors.get("a") is not first
    assert visitors.get(None) is not visitors.get(None)


# Input


def test_input_is_answered_kindly(pair):
    for nothing in ("", "  \n", None):
        with pytest.raises(Unsuitable, match="nothing to read"):
            encode(pair, nothing, 8)
    with pytest.raises(Unsuitable, match=r"600 tokens.*up to 504.*by 96 tokens"):
        encode(pair, text(600), 8)
    with pytest.raises(Unsuitable, match="characters"):
        encode(pair, "w1 " * 100_000, 8)
    assert encode(pair, text(504), 8).shape == (1, 504)


def test_errors_become_text():
    assert explain(Unsuitable("Say something.")) == "Say something."
    assert explain(PairError("no\n  such pair")) == "no such pair"
    assert explain(KeyError("x")) == "KeyError: 'x'"
    assert "memory" in explain(torch.OutOfMemoryError("CUDA out of memory"))
    assert explain(RuntimeError()) == "RuntimeError: no further message"


def test_markup_escapes_what_people_and_models_write():
    evil = "<script>alert(1)</script>"
    lane = SimpleNamespace(text=evil, tokens=(1,), first_token=0.01, tokens_per_second=None, done=True, error=evil)
    token = SimpleNamespace(text=evil, kl=0.3, agree=False, own=evil, other='"><b>', probability=0.5)
    piece = SimpleNamespace(text=evil, origin="mapped")
    for html in (
        markup.pane(lane, "native", evil, evil),
        markup.strip([token]),
        markup.cache_strip([piece], evil),
        markup.message(evil),
        markup.pair_card([(evil, evil)]),
    ):
        assert "<script" not in html and '"><b>' not in html and "&lt;script&gt;" in html


def test_right_and_wrong_are_marked_where_the_answer_is_known(pair):
    example = pair.examples[0]
    assert pair.answer_to(example.prompt + " ") == example.answer == "w1" and pair.answer_to("w1 w2") == ""

    def shown(text, answer):
        lane = SimpleNamespace(
            text=text, tokens=(1, 2), first_token=0.01, tokens_per_second=1.0, done=True, error=None
        )
        return markup.pane(lane, "native", "title", "model", answer=answer)

    assert "✓ right" in shown(" Oslo. Who", "Oslo") and "✗ wrong" in shown("Oslofjord", "Oslo")
    assert "kv-mark" not in shown("Oslo", "")
    assert "The text says: <b>&lt;b&gt;</b>" in markup.counter(3, 9, "<b>")


def test_strip_colours_by_kl_and_frames_disagreement():
    def token(kl, agree):
        return SimpleNamespace(text="x", kl=kl, agree=agree, own="a", other="b", probability=0.5)

    html = markup.strip([token(0.0, True), token(0.1, True), token(5.0, False)])
    assert 'kv-cell k0"' in html and 'kv-cell k2"' in html and 'kv-cell k4 kv-disagree"' in html
    assert "2 of 3" in html and "1.7000" in html


def test_pieces_join_to_the_whole_text(pair):
    ids = pair.tokenizer("w1 w2 w3")["input_ids"]
    assert "".join(pieces(pair.tokenizer, ids)) == "w1 w2 w3"


def test_pairs_are_checked(family, pair, monkeypatch):
    pairs = Pairs(family)
    assert pairs.bundled() == [("tinytown-m → tinytown-l", "m-to-l")]
    assert pair.examples[0].prompt.startswith(text(40)) and pairs.first_prompt() == pair.examples[0].prompt
    with pytest.raises(PairError, match="no pair 's-to-l'"):
        pairs.load("s-to-l")
    with pytest.raises(PairError, match="Name a mapper"):
        pairs.load_custom("", "", " ", "")
    for name in ("not an id", "../../etc", "/etc"):
        if not Path(name).is_dir():
            with pytest.raises(PairError, match="not a Hub id"):
                pairs.load_custom("", "", name, "")
    folders = [str(family / part) for part in ("models/tinytown-m", "models/tinytown-l", "mappers/m-to-l")]
    assert pairs.load_custom(*folders, "").target_name == "tinytown-l"
    monkeypatch.setattr("pairs.MAX_PARAMETERS", 100)
    with pytest.raises(PairError, match="parameters together"):
        pairs.load_custom(*folders, "")
    monkeypatch.setattr("pairs.ON_SPACES", True)
    with pytest.raises(PairError, match="not a Hub id"):
        pairs.load_custom(*folders, "")


# Side by side


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("has_read", [True, False])
def test_race_gives_what_generate_gives(pair, temperature, has_read):
    settings = Settings(max_new_tokens=8, temperature=temperature, seed=5, source_has_read=has_read, readable=False)
    race = Race(pair, text(40, seed=9), settings)
    last = list(race.run())[-1]
    assert last.done and last.native.error is None and last.handoff.error is None
    common = {"max_new_tokens": 8, "do_sample": temperature > 0, "attention_mask": torch.ones_like(race.input_ids)}
    if temperature > 0:
        common |= {"temperature": 1.0, "top_k": 0}
    for lane, bridge in ((last.native, {}), (last.handoff, {"bridge": pair.bridge})):
        torch.manual_seed(5)
        expected = pair.target.generate(race.input_ids, **common, **bridge)[0, 40:].tolist()
        assert list(lane.tokens) == expected
        assert lane.text == pair.tokenizer.decode(expected, skip_special_tokens=True)
        assert lane.first_token > 0 and lane.tokens_per_second > 0
    assert last.handoff.report.status == "ok" and last.handoff.report.tokens_mapped > 0
    assert last.source_seconds > 0 and last.source_counted is not has_read
    assert has_read or last.handoff.first_token > last.source_seconds


def test_stop_ends_both_panes(pair):
    stop = threading.Event()
    race = Race(pair, text(30), Settings(max_new_tokens=300, readable=True), stop)
    for snapshot in race.run():
        if len(snapshot.native.tokens) >= 2 and len(snapshot.handoff.tokens) >= 2:
            stop.set()
    assert snapshot.stopped and snapshot.done
    assert 2 <= len(snapshot.native.tokens) < 300 and 2 <= len(snapshot.handoff.tokens) < 300


def test_errors_stay_in_their_pane(pair, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("the bridge broke")

    monkeypatch.setattr(type(pair.bridge), "attempt", fail)
    last = list(Race(pair, text(30), FAST).run())[-1]
    assert last.handoff.error == "the bridge broke" and last.native.error is None and len(last.native.tokens) == 6


def test_two_visitors_at_once_get_their_own_answers(pair):
    settings = Settings(max_new_tokens=8, temperature=1.0, seed=3, readable=False)
    prompts = [text(30, seed=1), text(35, seed=2)]
    alone = [list(Race(pair, prompt, settings).run())[-1] for prompt in prompts]
    together: dict[int, object] = {}

    def visit(number):
        together[number] = list(Race(pair, prompts[number], settings).run())[-1]

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for lane in ("native", "handoff"):
            assert getattr(together[number], lane).tokens == getattr(alone[number], lane).tokens


def test_judgement_against_two_plain_forwards(pair):
    ids = encode(pair, text(40, seed=4), 8)
    answer = [5, 6, 7, 8]
    result = judge_answer(pair, ids, answer)
    whole = torch.cat([ids, torch.tensor([answer])], dim=1)
    with torch.no_grad():
        own = pair.target(whole).logits[0, 39:43].double().log_softmax(-1)
        cache = pair.bridge.handoff(ids, target_model=pair.target)
        held = cache.get_seq_length()
        other = pair.target(whole[:, held:], past_key_values=cache).logits[0, 39 - held : 43 - held]
    other = other.double().log_softmax(-1)
    kl = (own.exp() * (own - other)).sum(-1)
    assert torch.allclose(torch.tensor([token.kl for token in result.tokens]).double(), kl, atol=1e-5, rtol=1e-4)
    assert [token.agree for token in result.tokens] == (own.argmax(-1) == other.argmax(-1)).tolist()
    probabilities = [token.probability for token in result.tokens]
    assert probabilities == pytest.approx([float(own[i, a].exp()) for i, a in enumerate(answer)], rel=1e-3)
    assert len(result.cosines) == 3 and len(result.cosines[0]) == 4
    assert all(-1.0001 <= value <= 1.0001 for row in result.cosines for value in row)


# Conversation


def turn(chat, message, model, settings=FAST, stop=None):
    return list(chat.turn(message, model, settings, stop))[-1]


def test_conversation_moves_and_shows_what_was_mapped(open_pair):
    chat = Chat(open_pair)
    first = turn(chat, text(20, seed=1), "source")
    assert first.switch.tokens_mapped == 0 and {piece.origin for piece in first.pieces} == {"native", "unread"}
    second = turn(chat, text(12, seed=2), "target")
    mapped = sum(piece.origin == "mapped" for piece in second.pieces)
    assert mapped == second.switch.tokens_mapped > 10 and second.switch.status == "ok"
    assert [message["role"] for message in second.messages] == ["user", "assistant"] * 2
    assert all(piece.origin == "native" for piece in second.pieces[:2])  # the sinks
    third = turn(chat, text(5, seed=3), "source")  # no mapper leads back
    assert third.switch.tokens_mapped == 0 and third.switch.tokens_kept > 20


def test_conversation_takes_back_what_it_cannot_answer(open_pair):
    chat = Chat(open_pair)
    turn(chat, text(10), "source")
    for message, words in (("", "Say something"), (text(700), "too long")):
        with pytest.raises(Unsuitable, match=words):
            turn(chat, message, "target")
    assert len(chat.messages) == 2
    stop = threading.Event()
    for view in chat.turn(text(8), "target", Settings(max_new_tokens=300, readable=True), stop):
        if view.seconds_to_first is not None:
            stop.set()
    assert view.done and len(chat.messages) == 4 and len(chat.session.input_ids[0]) < 300


def test_conversation_survives_a_process_of_its_own_for_each_turn(open_pair, tmp_path):
    usual = Chat(open_pair)
    for number, model in enumerate(("source", "target", "source")):
        expected = turn(usual, text(12, seed=number), model)
        # What another turn's process left in its objects is gone; only the folder stays.
        got = turn(Chat(open_pair, tmp_path), text(12, seed=number), model)
        assert got.messages == expected.messages and got.pieces == expected.pieces


def test_plain_render_for_tokenizers_without_template(pair):
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    ids = plain_render(pair.tokenizer)(messages, True)
    assert ids == pair.tokenizer("User: w1\nAssistant: w2\nAssistant:")["input_ids"]


# Damage


def test_damage_is_noise_of_the_stated_size_and_leaves_the_pair_alone(pair):
    ids = encode(pair, text(40, seed=6), 4)

    def states(bridge):
        cache = bridge.handoff(ids, target_model=pair.target, policy=DamageTestPolicy)
        return [layer.values[:, :, 2:36] for layer in cache.map_all().layers]

    from judgement import without_gates

    DamageTestPolicy = without_gates(pair.bridge)
    clean, again = states(pair.bridge), states(damaged_bridge(pair.bridge, 0.0))
    damaged = states(damaged_bridge(pair.bridge, 0.5))
    for layer in range(3):
        assert torch.equal(clean[layer], again[layer])
        ratio = (damaged[layer] - clean[layer]).std() / clean[layer].std(dim=(-2, -1)).mean()
        assert 0.35 < float(ratio) < 0.65
    assert all(torch.equal(a, b) for a, b in zip(clean, states(pair.bridge), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(damaged, states(damaged_bridge(pair.bridge, 0.5)), strict=True))


def test_guard_falls_back_under_damage(pair):
    ids = encode(pair, text(48, seed=40), 6)  # one of the texts on which the gates were calibrated
    with torch.no_grad():
        cache = pair.source(ids, use_cache=True).past_key_values
        own = pair.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    test = DamageTest(pair, ids, own[0, 48:].tolist(), cache)
    none, much = test.verdict(0.0), test.verdict(4.0)
    assert not none.fell_back and none.kl_guarded == pytest.approx(none.kl_unguarded, rel=1e-3, abs=1e-5)
    assert much.fell_back and much.report.gate in ("magnitude", "suffix_likelihood")
    assert much.kl_guarded < 1e-4 < none.kl_unguarded < much.kl_unguarded
    assert test.answer_with(4.0, True, 6) == pair.tokenizer.decode(own[0, 48:], skip_special_tokens=True).strip()
    html = markup.verdict_card(much, "own", "unguarded", "guarded")
    assert "Fell back" in html and much.report.gate in html


def test_command_line_finds_the_page_and_refuses_what_cannot_be(monkeypatch, capsys, tmp_path):
    assert bundled.space_folder() == SPACE
    monkeypatch.setattr("kvbridge_hf.space_command.NEEDED", ("no_such_module_here",))
    assert main(["space"]) == 2
    assert "pip install" in capsys.readouterr().err
    monkeypatch.setattr("kvbridge_hf.space_command.NEEDED", ())
    assert main(["space", "--family", str(tmp_path)]) == 2
    assert "no family" in capsys.readouterr().err


def test_front_matter_and_requirements():
    import yaml

    front = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert front["sdk"] == "gradio" and (SPACE / front["app_file"]).is_file()
    assert len(front["short_description"]) <= 60 and front["license"] == "apache-2.0"
    pinned = (SPACE.parent.parent / "constraints.txt").read_text(encoding="utf-8").split()
    assert f"gradio=={front['sdk_version']}" in pinned
    names = {line.split(">")[0] for line in (SPACE / "requirements.txt").read_text().splitlines() if "#" not in line}
    assert {"kvbridge_hf", "plotly", "spaces"} <= names


# Elsewhere than on this machine

CALLS = """
import json, pickle, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import zero, actions
from race import Settings
assert zero.ON_ZERO
actions.configure(Path(sys.argv[2]))
prompt, settings = sys.argv[3], Settings(max_new_tokens=4, readable=False)
frames = list(actions.race_frames("m-to-l", prompt, settings, None))
folder = actions.new_chat_folder()
for model in ("source", "target"):
    view = list(actions.chat_frames("m-to-l", None, folder, prompt, model, settings, None))[-1]
verdict, *_ = list(actions.damage_frames("m-to-l", prompt, 0.5, 4, False, None))
times = actions.latency("m-to-l", prompt, 2)
import spaces
kinds = [kind for kind, _ in frames][-2:]
print("ANSWER " + json.dumps([kinds, len(view.messages), verdict[0], sorted(times["paths"]), spaces.LENT]))
"""

# Every call is lent a GPU for some seconds and runs elsewhere: arguments and results travel by pickle.
FAKE_SPACES = """
import functools, inspect, pickle
LENT = {}
def travel(value):
    return pickle.loads(pickle.dumps(value))
def GPU(duration=60):
    def decorate(function):
        LENT[function.__name__] = duration
        if inspect.isgeneratorfunction(function):
            @functools.wraps(function)
            def run(*args):
                for item in function(*travel(args)):
                    yield travel(item)
        else:
            @functools.wraps(function)
            def run(*args):
                return travel(function(*travel(args)))
        return run
    return decorate
"""


def answer_of(code, *arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": str(SPACE.parent.parent), **variables}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))[7:])


def test_zero_gpu_lends_each_call_a_gpu_and_what_it_gives_travels(family, tmp_path):
    (tmp_path / "spaces").mkdir()
    (tmp_path / "spaces" / "__init__.py").write_text(FAKE_SPACES)
    path = os.pathsep.join([str(tmp_path), str(SPACE.parent.parent)])
    answer = answer_of(CALLS, SPACE, family, text(40), SPACES_ZERO_GPU="true", PYTHONPATH=path)
    kinds, messages, verdict, paths, lent = answer
    assert kinds == ["race", "judgement"] and messages == 4 and verdict == "verdict" and len(paths) == 4
    assert lent == {"race_frames": 90, "chat_frames": 60, "damage_frames": 90, "latency": 120}


FROM_THE_HUB = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pairs
from race import Race, Settings
pairs.ON_SPACES = True
known = pairs.Pairs()
try:
    known.load_custom("", "", "org/missing", "")
    missing = ""
except Exception as error:
    from prompts import explain
    missing = explain(error)
pair = known.load_custom("org/m", "org/l", "org/m-to-l", sys.argv[3])
last = list(Race(pair, sys.argv[2], Settings(max_new_tokens=4, readable=False)).run())[-1]
print("ANSWER " + json.dumps([missing, pair.source_name, list(last.handoff.tokens), last.handoff.report.status]))
"""


def test_pair_by_hub_ids(family, pair, tmp_path):
    expected = list(Race(pair, text(40, seed=9), Settings(max_new_tokens=4, readable=False)).run())[-1]
    with LoopbackHub() as hub:
        for name, folder in (("m", "models/tinytown-m"), ("l", "models/tinytown-l"), ("m-to-l", "mappers/m-to-l")):
            hub.put(f"org/{name}", family / folder)
        commit = hub.repos["model", "org/m-to-l"].refs["main"]
        variables = hub.environment(tmp_path / "home")
        missing, name, tokens, status = answer_of(FROM_THE_HUB, SPACE, text(40, seed=9), commit, **variables)
    assert "org/missing" in missing
    assert (name, tokens, status) == ("org/m", list(expected.handoff.tokens), expected.handoff.report.status)


# The page in a browser

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WAIT = 120_000


@pytest.fixture(scope="module")
def served(family):
    """The page's address, served from this process."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'kvbridge_hf[space]'")
    pytest.importorskip("plotly", reason="the page needs plotly: pip install 'kvbridge_hf[space]'")
    pytest.importorskip("playwright.sync_api", reason="the browser test needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("the browser test needs Chromium: apt-get install chromium")
    import app

    page = app.launch(family, server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield page.local_url
    page.close()


@pytest.fixture(scope="module")
def browser(served):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def visit(browser, address, width=1180, height=900):
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(WAIT)
    page.goto(address)
    page.wait_for_selector(".kv-pair")
    return page


def test_browser_runs_both_panes(browser, served):
    page = visit(browser, served)
    page.locator(".kv-examples button:visible").first.click()
    page.wait_for_function("document.querySelector('#prompt textarea').value.length > 20")
    page.click("#run")
    page.wait_for_selector("#strip .kv-cell")
    page.wait_for_selector("#heat .js-plotly-plot")
    for pane in ("#native", "#handoff"):
        assert page.inner_text(f"{pane} .kv-text").strip()
        assert page.inner_text(f"{pane} .kv-ttft").endswith(("ms", "s"))
        assert float(page.inner_text(f"{pane} .kv-speed").replace(",", "")) > 0
        assert page.get_attribute(f"{pane} .kv-pane", "data-state") == "done"
    assert "mapped" in page.inner_text("#handoff .kv-foot") or "Fell back" in page.inner_text("#handoff .kv-foot")
    assert float(page.inner_text("#strip .kv-kl")) >= 0
    page.close()


def test_browser_stops_a_run_and_says_so(browser, served):
    page = visit(browser, served)
    page.fill("#prompt textarea", text(30))
    page.click("#settings button")
    page.locator("#settings input[type=number]").first.fill("256")
    page.locator("#settings input[type=number]").first.press("Tab")
    page.click("#run")
    page.wait_for_selector("#handoff [data-state=running] .kv-ttft:not(:text('–'))")
    page.click("#stop")
    page.wait_for_selector("#race-message .kv-note")
    page.wait_for_selector("#handoff [data-state=done]")
    assert int(page.inner_text("#handoff .kv-count")) < 256
    page.close()


def test_browser_answers_empty_and_long_input_in_words(browser, served):
    page = visit(browser, served)
    page.fill("#prompt textarea", "  ")
    page.click("#run")
    page.wait_for_selector("#race-message .kv-error:text('nothing to read')")
    page.fill("#prompt textarea", text(700))
    page.click("#run")
    page.wait_for_selector("#race-message .kv-error:text('Shorten it')")
    page.close()


def test_browser_at_phone_size(browser, served):
    page = visit(browser, served, 390, 844)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("Chat", "Side by side"):
        page.get_by_role("tab", name=name).click()
    page.fill("#prompt textarea", text(30))
    page.click("#run")
    page.wait_for_selector("#strip .kv-cell")
    native, handoff = (page.locator(pane).bounding_box() for pane in ("#native", "#handoff"))
    assert (
        native["x"] + native["width"] <= 390 and handoff["y"] >= native["y"] + native["height"]
    )  # one below the other
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
