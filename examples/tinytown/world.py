"""The world of a Tinytown document, and the writer who tells, changes and asks about it.

A document is a list of segments ``(text, is_answer)``; joined with spaces they are the text. The state of the world is
kept while the document is written, so that each answer follows from what was said before it and from nothing else.
Train, validation and test worlds are peopled from disjoint sets of full names; test documents also use fillers and
question templates that occur nowhere else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import words as W

SPLITS = ("train", "validation", "test")
ATTRIBUTES = ("city", "job", "color", "friend", "coins")
KINDS_BY_LEVEL = {
    1: ("city", "job", "thing", "color", "friend", "coins"),
    2: ("city", "job", "thing", "color", "friend", "coins", "resident", "worker"),
    3: tuple(kind for kind in W.QUESTIONS),
}
Segment = tuple[str, bool]


def full_names(split: str) -> list[tuple[str, str]]:
    """First and last names of the people who may live in the worlds of ``split``: 80 % / 10 % / 10 %, disjoint."""
    wanted = {"train": range(2, 10), "validation": (0,), "test": (1,)}[split]
    return [
        (first, last)
        for i, first in enumerate(W.FIRST_NAMES)
        for j, last in enumerate(W.LAST_NAMES)
        if (3 * i + 7 * j) % 10 in wanted
    ]


@dataclass
class World:
    """The people of one document and what has been said of them so far."""

    rng: random.Random
    split: str = "train"
    num_people: int = 5
    values: dict = field(default_factory=dict)  # (attribute, person) -> value
    holder: dict = field(default_factory=dict)  # thing -> person
    told: list = field(default_factory=list)  # (teller, listener, thing)
    said: dict = field(default_factory=dict)  # person -> quoted text
    changed: set = field(default_factory=set)  # ("city", person) or ("thing", thing) that was updated

    def __post_init__(self):
        names, self.full = full_names(self.split), {}
        self.rng.shuffle(names)
        for first, last in names:
            if first not in self.full and len(self.full) < self.num_people:
                self.full[first] = f"{first} {last}"
        self.people = list(self.full)
        self.introduced: set[str] = set()

    def knows(self, attribute: str) -> list[str]:
        return [person for person in self.people if (attribute, person) in self.values]

    def with_value(self, attribute: str, value: str) -> list[str]:
        return [person for person in self.knows(attribute) if self.values[attribute, person] == value]

    def draw(self, attribute: str, person: str) -> str:
        """A value for ``attribute``; jobs are unique in a world, cities are shared now and then."""
        rng = self.rng
        if attribute == "city":
            taken = [self.values["city", p] for p in self.knows("city")]
            if taken and rng.random() < 0.3:
                return rng.choice(taken)
            return rng.choice([c for c in W.CITIES if c not in taken] or W.CITIES)
        if attribute == "job":
            taken = [self.values["job", p] for p in self.knows("job")]
            return rng.choice([j for j in W.JOBS if j not in taken] or W.JOBS)
        if attribute == "color":
            return rng.choice(W.COLORS)
        if attribute == "coins":
            return str(rng.randint(1, 10))
        return rng.choice([p for p in self.people if p != person])


class Writer:
    """Writes one document; every method appends segments and keeps the world in step with them."""

    def __init__(
        self, rng: random.Random, split: str, level: int, num_people: int, diary: bool = False, unasked: float = 0.0
    ):
        self.rng, self.split, self.level, self.diary, self.unasked = rng, split, level, diary, unasked
        self.world = World(rng, split, num_people)
        self.segments: list[Segment] = []
        # ("city", person), ("thing", thing) or ("tell", teller, listener, thing) -> the segments it follows from
        self.told_in: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.introduced_in: dict[str, int] = {}
        self.count = 0
        self.asked: set[tuple[str, str, str]] = set()  # (kind, slots, answer)
        self.kinds = KINDS_BY_LEVEL[level]
        self.attributes = [a for a in ATTRIBUTES if a in self.kinds]
        self.fillers = W.FILLERS + (W.HELD_OUT_FILLERS if split == "test" else [])

    def add(
        self, text: str, answer: bool = False, fact: tuple[str, ...] | None = None, before: tuple[int, ...] = ()
    ) -> None:
        """Append a segment, which says ``fact`` together with those ``before`` that it refers to."""
        if fact is not None:
            self.told_in[fact] = (*before, len(self.segments))
        self.segments.append((text, answer))
        self.count += len(text.split()) + text.count(".") + text.count("?") + text.count(":") + text.count(",")

    def pick(self, templates: list[str], **slots) -> str:
        return self.rng.choice(templates).format(day=self.rng.choice(W.DAYS), **slots)

    # ---- what happens -------------------------------------------------------------------------------------------
    def state(self, attribute: str, person: str, pronoun: bool = False) -> None:
        value = self.world.draw(attribute, person)
        self.world.values[attribute, person] = value
        self.render(attribute, person, value, pronoun)

    def render(self, attribute: str, person: str, value: str, pronoun: bool = False) -> None:
        fact = (attribute, value if attribute == "thing" else person)
        if pronoun and attribute in W.PRONOUN_STATEMENTS:
            subject = W.PRONOUNS[person in W.WOMEN]
            text = self.pick(W.PRONOUN_STATEMENTS[attribute], s=subject, v=value)
            self.add(text, fact=fact, before=(self.introduced_in[person],))
        elif self.diary:
            self.add(self.pick(W.DIARY[attribute], p=person, v=value), fact=fact)
        else:
            self.add(self.pick(W.STATEMENTS[attribute], p=person, v=value), fact=fact)

    def place_thing(self, person: str, pronoun: bool = False) -> None:
        free = [t for t in W.THINGS if t not in self.world.holder]
        if free:
            thing = self.rng.choice(free)
            self.world.holder[thing] = person
            self.render("thing", person, thing, pronoun)

    def introduce(self, person: str) -> None:
        """A new person: full name, then two or three facts, most of them with a pronoun."""
        self.world.introduced.add(person)
        self.introduced_in[person] = len(self.segments)
        self.add(self.pick(W.INTRODUCTIONS, f=self.world.full[person]))
        options = [a for a in self.attributes if (a, person) not in self.world.values]
        for attribute in self.rng.sample(options, min(len(options), self.rng.randint(2, 3))):
            self.state(attribute, person, pronoun=self.rng.random() < 0.25)

    def fact(self) -> bool:
        """One fact that has not been told yet; False when all of them have."""
        world, rng = self.world, self.rng
        if "thing" in self.kinds and len(world.holder) < 2 * len(world.people) and rng.random() < 0.3:
            self.place_thing(rng.choice(world.people))
            return True
        options = [(a, p) for a in self.attributes for p in world.people if (a, p) not in world.values]
        if not options:
            return False
        attribute, person = rng.choice(options)
        if self.level == 3 and not self.diary and person not in world.introduced and rng.random() < 0.25:
            self.introduce(person)
        else:
            self.state(attribute, person)
        return True

    def event(self) -> None:
        world, rng = self.world, self.rng
        kind = rng.choice(("move", "newjob", "give", "tell", "tell", "say"))
        person, other = rng.sample(world.people, 2)
        if kind == "move" and world.knows("city"):
            person = rng.choice(world.knows("city"))
            value = rng.choice([c for c in W.CITIES if c != world.values["city", person]])
            world.values["city", person] = value
            world.changed.add(("city", person))
            self.add(self.pick(W.EVENTS["move"], p=person, v=value), fact=("city", person))
        elif kind == "newjob" and world.knows("job"):
            person = rng.choice(world.knows("job"))
            taken = {world.values["job", p] for p in world.knows("job")}
            value = rng.choice([j for j in W.JOBS if j not in taken] or W.JOBS)
            world.values["job", person] = value
            world.changed.add(("job", person))
            self.add(self.pick(W.EVENTS["newjob"], p=person, v=value), fact=("job", person))
        elif kind == "give" and world.holder:
            thing = rng.choice(list(world.holder))
            giver = world.holder[thing]
            other = rng.choice([p for p in world.people if p != giver])
            world.holder[thing] = other
            world.changed.add(("thing", thing))
            self.add(self.pick(W.EVENTS["give"], p=giver, q=other, t=thing), fact=("thing", thing))
        elif kind == "say" and world.values and person not in world.said:
            (attribute, about), value = rng.choice(list(world.values.items()))
            text = rng.choice(W.STATEMENTS[attribute]).format(p=about, v=value)
            world.said[person] = text
            self.add(self.pick(W.EVENTS["say"], p=person, text=text))
        else:
            self.tell_of_thing(person, other)

    def tell_of_thing(self, person: str, other: str) -> None:
        """A thing is told by, and to, a person once only, so that both questions have one answer."""
        used = self.world.told
        options = [t for t in W.THINGS if not any(t == u and (person == a or other == b) for a, b, u in used)]
        thing = self.rng.choice(options)
        used.append((person, other, thing))
        self.add(self.pick(W.EVENTS["tell"], p=person, q=other, t=thing), fact=("tell", person, other, thing))

    def filler(self) -> None:
        if self.diary and self.rng.random() < 0.5:
            self.add(self.pick(W.DIARY["filler"] + W.DIARY["day"]))
            return
        person, other = self.rng.sample(self.world.people, 2)
        self.add(self.pick(self.fillers, p=person, q=other))

    def tell(self, length: int) -> None:
        """Statements, events and fillers, but no questions, until the document has about ``length`` tokens."""
        while self.count < length:
            draw = self.rng.random()
            if draw < 0.15:
                self.filler()
            elif draw < 0.32 and self.world.values:
                self.event()
            elif not self.fact():
                (self.event if self.rng.random() < 0.4 else self.filler)()

    # ---- what is asked ------------------------------------------------------------------------------------------
    def candidates(self, kind: str) -> list[tuple[dict, str]]:
        """All questions of a kind that the text so far answers: (slots, answer)."""
        world, values = self.world, self.world.values
        if kind in ATTRIBUTES:
            return [({"p": p}, values[kind, p]) for p in world.knows(kind)]
        if kind == "thing":
            return [({"t": t}, p) for t, p in world.holder.items()]
        if kind in ("resident", "worker"):
            attribute, slot = ("city", "c") if kind == "resident" else ("job", "j")
            once = [p for p in world.knows(attribute) if len(world.with_value(attribute, values[attribute, p])) == 1]
            return [({slot: values[attribute, p]}, p) for p in once]
        if kind in ("friend_city", "friend_job"):
            target = kind.split("_")[1]
            known = [p for p in world.knows("friend") if (target, values["friend", p]) in values]
            return [({"p": p}, values[target, values["friend", p]]) for p in known]
        if kind == "thing_city":
            return [({"t": t}, values["city", p]) for t, p in world.holder.items() if ("city", p) in values]
        if kind == "teller":
            return [({"q": b, "t": t}, a) for a, b, t in world.told]
        if kind == "listener":
            return [({"p": a, "t": t}, b) for a, b, t in world.told]
        if kind == "count":
            cities = sorted({values["city", p] for p in world.knows("city")})
            return [({"c": c}, str(len(world.with_value("city", c)))) for c in cities]
        if kind == "sum":
            known = world.knows("coins")
            pairs = [(p, q) for p in known for q in known if p != q]
            return [({"p": p, "q": q}, str(int(values["coins", p]) + int(values["coins", q]))) for p, q in pairs]
        return [({"p": p}, text) for p, text in world.said.items()]

    def choices(self, kind: str, answer: str, limit: int = 8) -> list[str]:
        """The answer among others of its sort, those that the text names first."""
        world, rng = self.world, self.rng
        if kind in ("city", "friend_city", "thing_city"):
            near, pool = [world.values["city", p] for p in world.knows("city")], W.CITIES
        elif kind in ("job", "friend_job"):
            near, pool = [world.values["job", p] for p in world.knows("job")], W.JOBS
        elif kind == "color":
            near, pool = [], W.COLORS
        elif kind in ("coins", "count", "sum"):
            top = {"coins": 10, "count": 7, "sum": 20}[kind]
            near, pool = [], W.NUMBERS[0 if kind == "count" else 1 : top + 1]
        else:
            near, pool = list(world.people), W.FIRST_NAMES
        near = [v for v in dict.fromkeys(near) if v != answer]
        far = [v for v in pool if v != answer and v not in near]
        rng.shuffle(near)
        rng.shuffle(far)
        options = [answer, *(near + far)[: limit - 1]]
        rng.shuffle(options)
        return options

    def question(self, kind: str | None = None, held_out: bool = False):
        """(kind, question with stem, answer), or None when nothing of the kind can be asked yet."""
        kinds = [kind] if kind else self.rng.sample(self.kinds, len(self.kinds))
        for name in kinds:
            # An answer that was given before would only have to be copied.
            options = [
                (slots, answer)
                for slots, answer in self.candidates(name)
                if (name, str(slots), answer) not in self.asked
            ]
            if options:
                slots, answer = self.rng.choice(options)
                self.asked.add((name, str(slots), answer))
                templates, stem = W.QUESTIONS[name]
                templates = W.HELD_OUT_QUESTIONS[name] if held_out else templates
                return name, f"{self.rng.choice(templates).format(**slots)} {stem.format(**slots)}", slots, answer
        return None

    def reword(self, question: list[str], slots: dict) -> str:
        """The question with some of its words replaced, dropped or doubled by words that mean nothing here."""
        words = []
        for word in question:
            draw = 1.0 if word.rstrip("?") in slots.values() else self.rng.random()
            if draw < 0.25:
                word = self.rng.choice(W.EMPTY_WORDS) + ("?" if word.endswith("?") else "")
            elif draw < 0.4:
                words.append(self.rng.choice(W.EMPTY_WORDS))
            if not 0.4 <= draw < 0.55 or word.endswith("?"):
                words.append(word)
        return " ".join(words)

    def ask(self, held_out: bool = False) -> bool:
        """A question and its answer; False when everything has been asked."""
        asked = self.question(held_out=held_out)
        if asked is None:
            return False
        kind, text, slots, answer = asked
        if self.unasked:
            stem = W.QUESTIONS[kind][1].format(**slots)
            draw = self.rng.random()
            if draw < self.unasked:
                text = stem
            elif draw < 2 * self.unasked:
                text = f"{self.reword(text[: -len(stem)].split(), slots)} {stem}"
        self.add(text)
        end = ' "' if kind == "quote" else " coins." if kind in ("coins", "sum") else "."
        self.add(f"{answer}{end}", True)
        return True
