"""Reads shell scripts that set variables and launch one program, without running them.

A part of bash: words, quotes, arrays, expansions, arithmetic, ``if``, ``case``, ``for`` over known words, functions.
What a script learns from the machine (the output of a command, a file that may be there) is not known: it becomes
:data:`UNKNOWN` in a word, and a condition on it is not decided. Neither branch of an undecided condition runs, and
every variable that one of them sets is unknown from then on.
"""

import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

UNKNOWN = "\ufffd"
"""Stands in a word for what only the machine knows."""
BUILTINS = frozenset(
    (
        *("set", "shopt", "ulimit", "cd", "pushd", "popd", "echo", "printf", "source", ".", "wait", "trap", "umask"),
        *("read", "exec", "eval", "local", "declare", "typeset", "readonly", "unset", "shift"),
    )
)
_OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")", "\n")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ENDS = frozenset({"then", "fi", "else", "elif", "do", "done", "esac", "}", ";;", ")"})


class Unreadable(Exception):
    """A script that is not of this part of bash."""


class _Exit(Exception):
    pass


@dataclass(frozen=True)
class _Word:
    text: str


@dataclass(frozen=True)
class _Array:
    """``name=(words)`` or ``name+=(words)``."""

    name: str
    adds: bool
    words: tuple[str, ...]


_Token = str | _Word | _Array


def _balanced(text: str, at: int, opening: str, closing: str) -> int:
    """The place after the bracket that closes the one at a place."""
    depth, quote = 0, ""
    while at < len(text):
        letter = text[at]
        if letter == "\\" and quote != "'":
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif text.startswith(opening, at):
            depth += 1
        elif text.startswith(closing, at):
            depth -= 1
            if not depth:
                return at + len(closing)
        at += 1
    raise Unreadable(f"no {closing} closes {opening}")


def _end_of_expansion(text: str, at: int) -> int:
    """The place after what begins with a dollar."""
    if text.startswith("${", at):
        return _balanced(text, at + 1, "{", "}")
    if text.startswith("$(", at):
        return _balanced(text, at + 1, "(", ")")
    found = re.match(rf"\$({_NAME}|[0-9@*#?!$-])", text[at:])
    return at + (found.end() if found else 1)


def _end_of_quotes(text: str, at: int) -> int:
    """The place after the double quotes that begin at a place."""
    at += 1
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text[at] == "$":
            at = _end_of_expansion(text, at)
        else:
            at += 1
    return at + 1


def _end_of_word(text: str, at: int) -> int:
    start = at
    while at < len(text) and text[at] not in " \t\n;&|()<>":
        letter = text[at]
        if letter == "\\":
            at += 2
        elif letter == "'":
            at = text.index("'", at + 1) + 1
        elif letter == '"':
            at = _end_of_quotes(text, at)
        elif letter == "`":
            at = text.index("`", at + 1) + 1
        elif letter == "$":
            at = _end_of_expansion(text, at)
        else:
            at += 1
        if text.startswith("(", at) and re.fullmatch(rf"{_NAME}\+?=", text[start:at]):
            return at
    return min(at, len(text))


