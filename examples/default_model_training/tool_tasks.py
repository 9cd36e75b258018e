"""Tasks with functions: the right call of one of several, an answer from a function's result, or no call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.default_model_training import words
from examples.default_model_training.exchange import Call, Example
from examples.default_model_training.other_tasks import talk_task
from examples.default_model_training.telling import styled
from examples.default_model_training.values import Values

ROOMS = ("kitchen", "bedroom", "bathroom", "office", "garden", "hall", "garage", "living room")
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "PLN", "SEK")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its names, its JSON type, and how to draw a value."""

    names: tuple[str, ...]
    type: str
    draw: Callable[[Values], Any]


def _parameter(names: str, kind: str, draw: Callable[[Values], Any]) -> Parameter:
    return Parameter(tuple(names.split("|")), kind, draw)


PARAMETERS = {
    "city": _parameter("city|location|place|city name", "string", Values.city),
    "from": _parameter("origin|from|from city|start|source", "string", Values.city),
    "to": _parameter("destination|to|to city|target", "string", Values.city),
    "person": _parameter("name|person|recipient|contact|to", "string", Values.first),
    "full": _parameter("name|full name|customer|user", "string", Values.person),
    "email": _parameter("email|to|address|recipient", "string", Values.email),
    "subject": _parameter("subject|title", "string", lambda v: " ".join((v.word(), v.word()))),
    "text": _parameter("text|message|body|content|note", "string", lambda v: " ".join(v.word() for _ in range(3))),
    "query": _parameter(
        "query|q|search|term|topic", "string", lambda v: " ".join((v.word(), v.rng.choice(words.NOUNS)))
    ),
    "topic": _parameter("topic|subject|category", "string", lambda v: v.rng.choice((v.word(), *words.NOUNS))),
    "date": _parameter("date|day|on", "string", Values.iso_date),
    "time": _parameter("time|at|when", "string", Values.time),
    "phone": _parameter("phone|number|phone number", "string", Values.phone),
    "nights": _parameter("nights|days|duration", "integer", lambda v: v.rng.randint(1, 14)),
    "guests": _parameter("guests|people|party size|persons", "integer", lambda v: v.rng.randint(1, 12)),
    "minutes": _parameter("minutes|duration|length", "integer", lambda v: v.integer(2, 90)),
    "quantity": _parameter("quantity|count|amount|number", "integer", lambda v: v.integer(2, 60)),
    "amount": _parameter("amount|value|sum", "number", Values.price),
    "price": _parameter("max price|price|limit|budget", "number", lambda v: v.integer(10, 900)),
    "currency": _parameter("from currency|from|source", "string", lambda v: v.rng.choice(CURRENCIES)),
    "other": _parameter("to currency|to|target", "string", lambda v: v.rng.choice(CURRENCIES)),
    "company": _parameter("company|name|firm|symbol", "string", Values.brand),
    "venue": _parameter("restaurant|venue|place|name", "string", Values.venue),
    "product": _parameter("product|item|name|product name", "string", Values.product),
    "code": _parameter("order id|id|order|code|reference", "string", Values.code),
    "id": _parameter("id|user id|number", "integer", Values.number),
    "language": _parameter("language|target|to", "string", lambda v: v.rng.choice(words.LANGUAGES)),
    "room": _parameter("room|where|location", "string", lambda v: v.rng.choice(ROOMS)),
    "degrees": _parameter("degrees|temperature|value", "integer", lambda v: v.integer(15, 30)),
    "song": _parameter("song|title|track|artist", "string", lambda v: " ".join((v.word().title(), v.word().title()))),
    "expression": _parameter(
        "expression|formula|term", "string", lambda v: f"{v.number()} {v.rng.choice('+-*/')} {v.number()}"
    ),
    "path": _parameter(
        "path|file|filename", "string", lambda v: f"{v.word()}.{v.rng.choice(('txt', 'csv', 'md', 'py'))}"
    ),
}
"""Values by the places in `FUNCTIONS`."""

