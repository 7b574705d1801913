"""From a push to an answer by unmodified clients in fresh processes, while the Hub misbehaves in every way it can."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from handoff_reference import random_mapper
from hub_server import LoopbackHub
from models import tiny_model
from test_hub import Client

from kvbridge_hf import KVBridge
from kvbridge_hf.fingerprint import model_fingerprint

ROOT = Path(__file__).resolve().parent.parent
SMALL, LARGE, MAPPER = "org/small", "org/large", "org/small-to-large"

PUSH = """
import sys
from kvbridge_hf import KVBridgeMapper
print("OID", KVBridgeMapper.from_pretrained(sys.argv[1]).push_to_hub(sys.argv[2], max_shard_size=20_000).oid)
"""

USE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from kvbridge_hf import KVBridge, KVBridgeMapper
from kvbridge_hf.hub import search_mappers

source_id, target_id = sys.argv[1:3]
found = [model.id for model in search_mappers(source_id, target_id)]
mapper = KVBridgeMapper.from_pretrained(found[0])
source, target = (AutoModelForCausalLM.from_pretrained(name) for name in (source_id, target_id))
ids = torch.tensor(json.loads(sys.argv[3]))
output = target.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    bridge=KVBridge(source, mapper),
    max_new_tokens=8,
    do_sample=False,
    return_dict_in_generate=True,
)
print("ANSWER " + json.dumps([found, output.sequences.tolist(), output.handoff_report.status]))
"""


