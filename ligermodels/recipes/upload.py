"""The upload of a result to the Hub: what can fail is tried before the training."""

from pathlib import Path

from ligermodels.checkpoint import hub
from ligermodels.errors import HubError
from ligermodels.recipes.options import TrainOptions
from ligermodels.recipes.report import say


def make_repository(options: TrainOptions) -> str:
    """Makes the repository of --push-to-hub, unless it is there; returns its name. Raises HubError."""
    from huggingface_hub import HfApi

    name = options.hub_model_id or Path(options.output_dir).resolve().name
    api = HfApi()
    try:
        name = api.create_repo(name, private=options.hub_private_repo, exist_ok=True).repo_id
        is_public = options.hub_private_repo and not api.repo_info(name).private
    except Exception as error:
        if not hub.refused(error):
            raise
        raise HubError(
            f"--push-to-hub: the repository {name} can be neither made nor read: {error}\n  Next: `hf auth login` or "
            "HF_TOKEN, with a token that may write; --hub-model-id OWNER/NAME names another; without --push-to-hub, "
            "`hf upload OWNER/NAME DIR/model` publishes the result later."
        ) from error
    if is_public:
        say(f"warning: {name} was there before, and is public: --hub-private-repo does not change that")
    return name


def upload(folder: Path, repository: str, recipe: str) -> None:
    """Uploads the folder of a result, and prints where. Raises HubError."""
    try:
        url = hub.push(folder, repository, commit_message=f"{recipe} by ligermodels train")
    except HubError as error:
        error.add_note(f"  The result is complete in {folder}. Next: `hf upload {repository} {folder}`")
        raise
    say(f"uploaded to {url}")
