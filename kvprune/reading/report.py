"""What an inspection finds, put together: one plain object that is printed, written as JSON, or shown as a page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.scores import SCORES
from kvprune.ffn.stats import FfnStats, fire_rate
from kvprune.ffn.walk import Setup, Walker
from kvprune.progress import advancing, log
from kvprune.reading.firing import THRESHOLD, firing
from kvprune.reading.forgets import forgets
from kvprune.reading.lens import lens
from kvprune.reading.slots import Choice, Names, Slot, chosen, names_of
from kvprune.reading.triggers import Text, Top, collect_tops, contexts, make_text, shared
from kvprune.reading.values import Unembedding, open_unembedding, walked_unembedding
from kvprune.reading.words import Words, read_all
from kvprune.schema import Calibrate, PlanSection
from kvprune.sources.models import naming_memory
from kvprune.sources.origins import Origins, origins

SECTIONS = ("firing", "triggers", "values", "layers")
FORGOTTEN = 50  # removed slots that are told of with the tokens that they are missed at


@dataclass(frozen=True)
class Subject:
    """What is looked at: a model, the tokens that it was calibrated on, and what was counted and planned then."""

    dense: Dense
    setup: Setup
    walker: Walker | None  # None: the model is run as a whole
    tokenizer: Any
    section: Calibrate
    tokens: Tensor  # int64 [sequences, length]
    samples: Tensor | None  # the model's own, among the tokens
    stats: Sequence[FfnStats]
    gone: Mapping[str, Sequence[int]] | None  # removed slots by names of FFNs, where there is a plan


@dataclass(frozen=True)
class HeldOut:
    """A text that was not calibrated on, and how well the dense and the slim model predict it."""

    tokens: Tensor  # int64 [sequences, length]
    places: Origins
    text: list[str]
    dense: Tensor  # float64 [sequences, length - 1], nats
    slim: Tensor


@dataclass(frozen=True)
class Asked:
    """What is wanted of an inspection."""

    slots: Sequence[Slot] = ()
    sections: Sequence[str] = SECTIONS
    every_slot: bool = False


@dataclass(frozen=True)
class Findings:
    """What is known of slots, one by one."""

    names: Names
    rates: Mapping[str, Tensor]  # [slots] by names of FFNs
    gone: Mapping[str, set[int]] | None
    tops: Mapping[str, Top]
    text: Text | None
    words: Words  # what values promote, of those that were asked for

    def card(self, slot: Slot) -> dict[str, Any]:
        """All that is known of a slot, as plain data."""
        name, index = slot
        card = {
            "id": self.names.id_of(slot),
            "ffn": name,
            "slot": index,
            "expert": self.names.experts.get(name),
            "rate": float(self.rates[name][index]),
            "removed": None if self.gone is None else index in self.gone.get(name, ()),
        }
        if self.text is not None:
            top = self.tops.get(name)  # none of an expert that no token reached
            card["triggers"] = [] if top is None else contexts(top, index, self.text)
            card["shared"] = None if top is None else shared(top, index, self.text)
        return card | self.words.of(slot)

    def every_card(self) -> Iterator[dict[str, Any]]:
        """The cards of all slots, in order."""
        ffns = self.names.layout.ffns
        with advancing(total=sum(ffn.width for ffn in ffns), label="slots", unit="slots") as advance:
            for ffn in ffns:
                yield from (self.card((ffn.name, index)) for index in range(ffn.width))
                advance(ffn.width)


def choose(subject: Subject, choice: Choice, score: PlanSection) -> list[Slot]:
    """The slots of a choice, the top ones by `score`. Raises KvpruneError for what is not there."""
    return chosen(choice, names_of(subject.dense.layout), _scores(subject, score) if choice.top else {})


def report(subject: Subject, asked: Asked, held_out: HeldOut | None = None) -> tuple[dict[str, Any], Findings]:
    """Look at a model. Returns the sections that were asked for, and what is known of slots.

    With `held_out`, also what was removed, and where it is missed.
    """
    layout, names = subject.dense.layout, names_of(subject.dense.layout)
    slots = list(asked.slots)
    sections = set(asked.sections)
    batch_size, skip_first = subject.setup.batch_size, subject.section.skip_first
    text = _text(subject) if "triggers" in sections and (slots or asked.every_slot or held_out) else None
    source, unembedding = _opened(subject, sections) if held_out or sections - {"firing"} else (None, None)
    data: dict[str, Any] = {}
    if "firing" in sections:
        data["firing"] = firing(subject.stats, layout.as_data())
    tops = {}
    if sections & {"triggers", "layers"}:
        with naming_memory(batch_size):
            tops = collect_tops(source, layout, subject.tokens, skip_first=skip_first, batch_size=batch_size)
    if held_out is not None:
        data["removed"] = _removed(subject, source, names, held_out)
        slots = list(dict.fromkeys(slots + data["removed"].pop("chosen")))
    words = Words(subject.tokenizer)
    if unembedding is not None and "values" in sections:
        some = None if asked.every_slot else slots
        data["coherence"], words = read_all(source, layout, unembedding, subject.tokenizer, some)
    if unembedding is not None and "layers" in sections:
        data["lens"] = lens(
            source,
            layout,
            subject.tokens,
            unembedding,
            tops={name: top.place[:, 0] for name, top in tops.items()},
            signs={name: top.value[:, 0] for name, top in tops.items()},
            skip_first=skip_first,
            batch_size=batch_size,
        )
    subject.dense.check_unchanged()
    findings = Findings(
        names,
        {ffn.name: fire_rate(item, THRESHOLD) for ffn, item in zip(layout.ffns, subject.stats, strict=True)},
        None if subject.gone is None else {name: set(slots) for name, slots in subject.gone.items()},
        tops,
        text,
        words,
    )
    return data | {"slots": [findings.card(slot) for slot in slots]}, findings


def _scores(subject: Subject, section: PlanSection) -> dict[str, Tensor]:
    score, items = SCORES[section.score], enumerate(zip(subject.dense.layout.ffns, subject.stats, strict=True))
    return {ffn.name: score(item, section, at).double() for at, (ffn, item) in items}


def _text(subject: Subject) -> Text:
    section, tokenizer = subject.section, subject.tokenizer
    places = origins(section, tokenizer, subject.tokens, subject.samples)
    return make_text(subject.tokens, places, tokenizer, skip_first=section.skip_first)


def _opened(subject: Subject, sections: set[str]) -> tuple[Any, Unembedding | None]:
    """What runs the model, the walker or the loaded model, and the way from its states to tokens, if that is needed."""
    source: Any = subject.walker or subject.dense.load(subject.setup.dtype_name, subject.setup.device)
    if not sections & {"values", "layers"}:
        return source, None
    try:
        if subject.walker is not None:
            return source, walked_unembedding(subject.walker)
        return source, open_unembedding(source, subject.dense.layout.layers)
    except KvpruneError as error:
        log.warning("no values and no layers: %s", error)
        return source, None


def _removed(subject: Subject, source: Any, names: Names, held_out: HeldOut) -> dict[str, Any]:
    """Where removed slots are missed in the held-out text; those that spoke there are `chosen`, the loudest first."""
    found = forgets(
        source,
        subject.dense.layout,
        subject.gone or {},
        held_out.tokens,
        held_out.dense,
        held_out.slim,
        subject.tokenizer,
        batch_size=subject.setup.batch_size,
    )
    said: Counter[Slot] = Counter()
    for token in found["tokens"]:
        place = token["sequence"], token["position"]
        offset = int(held_out.places.offset[place])
        token |= {
            "document": held_out.places.names[int(held_out.places.document[place])],
            "offset": None if offset < 0 else offset,
        }
        for item in token["slots"]:
            slot = item["ffn"], item["slot"]
            item["id"] = names.id_of(slot)
            said[slot] += item["contribution"]
    slots = [slot for slot, _ in said.most_common(FORGOTTEN)]
    return {**found, "text": held_out.text, "slots": [names.id_of(slot) for slot in slots], "chosen": slots}
