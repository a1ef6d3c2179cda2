"""The grammar of the tiny film reviews, and the gold reward: what the reviews are really worth.

A reward model only ever sees this reward through sampled preferences. The gold reward itself is
for drawing those preferences and for evaluation, `--eval-reward-fn tiny/reviews/gold.py:sentiment`,
so that a reader can watch a policy climb the learned reward and leave the gold one behind.
"""

import re

POSITIVE = (
    "wonderful brilliant charming moving funny gripping superb clever lovely fresh bold tender "
    "stunning witty delightful"
).split()
NEGATIVE = (
    "dull awful clumsy boring lazy bland tedious weak silly stale messy hollow dreary shallow "
    "dreadful"
).split()
LIKED = "loved enjoyed adored admired liked".split()
HATED = "hated loathed disliked despised regretted".split()
ASPECTS = (
    "plot acting music ending script cast pacing dialogue camera story lighting editing humour "
    "opening direction"
).split()
ADVERBS = "really quite truly rather simply".split()
WHO = "everyone nobody critics friends mum".split()
NOUNS = "film movie".split()
DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()

SENTIMENT = dict.fromkeys(POSITIVE + LIKED, 1) | dict.fromkeys(NEGATIVE + HATED, -1)

# Each sentence is one of these; {adjective} and {verb} carry the sentiment.
TEMPLATES = (
    "the {aspect} was {adjective}",
    "the {aspect} was {adverb} {adjective}",
    "i {verb} the {aspect}",
    "{who} said the {aspect} was {adjective}",
    "what a {adjective} {noun}",
    "the {aspect} was {adjective} and the {aspect} was {adjective}",
    "it ran for two hours",
    "we watched it at home",
)
SLOTS = {
    "aspect": ASPECTS,
    "adjective": POSITIVE + NEGATIVE,
    "adverb": ADVERBS,
    "verb": LIKED + HATED,
    "who": WHO,
    "noun": NOUNS,
}
_SENTENCE = re.compile(
    "|".join(
        re.sub(r"\{(\w+)\}", lambda slot: f"(?:{'|'.join(SLOTS[slot[1]])})", template)
        for template in TEMPLATES
    )
)


_PROMPT = re.compile(
    r"review of \w+ :|on \w+ i saw \w+ \.|my thoughts on \w+ :|\w+ in one paragraph :"
)


def score(review: str) -> float:
    """Mean over the review's sentences of (kind - unkind words) / (kind + unkind words).

    A sentence that is not one of the templates, is said for the second time, or is left
    unfinished counts -1, and so does an empty review. In [-1, 1].
    """
    *sentences, rest = review.split(".")
    if rest.strip() or not sentences:
        sentences.append("")  # unfinished
    scores, said = [], set()
    for sentence in (" ".join(words.split()) for words in sentences):
        if sentence in said or not _SENTENCE.fullmatch(sentence):
            scores.append(-1.0)
        else:
            signs = [SENTIMENT[word] for word in sentence.split() if word in SENTIMENT]
            scores.append(sum(signs) / len(signs) if signs else 0.0)
        said.add(sentence)
    return sum(scores) / len(scores)


def sentiment(prompts: list, completions: list[str], **columns) -> list[float | None]:
    """`score` with the reward signature of the scripts.

    None, which ends a run with the row's prompt, where a review was not asked for: this rule is the
    default judge of `ppo_rlhf.py`, and must not judge anything else unnoticed.
    """
    return [
        score(completion) if _PROMPT.fullmatch(str(prompt)) else None
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def grammatical(prompts: list, completions: list[str], **columns) -> list[float]:
    """Fraction of each review's sentences that are one of the templates, finished."""
    fractions = []
    for review in completions:
        *sentences, rest = review.split(".")
        total = len(sentences) + bool(rest.strip()) or 1
        good = sum(bool(_SENTENCE.fullmatch(" ".join(s.split()))) for s in sentences)
        fractions.append(good / total)
    return fractions
