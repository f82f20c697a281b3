"""Publish a bundle on the hub, with the hub's own client."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compress.arguments import BundleLike, check_arguments
from compress.errors import PushError, first_reason
from compress.exporters.artifact import BUNDLE_CARD, Bundle
from compress.exporters.card import escape
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
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        advice = {
            401: "the token is not valid: set HF_TOKEN, or log in with `hf auth login`",
            403: (
                "the token may not write there: create one with write permission, or "
                "name another owner"
            ),
        }.get(
            status,
            "repeat the command: what was uploaded already is not sent again",
        )
        raise PushError(
            f"{repo}: {' '.join(str(error).split())[:300]}; {advice}"
        ) from error
    return replace(planned, url=str(sent.commit_url))


def _plan(bundle: Bundle, repo: str, private: bool) -> PushResult:
    import yaml
    from huggingface_hub import ModelCard

    sizes = {name: stamp.bytes for name, stamp in bundle.manifest.files.items()}
    sizes[MANIFEST] = (bundle.path / MANIFEST).stat().st_size
    readme = bundle.path / BUNDLE_CARD
    text = readme.read_text(encoding="utf-8") if BUNDLE_CARD in sizes else ""
    try:
        card: Any = ModelCard(text).data
    except (ValueError, yaml.YAMLError) as error:
        raise PushError(
            f"{readme}: its front matter is not in the hub's form "
            f"({first_reason(error)}); correct it with Bundle.attach"
        ) from None
    known = {key: value for key in CARD_FIELDS if (value := card.get(key))}
    return PushResult(
        repo=repo,
        private=private,
        files=dict(sorted(sizes.items())),
        card=known,
        missing=tuple(key for key in CARD_FIELDS if key not in known),
        scores=tuple(
            f"{each.metric_name or each.metric_type} {escape(each.metric_value)}"
            for each in card.eval_results or ()
        ),
    )
