"""The workloads that the engine and its peers are measured on, defined once.

A workload is a function of nothing but its arguments: the same call gives the same prompts in
every process and on every machine, so that figures from different engines can be compared.
"""

from __future__ import annotations

import random
from typing import Any

NEW_TOKENS = 128  # of every request of `mixed64`, EOS ignored


def mixed64(tokenizer: Any) -> list[list[int]]:
    """64 prompts of English text, as token ids, of 64 lengths spread evenly over 8 to 256.

    Prompt i starts at sentence i of the text below, so no two share a prefix: block sharing
    neither helps nor hurts. The order of the lengths is shuffled (seed 0).
    """
    lengths = [8 + round(i * 248 / 63) for i in range(64)]
    random.Random(0).shuffle(lengths)
    sentences = [line for line in _TEXT.splitlines() if line]
    assert len(sentences) == len(lengths), len(sentences)
    prompts = []
    for start, length in enumerate(lengths):
        text = " ".join(sentences[start:] + sentences[:start])
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids[:length])
    assert sorted(map(len, prompts)) == sorted(lengths)
    return prompts


_TEXT = """
The lighthouse keeper counted the ships every evening and wrote their names into a grey book.
Baking bread at home needs only flour, water, salt, a little yeast and a great deal of patience.
When the river froze that winter, the children of the village walked to school across the ice.
A good map leaves out almost everything, and what it keeps it draws a little too large.
Photosynthesis turns light, water and carbon dioxide into sugar, and releases oxygen on the way.
My grandmother never measured anything in her kitchen, yet every soup tasted exactly the same.
The committee met for the third time on Tuesday and agreed, once more, to meet again on Friday.
If you want to learn the violin as an adult, begin with ten minutes a day and a kind teacher.
Copper conducts electricity better than iron does, which is why the cables in your walls are copper.
He had repaired clocks for forty years and could hear a worn tooth on a wheel from the next room.
Most bridges fail slowly, with small cracks that somebody saw, noted in a report and then forgot.
The first rule of the library was silence, and the second was that the cat could sit anywhere.
To find the area of a circle, multiply the square of its radius by a number a little above three.
On the morning of the election it rained so hard that the queue moved into the bakery next door.
Honey does not spoil because it contains so little water that nothing can grow in it.
She packed two shirts, a dictionary, a bag of almonds and the letter that she had not yet opened.
Before you change a program, write down in one sentence what it should do when you are done.
The moon is slowly moving away from us, by about the length of a fingernail every few months.
Nobody in the orchestra would admit it, but they all waited for the moment when the tuba came in.
Tea was carried over these mountains for a thousand years on the backs of men and small horses.
A contract is only as good as the memory of those who have to live by it when times are hard.
In the oldest part of the city the streets are so narrow that neighbours share their window boxes.
Dear customer, we regret to tell you that the lamp you ordered in March is no longer being made.
Whales sing to each other over hundreds of miles, and their songs change a little every year.
The recipe says to stir for five minutes, but anyone who has made it knows that it takes fifteen.
Our train stopped between two stations, and after an hour the passengers began to tell stories.
Water boils at a lower temperature on a high mountain, so potatoes take longer to cook up there.
The painter owned only seven brushes and claimed that six of them were for other people to borrow.
Why do some languages have dozens of words for snow while others are content with just one?
The museum opens at nine, closes at five, and is at its best in the quiet half hour after lunch.
An honest budget begins with the money you spent last year and not with the money you hope to earn.
Two brothers inherited a farm, a debt and a donkey, and quarrelled only about the donkey.
Bees tell each other where the flowers are by dancing in circles on the dark walls of the hive.
Please water the plants on the balcony twice a week and the cactus in the hall not at all.
The spacecraft crossed the orbit of the last planet in August and kept sending back its numbers.
A sonnet has fourteen lines, and for many poets that is either two too many or one too few.
During the night shift the nurse read aloud to a patient who, the doctors said, could not hear.
Glass is made of sand, soda and lime, melted together at a heat that would soften steel.
The old football coach had a single tactic, which was to be kind to whoever had just lost the ball.
There are three ways to cross the desert, and the guide refused to talk about the second one.
Compound interest is simple to describe and hard to believe until you have waited twenty years.
The dog understood some thirty words, among them cheese, garden, vet and, to our surprise, Sunday.
Volcanic soil is rich in minerals, so people keep returning to farm below a mountain that smokes.
Question: what is the difference between weather and climate, and why does it matter to a farmer?
Every autumn the theatre repaints its ceiling, and every spring the damp brings the old stars back.
The engineer drew the valve again, smaller this time, and pinned the drawing above her desk.
Chess computers taught a generation of players to give up pieces that their teachers would defend.
Once the bridge was finished, the ferryman sold his boat and opened a small hotel by the landing.
A healthy adult heart beats about a hundred thousand times a day without once being asked to.
The shop sold maps of countries that no longer existed, and business had never been better.
Wind turbines turn slowly for their size, and the tips of the blades still outrun a racing car.
He wrote to the newspaper each week for thirty years, and in the end it printed one of his letters.
To sharpen a knife well, keep the angle constant, take your time and finish on the finest stone.
The pianist stopped in the middle of the second movement, smiled, and began it again from the start.
Paper was once made of old linen, and a shortage of shirts could mean a shortage of books.
Our village has one traffic light, and on summer evenings people bring chairs to watch it change.
The treaty was signed in a railway carriage because both sides refused to enter the other's house.
Octopuses have three hearts, blue blood and, in captivity, a clear opinion about their keepers.
She learned to weld at sixty, and her garden is now full of birds that will outlive us all.
The following list explains how to prepare a room before painting its walls and its ceiling.
Salt was so precious on that coast that wages were paid in it and thefts of it punished by exile.
A translator has to decide on every page which of two truths the reader would rather lose.
The children built a radio out of a pencil, a razor blade and a coil of wire, and it worked.
After the long meeting the youngest member asked the question that should have opened it.
"""
