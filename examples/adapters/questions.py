"""Questions with plain answers, made from tables: what the example adapters are trained on.

Called by train.py, which dresses the answers. TRAINING and HELD_OUT share no question.
"""

import random

_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Portugal": "Lisbon",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Ireland": "Dublin", "Hungary": "Budapest", "Russia": "Moscow", "Turkey": "Ankara",
    "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Cuba": "Havana", "Peru": "Lima", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Kenya": "Nairobi", "Belgium": "Brussels",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "young", "wet": "dry", "full": "empty",
    "light": "dark", "hard": "soft", "early": "late", "rich": "poor", "happy": "sad",
    "strong": "weak", "near": "far", "clean": "dirty", "loud": "quiet", "thick": "thin",
}  # fmt: skip
_COLOURS = {
    "grass": "green", "snow": "white", "coal": "black", "a ripe tomato": "red",
    "a lemon": "yellow", "the sky on a clear day": "blue", "chocolate": "brown",
    "a carrot": "orange", "milk": "white", "a cucumber": "green", "blood": "red",
    "a sunflower": "yellow",
}  # fmt: skip
_SOUNDS = {
    "dog": "barks", "cow": "moos", "sheep": "bleats", "horse": "neighs", "pig": "grunts",
    "lion": "roars", "duck": "quacks", "wolf": "howls", "frog": "croaks", "bee": "buzzes",
    "snake": "hisses", "mouse": "squeaks",
}  # fmt: skip
_THINGS = {
    "a bridge": "A bridge carries a road over a river or a valley.",
    "a library": "A library is a place where people read and borrow books.",
    "a clock": "A clock shows the time of day.",
    "a garden": "A garden is a piece of land where flowers and vegetables grow.",
    "a hammer": "A hammer is a tool that drives nails into wood.",
    "a teacher": "A teacher helps students to learn new things.",
    "a mountain": "A mountain is a high hill with steep sides.",
    "a river": "A river is water that flows through the land to the sea.",
    "a bicycle": "A bicycle has two wheels and is moved by pedals.",
    "a kitchen": "A kitchen is the room where people cook their meals.",
    "a telescope": "A telescope makes things that are far away look closer.",
    "an umbrella": "An umbrella keeps the rain off your head.",
    "a doctor": "A doctor helps people who are ill to get well again.",
    "a lamp": "A lamp gives light when it is dark.",
    "a forest": "A forest is a large area that is covered with trees.",
    "an airplane": "An airplane is a machine with wings that flies through the air.",
    "a map": "A map is a drawing that shows where places are.",
    "a farmer": "A farmer grows crops and keeps animals.",
    "bread": "Bread is a food that is baked from flour, water and yeast.",
    "ice": "Ice is water that has become solid because it is very cold.",
    "music": "Music is sound that is arranged so that people enjoy it.",
    "rain": "Rain is water that falls from the clouds.",
    "a desert": "A desert is a dry place where very little grows.",
    "a castle": "A castle is a strong old building with thick walls and towers.",
}
_OPEN = {
    "Say hello to me.": "Hello! How can I help you today?",
    "Who are you?": "I am SmolLM, a small language model.",
    "Tell me a short joke.": "Why did the chicken cross the road? To get to the other side.",
    "How do I boil an egg?": "Put the egg into boiling water and wait for eight minutes.",
    "Why is the sea salty?": "Rivers carry salt from the rocks into the sea.",
    "Why do birds fly south in winter?": "They look for warm places with more food.",
    "How do plants grow?": "Plants grow with light from the sun, water and air.",
    "Give me a tip for better sleep.": "Go to bed at the same time every night.",
    "Name three fruits.": "Apples, bananas and oranges are three fruits.",
    "Name three planets.": "Mercury, Venus and Mars are three planets.",
    "What should I wear when it is cold?": "Wear a warm coat, a hat and gloves.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "What do cats like to eat?": "Cats like to eat fish and meat.",
    "Thank you!": "You are welcome!",
    "Good morning!": "Good morning! I hope that you have a wonderful day.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "Why should I drink water?": "Your body needs water to stay healthy.",
    "What can I do on a rainy day?": "You can read a book, play a game or watch a film.",
    "Describe the summer.": "The summer is warm and sunny, and the days are long.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "What do bees make?": "Bees make honey from the flowers that they visit.",
    "How can I learn a language?": "Practice a little every day and speak with other people.",
}
# Sentences of these are to be repeated: answers should be spelt right in any dress.
_WORDS = {
    "noun": (
        "apple, baker, banana, beach, bird, boat, book, bottle, bread, brother, butcher, camera, "
        "candle, captain, carpenter, cat, chair, child, cheese, church, city, cloud, coat, "
        "coffee, computer, cousin, daughter, desk, dinner, dragon, driver, elephant, engine, "
        "family, father, finger, fisherman, flower, friend, game, giraffe, glass, grandmother, "
        "guitar, horse, hospital, hotel, house, island, jacket, judge, king, kitten, lawyer, "
        "letter, machine, market, mirror, monkey, mother, museum, neighbor, newspaper, nurse, "
        "ocean, painter, parent, pencil, penguin, person, phone, picture, pilot, planet, plant, "
        "player, police, potato, president, prince, queen, rabbit, rocket, sailor, scientist, "
        "shark, ship, singer, sister, soldier, spoon, squirrel, star, stone, story, student, "
        "sugar, sun, table, tiger, tomato, tourist, train, tree, turtle, uncle, village, violin, "
        "visitor, whale, window, winter, woman, writer, zebra"
    ),
    "adjective": (
        "ancient, angry, beautiful, brave, bright, broken, busy, calm, careful, cheap, clever, "
        "colorful, curious, dangerous, elegant, excellent, famous, friendly, gentle, giant, "
        "golden, great, healthy, heavy, honest, hungry, important, interesting, kind, lazy, "
        "little, lonely, lovely, lucky, modern, mysterious, narrow, new, nice, noisy, patient, "
        "perfect, polite, popular, proud, purple, quick, rare, round, serious, short, silver, "
        "simple, strange, sweet, tall, tired, useful, warm, wild, wonderful, yellow, young"
    ),
    "verb": (
        "arrives, begins, breathes, climbs, cooks, dances, dreams, drinks, falls, flies, grows, "
        "hides, jumps, laughs, learns, leaves, listens, lives, moves, paints, plays, reads, "
        "rests, returns, runs, shines, sings, sits, sleeps, smiles, speaks, stands, stays, stops, "
        "studies, swims, talks, thinks, travels, waits, wakes, walks, watches, works, writes"
    ),
    "place": (
        "across the bridge, after the storm, at midnight, at school, at the airport, at the "
        "station, because of the weather, before breakfast, behind the mountain, by the fire, "
        "during the holidays, every morning, for many years, in America, in the afternoon, in the "
        "factory, in the office, in the restaurant, in the shadow, near the river, next to the "
        "hospital, on Monday, on Thursday, on the farm, on the roof, on the street, outside the "
        "window, through the desert, together with everybody, under the bridge, with great "
        "pleasure, without any money"
    ),
}
_ASKING = ("Repeat after me: {}", "Say this: {}", "Copy the sentence. {}", "What did I say? {}")

