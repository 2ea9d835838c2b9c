"""Between text and tokens: the chat markup, the policy's actions and what it is shown.

Token in, token out: the token list of a turn extends the last one exactly, and nothing that was sampled or sent is
tokenised again. The markup is read off any HF chat template by rendering marked messages and taking the text between
the marks; message bodies are then encoded on their own, as plain text, so that `<|end|>` in the output of a command
stays six characters of text and never ends a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from tokenizers import Tokenizer

from infra.errors import ConfigError

ActionFormat = Literal["plain", "fenced"]

SUBMIT = "submit"
_SYSTEM, _USER, _REPLY, _OBSERVATION = "MarkSystem7Q1", "MarkUser7Q2", "MarkReply7Q3", "MarkObservation7Q4"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FENCE = re.compile(r"^```(?:bash|sh)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One message of the policy, read: a command, or `submit`, or an error to tell it about."""

    command: str | None = None
    submit: bool = False
    error: str | None = None


def parse_action(text: str, action_format: ActionFormat) -> Action:
    """Read one message. `submit` alone ends the episode; `fenced` wants exactly one ```bash block."""
    body = text.strip()
    if action_format == "fenced" and body != SUBMIT:
        blocks = _FENCE.findall(text)
        if len(blocks) != 1:
            return Action(error=f"expected one ```bash block, found {len(blocks)}")
        body = str(blocks[0]).strip()
    if not body:
        return Action(error="empty message, expected one bash command")
    if body == SUBMIT:
        return Action(submit=True)
    if "\0" in body:
        return Action(error="a command cannot hold a NUL character")
    return Action(command=body)


def render_observation(output: str, *, exit_code: int | None, timed_out: bool, max_chars: int) -> str:
    """What the policy sees of one command: `[timeout]` or `[exit N]` first where it went wrong, `[ok]` for silence.

    The output loses its trailing newlines and, beyond `max_chars` characters, its middle.
    """
    body = truncate_middle(output.rstrip("\n"), max_chars)
    if timed_out:
        head = "[timeout]"
    elif exit_code not in (0, None):
        head = f"[exit {exit_code}]"
    else:
        return body or "[ok]"
    return f"{head}\n{body}" if body else head


def render_error(error: str) -> str:
    """What the policy sees when its message was no action."""
    return f"[error] {error}"


