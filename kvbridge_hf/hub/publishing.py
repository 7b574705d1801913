"""Put an artifact on the Hub, and find the artifacts that are there."""

from __future__ import annotations

import os

from huggingface_hub import CommitInfo, HfApi, ModelInfo

from .integrity import INDEX_NAME, WEIGHTS_NAME, verify_folder
from .model_card import LIBRARY_NAME
from .retries import with_retries

# Weight files of an earlier push that a new one does not overwrite; patterns without a leading `*`, so that artifacts
# in other folders of the repository stay.
_STALE_WEIGHTS = [WEIGHTS_NAME, INDEX_NAME, "model-?????-of-?????.safetensors"]


def publish_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    subfolder: str = "",
) -> CommitInfo:
    """Upload a saved mapper as one commit, so that no reader of the repository ever sees half of it.

    Args:
        folder: a folder written by `save_pretrained`; verified before anything is sent.
        repo_id: model repository; created when it does not exist.
        private: visibility of a repository that is created now.
        revision: branch; created when it does not exist.
        create_pr: open a pull request instead of committing to the branch.
        subfolder: folder of the repository to put the artifact into.

    Raises:
        ArtifactError: the folder holds no whole artifact.
    """
    manifest = verify_folder(folder)
    api = HfApi(token=token)
    repo_id = with_retries(api.create_repo, repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        with_retries(api.create_branch, repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=os.fspath(folder),
        path_in_repo=subfolder or None,
        commit_message=commit_message or "Upload mapper",
        commit_description=commit_description or f"Artifact digest: {manifest.digest}",
        revision=revision,
        create_pr=create_pr,
        delete_patterns=_STALE_WEIGHTS,
    )


def search_mappers(
    source: str | None = None, target: str | None = None, *, token: str | bool | None = None, limit: int | None = 50
) -> list[ModelInfo]:
    """List the mappers on the Hub that were made for these models, most downloaded first.

    Args:
        source, target: Hub ids; either may be left out.
    """
    tags = [LIBRARY_NAME] + [f"base_model:{model}" for model in (source, target) if model]
    api = HfApi(token=token)
    # The list comes page by page while it is read, so reading it is what is tried again.
    found = with_retries(lambda: list(api.list_models(filter=tags, sort="downloads", limit=limit, cardData=True)))
    return [model for model in found if _has_roles(model, source, target)]


def _has_roles(model: ModelInfo, source: str | None, target: str | None) -> bool:
    """Whether the models have the roles asked for. The tags do not say; the card does, unless somebody rewrote it."""
    roles = (model.card_data.to_dict() if model.card_data else {}).get("kvbridge") or {}
    wanted = {"source": source, "target": target}
    return all(name is None or roles.get(role) in (None, name) for role, name in wanted.items())
