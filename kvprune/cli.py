"""The command line: a thin skin over `kvprune.pipeline`. Nothing heavy is imported before a command runs."""

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvprune import __version__
from kvprune.errors import KvpruneError
from kvprune.ranks import launched

log = logging.getLogger("kvprune")
DEFAULT_BATCH = 8

EXAMPLES = {
    "run": "kvprune run recipes/quickstart.yaml -o runs/quickstart --set plan.budget.keep=0.7",
    "calibrate": "kvprune calibrate recipes/quickstart.yaml -o runs/quickstart",
    "plan": "kvprune plan runs/quickstart --dry-run --set plan.budget.bytes=200MiB",
    "refit": "kvprune refit runs/quickstart --set refit.method=sequential",
    "export": "kvprune export runs/quickstart",
    "evaluate": "kvprune evaluate runs/quickstart --set 'evaluate.tasks=[builtin, lambada_openai]'",
    "show": "kvprune show runs/quickstart",
    "inspect": "kvprune inspect runs/quickstart --removed --html memory.html",
}
ABOUT = {
    "run": "all stages in order: calibrate, plan, refit, export, evaluate; what is done and current is not redone",
    "calibrate": "count how the slots of the recipe's model fire",
    "plan": "decide which slots stay, from the counts",
    "refit": "make the kept values up for the removed slots, layer by layer",
    "export": "write the slim checkpoint and verify it",
    "evaluate": "judge dense and slim with lm-eval, and measure size and speed",
    "show": "print what a run is: recipe, stages, budget, firing, results",
    "inspect": "what slots detect and write, and what pruning makes the model forget; of a run, or of any model",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object on stdout; all else goes to stderr")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress, only warnings and errors")
    common.add_argument("-v", "--verbose", action="store_true", help="also what the libraries say")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda|cuda:N", help="where the model runs (default: auto)"
    )
    where.add_argument(
        "--batch-size",
        type=_positive,
        default=DEFAULT_BATCH,
        metavar="N",
        help="sequences at once (default: 8); lower it when memory runs out",
    )
    limit = argparse.ArgumentParser(add_help=False)
    limit.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="what may be used, as 4GiB; beyond it hidden states go to disk (default: what is free)",
    )
    walk = argparse.ArgumentParser(add_help=False, parents=[limit])
    walk.add_argument("--hidden-cache", metavar="DIR", help="where hidden states go (default: in the run folder)")
    trust = argparse.ArgumentParser(add_help=False)
    trust.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    change = argparse.ArgumentParser(add_help=False)
    change.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a recipe value, as in plan.budget.keep=0.7",
    )

    top = argparse.ArgumentParser(
        prog="kvprune", description="Make transformer language models smaller by removing FFN slots they hardly use.",
        epilog=f"example: {EXAMPLES['run']}",
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"kvprune {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=ABOUT[name], description=ABOUT[name].capitalize() + ".", epilog=f"example: {EXAMPLES[name]}",
            parents=[*parents, common],
        )  # fmt: skip

    for name in ("run", "calibrate"):
        made = verb(name, where, walk, trust, change)
        made.add_argument(
            "recipe", metavar="RECIPE", help="a YAML file, or builtin:NAME for one that ships with kvprune"
        )
        made.add_argument(
            "-o", "--output", required=True, metavar="RUN", help="the run folder, made where it is not there"
        )
    planning = verb("plan", where, walk, trust, change)
    planning.add_argument("--dry-run", action="store_true", help="print widths and budget, write nothing")
    for made in (
        planning,
        verb("refit", where, walk, trust, change),
        verb("export", trust),
        verb("evaluate", where, trust, change),
        verb("show"),
    ):
        made.add_argument("folder", metavar="RUN", help="a run folder")
    _inspect_arguments(verb("inspect", where, limit, trust, change))
    return top


