"""docs/real.md: SmolLM2-135M-Instruct, which docs/real/unpack.py has put into runs/."""

from typing import Any

from docs.experiments.lib.experiment import Experiment
from docs.experiments.lib.metrics import Metric, at, average, last
from docs.experiments.lib.runs import Run

MODEL = "--model runs/SmolLM2-135M-Instruct"
ON_POLICY = "--chat --beta 0 --num-minibatches 1 --micro-batch-size 8 --prompts-per-rollout 8"
TONE = (
    f"grpo.py {MODEL} {ON_POLICY} --dataset docs/real/films --group-size 6 --max-new-tokens 40 "
    "--reward-fn docs/rewards/tone.py:tone --learning-rate 2e-5 --total-rollouts 10 --eval-every 2"
)
SFT = (
    f"sft.py {MODEL} --chat --dataset docs/real/sums --train-split train[:64] --epochs 2 "
    "--batch-size 16 --micro-batch-size 8 --learning-rate 2e-5 --eval-rows 100 --eval-samples 8"
)
ON_SUMS = (
    f"{ON_POLICY} --dataset docs/real/sums --group-size 8 --max-new-tokens 24 --eval-rows 60 "
    "--learning-rate 1e-5 --total-rollouts 16 --eval-every 4 --eval-samples 4"
)
COMMANDS = {
    "tone": TONE,
    "SFT": SFT,
    "GRPO after SFT": f"grpo.py --model {{{SFT}}} {ON_SUMS}",
    "GRPO without SFT": f"grpo.py {MODEL} {ON_SUMS}",
}
EXPERIMENTS = ()
