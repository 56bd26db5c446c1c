"""The commands of a shell block."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import groupby

KEYWORDS = ("do", "then", "else", "if", "while", "!", "{", "time")
SKIPPED = ("for", "done", "fi", "}")
HEREDOC = re.compile(r"<<\s*'?(\w+)'?([^\n]*)\n.*?\n\1\n", flags=re.DOTALL)
COMMENT = re.compile(
    r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:^|(?<=\s))#[^\n]*""", flags=re.DOTALL | re.MULTILINE
)
BRACES = re.compile(r"(\S*)\{([\w.-]+(?:,[\w.-]+)+)\}(\S*)")
OPERATORS = set(";&|<>()\n")


def commands(script: str) -> list[list[str]]:
    """Return the words of each command of a script, without comments, loops around it and where its output goes."""
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert not checked.returncode, checked.stderr
    script = COMMENT.sub(
        lambda found: found[1] or "", HEREDOC.sub(r"\2\n", script).replace("\\\n", " ")
    )
    lexer = shlex.shlex(BRACES.sub(expanded, script), posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    found: list[list[str]] = []
    into = False  # what comes next is a file that is read or written
    for ends, words in groupby(lexer, lambda word: bool(word) and set(word) <= OPERATORS):
        if ends:
            operator = "".join(words)
            into = operator[0] in "<>"
            continue
        command = list(words)
        if into:
            if found and len(command) > 1:
                found[-1] += command[1:]
            continue
        found.append(command)
    return [command for command in map(bare, found) if command]


def expanded(braces: re.Match[str]) -> str:
    """Return what a shell makes of ``{a,b}-c``."""
    return " ".join(f"{braces[1]}{each}{braces[3]}" for each in braces[2].split(","))


def bare(command: list[str]) -> list[str]:
    """Return a command without what is set for it alone, and without the words of a loop around it."""
    while command and (command[0] in KEYWORDS or re.match(r"\w+=", command[0])):
        command = command[1:]
    if command and command[0] in SKIPPED:
        return []
    return [word for word in command if word != "..."]
