"""Every command that the documentation names, and how each is accounted for.

A block is shell when its first line begins with one of PROGRAMS. What no test can run is marked: a line by a comment
`# needs ...` at its end, a block by one right above it, a command between backticks by one right after it, a page by
one anywhere:

    <!-- not run: needs a GPU -->
    <!-- page not run: needs a GPU and the hub -->

Everything else is run: by another test (RUN_ELSEWHERE), or by tests/pipeline/test_documented_commands.py.
"""

import re
import shlex
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from drafthead.config import REPO_ROOT

PAGES = [REPO_ROOT / "README.md", REPO_ROOT / "CONTRIBUTING.md", *sorted((REPO_ROOT / "docs").glob("*.md"))]
PROGRAMS = ("python", "make", "accelerate", "pip", "vllm", "hf", "ray", "sbatch", "trtllm-serve", "docker", "git")
# Script and flags that other tests run. `make check` and its like run the suite itself.
RUN_ELSEWHERE = {
    "data_gen/prompts.py",
    "data_gen/regenerate.py",
    "data_gen/regenerate.py --workers",
    "data_gen/harvest.py",
    "data_gen/harvest.py --dry-run",
    "data_gen/harvest.py --verify",
    "data_gen/harvest.py --cluster",
    "data_gen/harvest.py --cluster --workers",
    "train/eagle3.py",
    "export/head.py",
    "data_gen/adapt.py",
    "eval/acceptance.py",
    "eval/serving.py --miniature --preset",
    "eval/serving.py",
    "eval/draft_lengths.py",
    "eval/compare.py --mask-token-id",
    "tools.tiny_long",
    "vllm.entrypoints.openai.api_server",
}
_BLOCK = re.compile(r"^```\w*\n(.*?)^```|((?:^ {4}[^\n]*\n(?:\n(?= {4}))?)+)", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (page )?not run: needs (.+?) -->")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page, line: page and line of the command.
        words: words of the command as the shell reads them, without synopsis brackets.
        needs: what a machine that runs tests lacks; empty: nothing.
    """

    page: str
    line: int
    words: tuple[str, ...]
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def script(self) -> str:
        """The recipe script, benchmark or job file that it runs; empty for other programs."""
        return next((word for word in self.words if re.fullmatch(r"[a-z_]+/[\w/]+\.(py|sbatch)", word)), "")

    @property
    def arguments(self) -> list[str]:
        """What the script gets."""
        return list(self.words[self.words.index(self.script) + 1 :]) if self.script else []

    @property
    def key(self) -> str:
        """The script with its flags, in one order; the module of `python -m`; of other programs the first two words."""
        if self.words[:2] == ("python", "-m"):
            return self.words[2]
        if not self.script:
            return " ".join(self.words[:2])
        return " ".join([self.script, *sorted(word for word in self.arguments if word.startswith("--"))])


@lru_cache(maxsize=1)
def documented() -> list[Command]:
    """All commands of all pages."""
    return [command for page in PAGES for command in commands_of(page)]


def commands_of(page: Path) -> list[Command]:
    """Of one page: those in blocks, and those between backticks."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(REPO_ROOT))
    whole = next((m.group(2) for m in _MARK.finditer(text) if m.group(1)), "")
    commands = []
    for line, block, above in blocks_of(text):
        mark = _MARK.search(above)
        needs = mark.group(2) if mark else whole
        commands += [Command(name, line, words, block_needs or needs) for words, block_needs in _commands(block)]
    for match in re.finditer(r"(?<!`)`((?:python|make|accelerate) [^`\n]+)`(?!`)", text):
        line = text[: match.start()].count("\n") + 1
        mark = _MARK.match(text[match.end() :].lstrip("). "))
        commands += [
            Command(name, line, words, mark.group(2) if mark else whole) for words, _ in _commands(match.group(1))
        ]
    return commands


def blocks_of(text: str) -> list[tuple[int, str, str]]:
    """(line number, block, the line right above it) of fenced and indented code."""
    blocks = []
    for match in _BLOCK.finditer(text):
        block = match.group(1) or re.sub("^    ", "", match.group(2), flags=re.MULTILINE)
        before = text[: match.start()]
        blocks.append((before.count("\n") + 1, block, (before.rstrip().splitlines() or [""])[-1]))
    return blocks


def _commands(block: str) -> list[tuple[tuple[str, ...], str]]:
    """Words, and what a comment at the end of the line says the command needs."""
    first = next((line for line in block.splitlines() if line.strip() and not line.startswith("#")), "")
    if first.split(" ")[0] not in PROGRAMS:
        return []
    commands = []
    for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
        line, _, comment = re.sub(r"(?:^|\s)#", "\0", line, count=1).partition("\0")
        needs = comment.strip().removeprefix("needs ") if comment.strip().startswith("needs ") else ""
        required = re.sub(r"(?<=\s)\[([^\[\]]|\[[^\[\]]*\])*\]", "", line)  # without what a synopsis calls optional
        for part in required.split("&&"):
            words = tuple(word for word in shlex.split(part) if word != "...")
            if words:
                commands.append((words, needs))
    return commands
