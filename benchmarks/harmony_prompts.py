"""Whether prompts of a Harmony target are, token by token, what openai-harmony renders, and where kept responses begin.

    python benchmarks/harmony_prompts.py CHATS.jsonl --tokenizer openai/gpt-oss-120b

CHATS has one conversation per line (`conversations` or `messages`). The other renderer shares no code with the chat
template, so agreement means that a head is trained on the prompts that a server builds. System messages and tools are
left out: openai-harmony is told them in another form.
"""

import argparse
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path

from openai_harmony import (
    Conversation,
    HarmonyEncodingName,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    load_harmony_encoding,
)
from transformers import AutoTokenizer

from drafthead.data.prompts import Prompt, RowError, parse_messages, prompt_id, split_turns
from drafthead.data.rendering import KeptResponses, Renderer, UnrenderableError

DAY, EFFORT = date(2025, 8, 5), "low"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--tokenizer", default="openai/gpt-oss-120b", help="hub id or folder, with its chat template")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    render = Renderer(tokenizer, DAY)
    render_response = KeptResponses(render, tokenizer, set(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])))
    counts: Counter[str] = Counter()
    for line in args.chats.open(encoding="utf-8"):
        if (prompt := prompt_with_response(json.loads(line))) is None:
            counts["no plain chat with a response"] += 1
            continue
        try:
            prompt_ids = render(prompt, EFFORT)
            same = prompt_ids == reference(encoding, prompt)
            counts["prompts equal" if same else "prompts DIFFERENT"] += 1
            render_response(prompt, prompt_ids, EFFORT)
            counts["responses with a boundary"] += 1
        except UnrenderableError as error:
            counts[error.reason] += 1
    print("\n".join(f"{count:6,}  {what}" for what, count in sorted(counts.items())))
    sys.exit(bool(counts["prompts DIFFERENT"]) or not counts["prompts equal"])


def prompt_with_response(row: dict) -> Prompt | None:
    """A chat up to its last response, with it; None without one, or with roles beyond user and assistant."""
    try:
        messages = parse_messages(row.get("conversations") or row.get("messages"))
    except RowError:
        return None
    complete = [(prompt, response) for prompt, response in split_turns(messages, "all") if response]
    if not complete or {message["role"] for message in messages} != {"user", "assistant"}:
        return None
    prompt, response = complete[-1]
    return Prompt(prompt_id(prompt), "local", "chat", prompt, response=response)


def reference(encoding, prompt: Prompt) -> list[int]:
    """The prompt as openai-harmony renders it for a completion."""
    about = SystemContent.new().with_reasoning_effort(ReasoningEffort.LOW).with_conversation_start_date(str(DAY))
    messages = [Message.from_role_and_content(Role.SYSTEM, about)]
    for message in prompt.messages:
        rendered = Message.from_role_and_content(Role(message["role"]), message["content"])
        messages.append(rendered.with_channel("final") if message["role"] == "assistant" else rendered)
    return encoding.render_conversation_for_completion(Conversation(messages=messages), Role.ASSISTANT)


if __name__ == "__main__":
    main()
