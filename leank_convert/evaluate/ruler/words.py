"""Plain English words, of which no one is part of another: keys to remember and words to count."""

from __future__ import annotations

_ADJECTIVES = """
amber ancient awkward bitter blunt brave brisk brittle broken bronze calm careful cheerful clever clumsy
coarse crimson crisp curious damp dapper daring deep dizzy dreary dusky eager early earnest elegant faded
fancy fearless fierce flat fluffy foggy foolish fragile frank frosty frugal gaunt gentle giddy gloomy golden
graceful grumpy hasty hollow honest humble hungry jolly keen kindly lanky lazy lively lofty lonely lucky
mellow merry mighty modest muddy murky mute nimble noble noisy odd pale patient placid playful plump polite
prickly proud quaint quick ragged rapid restless rough rowdy rugged rusty salty scarlet shabby sharp shiny
shy silent sleepy slender slow sly smooth snug sober solemn sour spry stale stern stiff stout strange sturdy
sullen sunny swift tame tender thirsty tidy timid tiny tough tranquil upright vague vast vivid wary weary
wild witty yellow young zesty
"""
_NOUNS = """
acorn almond anvil apron arch attic axle bacon badge bagel balcony banjo banner basket beacon beaver bench
berry bicycle biscuit blanket blossom boulder bracelet broom bucket buffalo bugle cactus camel canoe caravan
cauldron cellar chalk cherry chimney cinnamon clarinet clay cliff clover cobbler comet compass cousin cradle
cricket crow cushion dagger daisy dolphin donkey drawer drum duckling elbow engine envelope fiddle finch
flagon flute fossil fox gazebo geyser giraffe glove goblet goose grape gravel hamlet hedgehog helmet heron
hinge hornet igloo inkwell iris jaguar jasmine jigsaw juniper kayak kennel kiln kitten lagoon lark lawn
leopard lighthouse lilac lobster locket lynx magpie mandolin mango meteor mitten moth mug mushroom napkin
nectar nutmeg oak oboe opal orchid otter owl paddock pancake parrot pebble pelican penguin piano pigeon plaza
poppy prairie prism puddle puffin pulley quarry quilt quince radish rafter raisin ranch reef robin rudder
sandal sapphire satchel sauna seal shovel sickle sparrow spoon squirrel stove sundial swan syrup tadpole
teapot thimble thistle toad torch trumpet tulip turnip umbrella valise vase vine viola waffle wagon wasp
weasel whale wharf windmill wren yacht yarn
"""
_VERBS = """
admire arrive bake balance bargain beckon believe borrow bounce browse burrow carve chuckle climb collect
complain crawl dance decide deliver deny dig discover doze dwell embark enjoy escape explain fasten fetch
flee float follow gather giggle glide grumble guess hesitate hover hurry imitate invent invite juggle jump
kneel knit laugh leap linger listen mend mingle mutter nibble obey observe paddle peel perch polish ponder
pretend promise pursue quarrel quiver recall remain repair reply rescue rinse roam scatter scribble shiver
shout sigh sing sketch skip sneeze soar stitch stroll stumble swim teach tease tiptoe tremble twirl unfold
vanish visit wander weave whistle whittle wiggle wonder wrestle yawn yearn
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
VERBS = tuple(_VERBS.split())
