"""Ten JSON schemas whose texts are bounded, each with a question: what structured outputs are tested with."""


def obj(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def text(most, least=0):
    return {"type": "string", "minLength": least, "maxLength": most}


def number(low, high):
    return {"type": "integer", "minimum": low, "maximum": high}


def some(items, most, least=0):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


PERSON = obj(name=text(20, 1), age=number(0, 120))

SCHEMAS = {
    "person": ("Invent a person.", PERSON),
    "enum": ("Is 'I love this film' positive?", obj(label={"enum": ["positive", "negative", "neutral"]}, score=number(0, 10))),
    "three levels": (
        "Describe a shop in Paris.",
        obj(shop=obj(name=text(16, 1), address=obj(city=text(16, 1), position=obj(x=number(0, 99), y=number(0, 99))))),
    ),
    "array of numbers": ("Give me some prime numbers.", obj(primes=some(number(2, 999), 6, 2))),
    "array of objects": ("Name two people.", obj(people=some(PERSON, 2, 1))),
    "pattern": ("Give a date and a colour.", obj(
        date={"type": "string", "pattern": r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"},
        colour={"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    )),
    "anyOf": ("Name a pet: a cat with its lives or a dog with its tricks.", {"anyOf": [
        obj(kind={"const": "cat"}, lives=number(1, 9)),
        obj(kind={"const": "dog"}, tricks=some({"enum": ["sit", "roll", "fetch"]}, 3, 1)),
    ]}),
    "reference": ("A small tree, please.", {
        "$defs": {"leaf": obj(value=number(0, 9))},
        **obj(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    }),
    "null or boolean": ("Is it raining?", obj(is_raining={"type": ["boolean", "null"]}, since={"anyOf": [text(8), {"type": "null"}]})),
    "top-level array": ("List three fruits.", some({"enum": ["apple", "pear", "plum", "fig"]}, 3, 3)),
}
