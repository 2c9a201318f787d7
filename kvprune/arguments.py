"""What the command line takes: verbs, their arguments and what each says of itself. Nothing heavy is imported."""

import argparse

from kvprune import __version__

DEFAULT_BATCH = 8

EXAMPLES = {
    "run": "kvprune run recipes/quickstart.yaml -o runs/quickstart --set plan.budget.keep=0.7",
    "calibrate": "kvprune calibrate recipes/quickstart.yaml -o runs/quickstart",
    "plan": "kvprune plan runs/quickstart --dry-run --set plan.budget.bytes=200MiB",
    "refit": "kvprune refit runs/quickstart --set refit.method=sequential",
    "export": "kvprune export runs/quickstart",
    "recover": "kvprune recover runs/quickstart --set recover.method=distill --set recover.text=corpus.txt",
    "evaluate": "kvprune evaluate runs/quickstart --set 'evaluate.tasks=[builtin, lambada_openai]'",
    "show": "kvprune show runs/quickstart --html run.html",
    "inspect": "kvprune inspect runs/quickstart --removed --html memory.html",
    "sweep": "kvprune sweep recipes/quickstart.yaml -o runs/keep --set plan.budget.keep=0.9,0.8,0.7",
    "compare": "kvprune compare runs/keep/* --against runs/quickstart --html runs.html",
    "publish": "kvprune publish runs/quickstart my-name/slim-model --dry-run",
    "reproduce": "kvprune reproduce my-name/slim-model",
}
ABOUT = {
    "run": "all stages in order: calibrate, plan, refit, export, recover, evaluate; what is current is not redone",
    "calibrate": "count how the slots of the recipe's model fire",
    "plan": "decide which slots stay, from the counts",
    "refit": "make the kept values up for the removed slots, layer by layer",
    "export": "write the slim checkpoint and verify it",
    "recover": "train the slim model on what the dense one says of a text, and keep what is better on held-out text",
    "evaluate": "judge dense and slim with lm-eval, and measure size and speed",
    "show": "print what a run is: recipe, stages, budget, firing, results",
    "inspect": "what slots detect and write, and what pruning makes the model forget; of a run, or of any model",
    "sweep": "run every combination of several values, each in a folder of its own, on one calibration",
    "compare": "finished runs side by side: sizes, metrics, paired differences with intervals, Pareto fronts",
    "publish": "upload the slim checkpoint to the Hub, with a card that tells how it was made and what it can do",
    "reproduce": "run a published checkpoint's recipe again and compare every tensor; exit status 1 where one differs",
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
        help="what may be used, as 4GiB; hidden states beyond it go to disk, not in inspect (default: what is free)",
    )
    walk = argparse.ArgumentParser(add_help=False, parents=[limit])
    walk.add_argument("--hidden-cache", metavar="DIR", help="where hidden states go (default: in the run folder)")
    training = argparse.ArgumentParser(add_help=False)
    training.add_argument(
        "--checkpointing",
        action="store_true",
        help="in recover, keep less of a forward and run it again backwards: less memory, a third more time",
    )
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
        made = verb(name, where, walk, *([training] if name == "run" else []), trust, change)
        made.add_argument(
            "recipe", metavar="RECIPE", help="a YAML file, or builtin:NAME for one that ships with kvprune"
        )
        made.add_argument(
            "-o", "--output", required=True, metavar="RUN", help="the run folder, made where it is not there"
        )
    planning = verb("plan", where, limit, trust, change)
    planning.add_argument("--dry-run", action="store_true", help="print widths and budget, write nothing")
    for made in (
        planning,
        verb("refit", where, walk, trust, change),
        verb("export", trust),
        verb("recover", where, training, trust, change),
        verb("evaluate", where, trust, change),
        showing := verb("show"),
    ):
        made.add_argument("folder", metavar="RUN", help="a run folder")
    showing.add_argument("--html", metavar="FILE", help="write one page that shows all of it and needs no network")
    _inspect_arguments(verb("inspect", where, limit, trust, change))
    _sweep_arguments(verb("sweep", where, walk, training, trust))
    _compare_arguments(verb("compare"))
    _publish_arguments(verb("publish"))
    _reproduce_arguments(verb("reproduce", where, walk, training, trust, change))
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


def _sweep_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("recipe", metavar="RECIPE", help="a YAML file, or builtin:NAME for one that ships with kvprune")
    made.add_argument("-o", "--output", required=True, metavar="RUNS", help="the folder for the run folders")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE[,VALUE...]",
        help="change a recipe value, or try several; a comma within brackets is part of a value",
    )
    made.add_argument("--dry-run", action="store_true", help="check and list the combinations, run nothing")


def _compare_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("folders", nargs="+", metavar="RUN", help="run folders of one model, evaluated alike")
    made.add_argument("--against", metavar="RUN", help="what the others are compared with (default: the first)")
    made.add_argument("--html", metavar="FILE", help="write one page that shows all of it and needs no network")


def _publish_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("folder", metavar="RUN", help="an exported run folder")
    made.add_argument("name", metavar="ORG/NAME", help="what it is called on the Hub")
    made.add_argument("--private", action="store_true", help="make the repository private")
    made.add_argument("--dry-run", action="store_true", help="show the files and the card, upload nothing")
    made.add_argument("--yes", action="store_true", help="upload without being asked")
    made.add_argument("--licence", metavar="ID", help="of a base model whose card names none, as apache-2.0")


def _reproduce_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("model", metavar="MODEL", help="a checkpoint on the Hub, or a folder that holds a kvprune.json")
    made.add_argument(
        "-o", "--output", metavar="RUN", help="a fresh folder for the new run (default: in the cache, and removed)"
    )


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
