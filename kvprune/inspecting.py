"""`kvprune inspect`: what slots detect and write, of a run or of a model, and what a run's pruning makes it forget."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch

from kvprune import config as configuring
from kvprune import pipeline
from kvprune.artifacts import RunFolder, cache_folder, library_versions, read_meta, read_plan, write_atomic, write_text
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.stats import read_stats
from kvprune.ffn.walk import Setup
from kvprune.opening import need
from kvprune.options import DEFAULT, Options, prepare
from kvprune.pages.frame import MARK, check_target
from kvprune.preflight import check_weights
from kvprune.progress import log
from kvprune.ranks import ALONE, launched
from kvprune.reading.forgets import removed_slots, token_losses
from kvprune.reading.page import page
from kvprune.reading.report import SECTIONS, Asked, Findings, HeldOut, Subject, choose, report
from kvprune.reading.slots import Choice
from kvprune.recipe import load_recipe, make_recipe
from kvprune.schema import Calibrate, PlanSection, Recipe, Score, TextSource
from kvprune.sources.models import load_model, load_tokenizer
from kvprune.sources.origins import origins
from kvprune.sources.packing import pack
from kvprune.sources.texts import TASK_TEXT, documents, sequences
from kvprune.staleness import stage_states
from kvprune.tokens import check_tokens, counted_tokens

FORMAT = "kvprune.inspect"
VERSION = 1
PAGE_TOP = 16  # slots of each layer on a page, where none are asked for
LAYER_TOP = 10  # slots of a layer that is asked for
HELD_OUT_SEQUENCES = 24


@dataclass(frozen=True)
class _Run:
    """The run that is looked at; of a model that has none, one in the cache."""

    recipe: Recipe
    place: RunFolder
    own: bool  # the user's
    dense: Dense
    dtype: str  # that it is read in


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
            check_target(Path(file), mark, "kvprune inspect")
    run = _open(str(target), overrides, removed, options)
    section = _score_section(run.recipe.plan, score)
    if top is None:
        top = LAYER_TOP if layer is not None else PAGE_TOP if html is not None and not slots else 0
    if score is not None and not top:
        raise KvpruneError(f"--score {score}: says which slots are the top ones; add --top N or --layer L")
    subject = _subject(run, set(sections), removed, options)
    some = choose(subject, Choice(tuple(slots), layer, top), section)
    missed = _held_out(run, subject, held_out or TASK_TEXT, options) if removed else None
    asked = Asked(some, tuple(sections), all_slots is not None)
    found, findings = report(subject, asked, missed)
    head = _head(run, subject)
    data = head | found
    if all_slots is not None:
        _write_slots(Path(all_slots), head, findings)
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
        "tokens": read_meta(run.place.stats)["counted"],
    }


def _open(target: str, overrides: list[str] | None, removed: bool, options: Options) -> _Run:
    """The run, checked and calibrated."""
    own = RunFolder(Path(target))
    if own.recipe.is_file():
        recipe, reading = load_recipe(own.recipe), load_recipe(own.recipe, overrides)
        if reading.model_copy(update={"dtype": recipe.dtype}) != recipe:
            raise KvpruneError(f"--set: {target} is a run, with its own recipe; only dtype, to read it in, can be set")
        need(own, recipe, "evaluate" if removed else "plan")
        return _Run(recipe, own, True, _dense(recipe, own, options), _reading_dtype(reading))
    if removed:
        raise KvpruneError(f"--removed: {target} is no run folder (no recipe.yaml): a model has nothing removed")
    if own.path.is_dir() and not (own.path / "config.json").is_file():
        raise KvpruneError(f"{target}: neither a run folder (no recipe.yaml) nor a model (no config.json)")
    for override in overrides or ():
        if not override.startswith(("calibrate.", "dtype=")):
            raise KvpruneError(f"--set {override}: kvprune inspect changes calibrate.* and dtype of a model only")
    recipe = make_recipe({"model": target, "plan": {"budget": {"keep": 1}}}, target, overrides)
    identity = json.dumps(recipe.model_dump(mode="json", include={"model", "dtype", "calibrate"}))
    place = RunFolder(cache_folder() / "inspect" / hashlib.sha256(identity.encode()).hexdigest()[:16])
    pipeline.calibrate(recipe, place.path, budget=False, options=options)
    return _Run(recipe, place, False, _dense(recipe, place, options), _reading_dtype(recipe))


def _reading_dtype(recipe: Recipe) -> str:
    """The type to read in: float32 where none is named, since the logits of shorter ones tie."""
    return "float32" if recipe.dtype == "auto" else recipe.dtype


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


def _subject(run: _Run, sections: set[str], removed: bool, options: Options) -> Subject:
    """All that is looked at, and how the model is run for it. What `sections` do not need is left out."""
    recipe, place, dense, device = run.recipe, run.place, run.dense, options.own_device()
    stats, _ = read_stats(place.stats)
    reading = recipe.model_copy(update={"dtype": run.dtype})
    tokens, samples = torch.empty(0, recipe.calibrate.sequence_length, dtype=torch.int64), None
    setup, walker = Setup(device, getattr(torch, dense.run_dtype(run.dtype, device)), options.batch_size), None
    if removed or sections - {"firing"}:
        setup, walker = prepare(reading, dense, options, ALONE, "inspect")
    if sections & {"triggers", "layers"}:
        if not setup.in_memory:
            raise KvpruneError(
                "inspect: hidden states of all calibration tokens do not fit in memory; raise --memory, or inspect a "
                "run with fewer calibrate.tokens"
            )
        tokens, samples = counted_tokens(recipe, place, dense, options)
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
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
    device = subject.setup.device
    dtype = run.dense.run_dtype(run.recipe.dtype, device)  # as in the run's evaluation
    check_weights(run.dense, replace(subject.setup, dtype=getattr(torch, dtype)), "for its losses")
    trust = options.trust_remote_code or configuring.is_own_code(run.place, run.dense)
    log.info("losses of the dense and the slim model on %s tokens of %s", f"{tokens.numel():,}", text)
    dense = token_losses(run.dense.load(dtype, device), tokens)
    slim = token_losses(load_model(run.place.model, dtype=dtype, device=device, trust_remote_code=trust)[0], tokens)
    return HeldOut(tokens, places, [text], dense, slim)


def _write_slots(path: Path, head: dict[str, Any], findings: Findings) -> None:
    """What is known of every slot, a JSON object a line, after a first one that says of what."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for item in chain([head], findings.every_card()):
                file.write(json.dumps(item, ensure_ascii=False) + "\n")

    write_atomic(path, write)
    log.info("inspect: %s", path)
