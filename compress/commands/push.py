"""Publish a bundle on the hub, with the hub's own client."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.arguments import BundleLike, check_arguments
from compress.errors import PushError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import MANIFEST_FILE as MANIFEST
from compress.provenance import versions

CARD_FIELDS = ("license", "base_model", "datasets", "language", "pipeline_tag")
"""Fields of the card by which the hub lists a model."""
REPOSITORY = r"(?!.*(?:--|\.\.))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?"


@dataclass(frozen=True)
class PushResult:
    """Describe what was published, or with `dry_run` would be.

    files    name -> bytes
    card     the fields of CARD_FIELDS in the front matter of README.md; missing: the
             fields that it lacks
    scores   the results in it, such as `accuracy (int8) 0.885`
    url      the address of the commit; '' if nothing was sent
    """

    repo: str
    private: bool
    files: Mapping[str, int]
    card: Mapping[str, Any]
    missing: tuple[str, ...]
    scores: tuple[str, ...]
    url: str = ""


@check_arguments
def push(
    bundle: BundleLike, repo: str, *, private: bool = True, dry_run: bool = False
) -> PushResult:
    """Upload a bundle's files to the hub's repository `repo` (owner/name), which is
    created if it does not exist.

    private  make a new repository private; an existing one keeps its visibility
    dry_run  only return what would be sent, without contacting the hub

    All files are sent in one commit. The token is HF_TOKEN, or the hub login's. Raises
    BundleError for a damaged bundle, PushError for an invalid name and when the hub
    refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    loaded = Bundle.load(bundle)
    if not re.fullmatch(REPOSITORY, repo, re.ASCII):
        raise PushError(
            f"{repo}: not a repository name; expected owner/name, as in "
            "my-team/intents-small"
        )
    planned = _plan(loaded, repo, private)
    if dry_run:
        return planned
    from compress.data.sources import is_hub_reachable

    if get_token() is None:
        raise PushError(
            "no token for the hub; set HF_TOKEN, or log in once with `hf auth login`; "
            "nothing was sent"
        )
    if not is_hub_reachable():
        raise PushError(
            f"{repo}: the hub cannot be reached, nothing was sent; copy the folder "
            f"{loaded.path} instead, which is complete, or repeat the command with a "
            "network connection"
        )
    api = HfApi(
        library_name="compress", library_version=versions(("compress",))["compress"]
    )
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        sent = api.upload_folder(
            repo_id=repo,
            folder_path=loaded.path,
            allow_patterns=list(planned.files),
            commit_message=f"Upload {loaded.path.name} by compress",
        )
    except (HfHubHTTPError, OSError) as error:  # failed connections are an OSError
        status = getattr(getattr(error, "response", None), "status_code", None)
        advice = {
            401: "the token is not valid: set HF_TOKEN, or log in with `hf auth login`",
            403: (
                "the token may not write there: create one with write permission, or "
                "name another owner"
            ),
        }.get(
            status or 0,
            "repeat the command: what was uploaded already is not sent again",
        )
        raise PushError(
            f"{repo}: {' '.join(str(error).split())[:300]}; {advice}"
        ) from error
    return PushResult(**{**vars(planned), "url": str(sent.commit_url)})


def _plan(bundle: Bundle, repo: str, private: bool) -> PushResult:
    from huggingface_hub.repocard import metadata_load

    sizes = {name: stamp.bytes for name, stamp in bundle.manifest.files.items()}
    sizes[MANIFEST] = (bundle.path / MANIFEST).stat().st_size
    front_matter = (
        metadata_load(bundle.path / "README.md") if "README.md" in sizes else None
    )
    card = front_matter if isinstance(front_matter, dict) else {}
    results = [
        metric
        for model in card.get("model-index", [])
        for each in model["results"]
        for metric in each["metrics"]
    ]
    return PushResult(
        repo=repo,
        private=private,
        files=dict(sorted(sizes.items())),
        card={key: card[key] for key in CARD_FIELDS if key in card},
        missing=tuple(key for key in CARD_FIELDS if key not in card),
        scores=tuple(
            f"{each.get('name', each['type'])} {each['value']:.4g}" for each in results
        ),
    )