def _tokens(text: str) -> Iterator[_Token]:
    at, here = 0, list[str]()
    while at < len(text):
        letter = text[at]
        if letter in " \t":
            at += 1
        elif letter == "#":
            at = text.index("\n", at) if "\n" in text[at:] else len(text)
        elif found := re.match(r"\d*(<<-?)\s*(['\"]?)(\w+)\2", text[at:]):
            here.append(found[3])
            at += found.end()
        elif found := re.match(r"(\d*|&)(>>|>\||>&|<&|<<<|>|<)[ \t]*", text[at:]):
            at = _end_of_word(text, at + found.end())  # files are not looked at
            while at < len(text) and text[at] == "(":  # a process as a file
                at = _end_of_word(text, _balanced(text, at, "(", ")"))
        elif operator_ := next((sign for sign in _OPERATORS if text.startswith(sign, at)), None):
            at += len(operator_)
            if operator_ == "\n":
                for last in here:
                    ended = re.search(rf"^\t*{re.escape(last)}$", text[at:], re.MULTILINE)
                    at = at + ended.end() if ended else len(text)
                here = []
            yield operator_
        else:
            end = _end_of_word(text, at)
            word = text[at:end]
            assigned = re.fullmatch(rf"({_NAME})(\+?)=", word)
            if assigned and text.startswith("(", end):
                after = _balanced_list(text, end)
                inner = [token.text for token in _tokens(text[end + 1 : after - 1]) if isinstance(token, _Word)]
                yield _Array(assigned[1], bool(assigned[2]), tuple(inner))
                end = after
            elif end == at:
                raise Unreadable(f"the sign {text[at]}")
            else:
                yield _Word(word)
            at = end


def _balanced_list(text: str, at: int) -> int:
    """The place after an array's closing bracket; comments in it may have brackets and quotes."""
    at += 1
    while at < len(text) and text[at] != ")":
        if text[at] in " \t\n":
            at += 1
        elif text[at] == "#":
            at = text.index("\n", at)
        else:
            end = _end_of_word(text, at)
            at = end if end > at else at + 1
    return at + 1


_Command = object
"""Any of the classes that follow."""


@dataclass(frozen=True)
class _Simple:
    parts: tuple[_Token, ...]


@dataclass(frozen=True)
class _Test:
    words: tuple[str, ...]


@dataclass(frozen=True)
class _If:
    cases: tuple[tuple["_List", "_List"], ...]
    otherwise: "_List | None"


@dataclass(frozen=True)
class _Case:
    word: str
    cases: tuple[tuple[tuple[str, ...], "_List"], ...]


@dataclass(frozen=True)
class _For:
    name: str
    words: tuple[str, ...]
    body: "_List"


@dataclass(frozen=True)
class _While:
    condition: "_List"
    body: "_List"
    until: bool


@dataclass(frozen=True)
class _Function:
    name: str
    body: "_List"


@dataclass(frozen=True)
class _Pipe:
    commands: tuple[_Command, ...]
    negated: bool


