"""Tasks with one right answer each, as applications send them to a model.

The schemas are written by pydantic, by zod (`z.toJSONSchema`), or by hand: none says
`additionalProperties: false`. Tasks ask for a call of a function with a schema, because
the model's chat template has no tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

Schema: TypeAlias = dict[str, Any]
KINDS = (
    "extraction",
    "nested lists",
    "classification",
    "tool calls",
    "regex and choice",
)


@dataclass(frozen=True)
class Task:
    """A question. Its constraint is a schema, a regex or a choice."""

    kind: str
    prompt: str
    expected: Any
    """The right answer. A tuple stands for a value that may be written in several
    ways."""
    schema: Schema | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    system: str | None = None
    show_schema: bool = False
    """Whether the prompt has the schema too, as many applications do."""

    def messages(self) -> list[dict[str, str]]:
        """Return the chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.prompt
        if self.show_schema:
            prompt += f"\n\nAnswer with JSON that matches this schema:\n{json.dumps(self.schema)}"
        return [*system, {"role": "user", "content": prompt}]

    def constraint(self) -> dict[str, Any]:
        """Return the fields of a request that constrain the answer, as users of vLLM
        send them."""
        if self.regex is not None:
            return {"structured_outputs": {"regex": self.regex}}
        if self.choice is not None:
            return {"structured_outputs": {"choice": list(self.choice)}}
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": self.schema},
            }
        }


def zod(properties: Schema, optional: tuple[str, ...] = ()) -> Schema:
    """Return the schema of an object as zod 4 writes it for an input."""
    required = [name for name in properties if name not in optional]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    return {**head, "properties": properties, "required": required}


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


# Extraction


class Person(BaseModel):
    name: str
    age: int
    city: str


class Employee(BaseModel):
    name: str
    age: int
    occupation: str
    city: str | None = None


class Contact(BaseModel):
    name: str
    email: str | None = None
    phone: str | None = None


class Invoice(BaseModel):
    number: str
    total: float
    currency: Literal["EUR", "USD", "GBP"]
    paid: bool


class Product(BaseModel):
    name: str
    color: str
    price: float = Field(gt=0)
    in_stock: bool


class Book(BaseModel):
    title: str
    author: str
    year: int
    pages: int | None = None


class Address(BaseModel):
    street: str
    zip_code: str
    city: str


class Customer(BaseModel):
    name: str
    address: Address


class Weather(BaseModel):
    city: str
    temperature_celsius: float
    humidity: int = Field(ge=0, le=100, description="Relative humidity in percent")
    condition: Literal["sunny", "cloudy", "rainy", "snowy"]


class Order(BaseModel):
    order_id: str = Field(description="For example A-17")
    customer: str
    quantity: int = Field(ge=1)
    express: bool


class Booking(BaseModel):
    guest: str
    nights: int = Field(ge=1, le=30)
    room_type: Literal["single", "double", "suite"]
    breakfast: bool


class Birth(BaseModel):
    name: str
    birthday: date


MEETING: Schema = {
    "type": "object",
    "properties": {
        "title": STRING,
        "date": {"type": "string", "format": "date"},
        "time": STRING,
        "room": STRING,
    },
    "required": ["title", "date", "time", "room"],
}
FLIGHT: Schema = {
    "type": "object",
    "properties": {
        "flight_number": {"type": "string", "description": "The number of the flight"},
        "from": {"type": "string", "description": "The city of departure"},
        "to": {"type": "string", "description": "The city of arrival"},
    },
    "required": ["flight_number", "from", "to"],
}
MOVIE = zod(
    {
        "title": STRING,
        "director": STRING,
        "year": INTEGER,
        "rating": {**NUMBER, "minimum": 0, "maximum": 10},
    }
)
JOB = zod({"title": STRING, "company": STRING, "salary": NUMBER, "remote": BOOLEAN})


def extraction(
    prompt: str,
    model: type[BaseModel] | Schema,
    expected: Any,
    *,
    show_schema: bool = False,
) -> Task:
    schema = model if isinstance(model, dict) else model.model_json_schema()
    return Task("extraction", prompt, expected, schema, show_schema=show_schema)


