"""`kvprune reproduce`: run the recipe of a slim checkpoint again, and say whether every tensor comes out the same."""

import hashlib
import json
import platform
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvprune import pipeline
from kvprune.artifacts import (
    FORMAT_VERSION,
    RunFolder,
    cache_folder,
    digest,
    library_versions,
    read_json,
    read_meta,
    write_json,
    write_text,
)
from kvprune.card import unpublished
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import WRITE_BLOCK, Checkpoint, TensorEntry, mapped, open_checkpoint
from kvprune.opening import open_checked
from kvprune.options import DEFAULT, Options
from kvprune.progress import log, only_errors, progress
from kvprune.ranks import launched
from kvprune.recipe import dump_recipe, make_recipe, parse_yaml
from kvprune.schema import Recipe
from kvprune.sources.models import first_look, load_tokenizer, open_model
from kvprune.sources.texts import check_text, self_share, sequences, token_digest
from kvprune.tokens import calibration_tokens

ABOUT = "kvprune.json"
MARK = "reproduce.json"  # tells a run of ours from the user's own
NEEDED = ("recipe", "model", "made_with", "calibration", "inputs")
TEXTS = ("calibrate.text", "recover.text", "recover.held_out")
OVERRIDES = ("model", *TEXTS, "evaluate.include_path")  # where things are; all else would be another recipe


@dataclass(frozen=True)
class Published:
    """A slim checkpoint, and what its kvprune.json says of it."""

    name: str
    folder: Path
    commit: str | None
    about: dict[str, Any]


def reproduce(
    model: str | Path,
    folder: str | Path | None = None,
    *,
    overrides: list[str] | None = None,
    options: Options = DEFAULT,
) -> dict[str, Any]:
    """Run the recipe of a slim checkpoint again, and compare every tensor byte for byte.

    `model` is published on the Hub ("org/name"), or a folder with a kvprune.json. The new run goes to `folder`, or to
    the cache for as long as it takes. `overrides` say where a model and texts are that were not published
    ("model=PATH", "calibrate.text=PATH", of several texts "calibrate.text=[PATH, PATH]"). A model of the Hub is the
    one of the recorded commit. Returns plain data:
    whether all is identical, the tensors that differ, and what may be why. Raises KvpruneError where the checkpoint
    does not say how it was made, or what it was made from cannot be had.
    """
    if launched().count > 1:
        raise KvpruneError("kvprune reproduce is the work of one process")
    published = _open(str(model))
    recipe = _recipe(published, overrides or [])
    reasons = _differences(published.about, options)
    _check_model(published, recipe, options)
    place = _place(published, folder, options)
    for reason in reasons:
        log.warning("reproduce: %s", reason)
    _run_again(published, recipe, place, options)
    about = read_json(place.model / ABOUT)
    reasons += _other_model(published.about, about) + _other_text(published.about, about)
    old, new = open_checkpoint(published.folder), open_checkpoint(place.model)
    found = differing(old, new)
    if folder is None:
        shutil.rmtree(place.path)
    return {
        "model": published.name,
        "commit": published.commit,
        "run": None if folder is None else str(place.path),
        "identical": not found,
        "tensors": len(old.tensors.keys() | new.tensors.keys()),
        "differing": found,
        "reasons": reasons,
    }


def render(found: dict[str, Any]) -> str:
    """What `reproduce` found, as text."""
    run = f"\nthe new run is {found['run']}" if found["run"] else ""
    if found["identical"]:
        return f"{found['model']}: identical: all {found['tensors']} tensors, byte for byte{run}"
    some = f"{len(found['differing'])} of {found['tensors']} tensors differ, {found['differing'][0]} first"
    why = "".join(f"\nit may be since {reason}" for reason in found["reasons"])
    return f"{found['model']}: not identical: {some}{why}{run}"


def differing(old: Checkpoint, new: Checkpoint) -> list[str]:
    """The tensors that are not the same in both, byte for byte, in the order of the first. Reads block by block."""
    names = [*old.tensors, *(name for name in new.tensors if name not in old.tensors)]
    pairs = ((name, old.tensors.get(name), new.tensors.get(name)) for name in names)
    return [
        name
        for name, one, other in progress(pairs, total=len(names), label="compare", unit="tensors")
        if one is None or other is None or not _same(old.folder, one, new.folder, other)
    ]


