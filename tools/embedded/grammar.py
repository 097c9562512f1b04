"""A small grammar of English: scenes of two or three sentences that begin neutrally and continue happily or gloomily.

It is the only source of the embedded demo's text, so everything in `tiny/` may be redistributed. Every phrase that
expresses a feeling is in a table under its valence (-2 ... +2). `scene` draws an opening and a continuation; `score`
computes the valence of any text, and `is_whole` says whether a continuation could be the grammar's own. So pairs of
sampled continuations are ranked without a human, and the result of PPO is judged by a measure that PPO was not trained
on.

    >>> import random
    >>> scene(random.Random(1))  # doctest: +SKIP
    ('Last week Clara had soup at the tavern.', ' The soup was tasty and fresh. She smiled all the way home.')
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

# -- who ----

WOMEN = ("Anna", "Clara", "Dora", "Emma", "Grace", "Ida", "Julia", "Lena", "Maria", "Nora", "Rosa", "Sara")
MEN = ("Ben", "Carl", "David", "Felix", "Hugo", "Jack", "Leo", "Martin", "Oscar", "Paul", "Sam", "Tom")
PRONOUNS = {  # subject, possessive, past of "to be"
    "woman": ("She", "her", "was"),
    "man": ("He", "his", "was"),
    "many": ("They", "their", "were"),
    "I": ("I", "my", "was"),
    "we": ("We", "our", "were"),
}
OTHERS = (
    ("My aunt", "woman"),
    ("My sister", "woman"),
    ("Our teacher", "woman"),
    ("My uncle", "man"),
    ("My brother", "man"),
    ("The twins", "many"),
    ("The children", "many"),
    ("My parents", "many"),
)
COMPANIONS = (
    "a friend",
    "an old friend",
    "{her} cousin",
    "{her} neighbour",
    "{her} family",
    "{her} dog",
    "{her} class",
)
TIMES = (
    "Yesterday",
    "On Monday",
    "On Friday",
    "On Sunday",
    "Last week",
    "Last month",
    "This morning",
    "One evening",
    "After work",
    "In the spring",
    "In the autumn",
    "In July",
)
CITIES = ("Cork", "Kyoto", "Lima", "Lisbon", "Oslo", "Porto", "Turin", "Vienna")

# -- where: each kind of scene has openings, and the things that its continuation may talk about ----


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of scene: `items` replace `{item}`; a thing is (noun, table of adjectives); `{item}` is also a thing."""

    openings: tuple[str, ...]
    places: tuple[str, ...]
    items: tuple[str, ...]
    item_table: str
    things: tuple[tuple[str, str], ...]


KINDS = (
    Kind(
        openings=(
            "had {item} at {place}",
            "ordered {item} at {place}",
            "went to {place} for {item}",
            "ate {item} at {place}",
        ),
        places=("the cafe", "the diner", "the tavern", "the tea house", "the noodle bar", "the corner bakery"),
        items=("soup", "bread", "rice", "fish", "cake", "pie", "pasta", "salad", "curry", "stew"),
        item_table="food",
        things=(("waiter", "staff"), ("cook", "staff"), ("owner", "staff"), ("table", "room"), ("room", "room")),
    ),
    Kind(
        openings=("went to {place} by {item}", "took the {item} to {place}", "rode the {item} to {place}"),
        places=CITIES,
        items=("train", "bus", "ferry", "tram", "night train", "boat"),
        item_table="ride",
        things=(("driver", "staff"), ("guard", "staff"), ("seat", "room"), ("view", "scene"), ("cabin", "room")),
    ),
    Kind(
        openings=(
            "walked along the {item} near {place}",
            "spent a day at the {item} near {place}",
            "went to the {item} near {place}",
        ),
        places=CITIES,
        items=("lake", "beach", "river", "valley", "garden", "harbour"),
        item_table="scene",
        things=(("sky", "scene"), ("view", "scene"), ("path", "scene"), ("air", "scene"), ("guide", "staff")),
    ),
    Kind(
        openings=("saw a {item} at {place}", "watched a {item} at {place}", "went to a {item} at {place}"),
        places=("the theatre", "the town hall", "the old cinema", "the school", "the city museum"),
        items=("film", "play", "concert", "puppet show", "musical"),
        item_table="show",
        things=(
            ("music", "show"),
            ("story", "show"),
            ("ending", "show"),
            ("hall", "room"),
            ("seat", "room"),
            ("host", "staff"),
        ),
    ),
    Kind(
        openings=(
            "stayed at an {item} in {place}",
            "spent two nights at an {item} in {place}",
            "booked an {item} in {place}",
        ),
        places=CITIES,
        items=("inn", "old hotel", "empty cottage", "artist's house"),
        item_table="room",
        things=(("bed", "room"), ("room", "room"), ("owner", "staff"), ("breakfast", "food"), ("view", "scene")),
    ),
)

# -- what happened: adjectives by table and valence, feelings and events by valence ----

