"""`kvprune publish`: upload the slim checkpoint of a run to the Hub, with a card that tells how it was made.

All goes up in one commit, so that a connection that breaks leaves nothing half done, and what the Hub has is not sent
again.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from kvprune.artifacts import RunFolder, digest, file_names, locked, read_json
from kvprune.card import BASE_CARD, Figure, base_fields, model_card, unpublished
from kvprune.errors import KvpruneError
from kvprune.opening import need, resume
from kvprune.progress import log
from kvprune.results.figures import make_figures
from kvprune.results.table import grid
from kvprune.schema import Recipe
from kvprune.sources.models import one_line
from kvprune.staleness import stage_states

ABOUT, CARD = "kvprune.json", "README.md"
NO_RIGHT = "the token gives no right to write there: {}; use one with write access, or another name"
THEIRS = {".gitattributes"}  # what the Hub puts into a new repository


@dataclass(frozen=True)
class Draft:
    """What would be uploaded, and where."""

    name: str
    private: bool
    folder: Path
    about: dict[str, Any]  # kvprune.json
    card: str
    files: dict[str, int]  # sizes of all that goes up, the card among them
    evaluated: bool
    parent: str | None = None  # the commit of the repository that is there
    removed: tuple[str, ...] = ()  # files of an earlier export that go
    replaced: bool = False  # if another card is there

    def as_data(self) -> dict[str, Any]:
        """What is told of it."""
        return {
            "name": self.name,
            "private": self.private,
            "files": self.files,
            "removed": list(self.removed),
            "replaced": [CARD] if self.replaced else [],
            "card": self.card,
            "evaluated": self.evaluated,
        }


def publish(
    folder: str | Path,
    name: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    licence: str | None = None,
    confirm: Callable[[dict[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """Upload the checkpoint of an exported run to the Hub as `name`, "org/name", with a card made now.

    `licence` is that of a base model whose card names none. `confirm` sees what would be uploaded, and where it is not
    true, nothing is. With `dry_run` nothing is uploaded, and the Hub is not asked. Returns plain data: files with their
    sizes, the card, and the commit. Raises KvpruneError where the run was not exported, or changed since, where the
    name is another's, and where the Hub refuses or cannot be reached: the same call then goes on.
    """
    _check_name(name)
    recipe, place = resume(folder, None, "publish")
    with locked(place):
        draft = _draft(recipe, place, name, private, licence)
        if dry_run:
            _check_digests(draft)
            return {**draft.as_data(), "url": None, "commit": None}
        if get_token() is None:
            raise KvpruneError("publish: no token of the Hub: set HF_TOKEN, or log in with: hf auth login")
        api = HfApi()
        with _reaching(name):
            draft = _beside(api, draft)
        _check_digests(draft)  # reads every byte, and so comes last
        if confirm is not None and not confirm(draft.as_data()):
            raise KvpruneError(f"publish: {name}: not agreed to; nothing was uploaded")
        with _reaching(name):
            commit = _upload(api, draft)
    return {**draft.as_data(), "url": f"{api.endpoint}/{name}", "commit": commit}


def render(found: dict[str, Any]) -> str:
    """What was uploaded, or would be, as text: files with their sizes, and the card."""
    name, files, removed = found["name"], found["files"], found["removed"]
    if found.get("commit"):
        return f"{found['url']}\ncommit {found['commit']}\nmake it again with: kvprune reproduce {name}"
    there = {file: f"{file} (replaced)" for file in found["replaced"]}
    rows = [["file", "bytes"], *([there.get(file, file), f"{size:,}"] for file, size in files.items())]
    rows.append([f"{len(files)} files", f"{sum(files.values()):,}"])
    kind = "private" if found["private"] else "public"
    gone = f"\nremoved there: {', '.join(removed)}" if removed else ""
    return f"{name} ({kind})\n\n{grid(rows)}{gone}\n\n{found['card']}"


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise KvpruneError(f"publish: {name}: not a name for the Hub: {one_line(error)}") from None
    if "/" not in name:
        raise KvpruneError(f"publish: {name}: should be ORG/NAME, with your user name or an organisation of yours")


def _draft(recipe: Recipe, place: RunFolder, name: str, private: bool, licence: str | None) -> Draft:
    """What would be uploaded, checked but for its bytes."""
    need(place, recipe, "evaluate")  # all before it, the export last
    about = read_json(place.model / ABOUT)
    _check_files(place.model, about)
    _check_licence(place.model, about, licence)
    figures = _figures(recipe, place)
    shown = {**about, "recipe": {**about["recipe"], "evaluate": _evaluate(recipe)}}  # it may be younger than the export
    card = model_card(shown, place.model, name=name, licence=licence, figures=figures)
    sizes = {file: (place.model / file).stat().st_size for file in file_names(place.model)}
    if CARD in sizes and digest(place.model / CARD) != about["digests"][CARD]:
        log.warning("publish: %s was edited: the card is made anew, without it", place.model / CARD)
    if local := unpublished(about):
        names = " and ".join(name for some in local.values() for name in some)
        log.warning("publish: it was made from %s, which others have not: they cannot reproduce it", names)
    files = {**sizes, CARD: len(card.encode())}
    return Draft(name, private, place.model, about, card, files, figures is not None)


def _evaluate(recipe: Recipe) -> dict[str, Any]:
    """How the run is judged now, as it is published: without a path of this machine."""
    section = recipe.evaluate.model_dump(mode="json")
    return section | {"include_path": section["include_path"] and Path(section["include_path"]).name}


def _check_files(folder: Path, about: dict[str, Any]) -> None:
    """Raise KvpruneError, naming the file, where `folder` holds one that is not of the export."""
    for name in file_names(folder):
        if name not in {ABOUT, CARD, *about["digests"]}:
            raise KvpruneError(f"{folder / name}: is not of the export; move it away")


def _check_digests(draft: Draft) -> None:
    """Raise KvpruneError, naming the file, where the folder does not hold what was exported, byte for byte."""
    folder, about = draft.folder, draft.about
    mend = f"move {folder} away and run: kvprune export {folder.parent}"
    for name, mark in about["digests"].items():
        if name == CARD:
            continue
        if not (folder / name).is_file():
            raise KvpruneError(f"{folder / name}: is missing; {mend}")
        if (folder / name).stat().st_size != about["files"][name] or digest(folder / name) != mark:
            raise KvpruneError(f"{folder / name}: was edited after the export (its SHA-256 is another); {mend}")


def _check_licence(folder: Path, about: dict[str, Any], licence: str | None) -> None:
    """Raise KvpruneError where neither the base model's card nor the caller names a licence, or they differ."""
    there, title = base_fields(folder).get("license"), about["model"]["title"]
    if there is None and licence is None:
        why = "names no licence" if (folder / BASE_CARD).is_file() else "is not there"
        raise KvpruneError(
            f"publish: the card of the base model {title} {why}: look its licence up and name it, as --licence mit"
        )
    if there is not None and licence not in (None, there):
        raise KvpruneError(f"publish: --licence {licence}: the base model {title} is under {there}; leave it out")


