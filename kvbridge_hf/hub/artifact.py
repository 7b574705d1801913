"""Saving, loading and pushing a mapper as a sealed artifact; the part of `KVBridgeMapper` that deals with files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitInfo, ModelCard

from ..configuration_kvbridge import KVBridgeConfig
from ..errors import ArtifactError
from .download import fetch_artifact
from .integrity import (
    CARD_NAME,
    GENERATE_NAME,
    MANIFEST_NAME,
    check_values,
    check_weight_files,
    file_sha256,
    find_strangers,
    read_manifest,
    write_manifest,
)
from .model_card import create_model_card
from .publishing import publish_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    _Base = PreTrainedModel
else:
    _Base = object

_PUSH_ARGUMENTS = ("commit_message", "commit_description", "private", "revision", "create_pr", "subfolder")
_CARD_ARGUMENTS = ("tags", "license", "source_id", "target_id")
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class ArtifactMixin(_Base):
    """`save_pretrained`, `from_pretrained` and `push_to_hub` with hashes, checks and a card."""

    config: KVBridgeConfig
    #: Digest of the artifact this mapper was loaded from or last saved as; pin it with `artifact_digest=`.
    artifact_digest: str | None = None

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "5GB",
        token: str | bool | None = None,
        *,
        model_card: ModelCard | str | None = None,
        repo_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save config, weights, card and manifest.

        The files are written beside the target and then moved. A new folder appears at once. In a folder that has
        files already they are replaced one by one, the manifest last: a process that dies in between leaves an
        artifact that is refused on load, never one that is half old and half new.

        Args:
            save_directory: folder; files in it that are not part of an artifact are left alone.
            push_to_hub: also push to `repo_id` (by default the folder's name).
            max_shard_size: largest weight file, as an integer in bytes or as a text such as `"5GB"`.
            model_card: a card to save instead of the one made from the config.
            kwargs: further arguments of `PreTrainedModel.save_pretrained`, and of [`push_to_hub`] when that is asked
                for.

        Raises:
            ArtifactError: the mapper is not one that could be loaded again (NaN, absurd values, indices that differ
                from the config's), or the folder holds files that would be loaded in its place.
        """
        push_kwargs = {name: kwargs.pop(name) for name in _PUSH_ARGUMENTS if name in kwargs}
        card_kwargs = {name: kwargs.pop(name) for name in _CARD_ARGUMENTS if name in kwargs}
        if not is_main_process:
            super().save_pretrained(save_directory, is_main_process=False, state_dict=state_dict, **kwargs)
            return
        target = Path(save_directory)
        if target.exists() and not target.is_dir():
            raise ArtifactError(f"{str(target)!r} is a file; a mapper is saved into a folder.")
        self._check_before_saving(self.state_dict() if state_dict is None else state_dict)

        target = target.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}.tmp"
        staging.mkdir()
        try:
            super().save_pretrained(staging, state_dict=state_dict, max_shard_size=max_shard_size, **kwargs)
            self._seal(staging, model_card, {**card_kwargs, "repo_id": repo_id})
            _move_into_place(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if push_to_hub:
            publish_folder(target, repo_id or target.name, token=token, **push_kwargs)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        subfolder: str = "",
        max_shard_size: int | str = "5GB",
        tags: list[str] | str = (),  # type: ignore[assignment]
        license: str | None = None,
        source_id: str | None = None,
        target_id: str | None = None,
        model_card: ModelCard | str | None = None,
    ) -> CommitInfo:
        """Upload the mapper to a model repository of the Hub, in one commit.

        Args:
            repo_id: `"name"` or `"organisation/name"`; created when it does not exist.
            private: whether a new repository is private.
            revision: branch to commit to; created when it does not exist.
            create_pr: open a pull request instead.
            subfolder: folder of the repository to put the artifact into.
            tags, license: for the card.
            source_id, target_id: Hub ids of the two models for the card, where they were loaded from folders.
            model_card: a card to push instead of the one made from the config.

        Returns:
            The commit; `commit.oid` pins this very artifact as `revision=`.
        """
        tags = [tags] if isinstance(tags, str) else list(tags)
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "mapper"
            self.save_pretrained(
                folder,
                max_shard_size=max_shard_size,
                model_card=model_card,
                repo_id=repo_id,
                tags=tags,
                license=license,
                source_id=source_id,
                target_id=target_id,
            )
            return publish_folder(
                folder,
                repo_id,
                commit_message=commit_message,
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                subfolder=subfolder,
            )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        artifact_digest: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a mapper from a folder or from the Hub.

        Every file is compared with the manifest, and every tensor with what the config calls for, before a model is
        made from it. From the Hub, all files come from the one commit that `revision` means.

        Args:
            pretrained_model_name_or_path: folder or repository id.
            artifact_digest: refuse any other artifact than the one with this digest.
            kwargs: as for `PreTrainedModel.from_pretrained`: `revision`, `subfolder`, `dtype`, `device_map`, `token`,
                `cache_dir`, `force_download`, `local_files_only`, `config`, fields of the config to override, ...

        Raises:
            ArtifactError: the artifact is damaged, incomplete, malformed, or another than the pinned one.
        """
        if pretrained_model_name_or_path is None or kwargs.get("state_dict") is not None:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        names = ("revision", "token", "cache_dir", "force_download", "local_files_only")
        download_kwargs = {name: value for name in names if (value := kwargs.pop(name, None)) is not None}
        kwargs.pop("proxies", None)
        subfolder = kwargs.pop("subfolder", None) or ""
        folder, manifest = fetch_artifact(
            pretrained_model_name_or_path, subfolder=subfolder, artifact_digest=artifact_digest, **download_kwargs
        )
        written = read_config(folder)
        with torch.device("meta"):
            expected = cls(written).state_dict()
        check_weight_files(folder, manifest, expected, written.weight_hashes)

        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(folder, *model_args, **kwargs)
        mapper = loaded[0] if isinstance(loaded, tuple) else loaded
        # The verified folder may be a path in the Hub's cache; the mapper's name is the one that was asked for.
        mapper.config.name_or_path = mapper.name_or_path = str(pretrained_model_name_or_path)
        mapper.artifact_digest = manifest.digest
        mapper._check_indices(mapper.state_dict())
        return loaded

    def _check_before_saving(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.config.check()
        for name, tensor in state_dict.items():
            check_values(name, tensor)
        self._check_indices(state_dict)

    def _check_indices(self, state_dict: dict[str, torch.Tensor]) -> None:
        """The index buffers repeat the config's lists; a map has to read what a reader of the config believes."""
        for name, value in (
            ("selected_layers", self.config.selected_layers),
            ("source_heads", self.config.head_assignment),
        ):
            tensor = state_dict.get(name)
            if tensor is not None and not tensor.is_meta and tensor.tolist() != value:
                raise ArtifactError(
                    f"The buffer {name!r} differs from the config: {tensor.tolist()} against {value}. Change the "
                    "config and make the mapper from it."
                )

    def _seal(self, folder: Path, model_card: ModelCard | str | None, card_kwargs: dict[str, Any]) -> None:
        """Write what follows from the weight files: their hashes in the config, the card, the manifest."""
        weights = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
        self.config.weight_hashes = {path.name: file_sha256(path) for path in weights}
        for fingerprint in (self.config.source_fingerprint, self.config.target_fingerprint):
            if os.path.isdir(
                fingerprint.get("name_or_path") or ""
            ):  # a path of this machine is nobody else's business
                fingerprint["name_or_path"] = Path(fingerprint["name_or_path"]).absolute().name
        self.config.save_pretrained(folder)
        # The file knows the affine maps only; a mapper of another method needs the library.
        has_generate = self.config.method == "ridge"
        if has_generate:
            (folder / GENERATE_NAME).parent.mkdir()
            (folder / GENERATE_NAME).write_bytes(current_generate_file())
        if model_card is None:
            model_card = create_model_card(
                self.config,
                num_parameters=self.num_parameters(),
                num_bytes=sum(path.stat().st_size for path in weights),
                has_custom_generate=has_generate,
                **card_kwargs,
            )
        (folder / CARD_NAME).write_text(str(model_card), encoding="utf-8", newline="\n")
        self.artifact_digest = write_manifest(folder).digest


