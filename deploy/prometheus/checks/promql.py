"""What a PromQL expression reads: its selectors and the labels it groups by. Not a parser: Prometheus itself does that."""

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
      | (?P<range>\[[^\]]*\])
      | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
      | (?P<number>[0-9][0-9a-zA-Z.]*)
      | (?P<mark>=~|!~|!=|==|>=|<=|[^\s])""",
    re.VERBOSE,
)
AGGREGATORS = set("sum min max avg group stddev stdvar count count_values bottomk topk quantile".split())
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "atan2"}


@dataclass(frozen=True)
class Selector:
    metric: str
    matchers: tuple  # of (label, operator, quoted value)

    def __str__(self):
        return self.metric + ("{%s}" % ",".join(map("".join, self.matchers)) if self.matchers else "")


def read(expr):
    """(selectors, grouping labels) of an expression, comments left out."""
    tokens = [(m.lastgroup, m.group()) for m in TOKEN.finditer(re.sub(r"(?m)#.*$", "", expr))]
    tokens.append(("end", ""))
    selectors, labels = [], set()
    at = 0
    while tokens[at][0] != "end":
        kind, text = tokens[at]
        following = tokens[at + 1][1]
        at += 1
        if kind != "name" or text.lower() in WORDS or text in AGGREGATORS:
            continue
        if text in GROUPINGS:
            if following == "(":
                end = closing(tokens, at, ")")
                labels.update(name for kind, name in tokens[at:end] if kind == "name")
                at = end
        elif following == "{":
            end = closing(tokens, at, "}")
            inside = [token for token in tokens[at + 1 : end] if token[1] != ","]
            matchers = tuple(tuple(t for _, t in inside[i : i + 3]) for i in range(0, len(inside), 3))
            selectors.append(Selector(text, matchers))
            at = end
        elif following != "(":
            selectors.append(Selector(text, ()))
    return selectors, labels


def closing(tokens, at, mark):
    while tokens[at][1] != mark:
        if tokens[at][0] == "end":
            raise ValueError(f"no closing {mark}")
        at += 1
    return at