def truncate_middle(text: str, max_chars: int) -> str:
    """Keep the first and the last `max_chars / 2` characters and say how many were cut between them."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    return f"{text[:head]}\n[{len(text) - max_chars} characters cut]\n{text[len(text) - tail :]}"


class ChatFormat:
    """The chat markup of one checkpoint, as token lists."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, variables: Mapping[str, str], extra_stop_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self.template = template
        """Source of the chat template."""
        render = self._render = _Template(template, variables)
        user = {"role": "user", "content": _USER}
        reply = {"role": "assistant", "content": _REPLY}
        observation = {"role": "user", "content": _OBSERVATION}
        opening = render([user], generate=True)
        self._user_head, self._user_tail = (self.markup(part) for part in _between(opening, _USER))
        self._system = self._system_parts(render, user)
        following = render([user, reply, observation], generate=True)
        end_and_head, tail = _between(_between(following, _REPLY)[1], _OBSERVATION)
        closing = self.markup(end_and_head)
        stop_at = next((index for index, token in enumerate(closing) if token in self._added), None)
        if stop_at is None:
            raise ConfigError(
                f"the chat template puts no special token after an assistant message (it continues with "
                f"{end_and_head!r}); use a template whose assistant turns end with one"
            )
        self._close, self._observation_head = closing[: stop_at + 1], closing[stop_at + 1 :]
        self._observation_tail = self.markup(tail)
        self.end_id: int = closing[stop_at]
        """The token that ends an assistant message."""
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((self.end_id, *extra_stop_ids)))
        """Tokens at which a generation stops; `end_id` first."""

    @classmethod
    def load(cls, model_dir: str) -> ChatFormat:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a HF checkpoint folder.

        Raises ConfigError when a part is missing or the template does not fit a conversation with observations.
        """
        folder = Path(model_dir)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; give a HF checkpoint folder with a fast tokenizer")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        names = {**_read_json(folder / "special_tokens_map.json"), **config}
        variables = {name: _content(names[name]) for name in _TOKEN_NAMES if names.get(name)}
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        stops = [eos] if isinstance(eos, int) else list(eos or ())
        if (eos_id := tokenizer.token_to_id(variables.get("eos_token", ""))) is not None:
            stops.append(eos_id)
        return cls(tokenizer, _template_text(folder, config), variables, stops)

    def initial(self, system: str | None, user: str) -> list[int]:
        """Tokens of the prompt up to and including the first assistant header."""
        if system is None:
            return [*self._user_head, *self.encode(user), *self._user_tail]
        if self._system is None:
            raise ConfigError("this chat template has no system message; leave rollout.system_prompt out")
        head, middle, tail = self._system
        return [*head, *self.encode(system), *middle, *self.encode(user), *tail]

    def extend(self, observation: str, *, ended: bool) -> list[int]:
        """Tokens to append after a generation; `ended` says whether it sampled a stop token itself."""
        close = [] if ended else self._close
        return [*close, *self._observation_head, *self.encode(observation), *self._observation_tail]

    def reply(self, text: str) -> list[int]:
        """Tokens of an assistant message as the policy would sample it, end token included (for supervised traces)."""
        return [*self.encode(text), self.end_id]

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text: never one of the added (special) tokens, whatever the text says."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._added.isdisjoint(ids):
            return ids
        # Some vocabularies hold the markup as ordinary entries too; single characters cannot form it.
        return [token for char in text for token in self._plain.encode(char, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens without the stop token at the end; other special tokens appear as their names."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=False))

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a generation ends with a stop token."""
        return bool(ids) and ids[-1] in self.stop_ids

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a conversation up to and including the next assistant header. Raises ConfigError where the template
        refuses it."""
        return self._render(messages, generate=True, tools=tools)

    def after_stop(self, closing: Sequence[int]) -> Sequence[int]:
        """What follows the token that ends an assistant message, of the markup behind one.

        Raises ConfigError where no special token ends it."""
        for index, token in enumerate(closing):
            if token in self._added:
                return closing[index + 1 :]
        raise ConfigError("the chat template puts no special token after an assistant message; use another template")

    def markup(self, text: str) -> list[int]:
        """Tokens of text that the template wrote: special tokens where it names them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _system_parts(
        self, render: _Template, user: Mapping[str, str]
    ) -> tuple[list[int], list[int], list[int]] | None:
        try:
            text = render([{"role": "system", "content": _SYSTEM}, user], generate=True)
            head, rest = _between(text, _SYSTEM)
            middle, tail = _between(rest, _USER)
        except ConfigError:
            return None
        return self.markup(head), self.markup(middle), self.markup(tail)


class _Template:
    """A compiled chat template, in the environment that transformers gives it."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import CallBlock, Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """`{% generation %}` marks assistant text for transformers; here it renders its body."""

            tags = {"generation"}  # noqa: RUF012  (the base class declares an instance variable)

            def parse(self, parser: Parser) -> Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

            def _body(self, caller: Any) -> Any:
                return caller()

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._error = TemplateError
        self._variables = dict(variables)
        try:
            self._compiled = env.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        variables = {**self._variables, **({"tools": list(tools)} if tools else {})}
        try:
            return self._compiled.render(messages=list(messages), add_generation_prompt=generate, **variables)
        except self._error as error:
            raise ConfigError(
                f"the chat template refuses a conversation of {len(messages)} messages: {error}"
            ) from error


def _between(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ConfigError("the chat template does not render each message exactly once; use another template")
    return before, after


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = None
    return Tokenizer.from_str(json.dumps(spec))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template; add chat_template.jinja to the checkpoint folder")
    return template
