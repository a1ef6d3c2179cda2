"""A rubric for each row: the weighted share of its questions that a judge answers with yes.

The column `rubric` is a JSON list of pairs: a weight above 0, and a question about the answer.
"""

import json

from docs.rewards.judge import grade  # or that of served_judge

ASKED = "{prompt}\n\nGrade the answer by one question alone, 9 for yes and 0 for no: {question}"


def share(prompts: list, completions: list[str], rubric: list[str], **columns: list) -> list[float]:
    rubrics, asked, answers = [json.loads(text) for text in rubric], [], []
    for prompt, completion, pairs in zip(prompts, completions, rubrics, strict=True):
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        asked += [ASKED.format(prompt=text, question=question) for _, question in pairs]
        answers += [completion] * len(pairs)
    yes = iter(grade(asked, answers))  # from 0 to 1
    return [sum(w * next(yes) for w, _ in pairs) / sum(w for w, _ in pairs) for pairs in rubrics]
