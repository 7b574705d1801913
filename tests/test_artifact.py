"""Saving and loading: every byte and every tensor of an artifact is checked, and a save is all or nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import tiny_model
from safetensors.torch import load_file, save_file
from test_modeling import make_config, make_mapper, make_source
from transformers import AutoConfig, AutoModel

from kvbridge_hf.configuration_kvbridge import KVBridgeConfig
from kvbridge_hf.errors import ArtifactError, KVBridgeError
from kvbridge_hf.hub import artifact, read_manifest, verify_folder, write_manifest
from kvbridge_hf.hub.integrity import GENERATE_NAME, MANIFEST_NAME, file_sha256
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

ROOT = Path(__file__).parents[1]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reseal(folder: Path, config: dict | None = None) -> None:
    """Make hashes and manifest agree with the files again, as somebody who alters an artifact on purpose would."""
    values = json.loads((folder / "config.json").read_text()) if config is None else config
    values["weight_hashes"] = {path.name: file_sha256(path) for path in folder.glob("*.safetensors")}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    write_manifest(folder)


@pytest.fixture
def saved(tmp_path) -> Path:
    make_mapper().save_pretrained(tmp_path / "mapper")
    return tmp_path / "mapper"


@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_size", ["5GB", 1500])
def test_round_trip_is_exact(tmp_path, support, dtype, max_shard_size):
    mapper = make_mapper(support).to(dtype)
    mapper.save_pretrained(tmp_path / "mapper", max_shard_size=max_shard_size)
    shards = list((tmp_path / "mapper").glob("model*.safetensors"))
    assert len(shards) > 1 if max_shard_size == 1500 else len(shards) == 1
    again = KVBridgeMapper.from_pretrained(tmp_path / "mapper")
    assert again.dtype == dtype and not again.training
    for name, tensor in mapper.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert again.artifact_digest == mapper.artifact_digest == read_manifest(tmp_path / "mapper").digest
    for (keys, values), (keys_again, values_again) in zip(mapper(make_source()), again(make_source()), strict=True):
        assert torch.equal(keys, keys_again) and torch.equal(values, values_again)


def test_round_trip_through_a_fresh_process(saved, tmp_path):
    """Load elsewhere, save again: the weights are the same bytes, and so is the rest."""
    script = (
        "import sys, kvbridge_hf.modeling_kvbridge as m\n"
        "m.KVBridgeMapper.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, str(saved), str(tmp_path / "again")], cwd=ROOT, check=True)
    assert tree(tmp_path / "again") == tree(saved)


def test_same_mapper_gives_the_same_artifact(saved, tmp_path):
    make_mapper().save_pretrained(tmp_path / "twin")
    assert tree(tmp_path / "twin") == tree(saved)


def test_auto_classes_know_the_type(saved):
    assert isinstance(AutoConfig.from_pretrained(saved), KVBridgeConfig)
    mapper = AutoModel.from_pretrained(saved, dtype="bfloat16")
    assert isinstance(mapper, KVBridgeMapper) and mapper.dtype == torch.bfloat16
    assert mapper.artifact_digest == read_manifest(saved).digest


def test_loading_options(saved, tmp_path):
    (tmp_path / "repo").mkdir()
    saved.rename(tmp_path / "repo" / "inner")
    mapper, info = KVBridgeMapper.from_pretrained(
        tmp_path / "repo",
        subfolder="inner",
        dtype=torch.float64,
        device_map="auto",
        num_sinks=9,
        output_loading_info=True,
    )
    assert mapper.dtype == torch.float64 and mapper.config.num_sinks == 9 and not info["missing_keys"]
    assert mapper.name_or_path == str(tmp_path / "repo")


def names_of(folder: Path) -> list[str]:
    return sorted(tree(folder))


@pytest.mark.parametrize("place", [0.0, 0.37, 0.5, 0.99999])
@pytest.mark.parametrize("max_shard_size", ["5GB", 1500])
def test_a_flipped_byte_anywhere_is_refused(tmp_path, place, max_shard_size):
    folder = tmp_path / "mapper"
    make_mapper("head_local").save_pretrained(folder, max_shard_size=max_shard_size)
    names = names_of(folder)
    assert {"config.json", "README.md", MANIFEST_NAME} < set(names)
    for name in names:
        flip(folder / name, int(place * (folder / name).stat().st_size))
        with pytest.raises(ArtifactError):
            KVBridgeMapper.from_pretrained(folder)
        flip(folder / name, int(place * (folder / name).stat().st_size))
    KVBridgeMapper.from_pretrained(folder)


def flip(path: Path, position: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def test_random_damage_is_refused(saved):
    """Any bit of any file, by the check that `from_pretrained` makes before anything else."""
    draw = random.Random(0)
    for _ in range(150):
        path = saved / draw.choice(names_of(saved))
        position, mask = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        flip(path, position, mask)
        with pytest.raises(ArtifactError):
            verify_folder(saved)
        flip(path, position, mask)
    verify_folder(saved)


def test_missing_shortened_and_foreign_files_are_refused(saved, tmp_path):
    for name in names_of(saved):
        data = (saved / name).read_bytes()
        (saved / name).write_bytes(data[:-1])
        with pytest.raises(ArtifactError):
            KVBridgeMapper.from_pretrained(saved)
        (saved / name).unlink()
        with pytest.raises(ArtifactError):
            KVBridgeMapper.from_pretrained(saved)
        (saved / name).write_bytes(data)
    for name in (
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "adapter_config.json",
        GENERATE_NAME + ".py",
    ):
        (saved / name).write_bytes(b"{}")
        with pytest.raises(ArtifactError, match=name):
            KVBridgeMapper.from_pretrained(saved)
        (saved / name).unlink()
    (saved / "notes.txt").write_text("not part of it, and nobody's business")
    KVBridgeMapper.from_pretrained(saved)
    with pytest.raises(ArtifactError, match=MANIFEST_NAME):
        (tmp_path / "empty").mkdir()
        KVBridgeMapper.from_pretrained(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="neither a folder"):
        KVBridgeMapper.from_pretrained(saved / "config.json")
    with pytest.raises(ArtifactError, match="neither a folder"):
        KVBridgeMapper.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a/../../b", "a\\b", "./config.json"])
def test_manifest_cannot_leave_the_artifact(saved, name):
    manifest = json.loads((saved / MANIFEST_NAME).read_text())
    manifest["files"][name] = manifest["files"]["config.json"]
    (saved / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="does not lie inside"):
        verify_folder(saved)


BAD_TENSORS = {
    "not a number": (lambda t: t["key_weight"].view(-1)[7:8].fill_(float("nan")), "key_weight.*nan"),
    "infinite": (lambda t: t["value_bias"].view(-1)[0:1].fill_(float("-inf")), "value_bias.*inf"),
    "absurd scale": (lambda t: t["value_weight"].mul_(2.0**20), "value_weight.*at most"),
    "negative layer": (lambda t: t["selected_layers"][0].fill_(-1), "selected_layers.*differs"),
    "layer out of range": (lambda t: t["selected_layers"][2].fill_(99), "selected_layers.*differs"),
    "another layer": (lambda t: t["selected_layers"][0, :].copy_(t["selected_layers"][0].flip(0)), "differs"),
    "wrong shape": (lambda t: t.update(key_weight=t["key_weight"][:, :, :-1].clone()), "key_weight.*shape"),
    "swapped axes": (lambda t: t.update(key_bias=t["key_bias"].transpose(1, 2).contiguous()), "key_bias.*shape"),
    "wrong kind": (lambda t: t.update(key_bias=t["key_bias"].long()), "key_bias.*dtype"),
    "missing": (lambda t: t.pop("value_bias"), "lack.*value_bias"),
    "unknown": (lambda t: t.update(extra=torch.zeros(2)), "extra.*does not call for"),
}


@pytest.mark.parametrize("spoil, message", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_malformed_tensors_are_refused_though_every_hash_fits(saved, spoil, message):
    tensors = load_file(saved / "model.safetensors")
    spoil(tensors)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    reseal(saved)
    verify_folder(saved)
    with pytest.raises(ArtifactError, match=message):
        KVBridgeMapper.from_pretrained(saved)


BAD_FIELDS = {
    "negative layer": {"selected_layers": [[2, -1], [3, 1], [0, 3]]},
    "layer out of range": {"selected_layers": [[2, 4], [3, 1], [0, 3]]},
    "text for a list": {"selected_layers": "all"},
    "other geometry": {"source_geometry": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8}},
    "geometry of texts": {"source_geometry": {"num_layers": "4", "num_kv_heads": 2, "head_dim": 6}},
    "other model": {"model_type": "qwen3"},
    "unknown method": {"method": "no_such_method"},
}


@pytest.mark.parametrize("fields", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_malformed_config_is_refused_though_every_hash_fits(saved, fields):
    reseal(saved, json.loads((saved / "config.json").read_text()) | fields)
    with pytest.raises(ArtifactError):
        KVBridgeMapper.from_pretrained(saved)


def test_weights_of_another_mapper_are_refused(saved, tmp_path):
    make_mapper(seed=5).save_pretrained(tmp_path / "other")
    (saved / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    (saved / MANIFEST_NAME).unlink()
    write_manifest(saved)
    with pytest.raises(ArtifactError, match="belongs to other weights"):
        KVBridgeMapper.from_pretrained(saved)


def test_garbage_as_weights_is_refused(saved):
    (saved / "model.safetensors").write_bytes(b"\xff" * 64)
    reseal(saved)
    with pytest.raises(ArtifactError, match="not a readable safetensors"):
        KVBridgeMapper.from_pretrained(saved)


def test_another_model_is_told_apart(tmp_path):
    tiny_model("qwen3", num_layers=1).save_pretrained(tmp_path / "qwen")
    with pytest.raises(ArtifactError, match=MANIFEST_NAME):
        KVBridgeMapper.from_pretrained(tmp_path / "qwen")
    write_manifest(tmp_path / "qwen")
    with pytest.raises(ArtifactError, match="AutoModelForCausalLM"):
        KVBridgeMapper.from_pretrained(tmp_path / "qwen")


def test_digest_pins_an_artifact(saved, tmp_path):
    digest = read_manifest(saved).digest
    assert KVBridgeMapper.from_pretrained(saved, artifact_digest=digest).artifact_digest == digest
    make_mapper(seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(ArtifactError, match=digest):
        KVBridgeMapper.from_pretrained(tmp_path / "other", artifact_digest=digest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**20])
def test_a_spoilt_mapper_is_not_saved(tmp_path, value):
    mapper = make_mapper()
    with torch.no_grad():
        mapper.value_weight[1, 0, 2, 3] = value
    with pytest.raises(ArtifactError, match="value_weight"):
        mapper.save_pretrained(tmp_path / "mapper")
    assert list(tmp_path.iterdir()) == []


def test_changed_indices_are_not_saved(tmp_path):
    mapper = make_mapper()
    mapper.selected_layers[0, 0] = 1
    with pytest.raises(ArtifactError, match="selected_layers"):
        mapper.save_pretrained(tmp_path / "mapper")


def test_failing_save_leaves_the_old_artifact(saved, monkeypatch):
    before = tree(saved)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(artifact, "write_manifest", fail)
    with pytest.raises(OSError, match="disk full"):
        make_mapper(seed=5).save_pretrained(saved)
    assert tree(saved) == before and [path.name for path in saved.parent.iterdir()] == ["mapper"]


@pytest.mark.parametrize("moved", range(1, 5))
def test_save_interrupted_while_moving_is_never_half_loaded(saved, monkeypatch, moved):
    """A process that dies between two moves leaves either whole artifact, or one that is refused."""
    replace, calls = artifact.os.replace, []

    def die(source, target):
        if len(calls) == moved:
            raise KeyboardInterrupt
        calls.append(target)
        replace(source, target)

    monkeypatch.setattr(artifact.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        make_mapper(seed=5).save_pretrained(saved)
    monkeypatch.undo()
    if moved == 1:  # only the card (moved first), which is the same in both
        assert torch.equal(KVBridgeMapper.from_pretrained(saved).key_weight, make_mapper().key_weight)
    else:
        with pytest.raises(ArtifactError):
            KVBridgeMapper.from_pretrained(saved)
    make_mapper(seed=5).save_pretrained(saved)
    assert torch.equal(KVBridgeMapper.from_pretrained(saved).key_weight, make_mapper(seed=5).key_weight)


def test_saving_again_replaces_shards_and_keeps_other_files(tmp_path):
    folder = tmp_path / "mapper"
    make_mapper().save_pretrained(folder, max_shard_size=1500)
    (folder / "training_args.bin").write_bytes(b"of a trainer")
    make_mapper(seed=5).save_pretrained(folder)
    whole = {"README.md", "config.json", "custom_generate/generate.py", MANIFEST_NAME, "model.safetensors"}
    assert set(names_of(folder)) == {*whole, "training_args.bin"}
    assert torch.equal(KVBridgeMapper.from_pretrained(folder).key_weight, make_mapper(seed=5).key_weight)
    make_mapper().save_pretrained(folder, max_shard_size=1500)
    assert torch.equal(KVBridgeMapper.from_pretrained(folder).key_weight, make_mapper().key_weight)


def test_folder_with_another_model_is_not_saved_into(tmp_path):
    (tmp_path / "mapper").mkdir()
    (tmp_path / "mapper" / "pytorch_model.bin").write_bytes(b"weights of something else")
    with pytest.raises(ArtifactError, match="pytorch_model.bin"):
        make_mapper().save_pretrained(tmp_path / "mapper")
    assert names_of(tmp_path / "mapper") == ["pytorch_model.bin"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="is a file"):
        make_mapper().save_pretrained(tmp_path / "file")


def test_edited_card_needs_a_new_seal(saved):
    (saved / "README.md").write_text((saved / "README.md").read_text() + "\nA remark.\n")
    with pytest.raises(KVBridgeError, match="write_manifest"):
        KVBridgeMapper.from_pretrained(saved)
    write_manifest(saved)
    KVBridgeMapper.from_pretrained(saved)


def test_no_path_of_this_machine_is_published(tmp_path):
    (tmp_path / "models" / "small").mkdir(parents=True)
    fingerprint = {"name_or_path": str(tmp_path / "models" / "small")}
    mapper = KVBridgeMapper(make_config(source_fingerprint=fingerprint))
    mapper.save_pretrained(tmp_path / "mapper")
    for name, data in tree(tmp_path / "mapper").items():
        assert str(tmp_path).encode() not in data, name
    assert (
        json.loads((tmp_path / "mapper" / "config.json").read_text())["source_fingerprint"]["name_or_path"] == "small"
    )