FUNCTIONS = (
    ("get weather|weather|current weather|fetch weather", "Get the current weather in a city.|Weather of a place",
     "What is the weather in {city}?|How is the weather in {city} today?|Weather in {city}?|Is it warm in {city}?|"
     "Do I need an umbrella in {city}?|What's the weather like in {city} right now?|Is it raining in {city}?|"
     "Tell me the weather in {city}."),
    ("get forecast|weather forecast", "Forecast for the next days.",
     "What is the forecast for {city} for the next {nights} days?|Forecast for {city}, {nights} days"),
    ("get time|current time|local time", "The local time in a city.|Current time",
     "What time is it in {city}?|Tell me the time in {city}.|How late is it in {city}?"),
    ("send email|email|write email|send mail", "Send an email.|Write an e-mail to an address.",
     "Send an email to {email} with the subject {subject} and the text {text}.|Email {email}: {text}|"
     "Write to {email} about {subject}.|Send a mail to {email} that says {text}."),
    ("send message|send sms|text|message", "Send a short message to a person.",
     "Tell {person} that {text}.|Send {person} the message {text}.|Text {person}: {text}|Message {person}: {text}"),
    ("call|phone call|dial", "Call a phone number.", "Call {phone}.|Please dial {phone}.|Phone {phone} now."),
    ("book flight|search flights|find flights|flight search", "Find and book a flight.|Flights between two cities",
     "Book a flight from {from} to {to} on {date}.|I want to fly from {from} to {to} on {date}.|"
     "Find flights from {from} to {to}.|Fly me from {from} to {to} on {date}."),
    ("book hotel|reserve hotel|find hotel|search hotels", "Book a room in a hotel.",
     "Book a hotel in {city} for {nights} nights.|I need a hotel in {city} for {nights} nights.|"
     "Find me a hotel in {city}.|A room in {city} for {guests} people, please."),
    ("book table|reserve table|make reservation|restaurant reservation", "Reserve a table in a restaurant.",
     "Book a table at {venue} for {guests} people at {time}.|Reserve a table for {guests} at {venue}.|"
     "A table at {venue} at {time}, please."),
    ("search|web search|search web|google", "Search the web.|Find pages on the internet.",
     "Search the web for {query}.|Google {query}.|Look up {query}.|Search for {query}|Find information about {query}."),
    ("get stock price|stock price|stock quote", "The price of a company's stock.",
     "What is the stock price of {company}?|How much is a share of {company}?|Price of {company} stock?"),
    ("convert currency|exchange|currency converter", "Convert an amount of money.",
     "Convert {amount} {currency} to {other}.|"
     "How much is {amount} {currency} in {other}?|{amount} {currency} in {other}"),
    ("calculate|calculator|compute|evaluate", "Calculate the value of an expression.",
     "What is {expression}?|Calculate {expression}.|Compute {expression}.|How much is {expression}?"),
    ("set alarm|alarm|create alarm", "Set an alarm.", "Wake me at {time}.|Set an alarm for {time}.|Alarm at {time}."),
    ("set timer|start timer|timer", "Start a timer.",
     "Set a timer for {minutes} minutes.|Timer: {minutes} minutes|Start a timer of {minutes} minutes."),
    ("set reminder|remind|create reminder|add reminder", "Remind the user of something.",
     "Remind me at {time}: {text}.|Set a reminder at {time} to {text}.|Remind me to {text} on {date}."),
    ("create event|add event|schedule meeting|calendar event", "Add an event to the calendar.|Schedule a meeting.",
     "Schedule a meeting about {subject} on {date} at {time}.|Put {subject} on my calendar for {date}.|"
     "Create an event {subject} on {date} at {time}.|Meeting with {person} on {date} at {time}."),
    ("play music|play song|play|music player", "Play a song.", "Play {song}.|I want to hear {song}.|Put on {song}."),
    ("translate|translate text|translation", "Translate a text into another language.",
     "Translate {text} into {language}.|How do you say {text} in {language}?|{text} in {language}, please."),
    ("add to cart|buy|order product|place order", "Buy a product.|Put a product into the cart.",
     "Add {quantity} {product} to the cart.|Buy {quantity} {product}.|Order {quantity} x {product}.|I want {product}."),
    ("search products|find products|product search", "Search the shop.",
     "Find {product} for less than {price}.|Show me {product} under {price}.|Do you have {product}?"),
    ("get order status|track order|order status|track package", "Where an order is.|The status of an order",
     "Where is my order {code}?|What is the status of order {code}?|Track {code}.|Has {code} been shipped?"),
    ("cancel order|cancel", "Cancel an order.",
     "Cancel order {code}.|I don't want {code} any more.|Please cancel {code}."),
    ("create user|add user|register user|sign up", "Create an account.",
     "Create a user {full} with the email {email}.|Register {full}, {email}.|Sign up {full} ({email})."),
    ("get user|find user|lookup user|user info", "Get a user by id.",
     "Show me user {id}.|Who is user {id}?|Get the user with the id {id}.|Find user {id}."),
    ("delete user|remove user", "Delete a user.",
     "Delete user {id}.|Remove the user {id}.|Please delete the user {id}."),
    ("get directions|route|directions|navigate", "The way from one place to another.",
     "How do I get from {from} to {to}?|Directions from {from} to {to}.|Show me the way from {from} to {to}."),
    ("turn on light|light on|switch light", "Switch on a lamp.",
     "Turn on the light in the {room}.|Light in the {room}!|"
     "Switch the {room} lamp on."),
    ("set temperature|thermostat|heating", "Set the thermostat.",
     "Set the {room} to {degrees} degrees.|Make the {room} {degrees} degrees warm.|Heat the {room} to {degrees}."),
    ("create invoice|invoice|bill", "Write an invoice.",
     "Write an invoice of {amount} to {company}.|Bill {company} for {amount}.|Invoice {company}: {amount}"),
    ("read file|open file|load file", "Read a file.", "Read {path}.|Open the file {path}.|What is in {path}?"),
    ("get news|news|headlines", "The latest news on a topic.",
     "What is new about {topic}?|News about {topic}?|Show me the headlines on {topic}."),
    ("add note|save note|take note|note", "Save a note.", "Note: {text}|Write down {text}.|Save the note {text}."),
)  # fmt: skip
"""Names, descriptions and requests, each separated by `|`. The parameters are the places in the request."""