def run(code: str, hub: LoopbackHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hub.environment(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=home.parent, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two models and a mapper whose card knows the models' ids."""
    folder = tmp_path_factory.mktemp("family")
    source = tiny_model("qwen3", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
    target = tiny_model("llama", num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, seed=1)
    mapper = random_mapper(source, target, num_sinks=2, num_native_suffix=3)
    for name, model in (("source", source), ("target", target)):
        fingerprint = {**model_fingerprint(model), "name_or_path": SMALL if name == "source" else LARGE}
        setattr(mapper.config, f"{name}_fingerprint", fingerprint)
        model.save_pretrained(folder / name)
    mapper.save_pretrained(folder / "mapper", max_shard_size=20_000)
    return folder, source, target, mapper


@pytest.fixture(scope="module")
def hub(family) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        for name, repo in (("source", SMALL), ("target", LARGE), ("mapper", MAPPER)):
            hub.put(repo, family[0] / name)
        yield hub


def test_push_search_load_generate_in_fresh_processes(family, tmp_path):
    """Every kind of fault that passes is met once on the way, and the answer is that of this process."""
    folder, source, target, mapper = family
    ids = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = target.generate(ids, bridge=KVBridge(source, mapper), **settings)
    with LoopbackHub() as hub:
        hub.put(SMALL, folder / "source")
        hub.put(LARGE, folder / "target")
        for method, pattern, kind in (
            ("POST", "/api/repos/create", "503"),
            ("POST", "/preupload/", "drop"),
            ("POST", "objects/batch", "429"),
            ("PUT", "/lfs-upload/", "503"),
        ):
            hub.fail(method, pattern, kind)
        pushed = run(PUSH, hub, tmp_path / "publisher", str(folder / "mapper"), MAPPER)
        assert pushed.returncode == 0, pushed.stderr[-2000:]
        assert [fault for fault in hub.faults if fault.times] == []
        assert sum(name.endswith(".safetensors") for name in hub.files(MAPPER)) > 1
        for method, pattern, kind in (
            ("GET", "/api/models$", "drop"),
            ("GET", "/api/models$", "truncate"),
            ("HEAD", f"{MAPPER}/.*/kvbridge_manifest.json", "429"),
            ("HEAD", f"{MAPPER}/.*/config.json", "503"),
            ("GET", f"{MAPPER}/.*/config.json", "wrong_bytes"),
            ("GET", f"{MAPPER}/.*/README.md", "truncate"),
            ("GET", "/cdn/", "truncate"),
            ("GET", "/cdn/", "drop"),
            ("GET", "/cdn/", "503"),
        ):
            hub.fail(method, pattern, kind)
        used = run(USE, hub, tmp_path / "user", SMALL, LARGE, json.dumps(ids.tolist()))
        assert used.returncode == 0, used.stderr[-2000:]
        assert [fault for fault in hub.faults if fault.times] == []
    answer = json.loads(next(line for line in used.stdout.splitlines() if line.startswith("ANSWER "))[7:])
    assert answer == [[MAPPER], expected.tolist(), "ok"]
    assert broken_files(tmp_path / "user") == []


def broken_files(cache: Path) -> list[str]:
    """Files of a Hub cache that are not what they promise: a blob has the hash of its bytes as its name."""
    broken = []
    for blob in cache.rglob("blobs/*"):
        data = blob.read_bytes()
        names = (hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
        if blob.name not in names:
            broken.append(blob.name)
    return broken + [str(link) for link in cache.rglob("snapshots/**/*") if link.is_symlink() and not link.exists()]


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory) -> Iterator[Client]:
    client = Client(hub, tmp_path_factory.mktemp("home"))
    # The client stays as it is, but it does not have to wait: the pauses between its attempts would be minutes.
    client.value("exec('import time; wait = time.sleep; time.sleep = lambda seconds: wait(min(seconds, 0.01))', {})")
    yield client
    client.close()


# Where a fault lasts, and what it ends in.
WEIGHTS, CONFIG, MANIFEST = "/cdn/", f"{MAPPER}/.*config.json", f"{MAPPER}/.*kvbridge_manifest.json"
LASTING = [
    (pattern, kind, expected)
    for pattern in (WEIGHTS, CONFIG, MANIFEST)
    for kind, expected in (
        ("drop", "TransportError"),
        ("truncate", "TransportError"),
        ("429", "HfHubHTTPError"),
        ("503", "HfHubHTTPError"),
        ("401", "HfHubHTTPError"),
        ("wrong_bytes", "ArtifactError"),
    )
]


@pytest.mark.parametrize("pattern, kind, expected", LASTING)
def test_lasting_fault_is_the_right_error_and_leaves_no_half_artifact(hub, client, tmp_path, pattern, kind, expected):
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache, **options) and None"
    hub.fail("GET", pattern, kind, 10_000)
    try:
        kinds, message = client.error(load, repo=MAPPER, cache=tmp_path, options={})
    finally:
        hub.faults.clear()
    assert expected in kinds, (kinds, message)
    assert broken_files(tmp_path) == [] or all(
        re.fullmatch(r".*\.incomplete", name) for name in broken_files(tmp_path)
    )
    # What has come so far is no mapper, and nobody who is offline takes it for one.
    kinds, _ = client.error(load, repo=MAPPER, cache=tmp_path, options={"local_files_only": True})
    assert {"LocalEntryNotFoundError", "ArtifactError"} & set(kinds), kinds
    client.value(load, repo=MAPPER, cache=tmp_path, options={})
    assert broken_files(tmp_path) == []


@pytest.mark.parametrize("kind", ["drop", "truncate", "429", "503", "wrong_bytes"])
def test_search_asks_again(hub, client, kind):
    hub.fail("GET", "/api/models$", kind)
    assert client.value("[model.id for model in hub.search_mappers(a, b)]", a=SMALL, b=LARGE) == [MAPPER]


def test_command_line_answers_a_dead_hub_in_one_line(hub, client):
    main = "__import__('kvbridge_hf.cli', fromlist=['main']).main"
    for kind in ("drop", "503", "401"):
        hub.fail("GET", "/api/models$", kind, 10_000)
        try:
            assert client.value(f"{main}(['search', a, b])", a=SMALL, b=LARGE) == 2
        finally:
            hub.faults.clear()
    lines = [line for line in client.log.read_text().splitlines() if line.startswith("kvbridge: ")]
    assert len(lines) == 3