ADJECTIVES = {
    "food": {
        2: ("delicious", "perfect", "wonderful", "superb"),
        1: ("tasty", "fresh", "warm", "good"),
        0: ("plain", "simple", "ordinary"),
        -1: ("bland", "cold", "salty", "stale"),
        -2: ("awful", "terrible", "disgusting", "rotten"),
    },
    "staff": {
        2: ("charming", "wonderful", "delightful", "brilliant"),
        1: ("kind", "friendly", "polite", "helpful"),
        0: ("quiet", "young", "tall"),
        -1: ("slow", "rude", "bored", "grumpy"),
        -2: ("awful", "nasty", "horrible", "cruel"),
    },
    "room": {
        2: ("lovely", "perfect", "beautiful", "splendid"),
        1: ("clean", "cosy", "comfortable", "bright"),
        0: ("small", "plain", "narrow"),
        -1: ("dirty", "cramped", "noisy", "cold"),
        -2: ("filthy", "horrible", "dreadful", "disgusting"),
    },
    "scene": {
        2: ("beautiful", "glorious", "lovely", "splendid"),
        1: ("clear", "bright", "calm", "fresh"),
        0: ("still", "quiet", "ordinary"),
        -1: ("dull", "bleak", "dirty", "gloomy"),
        -2: ("dreadful", "horrible", "ugly", "terrible"),
    },
    "ride": {
        2: ("wonderful", "perfect", "delightful", "splendid"),
        1: ("smooth", "quick", "comfortable", "clean"),
        0: ("long", "full", "ordinary"),
        -1: ("late", "slow", "crowded", "noisy"),
        -2: ("dreadful", "terrible", "awful", "filthy"),
    },
    "show": {
        2: ("brilliant", "superb", "wonderful", "glorious"),
        1: ("funny", "clever", "lively", "good"),
        0: ("long", "short", "simple"),
        -1: ("boring", "dull", "clumsy", "bland"),
        -2: ("terrible", "awful", "dreadful", "ugly"),
    },
}
FEELINGS = {
    2: ("overjoyed", "thrilled", "delighted"),
    1: ("happy", "glad", "cheerful", "grateful"),
    0: ("hungry", "sleepy", "curious"),
    -1: ("sad", "tired", "upset", "annoyed"),
    -2: ("miserable", "heartbroken", "furious"),
}
EVENTS = {  # follow a pronoun
    2: (
        "laughed all the way home",
        "called it the best day of the year",
        "danced in the street",
        "fell in love with the place",
    ),
    1: (
        "smiled all the way home",
        "thanked everyone",
        "made a new friend",
        "stayed until the end",
        "slept well that night",
    ),
    0: ("went home at nine", "took the bus home", "wrote a letter that night", "read a book on the way back"),
    -1: ("left early", "lost an umbrella", "had a headache", "hardly spoke on the way home", "slept badly that night"),
    -2: (
        "cried all the way home",
        "called it the worst day of the year",
        "was robbed in the street",
        "hated every minute",
    ),
}

MOODS = {  # how often a valence is drawn: a mood leans, it does not decide
    "gloomy": {-2: 0.25, -1: 0.40, 0: 0.20, 1: 0.12, 2: 0.03},
    "mixed": {-2: 0.10, -1: 0.25, 0: 0.30, 1: 0.25, 2: 0.10},
    "happy": {-2: 0.03, -1: 0.12, 0: 0.20, 1: 0.40, 2: 0.25},
}
MOOD_SHARES = {"gloomy": 0.35, "mixed": 0.3, "happy": 0.35}
SHAPES = {  # the sentences of a continuation, and how often that shape is drawn
    ("thing",): 0.08,
    ("person",): 0.04,
    ("thing", "person"): 0.38,
    ("pair",): 0.10,
    ("pair", "person"): 0.20,
    ("thing", "thing"): 0.20,
}


def _pick(rng: random.Random, shares: dict):
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def _person(rng: random.Random) -> tuple[str, str]:
    """Returns a subject and its key in PRONOUNS."""
    draw = rng.random()
    if draw < 0.35:
        return rng.choice(WOMEN), "woman"
    if draw < 0.70:
        return rng.choice(MEN), "man"
    if draw < 0.85:
        return rng.choice(OTHERS)
    return rng.choice((("I", "I"), ("we", "we")))


@dataclass(frozen=True, slots=True)
class Opening:
    """A neutral first sentence, and the facts that its continuation needs."""

    text: str
    kind: Kind
    item: str
    pronouns: tuple[str, str, str]


def opening(rng: random.Random) -> Opening:
    """Draws an opening."""
    who, key = _person(rng)
    kind = rng.choice(KINDS)
    item, place = rng.choice(kind.items), rng.choice(kind.places)
    did = rng.choice(kind.openings).format(item=item, place=place)
    companion = f" with {rng.choice(COMPANIONS)}" if rng.random() < 0.35 else ""
    if who == "we" or rng.random() < 0.7:
        inner = who if key not in ("woman", "man", "many") or who in WOMEN + MEN else who[0].lower() + who[1:]
        text = f"{rng.choice(TIMES)} {inner} {did}{companion}."
    else:
        text = f"{who} {did}{companion}."
    return Opening(text.replace("{her}", PRONOUNS[key][1]), kind, item, PRONOUNS[key])