def _figures(recipe: Recipe, place: RunFolder) -> list[Figure] | None:
    """The run's results, None where it was not evaluated as it is now: that is told."""
    state = stage_states(place, recipe)["evaluate"]
    if state.status == "current":
        return make_figures(place, read_json(place.results))
    why = f"is stale ({state.reason})" if state.status == "stale" else "is missing"
    log.warning(
        "publish: the evaluation %s: the card says that it was not evaluated; run: kvprune evaluate %s", why, place.path
    )
    return None


def _beside(api: HfApi, draft: Draft) -> Draft:
    """The draft with what is known of the repository, where there is one. Refuses one that is not of this model."""
    try:
        info = api.model_info(draft.name)
    except RepositoryNotFoundError:
        return draft
    if draft.private and not info.private:
        raise KvpruneError(
            f"publish: {draft.name} exists and is public: make it private in its settings first, or use another name"
        )
    draft = replace(draft, private=bool(info.private), parent=info.sha)
    names = {sibling.rfilename for sibling in info.siblings or []} - THEIRS
    if not names:
        return draft
    other = f"publish: {draft.name} exists and holds"
    if ABOUT not in names:
        raise KvpruneError(f"{other} other files ({sorted(names)[0]} first) and no {ABOUT}; use another name")
    there = read_json(Path(api.hf_hub_download(draft.name, ABOUT, revision=info.sha)))
    (title, files), (mine, own) = _model(there), _model(draft.about)
    if title != mine:
        raise KvpruneError(f"{other} a slim {title}, and this is a slim {mine}; use another name")
    if files != own:  # two folders may have one name
        raise KvpruneError(f"{other} a slim {title} made from other files or another commit of it; use another name")
    card = Path(api.hf_hub_download(draft.name, CARD, revision=info.sha)) if CARD in names else None
    removed = tuple(sorted(names & set(there.get("files", ())) - set(draft.files)))
    return replace(draft, removed=removed, replaced=card is not None and card.read_bytes() != draft.card.encode())


def _model(about: Any) -> tuple[Any, Any]:
    """The model that a kvprune.json is of: its title, and what tells its files from others."""
    try:
        return about["model"]["title"], about.get("inputs", {}).get("model")
    except (KeyError, TypeError, AttributeError):
        return None, None


def _upload(api: HfApi, draft: Draft) -> str:
    """Make the repository where there is none, and one commit of all files. Returns the commit."""
    if draft.parent is None:
        api.create_repo(draft.name, private=draft.private, exist_ok=True)
    content = {name: draft.folder / name for name in draft.files} | {CARD: draft.card.encode()}
    version = draft.about["made_with"]["kvprune"]
    log.info("publish: uploading %s files to %s", len(draft.files), draft.name)
    commit = api.create_commit(
        draft.name,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in content.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in draft.removed),
        ],
        commit_message=f"{draft.about['model']['title']}, slimmed with kvprune {version}",
        parent_commit=draft.parent,
    )
    return str(commit.oid)


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Say in one line what the Hub did not allow, or that it could not be reached."""
    try:
        yield
    except KvpruneError:
        raise
    except OfflineModeIsEnabled:
        raise KvpruneError("publish: HF_HUB_OFFLINE is set, and an upload needs the Hub; unset it") from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.filename:  # a file of ours
            raise
        raise KvpruneError(f"publish: {name}: {_refusal(error)}") from error


def _refusal(error: BaseException) -> str:
    """What an error of the Hub's client means; the answer of the Hub may be its cause."""
    if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError | json.JSONDecodeError):
        return f"the Hub does not take it: {one_line(error)}"
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, HfHubHTTPError):
        answer = answer.__cause__
    if answer is None:
        return f"the connection to the Hub broke: {one_line(error)}; run the same command again, and it goes on"
    said = answer.server_message or one_line(answer)
    what = {
        400: "the Hub does not take it: {}",
        401: "the Hub does not know the token: {}; set HF_TOKEN, or log in with: hf auth login",
        403: NO_RIGHT,
        404: NO_RIGHT,
        409: "it changed while this was uploaded: {}; run the same command again",
        412: "it changed while this was uploaded: {}; run the same command again",
    }
    status = answer.response.status_code
    return what.get(status, f"the Hub answered {status}: {{}}; run the same command again, and it goes on").format(said)
