"""Publishing and loading through an unmodified `huggingface_hub` in another process, against a Hub on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import LoopbackHub
from safetensors.torch import load_file
from test_modeling import make_config, make_mapper

from kvbridge_hf.hub import read_manifest
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

ROOT = Path(__file__).parents[1]
REPO = "org/small-to-large"

# A process that runs what it is told and answers with a value or with the names of an error's classes.
CLIENT = """
import json, sys, traceback
import huggingface_hub
from kvbridge_hf import hub
from kvbridge_hf.hub.inspection import inspect_artifact
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper
from transformers import AutoConfig, AutoModel
for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"value": eval(request["code"], globals(), request["names"])}
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        answer = {"error": kinds, "message": str(error), "trace": traceback.format_exc()}
    print("ANSWER " + json.dumps(answer), flush=True)
"""


class Client:
    """An unmodified client in a process of its own."""

    def __init__(self, hub: LoopbackHub, home: Path, **variables: str):
        environment = {**os.environ, **hub.environment(home), **variables}
        home.mkdir(exist_ok=True)
        self.log = home / "stderr.log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
        )

    def ask(self, code: str, **names):
        assert self.process.stdin and self.process.stdout
        names = {name: str(value) if isinstance(value, Path) else value for name, value in names.items()}
        self.process.stdin.write(json.dumps({"code": code, "names": names}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the client ended: {self.log.read_text()[-2000:]}")

    def value(self, code: str, **names):
        answer = self.ask(code, **names)
        assert "error" not in answer, answer["trace"]
        return answer["value"]

    def error(self, code: str, **names) -> tuple[list[str], str]:
        answer = self.ask(code, **names)
        assert "error" in answer, f"no error, but {answer}"
        return answer["error"], answer["message"]

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory) -> Iterator[Client]:
    client = Client(hub, tmp_path_factory.mktemp("home"))
    yield client
    client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "mapper"
    names = {"source_fingerprint": {"name_or_path": "org/small"}, "target_fingerprint": {"name_or_path": "org/large"}}
    mapper = KVBridgeMapper(make_config(**names))
    mapper.load_state_dict(make_mapper().state_dict())
    mapper.save_pretrained(folder, max_shard_size=1500)
    return folder


PUSH = "KVBridgeMapper.from_pretrained(folder).push_to_hub(repo, max_shard_size=1500, **options).oid"
LOAD = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache, **options).save_pretrained(out, max_shard_size=1500)"


@pytest.fixture(scope="module")
def pushed(hub, client, folder) -> str:
    """The commit of the mapper in `REPO`."""
    return client.value(PUSH, folder=folder, repo=REPO, options={})


@pytest.fixture(autouse=True)
def _no_faults_left(hub):
    hub.requests.clear()
    yield
    assert all(fault.times == 0 for fault in hub.faults), "a fault was never met"
    hub.faults.clear()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        loaded |= load_file(path)
    return loaded


def incomplete(cache: Path) -> list[Path]:
    """Blobs in a cache whose bytes are not those that their name promises, and files of broken-off downloads."""
    blobs = [path for path in cache.rglob("blobs/*") if path.is_file()]
    return [path for path in blobs if path.name.endswith(".incomplete") or not path.stat().st_size]


def test_push_then_load_elsewhere_is_byte_identical(hub, client, folder, pushed, tmp_path):
    uploaded = hub.files(REPO)
    for path in folder.glob("*.safetensors"):
        assert uploaded[path.name] == path.read_bytes()
    fresh = Client(hub, tmp_path / "home")
    fresh.value(LOAD, repo=REPO, cache=tmp_path / "cache", out=tmp_path / "out", options={})
    fresh.close()
    for path in folder.glob("model*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert hub.count("GET", "/cdn/") == len(list(folder.glob("*.safetensors"))) > 1


def test_only_what_is_needed_is_downloaded(hub, client, pushed, tmp_path):
    hub.repos["model", REPO].commits[pushed]["large.bin"] = hub.repos["model", REPO].commits[pushed]["config.json"]
    options = {"revision": pushed}
    client.value(LOAD, repo=REPO, cache=tmp_path / "cache", out=tmp_path / "out", options=options)
    assert hub.count("GET", "large.bin") == 0
    before = len(hub.requests)
    client.value(LOAD, repo=REPO, cache=tmp_path / "cache", out=tmp_path / "again", options=options)
    assert len(hub.requests) == before, "a pinned commit in the cache needs no request"
    del hub.repos["model", REPO].commits[pushed]["large.bin"]
    hub.requests.clear()
    facts = client.value("inspect_artifact(repo, cache_dir=cache)", repo=REPO, cache=tmp_path / "light")
    assert hub.count("GET", "config.json") == 1
    assert facts["parameters"] == sum(parameter.numel() for parameter in make_mapper().parameters())
    # Of the weight files the headers are asked for, and nothing lands in the cache.
    assert not list((tmp_path / "light").rglob("*.safetensors"))


def test_auto_classes_load_from_the_hub(client, pushed, tmp_path):
    code = "type(AutoModel.from_pretrained(repo, cache_dir=cache)).__name__"
    assert client.value(code, repo=REPO, cache=tmp_path) == "KVBridgeMapper"
    code = "type(AutoConfig.from_pretrained(repo, cache_dir=cache)).__name__"
    assert client.value(code, repo=REPO, cache=tmp_path) == "KVBridgeConfig"


def test_branches_commits_subfolders_and_pull_requests(hub, client, folder, pushed, tmp_path):
    repo = "org/many"
    first = client.value(PUSH, folder=folder, repo=repo, options={})
    other = tmp_path / "other"
    make_mapper(seed=5).save_pretrained(other)
    push = "KVBridgeMapper.from_pretrained(folder).push_to_hub(repo, **options)"
    client.value(f"{push}.oid", folder=other, repo=repo, options={"revision": "dev"})
    client.value(f"{push}.oid", folder=other, repo=repo, options={"subfolder": "second/mapper"})
    url = client.value(f"{push}.pr_url", folder=other, repo=repo, options={"create_pr": True, "commit_message": "New"})
    assert re.search(r"/discussions/1$", url)
    expected = {"main": folder, "dev": other, first: folder, "refs/pr/1": other}
    for number, (revision, saved) in enumerate(expected.items()):
        out = tmp_path / f"out{number}"
        client.value(LOAD, repo=repo, cache=tmp_path / "cache", out=out, options={"revision": revision})
        assert all(torch.equal(tensors(out)[name], tensor) for name, tensor in tensors(saved).items())
    client.value(
        LOAD, repo=repo, cache=tmp_path / "cache", out=tmp_path / "sub", options={"subfolder": "second/mapper"}
    )
    assert torch.equal(tensors(tmp_path / "sub")["key_weight"], make_mapper(seed=5).key_weight)
    # Shards of the first push are gone where the second, unsharded one was committed, and nowhere else.
    assert [name for name in hub.files(repo, "dev") if "of-" in name] == []
    assert [name for name in hub.files(repo) if "of-" in name] != []


def test_private_gated_and_missing_repositories_give_the_hubs_errors(hub, client, folder, tmp_path):
    client.value(PUSH, folder=folder, repo="org/secret", options={"private": True})
    assert hub.repos["model", "org/secret"].private
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache, **options) and None"
    anonymous, cache = {"token": False}, tmp_path / "cache"
    kinds, _ = client.error(load, repo="org/secret", cache=cache, options=anonymous)
    assert "RepositoryNotFoundError" in kinds
    client.value(load, repo="org/secret", cache=cache, options={"token": "hf_loopback"})
    assert "RepositoryNotFoundError" in client.error(load, repo="org/missing", cache=cache, options={})[0]
    hub.repos["model", "org/secret"].private, hub.repos["model", "org/secret"].gated = False, True
    kinds, _ = client.error(load, repo="org/secret", cache=tmp_path / "none", options=anonymous)
    assert "GatedRepoError" in kinds
    kinds, _ = client.error(load, repo=REPO, cache=cache, options={"revision": "no-such-branch"})
    assert "RevisionNotFoundError" in kinds
    kinds, message = client.error(PUSH, folder=folder, repo="org/x", options={"token": "hf_wrong"})
    assert "HfHubHTTPError" in kinds and "401" in message


def test_repository_without_a_mapper_is_an_artifact_error(hub, client, pushed, tmp_path):
    repo = hub.repos["model", REPO]
    files = {name: blob for name, blob in repo.commits[pushed].items() if name != "config.json"}
    repo.commit("holed", files)
    repo.commit("bare", {})
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache, revision=revision) and None"
    for revision, name in (("holed", "config.json"), ("bare", "kvbridge_manifest.json")):
        kinds, message = client.error(load, repo=REPO, cache=tmp_path, revision=revision)
        assert "ArtifactError" in kinds and name in message


def test_search_finds_a_mapper_by_its_pair(hub, client, folder, pushed):
    search = "[model.id for model in hub.search_mappers(source, target)]"
    assert REPO in client.value(search, source="org/small", target="org/large")
    assert REPO not in client.value(search, source="org/large", target="org/small")
    assert client.value(search, source="org/small", target="org/other") == []


def test_offline_uses_the_cache_and_says_when_it_cannot(hub, client, folder, pushed, tmp_path):
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache, **options) and None"
    kinds, _ = client.error(load, repo=REPO, cache=tmp_path / "cache", options={"local_files_only": True})
    assert "LocalEntryNotFoundError" in kinds
    client.value(load, repo=REPO, cache=tmp_path / "cache", options={})
    hub.requests.clear()
    client.value(load, repo=REPO, cache=tmp_path / "cache", options={"local_files_only": True})
    # What HF_HUB_OFFLINE=1 sets, without the time that another process takes to start.
    switch = "setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', on)"
    client.value(switch, on=True)
    try:
        client.value(load, repo=REPO, cache=tmp_path / "cache", options={})
        kinds, _ = client.error(load, repo=REPO, cache=tmp_path / "empty", options={})
        assert "LocalEntryNotFoundError" in kinds
    finally:
        client.value(switch, on=False)
    assert hub.requests == []


# Faults that pass: the client tries again and ends with the right bytes.
PASSING = [
    ("HEAD", "kvbridge_manifest.json", "503", 1),
    ("HEAD", "config.json", "429", 1),
    ("HEAD", "model-00001", "drop", 1),
    ("GET", "/cdn/", "drop", 1),
    ("GET", "/cdn/", "503", 2),
    ("GET", "/cdn/", "truncate", 1),
    ("GET", "config.json", "truncate", 1),
    ("GET", "/cdn/", "wrong_bytes", 1),
    ("GET", "kvbridge_manifest.json", "wrong_bytes", 1),
    ("GET", "README.md", "wrong_bytes", 1),
]


@pytest.mark.parametrize("method, pattern, kind, times", PASSING)
def test_passing_fault_while_loading_is_survived(hub, client, folder, pushed, tmp_path, method, pattern, kind, times):
    hub.fail(method, pattern, kind, times)
    client.value(LOAD, repo=REPO, cache=tmp_path / "cache", out=tmp_path / "out", options={})
    for name, tensor in tensors(folder).items():
        assert torch.equal(tensors(tmp_path / "out")[name], tensor)
    assert incomplete(tmp_path / "cache") == []


def test_lasting_wrong_bytes_are_refused_and_do_not_stay_in_the_cache(hub, client, pushed, tmp_path):
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache) and None"
    for pattern in ("/cdn/", "config.json", "kvbridge_manifest.json"):
        cache = tmp_path / re.sub(r"\W", "", pattern)
        fault_count = (
            2 if pattern != "/cdn/" else 2 * len([name for name in hub.files(REPO) if ".safetensors" in name])
        )
        hub.fail("GET", pattern, "wrong_bytes", fault_count)
        kinds, message = client.error(load, repo=REPO, cache=cache)
        assert "ArtifactError" in kinds, message
        hub.faults.clear()
        client.value(load, repo=REPO, cache=cache)


@pytest.mark.parametrize("kind, expected", [("401", "HfHubHTTPError"), ("403", "LocalEntryNotFoundError")])
def test_refused_download_is_an_error_and_leaves_no_half_artifact(hub, client, pushed, tmp_path, kind, expected):
    hub.fail("HEAD", "config.json", kind, 1)
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache) and None"
    assert expected in client.error(load, repo=REPO, cache=tmp_path)[0]
    client.value(load, repo=REPO, cache=tmp_path)
    assert incomplete(tmp_path) == []


def test_lasting_outage_is_the_hubs_error_and_leaves_no_half_artifact(hub, client, pushed, tmp_path):
    load = "KVBridgeMapper.from_pretrained(repo, cache_dir=cache) and None"
    hub.fail("GET", "/cdn/", "503", 1000)
    kinds, message = client.error(load, repo=REPO, cache=tmp_path)
    assert "HfHubHTTPError" in kinds and "503" in message
    hub.faults.clear()
    client.value(load, repo=REPO, cache=tmp_path)
    assert incomplete(tmp_path) == []


@pytest.mark.parametrize(
    "method, pattern, kind",
    [("PUT", "/lfs-upload/", "503"), ("POST", "objects/batch", "503"), ("POST", "/preupload/", "drop")],
)
def test_passing_fault_while_pushing_is_survived(hub, client, folder, tmp_path, method, pattern, kind):
    hub.lfs.clear()
    repo = f"org/pushed-{kind}-{method}".lower()
    hub.fail(method, pattern, kind)
    client.value(PUSH, folder=folder, repo=repo, options={})
    assert hub.files(repo)["model.safetensors.index.json"] == (folder / "model.safetensors.index.json").read_bytes()


def test_broken_push_leaves_the_repository_as_it_was(hub, client, folder, tmp_path):
    repo = "org/steady"
    client.value(PUSH, folder=folder, repo=repo, options={})
    before = hub.files(repo)
    make_mapper(seed=5).save_pretrained(tmp_path / "other")
    hub.fail("POST", "/commit/", "500")
    assert "HfHubHTTPError" in client.error(PUSH, folder=tmp_path / "other", repo=repo, options={})[0]
    assert hub.files(repo) == before
    client.value(PUSH, folder=tmp_path / "other", repo=repo, options={})
    assert hub.files(repo) != before


def test_damaged_folder_is_not_published(hub, client, folder, tmp_path):
    make_mapper().save_pretrained(tmp_path / "mapper")
    (tmp_path / "mapper" / "config.json").write_text("{}")
    kinds, _ = client.error("hub.publish_folder(folder, repo)", folder=tmp_path / "mapper", repo="org/never")
    assert "ArtifactError" in kinds and ("model", "org/never") not in hub.repos


def test_what_was_pushed_is_a_sealed_artifact_with_a_valid_card(hub, client, folder, pushed, tmp_path):
    for name, data in hub.files(REPO).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    manifest = read_manifest(tmp_path)
    assert set(hub.files(REPO)) == {*manifest.files, "kvbridge_manifest.json", ".gitattributes"}
    assert hub.count("POST", "validate-yaml") == 0  # asked when it was pushed, before this test
    card = (tmp_path / "README.md").read_text()
    assert f'KVBridgeMapper.from_pretrained("{REPO}")' in card


def test_command_line_pushes_and_searches(hub, client, folder, tmp_path):
    main = "__import__('kvbridge_hf.cli', fromlist=['main']).main"
    assert client.value(f"{main}(['push', folder, 'org/from-the-command-line'])", folder=folder) == 0
    assert hub.files("org/from-the-command-line")["config.json"] == (folder / "config.json").read_bytes()
    assert client.value(f"{main}(['search', 'org/small', 'org/large'])") == 0
    assert client.value(f"{main}(['push', folder, 'org/nothing'])", folder=tmp_path) == 2
    assert ("model", "org/nothing") not in hub.repos
    assert client.value(f"{main}(['inspect', 'org/nothing'])") == 2