def _inspect_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "target", metavar="RUN|MODEL", help="a run folder; or a model, calibrated first (--set says on what)"
    )
    made.add_argument(
        "--slot",
        action="append",
        default=[],
        metavar="LAYER:INDEX",
        help="tell of this slot; LAYER.EXPERT:INDEX of experts",
    )
    made.add_argument("--layer", type=int, metavar="L", help="tell of slots of this layer")
    made.add_argument(
        "--top", type=_positive, metavar="N", help="of so many of a layer, or of each (10; on a page 16 of each layer)"
    )
    made.add_argument("--score", metavar="NAME", help="by which they are the top (default: the recipe's plan.score)")
    made.add_argument(
        "--only",
        metavar="SECTIONS",
        help="some of firing,triggers,values,layers; firing alone needs no pass",
    )
    made.add_argument(
        "--removed", action="store_true", help="where the slim model is worse, and the removed slots that spoke there"
    )
    made.add_argument(
        "--held-out", metavar="TEXT", help="the text for --removed, as in calibrate.text (default: the builtin task's)"
    )
    made.add_argument("--all", metavar="FILE", help="write what is known of every slot, a JSON object a line")
    made.add_argument("--html", metavar="FILE", help="write one page that holds all of it and needs no network")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be 1 or more, got {value}")
    return value


def _size(text: str) -> int:
    from kvprune.sizes import BYTE_UNITS, parse_size

    try:
        return parse_size(text, BYTE_UNITS)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, as 4GiB") from None


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
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was finished is kept; the same command goes on from there", file=sys.stderr)
        return 130
    except OSError as error:  # a full disk, a folder that cannot be written
        if arguments.debug:
            raise
        print(f"error: {error.filename or arguments.verb}: {error.strerror or error}", file=sys.stderr)
        return 1
    except Exception as error:
        if arguments.debug:
            raise
        print(
            f"error: {type(error).__name__}: {' '.join(str(error).split())[:500]} (--debug shows where)",
            file=sys.stderr,
        )
        return 1
    if launched().first:
        print(json.dumps(_finite(data), ensure_ascii=False, allow_nan=False) if arguments.json else text)
    return 0


def _finite(data: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _set_up_output(arguments: argparse.Namespace) -> logging.Handler:
    """Our log on stderr; the libraries' only on request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
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

    from transformers.utils import logging as transformers_logging

    from kvprune import pipeline
    from kvprune.options import Options
    from kvprune.results.show import render

    if not arguments.verbose:
        with warnings.catch_warnings():  # it warns where the user has switched the bars of the Hub off already
            warnings.simplefilter("ignore")
            transformers_logging.disable_progress_bar()
    if arguments.verb == "show":
        about = pipeline.show(arguments.folder)
        return about, render(about)
    options = Options(
        getattr(arguments, "device", "auto"),
        getattr(arguments, "batch_size", DEFAULT_BATCH),
        arguments.trust_remote_code,
        getattr(arguments, "memory", None),
        getattr(arguments, "hidden_cache", None),
    )
    match arguments.verb:
        case "run":
            assert recipe is not None
            results = pipeline.run(recipe, arguments.output, options=options)
            return results, _results_text(results, arguments.output)
        case "calibrate":
            assert recipe is not None
            stats = pipeline.calibrate(recipe, arguments.output, options=options)
            return {"stats": str(stats)}, f"{stats}\nnext: kvprune plan {arguments.output}"
        case "inspect":
            return _inspect(arguments, options)
        case "evaluate":
            results = pipeline.evaluate(arguments.folder, overrides=arguments.set, options=options)
            return results, _results_text(results, arguments.folder)
        case _:
            return _stage(arguments, options)


def _stage(arguments: argparse.Namespace, options: Any) -> tuple[Any, str]:
    """One of the stages between the calibration and the judgement."""
    from kvprune import pipeline
    from kvprune.results.table import refit_table

    match arguments.verb:
        case "plan":
            made = pipeline.plan(arguments.folder, overrides=arguments.set, dry_run=arguments.dry_run, options=options)
            return asdict(made), _plan_text(made, arguments)
        case "refit":
            found = pipeline.refit(arguments.folder, overrides=arguments.set, options=options)
            what = refit_table(found["ffns"]) if found["ffns"] else "refit.method is none: values stay as they are"
            return found, f"{what}\nnext: kvprune export {arguments.folder}"
        case _:
            folder = pipeline.export(arguments.folder, options=options)
            return {"checkpoint": str(folder)}, f"{folder}\nnext: kvprune evaluate {arguments.folder}"


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