EXTRACTION = [
    extraction(
        "Extract the person as JSON: Maria Keller is 34 years old and lives in Lisbon.",
        Person,
        {"name": "Maria Keller", "age": 34, "city": "Lisbon"},
    ),
    extraction(
        "Extract the person from the text.\n\nText: Ahmed, aged 27, moved to Cairo last year.",
        Person,
        {"name": "Ahmed", "age": 27, "city": "Cairo"},
        show_schema=True,
    ),
    extraction(
        "Extract the person as JSON with name, age, occupation and city: "
        "John Smith is a 52 year old teacher from Boston.",
        Employee,
        {"name": "John Smith", "age": 52, "occupation": "teacher", "city": "Boston"},
    ),
    extraction(
        "Extract the contact as JSON: You can reach Paul Young at paul.young@example.com.",
        Contact,
        {"name": "Paul Young", "email": "paul.young@example.com", "phone": None},
    ),
    extraction(
        "Extract the invoice as JSON (number, total, currency, paid):\nInvoice INV-2041 over 129.50 USD has been paid.",
        Invoice,
        {"number": "INV-2041", "total": 129.5, "currency": "USD", "paid": True},
    ),
    extraction(
        'Extract the meeting as JSON: The meeting "Budget review" takes place on 2031-05-17 at 14:30 in room 204.',
        MEETING,
        {
            "title": "Budget review",
            "date": "2031-05-17",
            "time": "14:30",
            "room": ("204", "room 204"),
        },
    ),
    extraction(
        "Extract the product. The lamp Aurora is blue, costs 39.90 euros and is in stock.",
        Product,
        {
            "name": ("Aurora", "lamp Aurora", "the lamp Aurora", "Aurora lamp"),
            "color": "blue",
            "price": 39.9,
            "in_stock": True,
        },
        show_schema=True,
    ),
    extraction(
        'Extract the book as JSON: "The Old Sea" by Clara Jones was published in 1987.',
        Book,
        {"title": "The Old Sea", "author": "Clara Jones", "year": 1987, "pages": None},
    ),
    extraction(
        "Extract the flight as JSON: Flight LH 454 goes from Frankfurt to San Francisco.",
        FLIGHT,
        {
            "flight_number": ("LH 454", "LH454"),
            "from": "Frankfurt",
            "to": "San Francisco",
        },
    ),
    extraction(
        'Return the movie as JSON. "Silent Rivers" (2009), directed by Ana Costa, has a rating of 7.8 out of 10.',
        MOVIE,
        {
            "title": "Silent Rivers",
            "director": "Ana Costa",
            "year": 2009,
            "rating": 7.8,
        },
        show_schema=True,
    ),
    extraction(
        "Extract the customer and the address as JSON: Lena Fischer lives at 12 Park Street, 10115 Berlin.",
        Customer,
        {
            "name": "Lena Fischer",
            "address": {
                "street": "12 Park Street",
                "zip_code": "10115",
                "city": "Berlin",
            },
        },
    ),
    extraction(
        "Extract the job as JSON with title, company, salary and remote: "
        "Northwind is hiring a data engineer for 85000 dollars a year. The job is remote.",
        JOB,
        {
            "title": "data engineer",
            "company": "Northwind",
            "salary": 85000,
            "remote": True,
        },
    ),
    extraction(
        "Extract the weather as JSON: It is sunny in Madrid, 31 degrees Celsius, with a humidity of 40 percent.",
        Weather,
        {
            "city": "Madrid",
            "temperature_celsius": 31,
            "humidity": 40,
            "condition": "sunny",
        },
    ),
    extraction(
        "Extract the order. Order B-93: Susan Miller orders 4 chairs, with express delivery.",
        Order,
        {
            "order_id": "B-93",
            "customer": "Susan Miller",
            "quantity": 4,
            "express": True,
        },
        show_schema=True,
    ),
    extraction(
        "Extract the booking as JSON: Tom Baker stays 3 nights in a double room, breakfast included.",
        Booking,
        {"guest": "Tom Baker", "nights": 3, "room_type": "double", "breakfast": True},
    ),
    extraction(
        "Extract name and birthday as JSON: Emma Stone was born on 1988-11-06.",
        Birth,
        {"name": "Emma Stone", "birthday": "1988-11-06"},
    ),
]

