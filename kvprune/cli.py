"""The command line: a thin skin over `kvprune.pipeline`. Nothing heavy is imported before a command runs."""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvprune.arguments import DEFAULT_BATCH, parser
from kvprune.errors import KvpruneError
from kvprune.ranks import launched
from kvprune.terminal import PrintableFormatter, finite, printable

log = logging.getLogger("kvprune")


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of ours, 2 for usage, 130 when interrupted."""
    arguments = parser().parse_args(argv)
    handler = _set_up_output(arguments)
    try:
        return _answer(arguments)
    finally:
        log.removeHandler(handler)
        log.propagate = True
        log.setLevel(logging.NOTSET)


def _answer(arguments: argparse.Namespace) -> int:
    """Do what was asked and print it, or the error in one line."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up as Ctrl-C does
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries and task files print is no result
            data, text = _command(arguments)
    except KvpruneError as error:
        if arguments.debug:
            raise
        print("\n".join(f"error: {line}" for line in printable(str(error)).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was finished is kept; the same command goes on from there", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, a folder that cannot be written
        if arguments.debug:
            raise
        print(printable(f"error: {error.filename or arguments.verb}: {error.strerror or error}"), file=sys.stderr)
        return 1
    except Exception as error:
        if arguments.debug:
            raise
        what = printable(" ".join(str(error).split()))[:500]
        print(f"error: {type(error).__name__}: {what} (--debug shows where)", file=sys.stderr)
        return 1
    if launched().first:
        print(json.dumps(finite(data), ensure_ascii=False, allow_nan=False) if arguments.json else printable(text))
    return int(_fell_short(arguments, data))


def _fell_short(arguments: argparse.Namespace, data: Any) -> bool:
    """Whether a verb that came to its end did not reach what was asked for."""
    match arguments.verb:
        case "reproduce":
            return not data["identical"]
        case "sweep":
            return any(run["status"] == "failed" for run in data["runs"])
        case _:
            return False


def _set_up_output(arguments: argparse.Namespace) -> logging.Handler:
    """Our log on stderr; the libraries' only on request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.WARNING if arguments.quiet else logging.DEBUG if arguments.verbose else logging.INFO)
    if not launched().first:
        log.setLevel(logging.ERROR)  # one process tells
    if not arguments.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if arguments.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours become lines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return handler


def _command(arguments: argparse.Namespace) -> tuple[Any, str]:
    """Do what was asked; the result as data and as text."""
    from kvprune.recipe import load_recipe

    # A bad recipe is told before torch is imported.
    recipe = load_recipe(arguments.recipe, arguments.set) if arguments.verb in ("run", "calibrate") else None
    if arguments.verb == "compare":  # needs no torch either
        return _compare(arguments)

    from transformers.utils import logging as transformers_logging

    from kvprune import pipeline
    from kvprune.options import Options
    from kvprune.results.show import render

    if not arguments.verbose:
        with warnings.catch_warnings():  # it warns where the user has switched the bars of the Hub off already
            warnings.simplefilter("ignore")
            transformers_logging.disable_progress_bar()
    if arguments.verb == "show":
        about = pipeline.show(arguments.folder, html=arguments.html)
        return about, render(about)
    if arguments.verb == "publish":
        return _publish(arguments)
    options = Options(
        getattr(arguments, "device", "auto"),
        getattr(arguments, "batch_size", DEFAULT_BATCH),
        arguments.trust_remote_code,
        getattr(arguments, "memory", None),
        getattr(arguments, "hidden_cache", None),
        getattr(arguments, "checkpointing", False),
    )
    return _work(arguments, recipe, options)


def _work(arguments: argparse.Namespace, recipe: Any, options: Any) -> tuple[Any, str]:
    """A verb that runs the model; `recipe` is that of run and calibrate."""
    from kvprune import pipeline

    match arguments.verb:
        case "run":
            results = pipeline.run(recipe, arguments.output, options=options)
            return results, _results_text(results, arguments.output)
        case "calibrate":
            stats = pipeline.calibrate(recipe, arguments.output, options=options)
            return {"stats": str(stats)}, f"{stats}\nnext: kvprune plan {arguments.output}"
        case "sweep":
            return _sweep(arguments, options)
        case "inspect":
            return _inspect(arguments, options)
        case "reproduce":
            return _reproduce(arguments, options)
        case _:
            return _stage(arguments, options)


def _stage(arguments: argparse.Namespace, options: Any) -> tuple[Any, str]:
    """One of the stages after the calibration."""
    from kvprune import pipeline
    from kvprune.results.table import recovery_text, refit_table

    match arguments.verb:
        case "plan":
            made = pipeline.plan(arguments.folder, overrides=arguments.set, dry_run=arguments.dry_run, options=options)
            return asdict(made), _plan_text(made, arguments)
        case "refit":
            found = pipeline.refit(arguments.folder, overrides=arguments.set, options=options)
            what = refit_table(found["ffns"]) if found["ffns"] else "refit.method is none: values stay as they are"
            return found, f"{what}\nnext: kvprune export {arguments.folder}"
        case "recover":
            found = pipeline.recover(arguments.folder, overrides=arguments.set, options=options)
            return found, f"{recovery_text(found)}\nnext: kvprune evaluate {arguments.folder}"
        case "evaluate":
            results = pipeline.evaluate(arguments.folder, overrides=arguments.set, options=options)
            return results, _results_text(results, arguments.folder)
        case _:
            folder = pipeline.export(arguments.folder, options=options)
            return {"checkpoint": str(folder)}, f"{folder}\nnext: kvprune evaluate {arguments.folder}"


def _sweep(arguments: argparse.Namespace, options: Any) -> tuple[Any, str]:
    from kvprune.results.sweeps import render
    from kvprune.sweeping import sweep

    found = sweep(arguments.recipe, arguments.output, arguments.set, dry_run=arguments.dry_run, options=options)
    return found, render(found)


def _compare(arguments: argparse.Namespace) -> tuple[Any, str]:
    from kvprune.comparing import compare
    from kvprune.results.comparison import render

    found = compare(arguments.folders, arguments.against, html=arguments.html)
    return found, render(found)


def _inspect(arguments: argparse.Namespace, options: Any) -> tuple[Any, str]:
    from kvprune.inspecting import inspect
    from kvprune.reading.report import SECTIONS
    from kvprune.results.inspection import render

    found = inspect(
        arguments.target,
        slots=arguments.slot,
        layer=arguments.layer,
        top=arguments.top,
        score=arguments.score,
        sections=SECTIONS if arguments.only is None else arguments.only.split(","),
        removed=arguments.removed,
        held_out=arguments.held_out,
        all_slots=arguments.all,
        html=arguments.html,
        overrides=arguments.set,
        options=options,
    )
    return found, render(found)


def _publish(arguments: argparse.Namespace) -> tuple[Any, str]:
    from kvprune.publishing import publish, render

    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        raise KvpruneError(
            "publish: asks before it uploads, and there is no terminal to ask on: add --yes, or --dry-run to see what "
            "would go up"
        )

    def agreed(draft: dict[str, Any]) -> bool:
        if not (arguments.yes and arguments.quiet):
            print(printable(render(draft)))  # to stderr, as all that is no result
        return arguments.yes or input(f"Upload this to {draft['name']}? [y/N] ").strip().lower() in ("y", "yes")

    found = publish(
        arguments.folder,
        arguments.name,
        private=arguments.private,
        dry_run=arguments.dry_run,
        licence=arguments.licence,
        confirm=agreed,
    )
    return found, render(found)


def _reproduce(arguments: argparse.Namespace, options: Any) -> tuple[Any, str]:
    from kvprune.reproducing import render, reproduce

    found = reproduce(arguments.model, arguments.output, overrides=arguments.set, options=options)
    return found, render(found)


def _plan_text(made: Any, arguments: argparse.Namespace) -> str:
    from kvprune.artifacts import budget_words
    from kvprune.recipe import load_recipe
    from kvprune.results.table import budget_table, width_lines

    round_to = made.provenance["recipe"]["plan"]["round_to"]
    ffns = [{"name": f.name, "before": f.width_before, "after": f.width, "tokens": f.tokens} for f in made.ffns]
    lines = "\n".join(width_lines(ffns))
    following = "export" if load_recipe(Path(arguments.folder) / "recipe.yaml").refit.method == "none" else "refit"
    end = "dry run: nothing written" if arguments.dry_run else f"next: kvprune {following} {arguments.folder}"
    return (
        f"{lines}\nrequested {budget_words(made.budget)}, in multiples of round_to {round_to}\n"
        f"{budget_table(asdict(made.before), asdict(made.after))}\n{made.loads}\n{_validated(made)}{end}"
    )


def _validated(made: Any) -> str:
    if not made.validated:
        return ""
    losses = ", ".join(f"{name} {loss:.4f}" for name, loss in made.validated.items())
    return f"loss with removed slots masked: {losses}\n"


def _results_text(results: dict[str, Any], run: str) -> str:
    from kvprune.card import load_command
    from kvprune.results.table import results_table

    note = f" (dense is {results['model']['note']})" if results["model"]["note"] else ""
    trust = json.loads((Path(run) / "model" / "kvprune.json").read_text(encoding="utf-8"))["trust_remote_code"]
    load = "\n".join(f"  {line}" for line in load_command(str(Path(run) / "model"), trust).splitlines())
    return f"{results['model']['title']}{note}\n\n{results_table(results)}\n\nload it with:\n{load}"


if __name__ == "__main__":
    sys.exit(main())