VERBS = {
    "create": "Create|Add|Make|New",
    "get": "Get|Show|Show me|Give me",
    "find": "Find|Search|Look for",
    "delete": "Delete|Remove|Drop",
    "update": "Update|Change|Edit",
    "send": "Send|Deliver|Ship",
    "check": "Check|Test|Verify",
    "start": "Start|Begin|Run",
    "stop": "Stop|End|Halt",
    "list": "List|List all",
    "open": "Open|Unlock",
    "close": "Close|Lock|Shut",
    "book": "Book|Reserve",
    "count": "Count|How many",
    "print": "Print|Output",
}
"""Of made-up functions: the verb of the name, and how a request says it."""


@dataclass
class Function:
    """A function and one request that it serves."""

    name: str
    description: str
    parameters: dict[str, str]
    """Name -> JSON type."""
    arguments: dict[str, Any]
    ask: str
    key: str
    """What functions of the same kind have in common. A request is offered one of a kind."""

    def offered(self, rng: random.Random) -> dict[str, Any]:
        """Return the function as a request's `tools` describes it."""
        properties: dict[str, Any] = {name: {"type": kind} for name, kind in self.parameters.items()}
        optional = rng.choice(words.KEYS)
        if rng.random() < 0.2 and optional not in properties:
            properties[optional] = rng.choice(({"type": "string"}, {"enum": rng.sample(words.NOUNS, 2)}))
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.8:
            schema["required"] = [*self.parameters]
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.8:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": schema}}


def known_function(v: Values) -> Function:
    """Draw one of `FUNCTIONS`."""
    rng = v.rng
    names, descriptions, asks = (part.split("|") for part in rng.choice(FUNCTIONS))
    style = rng.choice(("snake", "snake", "snake", "camel", "kebab"))
    ask = rng.choice(asks)
    values, arguments, parameters = {}, {}, {}
    for place in (each.partition("}")[0] for each in ask.split("{")[1:]):
        parameter = PARAMETERS[place]
        name = styled(rng.choice([each for each in parameter.names if each not in arguments]), "snake")
        while name in arguments:
            name += "2"
        values[place] = arguments[name] = parameter.draw(v)
        parameters[name] = parameter.type
    return Function(
        styled(rng.choice(names), style),
        rng.choice(descriptions),
        parameters,
        arguments,
        ask.format(**values),
        names[0],
    )


