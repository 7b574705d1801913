"""Documents about Tinytown: a simulated world is told, changed and asked about.

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
        self.count = 0
        self.asked: set[tuple[str, str, str]] = set()  # (kind, slots, answer)
        self.kinds = KINDS_BY_LEVEL[level]
        self.attributes = [a for a in ATTRIBUTES if a in self.kinds]
        self.fillers = W.FILLERS + (W.HELD_OUT_FILLERS if split == "test" else [])

    def add(self, text: str, answer: bool = False) -> None:
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
        if pronoun and attribute in W.PRONOUN_STATEMENTS:
            subject = W.PRONOUNS[person in W.WOMEN]
            self.add(self.pick(W.PRONOUN_STATEMENTS[attribute], s=subject, v=value))
        elif self.diary:
            self.add(self.pick(W.DIARY[attribute], p=person, v=value))
        else:
            self.add(self.pick(W.STATEMENTS[attribute], p=person, v=value))

    def place_thing(self, person: str, pronoun: bool = False) -> None:
        free = [t for t in W.THINGS if t not in self.world.holder]
        if free:
            thing = self.rng.choice(free)
            self.world.holder[thing] = person
            self.render("thing", person, thing, pronoun)

    def introduce(self, person: str) -> None:
        """A new person: full name, then two or three facts, most of them with a pronoun."""
        self.world.introduced.add(person)
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
            self.add(self.pick(W.EVENTS["move"], p=person, v=value))
        elif kind == "newjob" and world.knows("job"):
            person = rng.choice(world.knows("job"))
            taken = {world.values["job", p] for p in world.knows("job")}
            value = rng.choice([j for j in W.JOBS if j not in taken] or W.JOBS)
            world.values["job", person] = value
            world.changed.add(("job", person))
            self.add(self.pick(W.EVENTS["newjob"], p=person, v=value))
        elif kind == "give" and world.holder:
            thing = rng.choice(list(world.holder))
            giver = world.holder[thing]
            other = rng.choice([p for p in world.people if p != giver])
            world.holder[thing] = other
            world.changed.add(("thing", thing))
            self.add(self.pick(W.EVENTS["give"], p=giver, q=other, t=thing))
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
        self.add(self.pick(W.EVENTS["tell"], p=person, q=other, t=thing))

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


SPACERS = "lives in works as a has the is with likes color home of".split()


def pairs_document(rng: random.Random, length: int, most_spacers: int = 0) -> list[Segment]:
    """Pairs repeated in shuffled order: the first lesson of the curriculum, from which lookups are learned.

    With ``most_spacers``, up to so many words that mean nothing stand between the two, other ones each time, so that
    the value must be found by its key and not by the word before it. Without this step the models stay for millions of
    tokens at any value of the right sort. Half of these documents ask the other way round after the first time, for
    the key by the value.
    """
    count = rng.randint(3, max(3, min(8, length // 12)))
    keys = rng.sample(W.FIRST_NAMES + W.THINGS, count)
    pool = rng.choice((W.CITIES, W.JOBS, W.FIRST_NAMES, W.COLORS + W.THINGS, W.NUMBERS[1:]))
    values = rng.sample([v for v in pool if v not in keys], count)
    pairs = list(zip(keys, values, strict=True))
    segments: list[Segment] = []
    first, backwards = True, most_spacers > 0 and rng.random() < 0.5
    while 3 * len(segments) // 2 < length:
        rng.shuffle(pairs)
        for key, value in pairs:
            spacers = [rng.choice(SPACERS) for _ in range(rng.randint(0, most_spacers))]
            if backwards and not first:
                segments += [(" ".join([value, *spacers, "is with"]), False), (f"{key}.", True)]
                continue
            segments += [(" ".join([key, *spacers]), False), (f"{value}.", not first)]
        first = False
    return segments


GENRES = ("story", "chat", "diary", "list", "quiz", "exam", "exam", "exam")


def relation_document(rng: random.Random, split: str, length: int) -> list[Segment]:
    """One relation of several people, then the same again in another order, as statements or as questions.

    The answer can only be found by whom it is about. With many relations in a short document each has but two or three
    values, and a model that looks for any value of the right sort is right so often that it learns nothing better.
    """
    writer = Writer(rng, split, 1, rng.randint(4, min(8, 3 + length // 24)))
    while writer.count < length:
        relation = rng.choice(KINDS_BY_LEVEL[1])
        world = writer.world = World(rng, split, len(writer.world.people))
        if rng.random() < 0.5:
            restate(writer, rng.choice(W.STATEMENTS[relation]), relation)
            continue
        writer.kinds = (relation,)
        writer.asked.clear()
        for person in rng.sample(world.people, len(world.people)):
            if relation == "thing":
                writer.place_thing(person)
            else:
                writer.state(relation, person)
        for _ in range(rng.randint(2, len(world.people))):
            writer.ask()
    return writer.segments


# Kinds that belong together: what must be told so that they can be asked.
DRILLS = (("coins",), ("listener", "teller"), ("friend", "city", "friend_city"), ("coins", "sum"), ("job", "color"))


def drill_document(rng: random.Random, split: str, length: int, unasked: float) -> list[Segment]:
    """One or two kinds of fact about everybody, then questions about them, again and again in new worlds."""
    writer = Writer(rng, split, 3, rng.randint(4, min(7, 3 + length // 24)), unasked=unasked)
    while writer.count < length:
        kinds = rng.choice(DRILLS)
        world = writer.world = World(rng, split, len(writer.world.people))
        writer.kinds = kinds
        writer.asked.clear()
        told = [(kind, person) for kind in kinds if kind in ATTRIBUTES for person in world.people]
        for attribute, person in rng.sample(told, len(told)):
            writer.state(attribute, person)
        if "teller" in kinds:
            for _ in world.people[1:]:
                writer.tell_of_thing(*rng.sample(world.people, 2))
        for _ in range(rng.randint(3, 8)):
            writer.ask()
    return writer.segments


def restate(writer: Writer, template: str, relation: str) -> None:
    """Statements of one form about everybody, twice; what stands last in the form is the answer the second time."""
    rng, world = writer.rng, writer.world
    pairs = []
    for person in world.people:
        if relation == "thing":
            value = rng.choice([thing for thing in W.THINGS if thing not in world.holder])
            world.holder[value] = person
        else:
            value = world.draw(relation, person)
        pairs.append({"p": person, "v": value})
    before, _, last = template.rpartition("{")
    slot, _, after = last.partition("}")
    for again in (False, True):
        for slots in rng.sample(pairs, len(pairs)):
            writer.add(before.format(**slots).strip())
            writer.add(f"{slots[slot]}{after}", again)


def document(
    rng: random.Random, split: str, length: int, level: int = 3, genre: str | None = None, unasked: float = 0.0
) -> list[Segment]:
    """One document of about ``length`` tokens.

    Args:
        rng: the only source of randomness.
        split: "train", "validation" or "test".
        length: wanted number of tokens (the last sentence may go beyond it).
        level: 0 bare pairs, 1 one relation at a time, 2 many relations and reverse questions, 3 everything.
        genre: "story", "chat", "diary", "list", "quiz", "exam" (all questions at the end) or "drill" (one or two kinds
            of fact and question); drawn among the others when None.
        unasked: share of the questions of which only the beginning of the answer is written ("Alice likes the color"),
            and share of those with other words in them, so that a model does not hang on the wording of questions.
    """
    if level == 0:
        return pairs_document(rng, length)
    if level == 1:
        return pairs_document(rng, length, 3) if rng.random() < 0.5 else relation_document(rng, split, length)
    if genre == "drill":
        return drill_document(rng, split, length, unasked)
    if genre is None:
        genre = rng.choice(GENRES) if level == 3 else "quiz"
    people = rng.randint(4, max(4, min(5 + level, 3 + length // 24)))
    writer = Writer(rng, split, level, people, diary=genre == "diary", unasked=unasked)
    if genre == "chat":
        return chat_document(writer, length)
    if genre == "diary":
        author = rng.choice(full_names(split))
        writer.add(writer.pick(W.DIARY["open"], f=" ".join(author)))
    if genre == "list":
        attribute = rng.choice([a for a in writer.attributes if a in W.LIST_TITLES])
        writer.add(W.LIST_TITLES[attribute])
        for person in writer.world.people:
            value = writer.world.draw(attribute, person)
            writer.world.values[attribute, person] = value
            writer.add(f"{person} - {value};")
    if genre == "exam":
        writer.tell(int(length * rng.uniform(0.5, 0.8)))
        while writer.count < length and writer.ask(held_out=split == "test" and rng.random() < 0.5):
            pass
        return writer.segments
    ask_share = {"quiz": 0.5, "list": 0.45}.get(genre, 0.35)
    for _ in range(3):
        writer.fact()
    while writer.count < length:
        draw = rng.random()
        if draw < ask_share:
            if genre == "diary":
                writer.add(writer.pick(W.DIARY["ask"]))
            if writer.ask(held_out=split == "test" and rng.random() < 0.5):
                continue
        if level == 3 and draw > 0.88:
            writer.filler()
        elif level == 3 and draw > 0.70:
            writer.event()
        elif not writer.fact() and not writer.ask():
            writer.event()
    return writer.segments


def chat_document(writer: Writer, length: int) -> list[Segment]:
    """A dialogue in the chat template's own words: facts and questions from the user, answers from the assistant."""
    rng = writer.rng
    if rng.random() < 0.5:
        writer.add(f"<|system|> {rng.choice(W.SYSTEM_PROMPTS)} <|end|>")
    while writer.count < length:
        writer.add(f"<|user|> {rng.choice(W.USER_OPENERS)}")
        for _ in range(rng.randint(1, 4)):
            if not writer.fact() or rng.random() < 0.3:
                writer.event()
        asked = (
            writer.question(held_out=writer.split == "test" and rng.random() < 0.5) if rng.random() < 0.75 else None
        )
        if asked is None:
            writer.add(f"<|end|> <|assistant|> {rng.choice(W.ASSISTANT_REPLIES)} <|end|>")
            continue
        kind, text, slots, answer = asked
        stem = W.QUESTIONS[kind][1].format(**slots)
        writer.add(f"{text[: -len(stem)].rstrip()} <|end|> <|assistant|> {stem}")
        end = ' "' if kind == "quote" else " coins." if kind in ("coins", "sum") else "."
        writer.add(f"{answer}{end}", True)
        writer.add("<|end|>")
    return writer.segments


def text_of(segments: list[Segment]) -> str:
    """The document as one string."""
    return " ".join(text for text, _ in segments)
