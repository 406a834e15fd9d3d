"""Names, code words, and running text of a small grammar, so that no corpus has to be downloaded."""

from __future__ import annotations

import random


def _listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(entry.split()) for entry in text.split(","))


# Samples are drawn by a word's place: one that is added, left out or moved changes the samples of every seed.
FIRST_NAMES = _listed(
    """
    Ada, Bruno, Clara, Dario, Edith, Felix, Greta, Hugo, Irma, Jonas, Katja, Leon, Marta, Nils, Olga, Pavel,
    Rosa, Stefan, Tilda, Viktor
    """
)
LAST_NAMES = _listed(
    """
    Ahlgren, Bianchi, Castell, Dvorak, Eklund, Ferrand, Gruber, Halloran, Ibsen, Jansen, Kowal, Lindqvist,
    Moreau, Novak, Ostrow, Petrov, Quist, Rossi, Sandoval, Tanaka
    """
)
CODE_WORDS = _listed(
    """
    anchor, apple, arrow, autumn, bamboo, barrel, basin, bridge, butter, cabin, candle, canyon, carpet,
    castle, cedar, circle, cloud, copper, coral, cotton, crystal, desert, diamond, dragon, eagle, ember,
    falcon, feather, forest, fountain, garden, ginger, glacier, granite, hammer, harbor, hazel, honey,
    horizon, island, ivory, jacket, jungle, kettle, ladder, lantern, lemon, linen, lizard, magnet, maple,
    marble, meadow, mirror, monkey, mountain, needle, nickel, ocean, olive, orange, orchard, oyster, paper,
    pepper, pillow, planet, pocket, purple, quartz, rabbit, raven, ribbon, river, rocket, saddle, salmon,
    shadow, silver, spider, spring, stone, summer, temple, thunder, tiger, timber, tunnel, turtle, valley,
    velvet, violet, walnut, whisper, willow, winter, wolf, zebra
    """
)
_PEOPLE = _listed(
    """
    the baker, the night watchman, an old sailor, the schoolteacher, two gardeners, the miller's daughter, a
    travelling tailor, the mayor, the librarian, a clockmaker, the ferryman, somebody from the valley
    """
)
_VERBS = _listed(
    """
    repaired, painted, borrowed, carried home, sold, argued about, measured, praised, forgot, polished,
    sketched, hid
    """
)
_ADJECTIVES = _listed(
    """
    blue, crooked, heavy, narrow, patched, quiet, silver, dusty, famous, wooden, borrowed, unfinished
    """
)
_THINGS = _listed(
    """
    ladder, lantern, accordion, cupboard, bell, rowing boat, kite, map of the hills, barometer, weathercock,
    bench, basket of pears
    """
)
_PLACES = _listed(
    """
    behind the station, near the old bridge, at the market, on the church steps, by the canal, in the upper
    orchard, under the arcades, outside the post office, along the harbour wall, in the reading room
    """
)
_TIMES = _listed(
    """
    before breakfast, late in the evening, during the long rain, on the first warm day, after the fair, at
    noon, in the last week of autumn, while the band was playing
    """
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
