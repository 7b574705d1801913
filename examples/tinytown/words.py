"""The closed vocabulary of Tinytown: names, places, things, and the sentence templates made of them.

Everything that a document can say stands here, so that the tokenizer can hold one entry a word. Slots in braces are
filled by :mod:`corpus`. Templates in the ``HELD_OUT_*`` lists never occur in training or validation documents.
"""

from __future__ import annotations

import re

WOMEN = (
    "Alice Carol Dora Emma Fiona Grace Hanna Irene Julia Karen Laura Maria Nora Olga Paula Rosa Sara Tina Vera Wanda"
).split()
MEN = (
    "Adam Bob Carl David Erik Frank Georg Henry Ivan Jack Karl Leon Mark Nils Otto Peter Ralph Simon Tom Victor"
).split()
FIRST_NAMES = WOMEN + MEN
LAST_NAMES = "Ash Birch Brook Dale Fern Field Ford Hill Lake Moss Reed Stone Wood Marsh Frost Pond".split()
CITIES = (
    "Rome Paris Oslo Cairo Lima Delhi Tokyo Berlin Madrid Vienna Dublin Athens Prague Warsaw Lisbon Boston Dallas "
    "Sydney Quito Havana"
).split()
THINGS = (
    "lamp key book clock ring knife map coat drum bell chair cup brush rope ladder mirror basket candle violin kettle"
).split()
JOBS = "baker doctor teacher farmer singer painter lawyer sailor miner tailor nurse pilot".split()
COLORS = "red blue green yellow black white brown purple".split()
NUMBERS = [str(n) for n in range(21)]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

# relation -> statements; {p} is a person, {v} the value. The question's stem is the first of the templates.
STATEMENTS = {
    "city": ["{p} lives in {v}.", "The home of {p} is {v}.", "{p} has a house in {v}."],
    "job": ["{p} works as a {v}.", "The job of {p} is {v}.", "{p} is a {v}."],
    "color": ["{p} likes the color {v}.", "The best color for {p} is {v}."],
    "friend": ["The friend of {p} is {v}.", "{p} has a friend named {v}."],
    "coins": ["{p} has {v} coins.", "In the purse of {p} are {v} coins."],
    "thing": ["The {v} is with {p}.", "{p} has the {v}.", "{p} owns the {v}."],
}
PRONOUN_STATEMENTS = {
    "city": ["{s} lives in {v}.", "{s} has a house in {v}."],
    "job": ["{s} works as a {v}.", "{s} is a {v}."],
    "color": ["{s} likes the color {v}."],
    "coins": ["{s} has {v} coins."],
    "thing": ["{s} has the {v}.", "{s} owns the {v}."],
}
EVENTS = {
    "move": ["{p} moved to {v}.", "On {day} {p} moved to {v}.", "Now {p} lives in {v}."],
    "newjob": ["{p} now works as a {v}.", "Since {day} {p} works as a {v}."],
    "give": ["{p} gave the {t} to {q}.", "On {day} {p} gave the {t} to {q}.", "{q} got the {t} from {p}."],
    "tell": ["{p} told {q} about the {t}.", "On {day} {p} told {q} about the {t}."],
    "say": ['{p} said: " {text} "', 'On {day} {p} said: " {text} "'],
}
INTRODUCTIONS = ["This is {f}.", "Here comes {f}.", "Then we met {f}.", "In this town there is {f}."]
FILLERS = [
    "It was a quiet day.",
    "The sun was warm and the wind was cold.",
    "Nobody was in the street.",
    "It rained on {day}.",
    "The market was open on {day}.",
    "Many birds were on the roof.",
    "{p} went for a walk.",
    "{p} slept well.",
    "{p} and {q} had dinner together.",
    "{p} wrote a long letter.",
]
HELD_OUT_FILLERS = [
    "The street was quiet and the birds slept well.",
    "{p} went for dinner on {day}.",
    "On {day} the wind was warm.",
    "It was a long walk and nobody was in the market.",
]

