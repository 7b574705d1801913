"""Documents about Tinytown: lessons of single relations, and stories, dialogues, diaries, lists and exams.

``world`` keeps what is true while a document is written.
"""

from __future__ import annotations

import random

import words as W
from world import ATTRIBUTES, KINDS_BY_LEVEL, Segment, World, Writer, full_names

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
