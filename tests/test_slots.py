"""Ids of slots: each its own, in models of every make, and those of the highest scores."""

import pytest
import torch

from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.reading.slots import Choice, chosen, names_of
from tests.families import family_config

# The first and the last label of a family's FFNs.
LABELS = {
    **{"llama": ("0", "1"), "gpt2": ("0", "1"), "falcon": ("0", "1"), "mixtral": ("0.0", "1.3")},
    **{"qwen3_moe": ("0", "1.3"), "jamba": ("0", "1.3"), "qwen2_moe": ("0", "1/mlp.shared_expert")},
    **{"deepseek_v3": ("0", "1/mlp.shared_experts"), "gemma4-experts": ("0/mlp", "1.3"), "nemotron_h": ("1.0", "3")},
}


@pytest.mark.parametrize("family", LABELS)
def test_every_slot_has_an_id_of_its_own_by_which_it_is_found(family: str) -> None:
    layout = find_layout(family_config(family))
    names = names_of(layout)
    slots = [(ffn.name, index) for ffn in layout.ffns for index in range(ffn.width)]
    ids = [names.id_of(slot) for slot in slots]
    assert len(set(ids)) == len(ids)
    assert [names.find(text) for text in ids] == slots
    first, last = LABELS[family]
    assert (ids[0], ids[-1]) == (f"{first}:0", f"{last}:{layout.ffns[-1].width - 1}")
    for text in ("", ":", "0", "99:0", f"{ids[-1]}0", f"{ids[0]}x", f"{ids[0][:-1]}-1"):
        with pytest.raises(KvpruneError, match=r"--slot .*: (no such FFN|the index)"):
            names.find(text)


def test_top_slots_are_those_of_a_layer_whichever_of_its_ffns_they_are_in() -> None:
    names = names_of(find_layout(family_config("qwen2_moe")))
    scores = {ffn.name: torch.zeros(ffn.width) for ffn in names.layout.ffns}
    wanted = [names.find(text) for text in ("1/mlp.shared_expert:20", "1.2:7", "1.0:3")]
    for score, (name, index) in enumerate(wanted):
        scores[name][index] = 3 - score
    first = [names.find(text) for text in ("1.0:0", "0:0", "0:1", "0:2", "0:3")]  # of those that tie, the earlier
    named = names.find("1.2:7")
    assert chosen(Choice(layer=1, top=4), names, scores) == [*wanted, first[0]]
    assert chosen(Choice(top=4), names, scores) == [*first[1:], *wanted, first[0]]
    assert chosen(Choice(("1.2:7",), 1, 3), names, scores) == [named, wanted[0], wanted[2]]
    assert chosen(Choice(("1.2:7",)), names, {}) == [named]
