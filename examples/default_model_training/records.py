"""People, orders, events, products and made-up things: each a list of facts that can be told and asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.default_model_training import words
from examples.default_model_training.values import Values


@dataclass(frozen=True)
class Fact:
    """One thing to know, under `keys` of lower-case words.

    Clauses have places for the value `{v}` and the subject: `{s}` who, `{p}` whose, `{o}` whom.
    """

    keys: tuple[str, ...]
    value: Any
    clauses: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """A described thing. `subject` stands in clauses; `facts[0]` names the thing."""

    domain: str
    subject: str
    pronouns: tuple[str, ...]  # she, her, her
    facts: tuple[Fact, ...]
    openings: tuple[str, ...] = ()  # first sentences, with places `{first key}` for several facts at once


PERSON = (
    "{name}, {age}, is a {job} from {city}",
    "{name} ({age}) lives in {city}",
    "{name} is a {age}-year-old {job}",
    "{name}, {age}, from {city}",
    "{name} is {age} years old and lives in {city}, {country}",
    "{name} is a {job} at {employer} in {city}",
    "my name is {name} and I am {age} years old",
    "I am {name}, a {job} from {city}",
    "{name}, {job}, {phone}, {email}",
    "{name} <{email}>",
    "{name} from {country}",
    "{name} lives in {city} and works as a {job}",
    "{age}-year-old {name} works for {employer}",
)
ORDER = (
    "{customer} ordered {quantity} {product}",
    "{customer} bought {quantity} x {product} for {total} {currency}",
    "order {order id} from {customer}",
    "order {order id} by {customer}: {quantity} x {product}, total {total}",
    "{customer} ordered {product} on {date}",
    "order {order id} ({status}): {total} {currency}",
    "please send {quantity} {product} to {customer} in {address}",
    "{order id}, {customer}, {total}",
)
EVENT = (
    "{title} takes place on {date} at {venue} in {city}",
    "{title}, {date}, {city}",
    "{title} ({date}, {time})",
    "on {date}, {title} starts at {time} in {city}",
    "come to {title} at {venue} on {date} at {time}",
    "{organizer} invites you to {title} on {date}",
    "{title} with {attendees} guests in {city}",
)
PRODUCT = (
    "the {color} {name} costs {price}",
    "{name}, {color}, {price}",
    "{name} by {brand}",
    "{brand} sells the {name} for {price}",
    "{name} ({sku}): {price}",
    "the {name} from {brand} costs ${price} and weighs {weight} kg",
    "{stock} x {name} at {price}",
)


def fact(keys: str, value: Any, *clauses: str) -> Fact:
    return Fact(tuple(keys.split("|")), value, clauses)


def flag(keys: str, value: bool, true: tuple[str, ...], false: tuple[str, ...]) -> Fact:
    return Fact(tuple(keys.split("|")), value, true if value else false)


def person(v: Values) -> Record:
    name = v.person()
    first, last = name.split(" ")[0], name.split(" ")[-1]
    facts = (
        fact("name|full name|person|person name|who", name, "the name is {v}", "this is about {v}", "meet {v}"),
        fact("first name|given name", first, "the first name is {v}"),
        fact("last name|surname|family name", last, "the last name is {v}"),
        fact(
            "age|years|age in years",
            v.integer(1, 99),
            "{s} is {v} years old",
            "{s} is {v}",
            "{s} turned {v}",
            "{s} is aged {v}",
            "at the age of {v}, {s} is happy",
        ),
        fact(
            "city|town|home|residence|location",
            v.city(),
            "{s} lives in {v}",
            "{s} moved to {v}",
            "{p} home is {v}",
            "{s} has a flat in {v}",
        ),
        fact(
            "country|nationality|home country|origin",
            v.country(),
            "{s} comes from {v}",
            "{s} was born in {v}",
            "{s} grew up in {v}",
        ),
        fact(
            "job|occupation|profession|role|job title",
            v.rng.choice(words.JOBS),
            "{s} works as a {v}",
            "{s} is a {v}",
            "{p} job is {v}",
        ),
        fact(
            "employer|company|organization|works at|workplace",
            v.company(),
            "{s} works for {v}",
            "{s} works at {v}",
            "{s} is employed by {v}",
            "{s} joined {v}",
        ),
        fact("email|email address|mail|e mail", v.email(), "{p} email is {v}", "write to {v}", "reach {o} at {v}"),
        fact(
            "phone|phone number|telephone|mobile|tel",
            v.phone(),
            "{p} phone number is {v}",
            "call {o} at {v}",
            "{s} can be called on {v}",
        ),
        fact("birthday|date of birth|birth date|born", v.iso_date(), "{s} was born on {v}", "{p} birthday is {v}"),
        fact(
            "hobbies|interests|likes|activities",
            v.some(words.HOBBIES),
            "{s} likes {v}",
            "{s} enjoys {v}",
            "{p} hobbies are {v}",
        ),
        fact("languages|speaks|spoken languages", v.some(words.LANGUAGES), "{s} speaks {v}"),
        fact("children|kids|number of children", v.integer(0, 12), "{s} has {v} children", "{s} has {v} kids"),
        flag(
            "married|is married",
            v.rng.random() < 0.5,
            ("{s} is married", "{s} has a spouse"),
            ("{s} is single", "{s} is not married"),
        ),
    )
    subject = v.rng.choice((name, name, first))
    return Record("person", subject, v.rng.choice((("she", "her", "her"), ("he", "his", "him"))), facts, PERSON)


def order(v: Values) -> Record:
    code = v.code()
    statuses = ["pending", "paid", "shipped", "delivered", "cancelled", "returned"]
    items = [{"product": v.product(), "quantity": v.integer(1, 60)} for _ in range(v.rng.randint(1, 3))]
    facts = (
        fact("order id|id|order|order number|number|reference", code, "the order number is {v}", "this is order {v}"),
        fact(
            "customer|customer name|buyer|client|name|ordered by",
            v.person(),
            "{s} was placed by {v}",
            "{v} made {s}",
            "the customer of {s} is {v}",
            "the buyer is {v}",
        ),
        fact("items|products|lines|articles", items, "{s} contains {v}", "{s} is for {v}", "{v} were ordered"),
        fact(
            "total|amount|total price|sum|price",
            v.price(),
            "the total is {v}",
            "{s} costs {v} in total",
            "the amount is ${v}",
            "{s} comes to {v} dollars",
        ),
        fact("currency", v.rng.choice(["EUR", "USD", "GBP", "JPY", "CHF"]), "the currency is {v}", "it is paid in {v}"),
        fact(
            "status|state|order status",
            v.rng.choice(statuses),
            "{s} is {v}",
            "{s} has been {v}",
            "the status of {s} is {v}",
        ),
        fact("date|order date|ordered on|day", v.iso_date(), "{s} was placed on {v}", "the date of {s} is {v}"),
        fact(
            "address|shipping address|destination|ship to|city",
            v.city(),
            "{s} goes to {v}",
            "{s} ships to {v}",
            "the destination is {v}",
        ),
        fact("quantity|count|units|pieces", v.integer(1, 500), "{s} has {v} pieces", "the quantity is {v}"),
        fact("product|item|article", v.product(), "the product is {v}", "the item ordered is {v}"),
        flag("gift|is gift|gift wrap", v.rng.random() < 0.5, ("{s} is a gift",), ("{s} is not a gift",)),
        fact("carrier|courier|shipped by", v.company(), "{s} is carried by {v}", "{s} travels with {v}"),
    )
    return Record(
        "order", v.rng.choice((f"order {code}", "the order", f"order {code}")), ("it", "its", "it"), facts, ORDER
    )


def event(v: Values) -> Record:
    title = f"{v.brand()} {v.rng.choice((*words.TOPICS, ''))} {v.rng.choice(words.EVENTS)}".replace("  ", " ")
    date = v.iso_date() if v.rng.random() < 0.6 else v.long_date()
    speakers = [v.person() for _ in range(v.rng.randint(1, 3))]
    facts = (
        fact("title|name|event|event name", title, "the event is called {v}", "welcome to {v}", "join us at {v}"),
        fact(
            "date|day|when|start date|event date",
            date,
            "{s} takes place on {v}",
            "{s} is on {v}",
            "{s} starts on {v}",
            "the date of {s} is {v}",
        ),
        fact("time|start time|starts at|hour", v.time(), "{s} begins at {v}", "doors open at {v}", "it starts at {v}"),
        fact(
            "venue|place|location|where", v.venue(), "{s} takes place in {v}", "{s} is held at {v}", "the venue is {v}"
        ),
        fact("city|town", v.city(), "{s} is in {v}", "{s} comes to {v}", "the city is {v}"),
        fact(
            "attendees|guests|participants|capacity|visitors",
            v.integer(5, 9000),
            "{v} guests are expected",
            "{s} has {v} attendees",
            "there is room for {v} people",
            "{v} people will attend",
        ),
        fact(
            "organizer|host|organiser|hosted by",
            v.rng.choice((v.person(), v.company())),
            "{s} is organized by {v}",
            "{v} hosts {s}",
            "the host is {v}",
        ),
        fact("speakers|guests of honor|artists", speakers, "the speakers are {v}", "{v} will speak"),
        fact(
            "ticket price|price|fee|cost|entry fee",
            v.price(),
            "tickets cost {v}",
            "a ticket is ${v}",
            "the fee is {v} euros",
        ),
        fact("topic|subject|theme", v.rng.choice(words.TOPICS), "the topic is {v}", "{s} is about {v}"),
        flag("online|is online|virtual", v.rng.random() < 0.5, ("{s} is online",), ("{s} is not online",)),
        fact("duration|hours|length in hours", v.integer(1, 72), "{s} lasts {v} hours"),
    )
    return Record("event", v.rng.choice((title, "the event", title)), ("it", "its", "it"), facts, EVENT)


def product(v: Values) -> Record:
    name = v.product()
    in_stock = v.rng.random() < 0.5
    facts = (
        fact("name|product|product name|title|item", name, "the product is {v}", "this is the {v}", "we sell the {v}"),
        fact(
            "brand|manufacturer|maker|made by|vendor",
            v.company(),
            "{s} is made by {v}",
            "{s} is from {v}",
            "the brand is {v}",
        ),
        fact(
            "price|cost|unit price",
            v.price(),
            "{s} costs {v}",
            "the price is {v}",
            "{s} sells for ${v}",
            "{s} is priced at {v} dollars",
        ),
        fact("color|colour", v.rng.choice(words.COLORS), "{s} is {v}", "{s} comes in {v}", "the color is {v}"),
        fact("weight|weight kg|weight in kg", v.integer(1, 90), "{s} weighs {v} kg", "the weight is {v} kg"),
        fact(
            "stock|quantity|count|units in stock|available",
            v.integer(1, 9999),
            "there are {v} in stock",
            "{v} units are available",
            "we have {v} of them",
        ),
        flag(
            "in stock|available now|is available",
            in_stock,
            ("{s} is in stock", "{s} is available"),
            ("{s} is sold out", "{s} is not in stock"),
        ),
        fact("rating|stars|score", v.rating(), "{s} is rated {v}", "it has {v} stars", "the rating is {v} out of 5"),
        fact("category|type|department", v.rng.choice(words.CATEGORIES), "the category is {v}", "{s} belongs to {v}"),
        fact(
            "sku|id|code|product id|article number",
            v.code(),
            "the code is {v}",
            "its number is {v}",
            "{s} has the id {v}",
        ),
        fact("tags|labels|keywords", v.some(words.TAGS), "the tags are {v}", "{s} is tagged {v}"),
        fact(
            "released|release date|available from|since", v.iso_date(), "{s} was released on {v}", "{s} came out on {v}"
        ),
        fact("warranty|warranty years", v.integer(1, 20), "the warranty is {v} years"),
    )
    return Record("product", v.rng.choice((f"the {name}", name, "the product")), ("it", "its", "it"), facts, PRODUCT)


def thing(v: Values) -> Record:
    """Something whose keys have never been seen: the model has to find key and value in the text."""
    rng = v.rng
    draws: tuple[Callable[[], Any], ...] = (
        v.word,
        v.word,
        v.brand,
        v.number,
        v.number,
        v.person,
        v.code,
        v.price,
        v.iso_date,
        v.time,
        v.email,
        v.phone,
        v.city,
        lambda: rng.random() < 0.5,
        lambda: [v.word() for _ in range(rng.randint(1, 4))],
        lambda: [v.number() for _ in range(rng.randint(1, 4))],
        lambda: f"{v.word()} {v.word()}",
        lambda: rng.choice(words.COLORS),
        lambda: -v.number(),
        v.phrase,
        v.phrase,
    )
    subject = rng.choice(("the " + v.word(), v.brand(), "it", f"unit {v.code()}"))
    keys: dict[str, None] = {}
    while len(keys) < rng.randint(2, 8):
        keys[" ".join(v.word() for _ in range(rng.choice((1, 1, 1, 2))))] = None
    facts = []
    for key in keys:
        clauses = (f"the {key} is {{v}}", f"{key} is {{v}}", f"its {key} is {{v}}", f"the {key} of {{s}} is {{v}}")
        facts.append(Fact((key,), rng.choice(draws)(), clauses))
    return Record("thing", subject, ("it", "its", "it"), tuple(facts))


DOMAINS: tuple[Callable[[Values], Record], ...] = (person, order, event, product)
