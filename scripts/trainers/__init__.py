"""The rollout configurations of trainers' examples, and what the start-up check says to each."""