def made_up_function(v: Values, verb: str | None = None, noun: str | None = None) -> Function:
    """Draw a function of a verb and a noun, with parameters that the request names."""
    rng = v.rng
    verb = verb or rng.choice([*VERBS])
    noun = noun or (v.word() if rng.random() < 0.5 else rng.choice(words.NOUNS))
    arguments: dict[str, Any] = {}
    told = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        key = rng.choice((v.word(), *rng.sample(words.KEYS, 4)))
        draws: dict[str, Callable[[], Any]] = {
            "string": lambda: rng.choice((v.word(), v.first(), v.code(), v.city(), v.iso_date())),
            "integer": v.number,
            "number": v.price,
            "boolean": lambda: rng.random() < 0.5,
        }
        value = draws[rng.choice(("string", "string", "integer", "number", "boolean"))]()
        if key not in arguments:
            arguments[key] = value
            shown = str(value).lower() if isinstance(value, bool) else value
            told.append(
                rng.choice(("{k} {v}", "{k} {v}", "{k}: {v}", "{k} = {v}", "the {k} {v}")).format(k=key, v=shown)
            )
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    said = rng.choice(VERBS[verb].split("|"))
    ask = f"{said} {rng.choice(('the ', 'a ', '', ''))}{noun}{rng.choice((' with ', ': ', ', ', ' for '))}"
    ask += rng.choice((", ", " and ")).join(told) + rng.choice((".", "", " please."))
    name = styled(f"{verb} {noun}", rng.choice(("snake", "snake", "camel", "kebab")))
    return Function(
        name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else f"{verb}_item",
        rng.choice((f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}", f"{said} {noun}")),
        {key: kinds[type(value)] for key, value in arguments.items()},
        arguments,
        ask,
        name,
    )


def offered_functions(v: Values) -> tuple[Function, list[Function]]:
    """Draw the function that a request needs, and two to four that are offered, in any order."""
    rng = v.rng
    share = 0.6

    def draw() -> Function:
        return known_function(v) if rng.random() < share else made_up_function(v)

    right = draw()
    offered = {right.key: right}
    if "_" in right.name and rng.random() < 0.25:  # a similar one: the same verb, or the same noun
        verb, _, noun = right.name.partition("_")
        other = (
            made_up_function(v, None, noun)
            if rng.random() < 0.5
            else made_up_function(v, verb if verb in VERBS else None)
        )
        offered.setdefault(other.key, other)
    count = rng.randint(2, 4)
    while len(offered) < count:
        other = draw()
        offered.setdefault(other.key, other)
    functions = [*offered.values()]
    rng.shuffle(functions)
    return right, functions


def call_task(v: Values) -> Example:
    """Call the one of two to four functions that the request is about."""
    rng = v.rng
    right, functions = offered_functions(v)
    ask = right.ask
    if rng.random() < 0.15:
        ask = f"{rng.choice(('Hi!', 'Hello.', 'Please:', 'I need your help.', 'Can you do this?'))} {ask}"
    call = Call(right.name, right.arguments)
    tools = [each.offered(rng) for each in functions]
    return Example([ask], call.text(), tools=tools)


def result_task(v: Values) -> Example:
    """Answer from the result of a call."""
    rng = v.rng
    right, functions = offered_functions(v)
    draws: dict[str, Callable[[], Any]] = {
        "temperature": lambda: v.integer(-9, 39),
        "condition": lambda: rng.choice(WEATHER),
        "status": lambda: rng.choice(("open", "shipped", "done", "ok", "pending", "delivered", "failed")),
        "price": v.price,
        "result": v.number,
        "date": v.iso_date,
        "time": v.time,
        "id": v.code,
        "name": v.person,
        v.word(): v.word,
    }
    result = {key: draws[key]() for key in rng.sample([*draws], rng.randint(1, 3))}
    told = [f"the {key} is {value}" for key, value in result.items()]
    answer = ", ".join(told[:-1]) + (" and " if told[1:] else "") + told[-1] + "."
    return Example(
        [right.ask],
        answer[0].upper() + answer[1:],
        tools=[each.offered(rng) for each in functions[:2]],
        call=Call(right.name, right.arguments),
        result=json.dumps(result, ensure_ascii=False),
    )


def no_call_task(v: Values) -> Example:
    """Answer small talk without a call, although functions are offered."""
    one = talk_task(v)
    one.tools = [each.offered(v.rng) for each in offered_functions(v)[1][:2]]
    return one


def tool_task(v: Values) -> Example:
    """One of the tasks above."""
    return v.rng.choices((call_task, result_task, no_call_task), (0.8, 0.12, 0.08))[0](v)
