"""Training: rows projected from episodes, advantages and losses, the learner, and the weights it publishes."""