def _same(folder: Path, one: TensorEntry, new: Path, other: TensorEntry) -> bool:
    if (one.dtype, one.shape, one.end - one.start) != (other.dtype, other.shape, other.end - other.start):
        return False
    with mapped(folder / one.file) as left, mapped(new / other.file) as right:
        return all(
            np.array_equal(
                np.frombuffer(left[one.start + at : min(one.start + at + WRITE_BLOCK, one.end)], np.uint8),
                np.frombuffer(right[other.start + at : min(other.start + at + WRITE_BLOCK, other.end)], np.uint8),
            )
            for at in range(0, one.end - one.start, WRITE_BLOCK)
        )


def _open(name: str) -> Published:
    """Find the checkpoint, on this machine or on the Hub."""
    folder, commit = Path(name), None
    if RunFolder(folder).recipe.is_file():
        folder = RunFolder(folder).model
    file = folder / ABOUT
    if not folder.exists():
        file, commit = first_look(name, ABOUT)
    if not file.is_file():
        raise KvpruneError(f"{name}: holds no {ABOUT}: kvprune did not make it; name a checkpoint that it did")
    about = read_json(file)
    if not isinstance(about, dict) or about.get("version") != FORMAT_VERSION:
        raise KvpruneError(f"{name}: its {ABOUT} is of another version of kvprune; install that one")
    lacking = [key for key in NEEDED if not isinstance(about.get(key), dict)]
    if lacking:
        raise KvpruneError(f"{name}: its {ABOUT} has no {lacking[0]}: it does not say how to make it again")
    return Published(name, folder if commit is None else open_model(name, commit=commit).folder, commit, about)


def _recipe(published: Published, overrides: list[str]) -> Recipe:
    """The recipe, of the very commit of a model of the Hub. Raises KvpruneError for what is not here."""
    for override in overrides:
        if override.partition("=")[0] not in OVERRIDES:
            raise KvpruneError(
                f"--set {override}: kvprune reproduce runs the recipe as it is; only {', '.join(OVERRIDES)} may say "
                "where theirs are"
            )
    about = published.about
    data, commit = about["recipe"], about["model"].get("commit")
    if not about.get("recover"):  # it is as it was exported
        data = data | {"recover": {"method": "none"}}
    if commit:
        data = data | {"model": f"{str(data['model']).partition('@')[0]}@{commit}"}
    where = f"{published.name}: {ABOUT}: recipe"
    make_recipe(data, where)  # valid, before it is read from
    given = {override.partition("=")[0] for override in overrides}
    for key, names in unpublished(about).items():
        gone = [name for name in names if not Path(name).exists()]
        if gone and key not in given:
            value = "PATH" if len(names) == 1 else f"[{', '.join(f'PATH of {name}' for name in names)}]"
            raise KvpruneError(
                f"{published.name}: was made from {gone[0]}, which is not published and not here; "
                f"say where it is: --set {shlex.quote(f'{key}={value}')}"
            )
    texts = [override for override in overrides if override.partition("=")[0] in TEXTS]
    for override in texts:
        data = _relocated(data, unpublished(about).get(override.partition("=")[0], []), override)
    recipe = make_recipe(data, where, [override for override in overrides if override not in texts])
    for source in recipe.calibrate.text:
        check_text(source)
    return recipe


def _relocated(data: dict[str, Any], names: list[str], override: str) -> dict[str, Any]:
    """Recipe `data` with the local texts `names` where `override` says that they are, and all else as it was."""
    where, _, text = override.partition("=")
    section, _, key = where.partition(".")
    value = parse_yaml(text, f"--set {override}")
    paths = value if isinstance(value, list) else [value]
    if len(paths) != len(names) or not all(isinstance(path, str) for path in paths):
        wanted = f"a path for each of these texts, in their order: {', '.join(names)}"
        raise KvpruneError(f"--set {override}: should be {wanted if names else 'left out: all texts are published'}")
    left = iter(paths)
    found = [item | {"source": next(left)} if item["source"] in names else item for item in data[section][key]]
    return data | {section: data[section] | {key: found}}