# Nested lists


class Item(BaseModel):
    name: str
    quantity: int


class Cart(BaseModel):
    customer: str
    items: list[Item]


class Member(BaseModel):
    name: str
    role: Literal["manager", "developer", "designer", "tester"]


class Team(BaseModel):
    name: str
    members: list[Member]


class Track(BaseModel):
    title: str
    artist: str


class Playlist(BaseModel):
    tracks: list[Track]


class Article(BaseModel):
    title: str
    tags: list[str]


class Ingredient(BaseModel):
    name: str
    amount: str


class Recipe(BaseModel):
    name: str
    ingredients: list[Ingredient] = Field(min_length=1)


class Scores(BaseModel):
    scores: dict[str, int]


class Line(BaseModel):
    description: str
    quantity: int = Field(ge=1)
    unit_price: float


class Bill(BaseModel):
    number: str
    lines: list[Line]
    total: float


class Child(BaseModel):
    name: str
    age: int


class Family(BaseModel):
    parent: str
    children: list[Child]


class Department(BaseModel):
    name: str
    employees: list[str]


class Company(BaseModel):
    company: str
    departments: list[Department]


CITIES: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"city": STRING, "country": STRING},
        "required": ["city", "country"],
    },
}
LANGUAGES = zod(
    {
        "name": STRING,
        "languages": {
            "type": "array",
            "items": {"type": "string", "enum": ["Spanish", "French", "German"]},
        },
    }
)
READINGS = zod({"sensor": STRING, "values": {"type": "array", "items": NUMBER}})
SCHEDULE: Schema = {
    "type": "object",
    "properties": {
        "days": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "day": {"enum": ["Monday", "Tuesday", "Wednesday"]},
                    "lessons": {"type": "array", "items": STRING},
                },
                "required": ["day", "lessons"],
            },
        }
    },
    "required": ["days"],
}


def lists(
    prompt: str,
    model: type[BaseModel] | Schema,
    expected: Any,
    *,
    show_schema: bool = False,
) -> Task:
    schema = model if isinstance(model, dict) else model.model_json_schema()
    return Task("nested lists", prompt, expected, schema, show_schema=show_schema)


