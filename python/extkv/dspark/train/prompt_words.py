"""Words that prompts are made of: topics, people, things to count, and what to do with them."""

from __future__ import annotations

TOPICS = (
    """
photosynthesis|the water cycle|black holes|plate tectonics|the immune system|volcanoes|gravity
electric motors|solar panels|wind turbines|batteries|the periodic table|chemical bonds|evolution
natural selection|DNA|vaccines|antibiotics|the human heart|sleep|memory|dreams|nutrition|vitamins
the French Revolution|the Roman Empire|ancient Egypt|the Silk Road|the Industrial Revolution
the Renaissance|the printing press|the Cold War|the space race|the Great Depression|World War I
democracy|inflation|supply and demand|interest rates|the stock market|taxes|trade|unemployment
budgeting|saving money|starting a business|marketing|negotiation|leadership|teamwork|job interviews
time management|public speaking|writing essays|learning a language|reading habits|studying for exams
machine learning|neural networks|databases|operating systems|the internet|encryption|passwords
version control|unit tests|recursion|sorting algorithms|hash tables|linked lists|binary trees
object-oriented programming|functional programming|web servers|cloud computing|open source software
fractions|prime numbers|probability|the Pythagorean theorem|linear equations|calculus|statistics
averages|percentages|geometry|graphs and functions|logarithms|matrices|number systems
baking bread|cooking pasta|growing tomatoes|gardening|composting|keeping bees|house plants|recycling
climate change|rain forests|coral reefs|deserts|oceans|rivers|earthquakes|hurricanes|weather maps
dogs|cats|horses|elephants|whales|birds|butterflies|sharks|wolves|penguins|owls|spiders
football|basketball|tennis|chess|swimming|running|yoga|cycling|hiking|mountain climbing|camping
painting|photography|music theory|playing the guitar|poetry|theatre|film making|architecture|dance
Paris|Tokyo|New York|London|Hawaii|the Amazon|Iceland|Kenya|Australia|Canada|Mexico|India|Peru
travel planning|packing a suitcase|road trips|public transport|electric cars|bridges|airplanes|ships
friendship|kindness|honesty|courage|patience|happiness|stress|meditation|exercise|healthy eating
social media|online privacy|robots|3D printing|virtual reality|smartphones|computer games|drones
parenting|school uniforms|homework|libraries|museums|volunteering|elections|human rights|justice
coffee|tea|chocolate|cheese|spices|soup|breakfast|desserts|street food|restaurants|farmers' markets
the moon|Mars|the solar system|stars|galaxies|telescopes|rockets|satellites|time zones|calendars
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Isabel",
    "Jack",
    "Karen",
    "Liam",
    "Mia",
    "Noah",
    "Olivia",
    "Peter",
    "Quinn",
    "Rosa",
    "Sam",
    "Tina",
    "Umar",
    "Vera",
    "Walter",
    "Xenia",
    "Yusuf",
    "Zoe",
    "Alice",
    "Bob",
    "Carlos",
    "Diana",
    "Ethan",
    "Fatima",
    "George",
    "Hannah",
    "Ivan",
    "Julia",
    "Kevin",
    "Laura",
    "Marco",
    "Nina",
    "Oscar",
    "Paula",
    "Rafael",
    "Sofia",
    "Thomas",
    "Uma",
    "Victor",
    "Wendy",
    "Ali",
    "Maria",
    "Priya",
    "Chen",
]

ITEMS = [
    "apples",
    "oranges",
    "books",
    "pencils",
    "marbles",
    "stickers",
    "cookies",
    "cupcakes",
    "flowers",
    "candles",
    "eggs",
    "bottles",
    "tickets",
    "shirts",
    "boxes",
    "stamps",
    "coins",
    "cards",
    "balloons",
    "notebooks",
    "sandwiches",
    "pizzas",
    "toys",
    "lamps",
    "chairs",
    "plates",
    "cups",
    "hats",
    "scarves",
    "bags",
    "stones",
    "shells",
    "photos",
    "posters",
    "magazines",
    "puzzles",
    "baskets",
    "roses",
    "tulips",
    "muffins",
    "pens",
]

PLACES = (
    """
a bakery|a farm|a library|a school|a factory|a market|a bookshop|a zoo|a museum|a garden|a gym
a hotel|a theatre|a harbour|a train station|an office|a hospital|a restaurant|a bicycle shop
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

AUDIENCES = (
    """
a ten-year-old child|a beginner|a university student|a busy manager|my grandmother|a new employee
someone who has never heard of it|a high school class|an expert from another field|a tourist
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

STYLES = (
    """
a formal style|a friendly tone|simple words|a humorous tone|three short sentences|a poem
a numbered list|bullet points|one paragraph|two paragraphs|a dialogue|a persuasive tone
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

QUESTIONS = (
    """
What is {topic}?|What are the main facts about {topic}?|Why is {topic} important?
How does {topic} work?|What is the history of {topic}?|What are common mistakes with {topic}?
What are the advantages and disadvantages of {topic}?|How can I learn more about {topic}?
What would happen without {topic}?|How has {topic} changed over the last hundred years?
What do most people get wrong about {topic}?|Which problems are connected with {topic}?
Can you tell me something surprising about {topic}?|Who should care about {topic}, and why?
How do {topic} and {other} compare?|What connects {topic} with {other}?
Is {topic} more important than {other}? Give reasons.
What is the difference between {topic} and {other}?
""".strip()
    .replace("\n", "|")
    .split("|")
)

EXPLANATIONS = (
    """
Explain {topic} to {audience}.|Explain {topic} in {style}.|Explain {topic} step by step.
Describe {topic} to {audience} in {style}.|Give a short introduction to {topic}.
Write an overview of {topic} with examples.|Teach me the basics of {topic}.
Explain three key ideas of {topic} and why they matter.|Explain how {topic} affects everyday life.
Give an example that makes {topic} easy to understand for {audience}.
""".strip()
    .replace("\n", "|")
    .split("|")
)

LISTS = (
    """
List {count} facts about {topic}.|List {count} tips for {topic}.|Name {count} examples of {topic}.
Give me {count} questions about {topic} with answers.|List {count} reasons to learn about {topic}.
Write {count} headlines about {topic}.|Make a checklist with {count} steps for {topic}.
Suggest {count} books or films about {topic} and say why.|Give {count} words related to {topic}.
Make a table with {count} rows about {topic}.|Write {count} multiple-choice questions about {topic}.
""".strip()
    .replace("\n", "|")
    .split("|")
)

WRITING = (
    """
Write a short story about {topic}.|Write a poem about {topic}.|Write a blog post about {topic}.
Write a travel blog post about {place} and {topic}.|Write an essay about {topic} in {style}.
Write a letter to {name} about {topic}.|Write a dialogue between {name} and {friend} about {topic}.
Write a product description for something to do with {topic}.|Write a speech about {topic}.
Write an email to {name} that invites them to a talk on {topic}. Keep it short.
Write a professional email to {name} asking for feedback on a report about {topic}.
Imagine you are {name}, who works at {place}. Describe your day.|Write a review of {place}.
Pretend to be an expert on {topic} and answer a question that {name} asks.
Write a story that begins with: "{name} opened the door of {place} and saw"
Write a news report about {topic} and {place}.|Invent a legend about {topic}.
Write a conversation in which {name} explains {topic} to {friend}, who does not agree.
""".strip()
    .replace("\n", "|")
    .split("|")
)

SENTENCES = """
{name} went to {place} to learn about {topic}, but it was closed, so {friend} suggested {other}.
Many people think that {topic} is difficult, yet with a little help from {name} it becomes clear.
The team at {place} has worked on {topic} for {count} years and will present its results on Monday.
Last summer {name} and {friend} bought {count} {items} at {place} and gave half of them away.
There are {count} reasons why {topic} matters, and {name} wrote about all of them in a book.
Although {friend} prefers {other}, {name} spends every weekend with {topic}.
The price of {items} rose by {count} percent, which {place} blamed on {topic}.
{topic} is often compared with {other}; experts at {place} say that both deserve attention.
""".strip().split("\n")

REWRITES = (
    """
Rewrite this text in {style}:|Summarize the following text in one sentence:
Correct the grammar of this text and explain the changes:|Translate the following text into French:
Translate the following text into Spanish:|Find all names in this text:|Continue this text:
Turn the following text into {style}:|What is the main idea of this text?
Extract the key facts from this text as JSON:|Write three questions about this text:
Make the following text shorter:|Make the following text longer and more detailed:
""".strip()
    .replace("\n", "|")
    .split("|")
)

FOLLOW_UPS = (
    """
Rewrite your answer in {style}.|Can you give an example?|Explain that to {audience}.
Summarize your answer in one sentence.|What did you leave out?|Are you sure? Explain why.
Now do the same for {other}.|Make it shorter.|Which part is the most important, and why?
Critique your own answer.|Start every sentence with the same letter.|Give three more examples.
""".strip()
    .replace("\n", "|")
    .split("|")
)
