"""The names that a configuration may choose from; no tensors here, so reading a configuration stays cheap."""

from typing import Literal

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]
LossName = Literal["clipped", "gspo", "cispo", "reinforce"]
AggregationName = Literal["token_mean", "sequence_mean", "rollout_mean"]
KLName = Literal["k1", "k2", "k3", "k3+"]