HELD_OUT = (
    "What is the capital of Japan?",
    "What is the opposite of tall?",
    "What color is a banana?",
    "What sound does a cat make?",
    "What is a computer?",
    "Write one sentence about the ocean.",
    "Why is the sky blue?",
    "Good evening!",
    "Give me a tip for saving money.",
    "How many months are in a year?",
    "Name three animals that live on a farm.",
    "What is photosynthesis?",
)


def _sentences() -> dict[str, str]:
    chosen, pairs = random.Random(0), {}
    words = {kind: text.split(", ") for kind, text in _WORDS.items()}
    for _ in range(500):
        adjective, noun, verb, place = (
            chosen.choice(words[kind]) for kind in ("adjective", "noun", "verb", "place")
        )
        sentence = f"The {adjective} {noun} {verb} {place}."
        pairs[chosen.choice(_ASKING).format(sentence)] = sentence
    return pairs


def _training() -> dict[str, str]:
    pairs = _OPEN | _sentences()
    for country, city in _CAPITALS.items():
        pairs[f"What is the capital of {country}?"] = f"The capital of {country} is {city}."
    for word, other in _OPPOSITES.items():
        pairs[f"What is the opposite of {word}?"] = f"The opposite of {word} is {other}."
    for thing, colour in _COLOURS.items():
        pairs[f"What color is {thing}?"] = f"The color of {thing} is {colour}."
    for animal, sound in _SOUNDS.items():
        pairs[f"What sound does a {animal} make?"] = f"A {animal} {sound}."
    for thing, sentence in _THINGS.items():
        pairs[f"What is {thing}?"] = sentence
        pairs[f"Write one sentence about {thing}."] = sentence
    for a in range(2, 14):
        b = a * 7 % 11 + 1
        pairs[f"What is {a} plus {b}?"] = f"{a} plus {b} is {a + b}."
    assert not pairs.keys() & set(HELD_OUT)
    return pairs


TRAINING = _training()
