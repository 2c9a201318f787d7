"""Prune a model's FFNs with another tool, as its own documentation says, and save the checkpoint.

    pip install --no-deps --target .peers optipfair==0.4.2 torch-pruning==1.6.1
    PYTHONPATH=.peers python scripts/run_peer.py optipfair MODEL OUT --width 1228 [--tokens ids.safetensors]

`bench_quality.py` calls it in a process of its own, so that nothing of a tool leaks into what it is compared with.
optipfair: `prune_model` with MAW, its default; with `--tokens` its data-driven form, which takes a data loader.
torch-pruning: the settings of its example for language models (group norm, p = 2, mean over the group, local ratios),
for gate and up matrices alone; heads and hidden size stay.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

BATCH = 8


def optipfair(model: Any, width: int, tokens: torch.Tensor | None) -> Any:
    """MAW: extremes of gate and up weights, times the norm of activations where there are tokens."""
    from optipfair import prune_model

    loader = None
    if tokens is not None:
        loader = DataLoader(TensorDataset(tokens, torch.ones_like(tokens)), batch_size=BATCH)
    full = model.config.intermediate_size
    return prune_model(
        model,
        pruning_type="MLP_GLU",
        neuron_selection_method="MAW",
        pruning_percentage=100 * (full - width) / full,
        dataloader=loader,
        show_progress=False,
    )


def torch_pruning(model: Any, width: int, tokens: torch.Tensor | None) -> Any:
    """Its dependency graph finds that gate, up and down go together; the mean of their norms decides."""
    import torch_pruning as tp

    assert tokens is None, "its settings for language models take no data"
    full = model.config.intermediate_size
    first = [layer.mlp.gate_proj for layer in model.model.layers]
    pruner = tp.pruner.MetaPruner(
        model,
        example_inputs=torch.arange(8)[None],
        forward_fn=lambda traced, ids: traced(ids, use_cache=False).logits,
        importance=tp.importance.GroupMagnitudeImportance(p=2, group_reduction="mean"),
        global_pruning=False,
        pruning_ratio=0.0,
        # It cuts width = int(full * (1 - ratio)), which rounding may put one below.
        pruning_ratio_dict=dict.fromkeys(first, (full - width - 0.5) / full),
        ignored_layers=[model.lm_head, *(layer.self_attn for layer in model.model.layers)],
    )
    for group in pruner.step(interactive=True):
        group.prune()
    model.config.intermediate_size = model.model.layers[0].mlp.gate_proj.out_features
    return model


TOOLS: dict[str, Callable[[Any, int, torch.Tensor | None], Any]] = {
    "optipfair": optipfair,
    "torch-pruning": torch_pruning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, required=True, help="slots that stay in every FFN")
    parser.add_argument("--tokens", type=Path, help="safetensors with `tokens` [sequences, length] to calibrate on")
    arguments = parser.parse_args()
    stored = AutoConfig.from_pretrained(arguments.model).dtype
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()  # no ties of short types
    tokens = load_file(arguments.tokens)["tokens"] if arguments.tokens else None
    pruned = TOOLS[arguments.tool](model, arguments.width, tokens)
    widths = {layer.mlp.down_proj.in_features for layer in pruned.model.layers}
    if widths != {arguments.width}:
        raise SystemExit(f"{arguments.tool} left widths {sorted(widths)}, and {arguments.width} was asked for")
    pruned.to(stored).save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.out)
    AutoModelForCausalLM.from_pretrained(arguments.out)  # it loads, or this fails


if __name__ == "__main__":
    main()