NESTED_LISTS = [
    lists(
        "Extract the purchase as JSON: John Smith bought 2 apples and 3 pears.",
        Cart,
        {
            "customer": "John Smith",
            "items": [
                {"name": "apples", "quantity": 2},
                {"name": "pears", "quantity": 3},
            ],
        },
    ),
    lists(
        "Extract the purchase. Rosa bought 1 hammer, 20 nails and 5 screws.",
        Cart,
        {
            "customer": "Rosa",
            "items": [
                {"name": "hammer", "quantity": 1},
                {"name": "nails", "quantity": 20},
                {"name": "screws", "quantity": 5},
            ],
        },
        show_schema=True,
    ),
    lists(
        "Extract the team and its members as JSON: In team Falcon, Ida is the manager, Max is a developer and Zoe is a "
        "designer.",
        Team,
        {
            "name": ("Falcon", "team Falcon"),
            "members": [
                {"name": "Ida", "role": "manager"},
                {"name": "Max", "role": "developer"},
                {"name": "Zoe", "role": "designer"},
            ],
        },
    ),
    lists(
        'List the tracks as JSON: "Blue Train" by John Coltrane, "Take Five" by Dave Brubeck.',
        Playlist,
        {
            "tracks": [
                {"title": "Blue Train", "artist": "John Coltrane"},
                {"title": "Take Five", "artist": "Dave Brubeck"},
            ]
        },
    ),
    lists(
        "Extract title and tags as JSON.\n\nTitle: Baking bread\nTags: food, baking, bread",
        Article,
        {"title": "Baking bread", "tags": ["food", "baking", "bread"]},
    ),
    lists(
        "Write the recipe as JSON. Pancakes: 200 g flour, 2 eggs, 300 ml milk.",
        Recipe,
        {
            "name": "Pancakes",
            "ingredients": [
                {"name": "flour", "amount": "200 g"},
                {"name": "eggs", "amount": ("2", "2 eggs")},
                {"name": "milk", "amount": "300 ml"},
            ],
        },
        show_schema=True,
    ),
    lists(
        "List the cities with their countries as JSON: Paris is in France, Rome is in Italy, Oslo is in Norway.",
        CITIES,
        [
            {"city": "Paris", "country": "France"},
            {"city": "Rome", "country": "Italy"},
            {"city": "Oslo", "country": "Norway"},
        ],
    ),
    lists(
        "Extract the schedule as JSON: On Monday there are math and music. On Tuesday there is biology.",
        SCHEDULE,
        {
            "days": [
                {"day": "Monday", "lessons": ["math", "music"]},
                {"day": "Tuesday", "lessons": ["biology"]},
            ]
        },
    ),
    lists(
        "Extract the scores of all players as JSON: Anna has 12 points, Ben has 7 points and Carla has 9 points.",
        Scores,
        {"scores": {"Anna": 12, "Ben": 7, "Carla": 9}},
    ),
    lists(
        "Extract the bill as JSON. Bill 778: 2 notebooks at 3.50 each, 1 pen at 1.20. Total: 8.20.",
        Bill,
        {
            "number": ("778", "Bill 778"),
            "lines": [
                {"description": "notebooks", "quantity": 2, "unit_price": 3.5},
                {"description": "pen", "quantity": 1, "unit_price": 1.2},
            ],
            "total": 8.2,
        },
        show_schema=True,
    ),
    lists(
        "Extract the family as JSON with parent and children: Karen has two children, Leo (8 years) and Mia (5 years).",
        Family,
        {
            "parent": "Karen",
            "children": [{"name": "Leo", "age": 8}, {"name": "Mia", "age": 5}],
        },
    ),
    lists(
        "Extract name and languages as JSON: Julia speaks French and German.",
        LANGUAGES,
        {"name": "Julia", "languages": ["French", "German"]},
    ),
    lists(
        "Extract the company as JSON. At Acme, Bob and Eve work in sales, and Carl works in support.",
        Company,
        {
            "company": "Acme",
            "departments": [
                {"name": "sales", "employees": ["Bob", "Eve"]},
                {"name": "support", "employees": ["Carl"]},
            ],
        },
        show_schema=True,
    ),
    lists(
        "Extract the readings as JSON: Sensor T4 measured 20.5, 21.0 and 19.8.",
        READINGS,
        {"sensor": ("T4", "Sensor T4"), "values": [20.5, 21.0, 19.8]},
    ),
]

# Classification


class Sentiment(BaseModel):
    sentiment: Literal["positive", "negative", "neutral"]


class Review(BaseModel):
    sentiment: Literal["positive", "negative"]
    stars: int = Field(ge=1, le=5)


class Ticket(BaseModel):
    category: Literal["billing", "technical", "shipping"]
    urgent: bool


class Topic(BaseModel):
    topic: Literal["sports", "politics", "science", "food"]


class Spam(BaseModel):
    is_spam: bool


class Animal(BaseModel):
    animal: str
    group: Literal["mammal", "bird", "fish", "insect"]


LANGUAGE: Schema = {
    "type": "object",
    "properties": {
        "language": {
            "type": "string",
            "enum": ["English", "French", "Spanish", "German"],
        }
    },
    "required": ["language"],
}
INTENT = zod(
    {
        "intent": {
            "type": "string",
            "enum": ["greeting", "question", "complaint", "order"],
        }
    }
)


def classification(
    prompt: str,
    model: type[BaseModel] | Schema,
    expected: Any,
    *,
    show_schema: bool = False,
) -> Task:
    schema = model if isinstance(model, dict) else model.model_json_schema()
    return Task("classification", prompt, expected, schema, show_schema=show_schema)


