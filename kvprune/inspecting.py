"""`kvprune inspect`: what slots detect and write, of a run or of a model, and what a run's pruning makes it forget."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from kvprune import config as configuring
from kvprune import pipeline
from kvprune.artifacts import RunFolder, cache_folder, library_versions, read_meta, read_plan, write_atomic, write_text
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.stats import read_stats
from kvprune.opening import need
from kvprune.options import DEFAULT, Options, prepare
from kvprune.progress import log
from kvprune.ranks import ALONE, launched
from kvprune.reading.forgets import removed_slots, token_losses
from kvprune.reading.page import MARK, page
from kvprune.reading.report import SECTIONS, Asked, Findings, HeldOut, Subject, choose, report
from kvprune.reading.slots import Choice
from kvprune.recipe import load_recipe, make_recipe
from kvprune.schema import Calibrate, PlanSection, Recipe, Score, TextSource
from kvprune.sources.models import load_model, load_tokenizer
from kvprune.sources.origins import origins
from kvprune.sources.texts import TASK_TEXT, documents, pack, sequences
from kvprune.staleness import stage_states
from kvprune.tokens import check_tokens, counted_tokens, own_samples

FORMAT = "kvprune.inspect"
VERSION = 1
PAGE_TOP = 16  # slots of each layer on a page, where none are asked for
LAYER_TOP = 10  # slots of a layer that is asked for
HELD_OUT_SEQUENCES = 24
START = 1024  # bytes of a file that tell what wrote it


@dataclass(frozen=True)
class _Run:
    """The run that is looked at; of a model that has none, one in the cache."""

    recipe: Recipe
    place: RunFolder
    own: bool  # the user's
    dense: Dense


def inspect(
    target: str | Path,
    *,
    slots: Sequence[str] = (),
    layer: int | None = None,
    top: int | None = None,
    score: str | None = None,
    sections: Sequence[str] = SECTIONS,
    removed: bool = False,
    held_out: str | None = None,
    all_slots: str | Path | None = None,
    html: str | Path | None = None,
    overrides: list[str] | None = None,
    options: Options = DEFAULT,
) -> dict[str, Any]:
    """Look into the memory of a run, or of a model: how its slots fire, what they detect, and what they write.

    `target` is a run folder, or a model as recipes name it, which is calibrated first (`overrides` of the recipe's
    calibrate section say on what). `slots` name some, as "12:345"; `top` adds the first by `score` of `layer`, or of
    every layer. `removed` adds where a run's slim model predicts `held_out` (a text as calibrate.text has it) worst,
    and the removed slots that spoke there. `all_slots` is a file for what is known of every slot, a JSON object a
    line; `html` one for a page. Returns plain data. Raises KvpruneError.
    """
    if launched().count > 1:
        raise KvpruneError("kvprune inspect is the work of one process")
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise KvpruneError(f"--only {unknown[0]}: should be of {', '.join(SECTIONS)}")
    if top is not None and top < 1:
        raise KvpruneError(f"--top {top}: should be 1 or more")
    if held_out is not None and not removed:
        raise KvpruneError("--held-out: says on which text --removed looks; add --removed")
    for file, mark in ((html, MARK), (all_slots, f'{{"format": "{FORMAT}"')):
        if file is not None:
            _check_file(Path(file), mark)
    run = _open(str(target), overrides, removed, options)
    section = _score_section(run.recipe.plan, score)
    if top is None:
        top = LAYER_TOP if layer is not None else PAGE_TOP if html is not None and not slots else 0
    subject = _subject(run, options)
    some = choose(subject, Choice(tuple(slots), layer, top), section)
    missed = _held_out(run, subject, held_out or TASK_TEXT, options) if removed else None
    asked = Asked(some, tuple(sections), all_slots is not None)
    found, findings = report(subject, asked, missed)
    data = _head(run, subject) | found
    if all_slots is not None:
        _write_slots(Path(all_slots), data, findings)
    if html is not None:
        write_text(Path(html), page(data))
        log.info("inspect: %s", html)
    return data


def _head(run: _Run, subject: Subject) -> dict[str, Any]:
    source = run.dense.source
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_with": library_versions(),
        "model": {"title": source.title, "commit": source.commit, "note": source.note},
        "run": str(run.place.path) if run.own else None,
        "text": [text.source for text in subject.section.text],
        "tokens": len(subject.tokens) * (subject.tokens.shape[1] - subject.section.skip_first),
    }


def _check_file(path: Path, mark: str) -> None:
    """Refuse to write over what is no file of the same kind; those have `mark` near their start."""
    if not path.parent.is_dir():
        raise KvpruneError(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            if mark.encode() in file.read(START):
                return
    raise KvpruneError(f"{path}: exists and was not written by kvprune inspect; use another name")


def _open(target: str, overrides: list[str] | None, removed: bool, options: Options) -> _Run:
    """The run, checked and calibrated."""
    own = RunFolder(Path(target))
    if own.recipe.is_file():
        if overrides:
            raise KvpruneError(f"--set {overrides[0]}: {target} is a run, with its own recipe; --set is for a model")
        recipe = load_recipe(own.recipe)
        need(own, recipe, "evaluate" if removed else "plan")
        return _Run(recipe, own, True, _dense(recipe, own, options))
    if removed:
        raise KvpruneError(f"--removed: {target} is no run folder (no recipe.yaml): a model has nothing removed")
    if own.path.is_dir() and not (own.path / "config.json").is_file():
        raise KvpruneError(f"{target}: neither a run folder (no recipe.yaml) nor a model (no config.json)")
    for override in overrides or ():
        if not override.startswith(("calibrate.", "dtype=")):
            raise KvpruneError(f"--set {override}: kvprune inspect changes calibrate.* and dtype of a model only")
    recipe = make_recipe({"model": target, "plan": {"budget": {"keep": 1}}}, target, overrides)
    identity = json.dumps([recipe.model_dump(mode="json", include={"model", "dtype", "calibrate"}), str(Path.cwd())])
    place = RunFolder(cache_folder() / "inspect" / hashlib.sha256(identity.encode()).hexdigest()[:16])
    pipeline.calibrate(recipe, place.path, options=options)
    return _Run(recipe, place, False, _dense(recipe, place, options))


def _dense(recipe: Recipe, place: RunFolder, options: Options) -> Dense:
    commit = read_meta(place.stats)["model"]["commit"]
    return open_dense(recipe.model, commit=commit, trust_remote_code=options.trust_remote_code)


def _score_section(section: PlanSection, score: str | None) -> PlanSection:
    """The plan section that says how slots are scored: the recipe's own, or the defaults of another score."""
    if score is None or score == section.score:
        return section
    if score not in get_args(Score):
        raise KvpruneError(f"--score {score}: should be one of {', '.join(get_args(Score))}")
    return PlanSection(score=score)  # type: ignore[arg-type]  # checked above


