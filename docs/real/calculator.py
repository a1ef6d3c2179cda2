"""A calculator for chat models, an environment of grpo_tools.py; its reward; and demonstrations.

    user: What is 34 + 47?    assistant: calculate: 34 + 47    tool: 81    assistant: 34 + 47 = 81

`python docs/real/calculator.py` writes docs/real/calls anew, from 64 sums: a row for each of the
two turns of the assistant.
"""

import json
import re
from pathlib import Path

CALL = re.compile(r"calculate: (\d+) \+ (\d+)<\|im_end\|>$")  # the policy has just ended its turn
TURN = "assistant\n"  # what ChatML opens a turn of the policy with


def calculator(prompts: list, completions: list[str], **columns: list) -> list[dict | None]:
    """A message with the sum after a call. None after any other turn: the completion is over."""
    calls = [CALL.search(completion) for completion in completions]
    return [{"role": "tool", "content": f"{int(c[1]) + int(c[2])}"} if c else None for c in calls]


def right(prompts: list, completions: list[str], answer: list, **columns: list) -> list[float]:
    """1 if the last number of the policy's last turn is the answer, whatever the tool has said."""
    turns = [completion.rpartition(TURN)[2] for completion in completions]
    numbers = [re.findall(r"\d+", turn) for turn in turns]
    return [float(found[-1:] == [a]) for found, a in zip(numbers, answer, strict=True)]


def write_demonstrations(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = []
        for line in Path(f"docs/real/sums/{split}.jsonl").read_text().splitlines()[:64]:
            sum_ = json.loads(line)
            question = {"role": "user", "content": sum_["prompt"]}
            said = "calculate: " + sum_["completion"].partition(" =")[0]
            call = {"role": "assistant", "content": said}
            reply = {"role": "tool", "content": sum_["answer"]}
            rows.append({"prompt": [question], "completion": said})
            rows.append({"prompt": [question, call, reply], "completion": sum_["completion"]})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_demonstrations(Path("docs/real/calls"))