CLASSIFICATION = [
    classification(
        "Classify the sentiment of this review: The hotel is wonderful, we will come again!",
        Sentiment,
        {"sentiment": "positive"},
    ),
    classification(
        "Classify the sentiment (positive, negative or neutral) as JSON: The food was cold and the waiter was rude.",
        Sentiment,
        {"sentiment": "negative"},
    ),
    classification(
        "Classify the review. I hate this phone. It broke after two days. 1 star.",
        Review,
        {"sentiment": "negative", "stars": 1},
        show_schema=True,
    ),
    classification(
        "Classify the review as JSON: Five stars! The best headphones that I ever had.",
        Review,
        {"sentiment": "positive", "stars": 5},
    ),
    classification(
        "Classify the support ticket as billing, technical or shipping, and say whether it is urgent:\n"
        "Urgent! Our production server crashes with an error message.",
        Ticket,
        {"category": "technical", "urgent": True},
    ),
    classification(
        "Classify the support ticket.\n\nTicket: My package has not been delivered yet. It is not urgent.",
        Ticket,
        {"category": "shipping", "urgent": False},
        show_schema=True,
    ),
    classification(
        "What is the topic of this text? The striker scored two goals in the last match of the season.",
        Topic,
        {"topic": "sports"},
    ),
    classification(
        "Classify the topic as sports, politics, science or food: The parliament voted on the law of the president.",
        Topic,
        {"topic": "politics"},
    ),
    classification(
        "Classify the topic. Physicists have measured the mass of the particle.",
        Topic,
        {"topic": "science"},
        show_schema=True,
    ),
    classification(
        "Is this message spam? Answer as JSON. Message: You have WON 1,000,000 dollars!!! Click here to claim it NOW!",
        Spam,
        {"is_spam": True},
    ),
    classification(
        "Extract the animal and its group as JSON: The salmon is a fish that swims up the river.",
        Animal,
        {"animal": ("salmon", "the salmon"), "group": "fish"},
    ),
    classification(
        "Which language is this? Bonjour, comment allez-vous aujourd'hui?",
        LANGUAGE,
        {"language": "French"},
    ),
    classification(
        "Classify the intent of the message as JSON: Hello! Good morning to you.",
        INTENT,
        {"intent": "greeting"},
        show_schema=True,
    ),
]

# Tool calls