def _check_model(published: Published, recipe: Recipe, options: Options) -> None:
    """Have the base model, and see before the calibration that texts give the tokens that were counted."""
    source = open_model(recipe.model, trust_remote_code=options.trust_remote_code)
    if not self_share(recipe.calibrate):  # own samples are drawn, which takes time: those are compared later
        tokenizer = load_tokenizer(source, trust_remote_code=options.trust_remote_code)
        _check_tokens(published, token_digest(sequences(recipe.calibrate, tokenizer)))


def _check_tokens(published: Published, found: str) -> None:
    if found != published.about["calibration"]["tokens"]:
        raise KvpruneError(
            f"{published.name}: calibrate.text gives other tokens here than were counted (their SHA-256 differs): the "
            "text, the tokenizer or a library is another"
        )


def _differences(about: dict[str, Any], options: Options) -> list[str]:
    """What is not as it was: libraries, and how the model is run."""
    versions = {"python": platform.python_version(), **library_versions()}
    found = [
        f"{name} was {then} and is {versions.get(name, 'not here')}"
        for made in (about, about.get("recover") or {})
        for name, then in made.get("made_with", {}).items()
        if versions.get(name) != then
    ]
    now = {"device": options.own_device().partition(":")[0], "batch_size": options.batch_size, "processes": 1}
    ways = {"device": "--device", "batch_size": "--batch-size"}
    runs = [(about.get(stage) or {}).get("run", {}) for stage in ("calibration", "recover")]
    others = [
        f"{name} was {run[name]} and is {value}" + (f" ({ways[name]} {run[name]})" if name in ways else "")
        for run in runs
        for name, value in now.items()
        if run.get(name, value) != value
    ]
    return [*dict.fromkeys([*found, *others])]


def _other_model(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Whether the base model is another: its commit, or the sizes of its files."""
    before, after = then["model"].get("commit"), now["model"]["commit"]
    if before != after:
        return [f"the base model was of commit {before} and is of {after}"]
    sizes, others = (_sizes(about["inputs"].get("model", {})) for about in (then, now))
    changed = next((name for name in {**sizes, **others} if sizes.get(name) != others.get(name)), None)
    return [f"the base model's {changed} is another"] if changed else []


def _other_text(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Whether a recovery was trained on other tokens."""
    before, after = ((about.get("recover") or {}).get("token_digest") for about in (then, now))
    return ["recover.text gives other tokens than were trained on"] if after and before != after else []


def _sizes(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without times, which differ from machine to machine."""
    return {name: mark[0] if isinstance(mark, list) else mark for name, mark in fingerprint.items()}


def _place(published: Published, folder: str | Path | None, options: Options) -> RunFolder:
    """The folder of the new run: a fresh one, or that of the same call, which was interrupted."""
    how = {"device": options.own_device(), "batch_size": options.batch_size}
    mark = {"of": digest(published.folder / ABOUT), "made_with": library_versions(), **how}
    if folder is None:
        name = hashlib.sha256(json.dumps(mark).encode()).hexdigest()[:16]
        place = RunFolder(cache_folder() / "reproduce" / name)
    else:
        place = RunFolder(Path(folder))
    file = place.path / MARK
    known = file.is_file() and read_json(file) == mark
    if place.path.exists() and not known and (not place.path.is_dir() or any(place.path.iterdir())):
        raise KvpruneError(f"{place.path}: exists and is not a run of kvprune reproduce of this model; use another -o")
    if known and folder is not None and place.model.exists():
        raise KvpruneError(f"{place.path}: was reproduced already; use another -o")
    write_json(file, mark)
    return place


def _run_again(published: Published, recipe: Recipe, place: RunFolder, options: Options) -> None:
    """All stages but the evaluation, into the new run folder; what is done there is not done again."""
    write_text(place.recipe, dump_recipe(recipe))
    if self_share(recipe.calibrate) and not place.stats.is_file():
        with only_errors():  # the calibration tells
            dense = open_checked(recipe, place, options, stages=("calibrate",))
        _check_tokens(published, token_digest(calibration_tokens(recipe, place, dense, options)))
    pipeline.calibrate(recipe, place.path, options=options)
    _check_tokens(published, read_meta(place.stats)["inputs"]["tokens"])
    pipeline.plan(place.path, options=options)
    pipeline.refit(place.path, options=options)
    pipeline.export(place.path, options=options)
    if recipe.recover.method != "none":
        pipeline.recover(place.path, options=options)