@dataclass(frozen=True)
class _List:
    """Commands with the operator before each: "" first, then ";", "&&" or "||"."""

    commands: tuple[tuple[str, _Pipe], ...]


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text.replace("\\\r\n", " ").replace("\\\n", " ")))
        self._at = 0

    def script(self) -> _List:
        found = self._list()
        if self._at < len(self._tokens):
            raise Unreadable(f"{self._tokens[self._at]} where a command should begin")
        return found

    def _peek(self) -> str:
        """The next token as text; empty at the end, and for an array."""
        if self._at >= len(self._tokens):
            return ""
        token = self._tokens[self._at]
        return token.text if isinstance(token, _Word) else token if isinstance(token, str) else ""

    def _next(self) -> _Token:
        if self._at >= len(self._tokens):
            raise Unreadable("the script ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        if self._peek() != text:
            raise Unreadable(f"{self._peek()} instead of {text}")
        self._at += 1

    def _skip_lines(self) -> None:
        while self._peek() in ("\n", ";") and self._at < len(self._tokens):
            self._at += 1

    def _list(self) -> _List:
        found, sign = list[tuple[str, _Pipe]](), ""
        self._skip_lines()
        while self._at < len(self._tokens) and self._peek() not in _ENDS:
            found.append((sign, self._pipe()))
            sign = ";"
            if self._peek() in ("&&", "||"):
                sign = str(self._next())
            elif self._peek() in (";", "&", "\n"):
                self._at += 1
            self._skip_lines()
        return _List(tuple(found))

    def _pipe(self) -> _Pipe:
        negated = self._peek() == "!"
        self._at += negated
        commands = [self._command()]
        while self._peek() == "|":
            self._at += 1
            self._skip_lines()
            commands.append(self._command())
        return _Pipe(tuple(commands), negated)

    def _command(self) -> _Command:
        match self._peek():
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for":
                return self._for()
            case "while" | "until" as word:
                self._at += 1
                condition = self._list()
                return _While(condition, self._block("do", "done"), word == "until")
            case "{":
                return self._block("{", "}")
            case "(":
                if self._tokens[self._at + 1 : self._at + 2] == ["("]:
                    return self._arithmetic()
                return self._block("(", ")")
            case "[[":
                return self._test()
            case "function":
                self._at += 1
        return self._simple()

    def _block(self, opening: str, closing: str) -> _List:
        self._skip_lines()
        self._expect(opening)
        found = self._list()
        self._expect(closing)
        return found

    def _arithmetic(self) -> _Test:
        self._at += 2
        words, depth = list[str](), 0
        while depth or self._peek() != ")":
            token = self._next()
            depth += (token == "(") - (token == ")")
            words.append(token.text if isinstance(token, _Word) else str(token))
        self._at += 2
        return _Test(("((", " ".join(words)))

    def _test(self) -> _Test:
        self._at += 1
        words = list[str]()
        while self._peek() != "]]":
            token = self._next()
            words += [token.text if isinstance(token, _Word) else str(token)]
        self._at += 1
        return _Test(tuple(words))

    def _if(self) -> _If:
        cases, otherwise = list[tuple[_List, _List]](), None
        while self._peek() in ("if", "elif"):
            self._at += 1
            condition = self._list()
            self._expect("then")
            cases.append((condition, self._list()))
        if self._peek() == "else":
            self._at += 1
            otherwise = self._list()
        self._expect("fi")
        return _If(tuple(cases), otherwise)

    def _case(self) -> _Case:
        self._at += 1
        word, cases = self._next(), list[tuple[tuple[str, ...], _List]]()
        self._skip_lines()
        self._expect("in")
        self._skip_lines()
        while self._peek() != "esac":
            patterns = list[str]()
            self._at += self._peek() == "("
            while self._peek() != ")":
                token = self._next()
                patterns += [token.text] if isinstance(token, _Word) else []
            self._at += 1
            cases.append((tuple(patterns), self._list()))
            self._at += self._peek() == ";;"
            self._skip_lines()
        self._at += 1
        return _Case(word.text if isinstance(word, _Word) else "", tuple(cases))

    def _for(self) -> _For:
        self._at += 1
        name, words = self._next(), list[str]()
        if not isinstance(name, _Word):  # ((...)): how often it runs is not looked at
            while self._peek() != "do":
                self._at += 1
            return _For("", (UNKNOWN,), self._block("do", "done"))
        self._skip_lines()
        if self._peek() == "in":
            self._at += 1
            while self._peek() not in (";", "\n"):
                token = self._next()
                words += [token.text] if isinstance(token, _Word) else []
        return _For(name.text, tuple(words), self._block("do", "done"))

    def _simple(self) -> _Simple | _Function:
        parts = list[_Token]()
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token == "(" and len(parts) == 1 and isinstance(parts[0], _Word):
                self._at += 1
                self._expect(")")
                return _Function(parts[0].text, self._block("{", "}"))
            if isinstance(token, str):
                break
            if isinstance(token, _Word) and token.text == "}" and not parts:
                break
            self._at += 1
            parts.append(token)
        if not parts:
            raise Unreadable(f"{self._peek()!r} where a command should begin")
        if len(parts) == 1 and isinstance(parts[0], _Word) and self._peek() == "{":
            return _Function(parts[0].text, self._block("{", "}"))
        return _Simple(tuple(parts))


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "*": operator.mul, "/": operator.floordiv, "%": operator.mod, "+": operator.add, "-": operator.sub,
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "&&": lambda left, right: bool(left) and bool(right), "||": lambda left, right: bool(left) or bool(right),
}  # fmt: skip
_PRECEDENCE = (("||",), ("&&",), ("==", "!="), ("<=", ">=", "<", ">"), ("+", "-"), ("*", "/", "%"))


