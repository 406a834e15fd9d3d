"""Running text to hide facts in: sentences of a small grammar, so that no corpus has to be downloaded."""

from __future__ import annotations

import random

FIRST_NAMES = [
    "Ada",
    "Bruno",
    "Clara",
    "Dario",
    "Edith",
    "Felix",
    "Greta",
    "Hugo",
    "Irma",
    "Jonas",
    "Katja",
    "Leon",
    "Marta",
    "Nils",
    "Olga",
    "Pavel",
    "Rosa",
    "Stefan",
    "Tilda",
    "Viktor",
]
LAST_NAMES = [
    "Ahlgren",
    "Bianchi",
    "Castell",
    "Dvorak",
    "Eklund",
    "Ferrand",
    "Gruber",
    "Halloran",
    "Ibsen",
    "Jansen",
    "Kowal",
    "Lindqvist",
    "Moreau",
    "Novak",
    "Ostrow",
    "Petrov",
    "Quist",
    "Rossi",
    "Sandoval",
    "Tanaka",
]
_PEOPLE = (
    "the baker",
    "the night watchman",
    "an old sailor",
    "the schoolteacher",
    "two gardeners",
    "the miller's daughter",
    "a travelling tailor",
    "the mayor",
    "the librarian",
    "a clockmaker",
    "the ferryman",
    "somebody from the valley",
)
_VERBS = (
    "repaired",
    "painted",
    "borrowed",
    "carried home",
    "sold",
    "argued about",
    "measured",
    "praised",
    "forgot",
    "polished",
    "sketched",
    "hid",
)
_ADJECTIVES = (
    "blue",
    "crooked",
    "heavy",
    "narrow",
    "patched",
    "quiet",
    "silver",
    "dusty",
    "famous",
    "wooden",
    "borrowed",
    "unfinished",
)
_THINGS = (
    "ladder",
    "lantern",
    "accordion",
    "cupboard",
    "bell",
    "rowing boat",
    "kite",
    "map of the hills",
    "barometer",
    "weathercock",
    "bench",
    "basket of pears",
)
_PLACES = (
    "behind the station",
    "near the old bridge",
    "at the market",
    "on the church steps",
    "by the canal",
    "in the upper orchard",
    "under the arcades",
    "outside the post office",
    "along the harbour wall",
    "in the reading room",
)
_TIMES = (
    "before breakfast",
    "late in the evening",
    "during the long rain",
    "on the first warm day",
    "after the fair",
    "at noon",
    "in the last week of autumn",
    "while the band was playing",
)
_PATTERNS = (
    "{when} {who} {verb} the {adjective} {thing} {place}.",
    "{who} {verb} a {adjective} {thing}, and {other} watched from {place}.",
    "nobody knew why {who} {verb} the {thing} {place} {when}.",
    "{place}, {who} and {other} talked about the {adjective} {thing} until it grew dark.",
    "it was {when} that {who} {verb} one more {adjective} {thing}.",
    "{who} had seen the {thing} {place}, but {other} would not believe it.",
)


def draw_sentence(rng: random.Random) -> str:
    """Draw one sentence of the chronicle."""
    pattern = rng.choice(_PATTERNS)
    sentence = pattern.format(
        who=rng.choice(_PEOPLE),
        other=rng.choice(_PEOPLE),
        verb=rng.choice(_VERBS),
        adjective=rng.choice(_ADJECTIVES),
        thing=rng.choice(_THINGS),
        place=rng.choice(_PLACES),
        when=rng.choice(_TIMES),
    )
    return sentence[0].upper() + sentence[1:]