def _subject(run: _Run, options: Options) -> Subject:
    """All that is looked at, and how the model is run for it."""
    recipe, place, dense = run.recipe, run.place, run.dense
    stats, _ = read_stats(place.stats)
    # In float32, since the logits of shorter types tie.
    reading = recipe.model_copy(update={"dtype": "float32"}) if recipe.dtype == "auto" else recipe
    setup, walker = prepare(reading, dense, options, ALONE, "inspect")
    if not setup.in_memory:
        raise KvpruneError(
            "inspect: hidden states of all calibration tokens do not fit in memory; raise --memory, or inspect a run "
            "with fewer calibrate.tokens"
        )
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    tokens = counted_tokens(recipe, place, dense, options)
    samples = own_samples(recipe, place, dense, tokenizer, options)
    planned = stage_states(place, recipe)["plan"].status == "current"
    gone = removed_slots(read_plan(place.plan)) if planned else None
    return Subject(dense, setup, walker, tokenizer, recipe.calibrate, tokens, samples, stats, gone)


def _held_out(run: _Run, subject: Subject, text: str, options: Options) -> HeldOut:
    """A text that was not calibrated on, as far as a few sequences of it, and the losses of both models on it."""
    recipe, tokenizer = run.recipe, subject.tokenizer
    source, length, seed = TextSource(source=text), recipe.calibrate.sequence_length, recipe.calibrate.seed
    if text == "self":
        raise KvpruneError("--held-out self: name a text that the model did not write")
    try:
        count = len(pack(documents(source, seed), tokenizer, length, HELD_OUT_SEQUENCES))
        if not count:
            raise KvpruneError(f"--held-out {text}: holds fewer tokens than one sequence, {length}")
        section = Calibrate(text=[source], tokens=count * length, sequence_length=length, seed=seed)
        tokens = sequences(section, tokenizer)
        places = origins(section, tokenizer, tokens)
    except KvpruneError as error:
        raise KvpruneError(str(error).replace("calibrate.text", "--held-out")) from None
    check_tokens(tokens, run.dense.text_config)
    device, dtype = subject.setup.device, subject.setup.dtype_name
    trust = options.trust_remote_code or configuring.is_own_code(run.place, run.dense)
    log.info("losses of the dense and the slim model on %s tokens of %s", f"{tokens.numel():,}", text)
    dense = token_losses(run.dense.load(dtype, device), tokens)
    slim = token_losses(load_model(run.place.model, dtype=dtype, device=device, trust_remote_code=trust)[0], tokens)
    return HeldOut(tokens, places, [text], dense, slim)


def _write_slots(path: Path, data: dict[str, Any], findings: Findings) -> None:
    """What is known of every slot, a JSON object a line, after a first one that says of what."""
    head = {key: data[key] for key in ("format", "version", "made_with", "model", "run", "text", "tokens")}

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for item in chain([head], findings.every_card()):
                file.write(json.dumps(item, ensure_ascii=False) + "\n")

    write_atomic(path, write)
    log.info("inspect: %s", path)