class _Writer:
    """Draws the sentences of one continuation without repeating a feeling or a thing."""

    def __init__(self, rng: random.Random, start: Opening):
        self.rng = rng
        self.start = start
        self.shares = MOODS[_pick(rng, MOOD_SHARES)]
        self.used: set[str] = set()

    def phrase(self, table: dict[int, tuple[str, ...]]) -> tuple[str, int]:
        while True:
            valence = _pick(self.rng, self.shares)
            free = [phrase for phrase in table[valence] if phrase not in self.used]
            if free:
                chosen = self.rng.choice(free)
                self.used.add(chosen)
                return chosen, valence

    def clause(self) -> tuple[str, int]:
        item = self.start.item.split()[-1]
        things = [(item, self.start.kind.item_table)] * 3 + list(self.start.kind.things)
        noun, table = self.rng.choice([thing for thing in things if thing[0] not in self.used])
        self.used.add(noun)
        adjective, valence = self.phrase(ADJECTIVES[table])
        text = f"the {noun} was {adjective}"
        if self.rng.random() < 0.25:
            more, other = self.phrase(ADJECTIVES[table])
            text += f" and {more}" if valence * other >= 0 else ""
        return text, valence

    def thing(self) -> str:
        return self.clause()[0]

    def pair(self) -> str:
        (first, a), (second, b) = self.clause(), self.clause()
        return f"{first}, {'but' if a * b < 0 else 'and'} {second}"

    def person(self) -> str:
        subject, _, was = self.start.pronouns
        if self.rng.random() < 0.35:
            return f"{subject} {self.rng.choice((was, 'felt'))} {self.phrase(FEELINGS)[0]}"
        event = self.phrase(EVENTS)[0]
        return f"{subject} {re.sub('^was ', f'{was} ', event)}"


def continuation(rng: random.Random, start: Opening) -> str:
    """Draws a continuation; it begins with a space, so that opening + continuation is the text."""
    writer = _Writer(rng, start)
    sentences = [getattr(writer, part)() for part in _pick(rng, SHAPES)]
    return "".join(f" {sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def scene(rng: random.Random) -> tuple[str, str]:
    """Draws (opening, continuation)."""
    start = opening(rng)
    return start.text, continuation(rng, start)


# -- reading it back ----


def valences() -> dict[str, int]:
    """Returns every phrase that expresses a feeling, as `score` searches for it, with its valence."""
    valences: dict[str, int] = {}
    for table in (*ADJECTIVES.values(), FEELINGS, EVENTS):
        for valence, phrases in table.items():
            for phrase in phrases:
                key = phrase.removeprefix("was ")
                assert valences.setdefault(key, valence) == valence, f"'{key}' has two valences"
    return valences


VALENCES = valences()
PATTERN = re.compile(r"\b(?:" + "|".join(sorted(VALENCES, key=len, reverse=True)) + r")\b")


def score(text: str) -> float:
    """Returns the valence of a text, about -1.6 ... +1.6.

    The sum of the valences of its distinct phrases, divided by their number plus one (so three pleasant phrases count
    more than one, but length alone gains little), less 1/2 for each repetition of a phrase.
    """
    phrases = PATTERN.findall(text)
    distinct = set(phrases)
    return sum(VALENCES[phrase] for phrase in distinct) / (len(distinct) + 1) - 0.5 * (len(phrases) - len(distinct))


def valence(prompts: list[str], responses: list[str]) -> list[float]:
    """Scores each response with `score`, as a reward function:
    eval.reward_function=tools/embedded/grammar.py:valence."""
    return [score(response) for response in responses]


def _one_of(phrases) -> str:
    return f"(?:{'|'.join(sorted(map(re.escape, set(phrases)), key=len, reverse=True))})"


def _whole() -> re.Pattern:
    """Returns what a continuation looks like: one or two sentences, whatever their nouns have to do with one
    another."""
    nouns = _one_of([item.split()[-1] for kind in KINDS for item in kind.items] + [
        noun for kind in KINDS for noun, _ in kind.things
    ])  # fmt: skip
    adjective = _one_of(phrase for table in ADJECTIVES.values() for phrases in table.values() for phrase in phrases)
    feeling = _one_of(phrase for phrases in FEELINGS.values() for phrase in phrases)
    event = _one_of(phrase.removeprefix("was ") for phrases in EVENTS.values() for phrase in phrases)
    clause = f"the {nouns} was {adjective}(?: and {adjective})?"
    subject = _one_of(subject for subject, *_ in PRONOUNS.values())
    person = f"{subject} (?:(?:was|were|felt) {feeling}|(?:(?:was|were) )?{event})"
    return re.compile(f"(?: (?:{clause}(?:, (?:but|and) {clause})?|{person})\\.){{1,2}}", re.IGNORECASE)


WHOLE = _whole()


def is_whole(text: str) -> bool:
    """Returns whether a continuation consists of sentences of the grammar."""
    return WHOLE.fullmatch(text) is not None