def arithmetic(text: str, value: Callable[[str], str]) -> int | None:
    """What a shell's arithmetic is; None if something in it is not known or no number.

    Args:
        text: the expression, with its names.
        value: gives a name's text.
    """
    tokens = re.findall(rf"\d+|\$?{{?{_NAME}}}?|[<>=!]=|&&|\|\||[-+*/%()<>]|\S", text)
    try:
        found, left = _sum(tokens, value, 0)
    except (ValueError, IndexError, ZeroDivisionError):
        return None
    return None if left else int(found)


def _sum(tokens: list[str], value: Callable[[str], str], level: int) -> tuple[int, list[str]]:
    if level == len(_PRECEDENCE):
        return _factor(tokens, value)
    found, tokens = _sum(tokens, value, level + 1)
    while tokens and tokens[0] in _PRECEDENCE[level]:
        right, rest = _sum(tokens[1:], value, level + 1)
        found, tokens = int(_ARITHMETIC[tokens[0]](found, right)), rest
    return found, tokens


def _factor(tokens: list[str], value: Callable[[str], str]) -> tuple[int, list[str]]:
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        found, rest = _sum(rest, value, 0)
        return found, rest[1:]
    if first in ("-", "+"):
        found, rest = _factor(rest, value)
        return (-found if first == "-" else found), rest
    name = first.strip("${}")
    return int(first if first.isdigit() else value(name) or "0"), rest


