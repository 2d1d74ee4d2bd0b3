"""What a line typed into chat means: a command, a mistyped command, or a message."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from speclocal.ui.prompt import Message

COMMANDS = {
    "help": "",
    "exit": "",
    "reset": "",
    "undo": "",
    "retry": "",
    "system": "[TEXT]",
    "stats": "",
    "drafter": "[NAME [key=value ...]]",
    "set": "[name=value ...]",
    "save": "FILE",
    "load": "FILE",
    "multi": "",
}
ALIASES = {"quit": "exit", "clear": "reset", "?": "help"}
NAMES = tuple(f"/{name}" for name in (*COMMANDS, *ALIASES))

HELP = """\
/help                       this text
/exit, /quit                leave (also Ctrl-D, or Ctrl-C twice at the empty prompt)
/reset, /clear              forget the conversation; the system message stays
/undo                       take back the last message and its answer
/retry                      answer the last message again, with the next seed
/system [TEXT]              set the system message; without TEXT remove it
/stats                      statistics of the last answer
/drafter [NAME key=value]   change the drafter; without NAME show it
/set [name=value]           change the sampler, for example /set temperature=0.7 seed=3; value "default" undoes it
/save FILE, /load FILE      the conversation as JSON
/multi                      write several lines; a line of \"\"\" ends them

Enter sends, Alt-Enter (or Esc, Enter) starts a new line. Pasted text stays one message and waits for Enter.
\"\"\" before and after a text also keeps it together. Such text is never a command.
A path such as /etc/hosts is no command. A space in front of / sends the line as it is.
Ctrl-C stops the answer; what was said so far stays in the conversation. If nothing was said yet, your message comes
back for editing. If a stopped answer does not end (one round may take long), two more presses leave."""


@dataclass(frozen=True)
class Command:
    """A known command and the text after it."""

    name: str
    rest: str


@dataclass(frozen=True)
class Mistyped:
    """Looks like a command but is none; it is not sent."""

    hint: str


def understand(message: Message) -> Command | Mistyped | str:
    """A command, a hint, or the text for the model."""
    text = message.text
    if message.literal or not text.startswith("/"):
        return text[1:] if text.startswith(" /") and not message.literal else text
    word, rest = re.fullmatch(r"(\S*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if not re.fullmatch(r"/(\?|[A-Za-z][\w-]*)?", word):
        return text
    name = word[1:].lower()
    name = ALIASES.get(name, name)
    if name in COMMANDS:
        return Command(name, rest.strip())
    near = difflib.get_close_matches(word.lower(), NAMES, n=1, cutoff=0.7)
    guess = f" (did you mean {near[0]}?)" if near else ""
    return Mistyped(
        f"no command {word}{guess}; nothing was sent. /help lists commands; a space in front sends it as it is"
    )