def current_generate_file() -> bytes:
    """The `custom_generate/generate.py` that artifacts carry, as this version writes it."""
    return files(__package__).joinpath(*GENERATE_NAME.split("/")).read_bytes()


def read_config(folder: str | os.PathLike) -> KVBridgeConfig:
    """Read a mapper's config from a folder.

    Raises:
        ArtifactError: there is none, or it is not one of a mapper.
    """
    path = Path(folder) / "config.json"
    try:
        values, _ = KVBridgeConfig.get_config_dict(folder)
        if values.get("model_type") != KVBridgeConfig.model_type:
            raise ArtifactError(
                f"{str(path)!r} describes a {values.get('model_type')!r} model, not a {KVBridgeConfig.model_type!r} "
                "mapper. Source and target models are loaded with AutoModelForCausalLM."
            )
        config = KVBridgeConfig.from_dict(values)
        config.check()
    except ArtifactError:
        raise
    except Exception as error:  # what a malformed file runs into in JSON, Transformers or dataclass validation
        raise ArtifactError(f"{str(path)!r} is not a mapper's config: {error}") from error
    return config


def _move_into_place(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    manifest = read_manifest(staging)
    try:
        old = set(read_manifest(target).files)
    except ArtifactError:
        old = set()
    old |= {path.name for path in target.iterdir() if _WEIGHT_FILE.fullmatch(path.name)}
    strangers = set(find_strangers(target, manifest)) - old
    if strangers:
        raise ArtifactError(
            f"{str(target)!r} holds {sorted(strangers)}, which would be loaded beside the mapper. Save into an empty "
            "folder."
        )
    for name in old - set(manifest.files):
        (target / name).unlink(missing_ok=True)
    for name in [*manifest.files, MANIFEST_NAME]:
        (target / name).parent.mkdir(exist_ok=True)
        os.replace(staging / name, target / name)