# kind -> (question templates, stem). The stem is the beginning of the answer; the answer is one more word.
QUESTIONS = {
    "city": (["Where does {p} live?", "In which city is the home of {p}?"], "{p} lives in"),
    "job": (["What is the job of {p}?", "What does {p} work as?"], "{p} works as a"),
    "color": (["Which color does {p} like?"], "{p} likes the color"),
    "friend": (["Who is the friend of {p}?"], "The friend of {p} is"),
    "coins": (["How many coins does {p} have?"], "{p} has"),
    "thing": (["Who has the {t}?", "With whom is the {t}?"], "The {t} is with"),
    "resident": (["Who lives in {c}?"], "The one who lives in {c} is"),
    "worker": (["Who works as a {j}?"], "The one who works as a {j} is"),
    "friend_city": (["Where does the friend of {p} live?"], "The friend of {p} lives in"),
    "friend_job": (["What does the friend of {p} work as?"], "The friend of {p} works as a"),
    "thing_city": (["In which city is the {t}?"], "The {t} is in"),
    "teller": (["Who told {q} about the {t}?"], "{q} heard about the {t} from"),
    "listener": (["Whom did {p} tell about the {t}?"], "{p} told about the {t} to"),
    "count": (["How many people live in {c}?"], "The number of people in {c} is"),
    "sum": (["How many coins do {p} and {q} have together?"], "Together {p} and {q} have"),
    "quote": (["What did {p} say?"], '{p} said: "'),
}
HELD_OUT_QUESTIONS = {
    "city": ["Does {p} live in a city? Which?"],
    "job": ["Which job does {p} have?"],
    "color": ["What color is the best for {p}?"],
    "friend": ["Who is a friend to {p}?"],
    "coins": ["How many coins are with {p}?"],
    "thing": ["Who now owns the {t}?"],
    "resident": ["In {c} lives who?"],
    "worker": ["Who is a {j}?"],
    "friend_city": ["In which city does the friend of {p} live?"],
    "friend_job": ["What is the job of the friend of {p}?"],
    "thing_city": ["Where is the {t}?"],
    "teller": ["From whom did {q} get told about the {t}?"],
    "listener": ["Who was told about the {t} from {p}?"],
    "count": ["What is the number of people in {c}?"],
    "sum": ["What is the number of coins with {p} and {q} together?"],
    "quote": ["What was said? What did {p} say?"],
}

DIARY = {
    "open": ["Diary of {f}.", "My diary, written down by {f}."],
    "day": ["{day}.", "Again it is {day}.", "Dear diary, today is {day}."],
    "city": [
        "I heard that {p} lives in {v}.",
        "I went to see the house of {p} in {v}.",
        "I learned: {p} lives in {v}.",
    ],
    "job": ["I saw {p} at work, as a {v}.", "I heard that {p} works as a {v}."],
    "color": ["I asked {p} which color is best and the answer was {v}."],
    "friend": ["I met {p} and then {v}, the friend of {p}."],
    "coins": ["I lost a game, so now {p} has {v} coins."],
    "thing": ["I saw the {v} in the house of {p}.", "I gave my {v} to {p}."],
    "filler": [
        "I was so tired today.",
        "I did not sleep well.",
        "My dinner was cold again.",
        "I feel happy and warm.",
    ],
    "ask": ["I asked myself:", "I want to remember this:"],
}
SYSTEM_PROMPTS = ["You know this town well.", "Answer from what you read.", "You are a good friend."]
USER_OPENERS = ["Listen.", "Here is some news.", "I want to tell you this.", "Remember this."]
ASSISTANT_REPLIES = ["I will remember.", "Good to know.", "I see.", "Go on."]
LIST_TITLES = {"city": "List of homes:", "job": "List of jobs:", "color": "List of colors:"}
PRONOUNS = {True: "She", False: "He"}
# For questions in other words: what stands in them tells nothing, even where statements have the same words.
EMPTY_WORDS = (
    "the a is in of for to was it day now So plus Earlier yes no not and or but best color job home friend "
    "city works lives likes has have told about one"
).split()
EXTRA = ["So", "plus", "is", "Earlier we read:", "Question:", "Answer:", "yes", "no", "not", "and", "or", "but"]


def _texts(node) -> list[str]:
    if isinstance(node, str):
        return [node]
    if isinstance(node, dict):
        return [text for value in node.values() for text in _texts(value)]
    return [text for value in node for text in _texts(value)]


def vocabulary() -> list[str]:
    """Every word and every punctuation mark that a document can hold, sorted, without duplicates."""
    sources = [FIRST_NAMES, LAST_NAMES, CITIES, THINGS, JOBS, COLORS, NUMBERS, DAYS, STATEMENTS, PRONOUN_STATEMENTS]
    sources += [EVENTS, INTRODUCTIONS, FILLERS, HELD_OUT_FILLERS, QUESTIONS, HELD_OUT_QUESTIONS, DIARY, SYSTEM_PROMPTS]
    sources += [USER_OPENERS, ASSISTANT_REPLIES, LIST_TITLES, PRONOUNS, EXTRA]
    words: set[str] = set()
    for text in _texts(sources):
        words.update(re.findall(r"\w+", re.sub(r"\{\w+\}", " ", text)))
    return sorted(words)