def function(
    name: str, description: str, properties: Schema, optional: tuple[str, ...] = ()
) -> Schema:
    """Return a function as OpenAI's API describes it."""
    required = [key for key in properties if key not in optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


WEATHER = function(
    "get_weather",
    "Get the current weather in a city",
    {"city": STRING, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
)
TIMER = function(
    "set_timer", "Set a timer", {"minutes": {"type": "integer", "minimum": 1}}
)
MAIL = function("send_email", "Send an email", {"to": STRING, "subject": STRING})
SEARCH = function(
    "search_products",
    "Search products in the shop",
    {"query": STRING, "max_price": NUMBER},
    optional=("max_price",),
)
CONVERT = function(
    "convert_currency",
    "Convert an amount of money",
    {"amount": NUMBER, "from": STRING, "to": STRING},
)
LIGHT = function(
    "set_light", "Turn the light of a room on or off", {"room": STRING, "on": BOOLEAN}
)
PLAY = function("play_song", "Play a song", {"title": STRING, "artist": STRING})
ADD = function("add_numbers", "Add two numbers", {"a": NUMBER, "b": NUMBER})
TRANSLATE = function(
    "translate", "Translate a text", {"text": STRING, "language": STRING}
)
BOOK_TABLE = function(
    "book_table",
    "Book a table in a restaurant",
    {"restaurant": STRING, "guests": INTEGER, "time": STRING},
)
SHOPPING = function(
    "add_to_list",
    "Add items to the shopping list",
    {"items": {"type": "array", "items": {"type": "string"}}},
)
SYSTEM = 'You call functions. Answer with one call as JSON: {"name": "...", "arguments": {...}}. The functions are:\n'


def call(prompt: str, functions: list[Schema], name: str, arguments: Schema) -> Task:
    calls = []
    for described in functions:
        properties = {
            "name": {"const": described["name"]},
            "arguments": described["parameters"],
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
            }
        )
    system = SYSTEM + "\n".join(map(json.dumps, functions))
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return Task(
        "tool calls",
        prompt,
        {"name": name, "arguments": arguments},
        schema,
        system=system,
    )


TOOL_CALLS = [
    call(
        "What is the weather in Lisbon in celsius?",
        [WEATHER],
        "get_weather",
        {"city": "Lisbon", "unit": "celsius"},
    ),
    call(
        "How warm is it in Boston? Use fahrenheit.",
        [WEATHER, TIMER],
        "get_weather",
        {"city": "Boston", "unit": "fahrenheit"},
    ),
    call("Set a timer for 15 minutes.", [WEATHER, TIMER], "set_timer", {"minutes": 15}),
    call(
        "Send an email to anna@example.com with the subject Lunch.",
        [MAIL, TIMER],
        "send_email",
        {"to": "anna@example.com", "subject": "Lunch"},
    ),
    call(
        "Search for red shoes below 50 dollars.",
        [SEARCH],
        "search_products",
        {"query": "red shoes", "max_price": 50},
    ),
    call(
        "Search for a wooden table.",
        [SEARCH, MAIL],
        "search_products",
        {"query": ("wooden table", "a wooden table")},
    ),
    call(
        "Convert 100 USD to EUR.",
        [CONVERT],
        "convert_currency",
        {"amount": 100, "from": "USD", "to": "EUR"},
    ),
    call(
        "Turn on the light in the kitchen.",
        [LIGHT, TIMER],
        "set_light",
        {"room": "kitchen", "on": True},
    ),
    call(
        "Play Yesterday by The Beatles.",
        [PLAY, SEARCH, LIGHT],
        "play_song",
        {"title": "Yesterday", "artist": "The Beatles"},
    ),
    call("Add 12 and 30.", [ADD, CONVERT], "add_numbers", {"a": 12, "b": 30}),
    call(
        'Translate "good morning" to Spanish.',
        [TRANSLATE],
        "translate",
        {"text": "good morning", "language": ("Spanish", "es")},
    ),
    call(
        "Book a table for 4 guests at Roma at 19:30.",
        [BOOK_TABLE, WEATHER],
        "book_table",
        {"restaurant": "Roma", "guests": 4, "time": "19:30"},
    ),
    call(
        "Add milk, bread and butter to the shopping list.",
        [SHOPPING],
        "add_to_list",
        {"items": ["milk", "bread", "butter"]},
    ),
]

# Regex and choice


def matched(prompt: str, regex: str, expected: str) -> Task:
    return Task("regex and choice", prompt, expected, regex=regex)


def chosen(prompt: str, choice: tuple[str, ...], expected: str) -> Task:
    return Task("regex and choice", prompt, expected, choice=choice)


REGEX_AND_CHOICE = [
    matched(
        "The meeting takes place on 2031-05-17 in Oslo. Write the date of the meeting.",
        r"\d{4}-\d{2}-\d{2}",
        "2031-05-17",
    ),
    matched(
        "The train to Rome leaves at 16:45. When does the train leave?",
        r"[0-2]\d:[0-5]\d",
        "16:45",
    ),
    matched(
        "Extract the email address: Write to info@acme.com for more.",
        r"[a-z0-9.]+@[a-z]+\.[a-z]{2,3}",
        "info@acme.com",
    ),
    matched(
        "Extract the order number: Your order AB-1234 has been shipped.",
        r"[A-Z]{2}-\d{4}",
        "AB-1234",
    ),
    matched(
        "Extract the price: The bicycle costs $249.99.", r"\$\d{1,4}\.\d\d", "$249.99"
    ),
    matched(
        "Extract the phone number: Call 555-0173 for a taxi.",
        r"\d{3}-\d{4}",
        "555-0173",
    ),
    matched(
        "Extract the version: This is release v2.14.3 of the program.",
        r"v\d+\.\d+\.\d+",
        "v2.14.3",
    ),
    chosen(
        "Classify the sentiment as positive or negative: The hotel is wonderful.",
        ("positive", "negative"),
        "positive",
    ),
    chosen("Is the sky blue? Answer yes or no.", ("yes", "no"), "yes"),
    chosen(
        "What is the capital of France?",
        ("London", "Paris", "Madrid", "Berlin"),
        "Paris",
    ),
    chosen("Which animal barks?", ("The cat", "The dog", "The fish"), "The dog"),
    chosen("What is the opposite of hot?", ("cold", "warm", "dry"), "cold"),
]

TASKS = [*EXTRACTION, *NESTED_LISTS, *CLASSIFICATION, *TOOL_CALLS, *REGEX_AND_CHOICE]