@dataclass
class Script:
    """A script that was read.

    Attributes:
        commands: the words of every program that it launches, in their order.
        variables: what its variables are at the end.
        environment: those that it exports.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    environment: set[str] = field(default_factory=set)


def read(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """Read a script.

    Args:
        text: of it.
        variables: those that are set around it. All others are not, but for ``HOME`` and ``PWD``, which nobody knows.

    Raises:
        Unreadable: it is not of this part of bash.
    """
    reader = _Reader({"HOME": UNKNOWN, "PWD": UNKNOWN, "USER": UNKNOWN} | dict(variables or {}))
    try:
        reader.run(_Parser(text).script())
    except _Exit:
        pass
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    return Script(reader.commands, reader.variables, reader.exported)


class _Reader:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables: dict[str, str | list[str]] = dict(variables)
        self.commands: list[list[str]] = []
        self.exported: set[str] = set()
        self._functions: dict[str, _List] = {}
        self._arguments: list[str] = []

    def run(self, commands: _List) -> bool | None:
        """The status of the last command that ran: whether it succeeded; None if only the machine knows."""
        status: bool | None = True
        for sign, pipe in commands.commands:
            if (sign == "&&" and status is False) or (sign == "||" and status is True):
                continue
            if sign in ("&&", "||") and status is None:
                self._forget(pipe)
                continue
            status = self._status(pipe)
        return status

    def _status(self, pipe: _Pipe) -> bool | None:
        status: bool | None = True
        for command in pipe.commands:
            status = self._one(command)
        return status if status is None or not pipe.negated else not status

    def _one(self, command: _Command) -> bool | None:
        match command:
            case _List():
                return self.run(command)
            case _If():
                return self._if(command)
            case _Case():
                return self._case(command)
            case _For():
                return self._for(command)
            case _While():
                status = self.run(command.condition)
                if status is not command.until:
                    self._forget(command.body)
                return True
            case _Function():
                self._functions[command.name] = command.body
                return True
            case _Test():
                return self._test(list(command.words))
            case _Simple():
                return self._simple(command)
        raise Unreadable(f"{command}")

    def _if(self, command: _If) -> bool | None:
        for number, (condition, body) in enumerate(command.cases):
            status = self.run(condition)
            if status:
                return self.run(body)
            if status is None:
                for _, other in command.cases[number:]:
                    self._forget(other)
                if command.otherwise:
                    self._forget(command.otherwise)
                return None
        return self.run(command.otherwise) if command.otherwise else True

    def _case(self, command: _Case) -> bool | None:
        word = self._text(command.word)
        if UNKNOWN in word:
            for _, body in command.cases:
                self._forget(body)
            return None
        for patterns, body in command.cases:
            if any(fnmatch.fnmatchcase(word, self._text(pattern)) for pattern in patterns):
                return self.run(body)
        return True

    def _for(self, command: _For) -> bool | None:
        words = [word for text in command.words for word in self.expand(text)]
        if any(UNKNOWN in word for word in words):
            self._forget(command.body)
            return None
        status: bool | None = True
        for word in words:
            self.variables[command.name] = word
            status = self.run(command.body)
        return status

    def _forget(self, node: object) -> None:
        """Make unknown what a part of the script would set, because nobody knows whether it runs."""
        if isinstance(node, _Simple):
            for part in node.parts:
                if isinstance(part, _Array):
                    self.variables[part.name] = [UNKNOWN]
                elif isinstance(part, _Word) and (found := re.match(rf"({_NAME})\+?=", part.text)):
                    self.variables[found[1]] = UNKNOWN
            name = node.parts[0].text if isinstance(node.parts[0], _Word) else ""
            if not re.match(rf"{_NAME}\+?=|\[|{'|'.join(map(re.escape, BUILTINS))}$|exit$|export$|return$", name):
                self.commands.append([UNKNOWN, *(part.text for part in node.parts if isinstance(part, _Word))])
        elif isinstance(node, tuple):
            for part in node:
                self._forget(part)
        elif hasattr(node, "__dataclass_fields__") and not isinstance(node, _Word | _Array):
            for name in node.__dataclass_fields__:
                self._forget(getattr(node, name))

    def _simple(self, command: _Simple) -> bool | None:
        words, set_before = list[str](), dict[str, str | list[str]]()
        for part in command.parts:
            if isinstance(part, _Array):
                found = [word for text in part.words for word in self.expand(text)]
                old = self.variables.get(part.name, [])
                set_before[part.name] = ([*old] if isinstance(old, list) else [old]) * part.adds + found
            elif isinstance(part, _Word):
                assigned = re.match(rf"({_NAME})(\+?)=", part.text)
                if assigned and (not words or words[0] in ("export", "local", "declare", "readonly", "typeset")):
                    value = self._text(part.text[assigned.end() :])
                    old = self.variables.get(assigned[1], "")
                    set_before[assigned[1]] = (old if isinstance(old, str) else "") * bool(assigned[2]) + value
                    if words:
                        words.append(assigned[1])
                else:
                    words += self.expand(part.text)
        if not words or words[0] in ("export", "local", "declare", "readonly", "typeset"):
            self.variables |= set_before
            if words and words[0] == "export":
                self.exported |= {word for word in words[1:] if not word.startswith("-")}
            return True
        return self._call(words, set_before)

    def _call(self, words: list[str], environment: Mapping[str, str | list[str]]) -> bool | None:
        name = words[0]
        if name in ("exit", "return"):
            raise _Exit
        if name in ("[", "test"):
            return self._test(words[1:-1] if name == "[" else words[1:], expanded=True)
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name == "shift":
            self._arguments = self._arguments[1:]
            return True
        if name in self._functions:
            before, self._arguments = self._arguments, words[1:]
            try:
                return self.run(self._functions[name])
            except _Exit:
                return True
            finally:
                self._arguments = before
        if name in BUILTINS:
            return True
        self.exported |= {*environment}
        self.variables |= environment
        self.commands.append(words)
        return None

    def _test(self, words: list[str], expanded: bool = False) -> bool | None:
        if words[:1] == ["(("]:
            found = arithmetic(words[1], self._value)
            return None if found is None else bool(found)
        for sign, combine in (("||", any), ("&&", all), ("-o", any), ("-a", all)):
            if sign in words:
                at = words.index(sign)
                sides = [self._test(words[:at], expanded), self._test(words[at + 1 :], expanded)]
                if (sign in ("||", "-o")) in sides:
                    return sign in ("||", "-o")
                return None if None in sides else combine(map(bool, sides))
        if words[:1] == ["!"]:
            status = self._test(words[1:], expanded)
            return None if status is None else not status
        if words[:1] == ["("]:
            return self._test(words[1:-1], expanded)
        texts = words if expanded else [self._text(word) for word in words]
        if any(UNKNOWN in text for text in texts):
            return None
        if len(texts) == 1:
            return bool(texts[0])
        if len(texts) == 2:
            checks = {"-z": lambda text: not text, "-n": bool, "-v": lambda text: text in self.variables}
            return checks[texts[0]](texts[1]) if texts[0] in checks else None
        if len(texts) != 3:
            return None
        left, sign, right = texts
        if sign in ("=", "=="):
            return left == right if expanded else fnmatch.fnmatchcase(left, right)
        if sign == "!=":
            return left != right if expanded else not fnmatch.fnmatchcase(left, right)
        if sign == "=~":
            return None
        names = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
        found = arithmetic(f"{left} {names[sign]} {right}", self._value) if sign in names else None
        return None if found is None else bool(found)

    def _value(self, name: str) -> str:
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else " ".join(value)

    def _text(self, raw: str) -> str:
        """A word's text where it is not split, as in an assignment."""
        return "".join(text for text, _ in self._pieces(raw, splits=False))

    def expand(self, raw: str) -> list[str]:
        """The words that one becomes."""
        words, current, is_there = list[str](), "", False
        for text, kind in self._pieces(raw):
            if kind == "next":
                words += [current] * is_there
                current, is_there = "", False
            else:
                current, is_there = current + text, True
        return [*words, *[current] * is_there]

    def _pieces(self, raw: str, splits: bool = True) -> Iterator[tuple[str, str]]:
        """Texts of a word, and "next" where another word begins."""
        at = 0
        while at < len(raw):
            letter = raw[at]
            if letter == "\\":
                yield raw[at + 1 : at + 2], ""
                at += 2
            elif letter == "'":
                end = raw.index("'", at + 1)
                yield raw[at + 1 : end], ""
                at = end + 1
            elif letter == '"':
                end = _end_of_quotes(raw, at)
                yield from self._quoted(raw[at + 1 : end - 1])
                at = end
            elif letter == "`":
                yield UNKNOWN, ""
                at = raw.index("`", at + 1) + 1
            elif letter == "$":
                end = _end_of_expansion(raw, at)
                found = self._expansion(raw[at:end])
                at = end
                texts = [text for one in found for text in (one.split() if splits else [one])]
                for number, text in enumerate(texts):
                    if number:
                        yield ("", "next") if splits else (" ", "")
                    yield text, ""
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\'\"`$":
                    end += 1
                yield raw[at:end], ""
                at = end

    def _quoted(self, raw: str) -> Iterator[tuple[str, str]]:
        if not raw:
            yield "", ""
        at = 0
        while at < len(raw):
            if raw[at] == "\\" and raw[at + 1 : at + 2] in ("$", '"', "\\", "`", "\n"):
                yield raw[at + 1], ""
                at += 2
            elif raw[at] == "`":
                yield UNKNOWN, ""
                at = raw.index("`", at + 1) + 1
            elif raw[at] == "$":
                end = _end_of_expansion(raw, at)
                found = self._expansion(raw[at:end])
                for number, text in enumerate(found):
                    if number:
                        yield "", "next"
                    yield text, ""
                at = end
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\`$":
                    end += 1
                yield raw[at:end], ""
                at = end

    def _expansion(self, raw: str) -> list[str]:
        """What begins with a dollar, as words."""
        if raw.startswith("$(("):
            found = arithmetic(self._text(raw[3:-2]), self._value)
            return [UNKNOWN if found is None else str(found)]
        if raw.startswith("$("):
            return [UNKNOWN]
        if raw == "$":
            return ["$"]
        if raw.startswith("${"):
            return self._parameter(raw[2:-1])
        return self._parameter(raw[1:])

    def _parameter(self, text: str) -> list[str]:
        if text in ("@", "*"):
            return list(self._arguments)
        if text == "#":
            return [str(len(self._arguments))]
        if text.isdigit():
            place = int(text)
            return [self._arguments[place - 1]] if 0 < place <= len(self._arguments) else [UNKNOWN * (place == 0)]
        if text in "?!$-":
            return [UNKNOWN]
        if text.startswith("#"):
            value = self.variables.get(text[1:].removesuffix("[@]").removesuffix("[*]"), "")
            return [str(len(value))]
        if text.startswith("!"):
            return self._parameter(self._value(text[1:]))
        found = re.match(rf"({_NAME}|[0-9]+|@)(\[[^\]]*\])?(.*)", text, re.DOTALL)
        if not found:
            return [UNKNOWN]
        name, index, rest = found[1], found[2], found[3]
        values, is_set = self._values(name, index)
        return self._operated(name, values, is_set, rest) if rest else values

    def _values(self, name: str, index: str | None) -> tuple[list[str], bool]:
        if name.isdigit() or name == "@":
            arguments = self._arguments if name == "@" else self._arguments[int(name) - 1 : int(name)]
            return list(arguments) or [""], bool(arguments)
        value = self.variables.get(name)
        if value is None:
            return [] if index in ("[@]", "[*]") else [""], False
        if isinstance(value, str):
            return [value], True
        if index in ("[@]", "[*]"):
            return list(value), bool(value)
        place = arithmetic(index.strip("[]"), self._value) if index else 0
        if place is None:
            return [UNKNOWN], True
        return [value[place] if -len(value) <= place < len(value) else ""], bool(value)

    def _operated(self, name: str, values: list[str], is_set: bool, rest: str) -> list[str]:
        """A parameter's words with what stands behind its name, such as ``:-word``."""
        text = " ".join(values)
        sign = re.match(r":[-=+?]|[-=+?]|##|#|%%|%|//|/|\^\^|\^|,,|,|:", rest)
        if not sign:
            return [UNKNOWN]
        word = rest[sign.end() :]
        kind = sign[0].removeprefix(":") if sign[0] in (":-", ":=", ":+", ":?") else sign[0]
        is_set = is_set and (bool(text) or not sign[0].startswith(":"))
        if kind in ("-", "=", "?"):
            if is_set:
                return values
            if kind == "?":
                return [UNKNOWN]
            found = self.expand(word) if word.startswith(('"$', "$")) else [self._text(word)]
            if kind == "=":
                self.variables[name] = " ".join(found)
            return found or [""]
        if kind == "+":
            return (self.expand(word) or [""]) if is_set else []
        if any(UNKNOWN in value for value in values):
            return [UNKNOWN]
        return [_edited(value, kind, self._text(word)) for value in values]


def _edited(value: str, sign: str, word: str) -> str:
    if sign in ("#", "##", "%", "%%"):
        parts = range(len(value) + 1) if sign in ("#", "%%") else range(len(value), -1, -1)
        for at in parts:
            cut, left = (value[:at], value[at:]) if sign[0] == "#" else (value[at:], value[:at])
            if fnmatch.fnmatchcase(cut, word):
                return left
        return value
    if sign in ("/", "//"):
        old, _, new = word.partition("/")
        return value.replace(old, new, 1 if sign == "/" else -1)
    if sign[0] in "^,":
        change = str.upper if sign[0] == "^" else str.lower
        return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
    return UNKNOWN


def launched(script: Script, programs: Sequence[str]) -> list[list[str]]:
    """The words after the name of one of some programs, of each command that names one."""
    found = []
    for words in script.commands:
        at = next((at for at, word in enumerate(words) if word in programs), None)
        if at is not None:
            found.append(words[at:])
    return found
